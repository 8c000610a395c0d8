"""The policy file that training writes: that of `policy_weights`, and what people want to know.

Besides the tensor `weights` and the metadata that `policy_weights` reads, it says in its metadata
`n_expert` (a JSON list, experts of each layer) and `note` (how it was made). Of flashmoe it has the
networks too, each tensor with the model's layer first: w1 [L, 2, 128], b1, w2 [L, 128, 128], b2,
w3 [L, 128, 1], b3; a layer of the network is x @ w + b, with SiLU between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.policy_weights import SCHEMAS
from flashmoe_gguf.replacing import first_bytes, replacing
from flashmoe_gguf.trace import check_writable

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PolicyFile:
    """What such a file holds. weights [n]; n_expert has one entry per layer."""

    policy: str
    weights: Floats
    n_expert: tuple[int, ...]
    fingerprint: str
    note: str
    networks: Mapping[str, Floats]


def check_policy_target(path: Path) -> None:
    """Raises TraceError where `write_policy_file` could not write, before there is anything to
    lose; also for a file of another kind, such as the model.
    """
    check_writable(path)
    start = first_bytes(path, 9)  # of safetensors: the length of a JSON object, which follows
    if start and start[8:] != b"{":
        raise TraceError(
            f"{path}: a file that is no policy's is there already",
            "give another name, or delete it",
        )


def write_policy_file(path: Path, file: PolicyFile) -> None:
    """Writes it; it appears under its name only when complete. Raises TraceError."""
    metadata = {
        "policy": file.policy,
        "schema": SCHEMAS[file.policy],
        "fingerprint": file.fingerprint,
        "n_expert": json.dumps(file.n_expert),
        "note": file.note,
    }
    tensors = {"weights": file.weights, **file.networks}
    data = save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata)
    try:
        with replacing(path) as part:
            part.write_bytes(data)
    except OSError as error:
        raise TraceError(
            f"cannot write {path}: {error.strerror or error}", "give another path, or make room"
        ) from error

"""The policy file: safetensors with what a policy has learned, for one model.

| metadata | |
|---|---|
| `format` | `flashmoe-policy` |
| `version` | `1` |
| `policy` | `flashmoe` or `learned` |
| `fingerprint` | of the model; empty when the traces did not say |
| `n_expert` | JSON list: experts of each layer |
| `note` | how it was made, for people |

The tensor `weights` [n] float32 is what the C policy takes as it is. `flashmoe` also has its
networks, each tensor with the model's layer first: w1 [L, 2, 128], b1, w2 [L, 128, 128], b2,
w3 [L, 128, 1], b3; a layer of the network is x @ w + b, with SiLU between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import OptionError, TraceError

Floats = npt.NDArray[np.float32]

FORMAT, VERSION = "flashmoe-policy", "1"


@dataclass(frozen=True)
class PolicyFile:
    """What such a file holds. weights [n]; n_expert has one entry per layer."""

    policy: str
    weights: Floats
    n_expert: tuple[int, ...]
    fingerprint: str
    note: str
    networks: Mapping[str, Floats]


def write_policy_file(path: Path, file: PolicyFile) -> None:
    """Writes it; it appears under its name only when complete. Raises TraceError."""
    try:
        from safetensors.numpy import save
    except ImportError:
        raise need_train_extra("safetensors") from None
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "policy": file.policy,
        "fingerprint": file.fingerprint,
        "n_expert": json.dumps(file.n_expert),
        "note": file.note,
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in file.networks.items()}
    data = save({"weights": np.ascontiguousarray(file.weights), **tensors}, metadata)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TraceError(f"cannot write {path}: {error.strerror or error}") from error


def read_policy_file(path: Path) -> PolicyFile:
    """Reads it; raises TraceError for a file that is none, or is of a newer version."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise need_train_extra("safetensors") from None
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        what = error.strerror or "it is no file that can be opened"
        raise TraceError(f"cannot read {path}: {what}", "check the path") from error
    except Exception as error:  # the library has an exception of its own for each damage
        raise _bad(path, " ".join(str(error).split())) from error
    if metadata.get("format") != FORMAT:
        raise _bad(path, "it does not say that it is one")
    if metadata.get("version") != VERSION:
        raise TraceError(
            f"{path.name} is a policy of version {metadata.get('version')}, known is {VERSION}",
            "use a newer flashmoe, or train it again",
        )
    try:
        n_expert = tuple(int(n) for n in json.loads(metadata["n_expert"]))
        weights = tensors.pop("weights").astype(np.float32).ravel()
    except (KeyError, ValueError, TypeError) as error:
        raise _bad(path, f"{error} is missing or wrong") from error
    return PolicyFile(
        metadata.get("policy", ""),
        weights,
        n_expert,
        metadata.get("fingerprint", ""),
        metadata.get("note", ""),
        tensors,
    )


def _bad(path: Path, what: str) -> TraceError:
    return TraceError(f"{path.name} is no policy file: {what}", "make one with `flashmoe train`")


def need_train_extra(module: str) -> OptionError:
    """The error for a library that is not installed."""
    return OptionError(
        f"training needs {module}, which is not installed", "pip install 'flashmoe-gguf[train]'"
    )

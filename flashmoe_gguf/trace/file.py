"""The trace file: an .npz with `experts`, `seq` and what is known about the model."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.replacing import replacing

# Fills the places of a token that used fewer experts in a layer than others did.
NO_EXPERT = 0xFFFF

Experts = npt.NDArray[np.uint16]

_ARRAYS = ("experts", "seq", "n_expert", "layers", "probs", "fingerprint", "phase")


@dataclass(frozen=True)
class Trace:
    """Routing of some sequences, one after the other.

    - experts [n_tokens, n_layers, k]: ids in the router's order where that is known, NO_EXPERT
      where a token used fewer than k.
    - seq [n_seq + 1]: where each sequence begins; the last is n_tokens.
    - n_expert [n_layers]: experts that each layer has.
    - layers [n_layers]: the model's layer that each column stands for.
    - probs [n_tokens, n_layers, k]: the router's probability of each of these experts, or None.
    - fingerprint: of the model; empty when not known.
    - phase [n_tokens]: 0 for tokens of a prompt, 1 for those of an answer, or None.

    llama.cpp computes a model's last layer only for tokens that give logits, so prompt tokens have
    NO_EXPERT there, but for the last one.
    """

    experts: Experts
    seq: npt.NDArray[np.int64]
    n_expert: npt.NDArray[np.int32]
    layers: npt.NDArray[np.int32]
    probs: npt.NDArray[np.float16] | None = None
    fingerprint: str = ""
    phase: npt.NDArray[np.uint8] | None = None

    @property
    def n_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def n_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def k(self) -> int:
        return int(self.experts.shape[2])

    def select(self, sequences: npt.ArrayLike) -> Trace:
        """The same trace with these sequences only, in this order."""
        wanted = np.asarray(sequences, np.int64)
        rows = [np.arange(self.seq[s], self.seq[s + 1]) for s in wanted]
        index = np.concatenate([np.zeros(0, np.int64), *rows])
        lengths = [len(r) for r in rows]
        return Trace(
            self.experts[index],
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            self.n_expert,
            self.layers,
            None if self.probs is None else self.probs[index],
            self.fingerprint,
            None if self.phase is None else self.phase[index],
        )

    @property
    def has_answers(self) -> bool:
        """Whether it is known of tokens that they belong to answers."""
        return self.phase is not None and bool(self.phase.any())

    def answers(self) -> Trace:
        """The same trace without the tokens of prompts; sequences may become empty."""
        if self.phase is None:
            return self
        kept = np.flatnonzero(self.phase != 0)
        return Trace(
            self.experts[kept],
            np.searchsorted(kept, self.seq).astype(np.int64),
            self.n_expert,
            self.layers,
            None if self.probs is None else self.probs[kept],
            self.fingerprint,
            self.phase[kept],
        )


def read_trace(path: Path, n_expert: int | None = None) -> Trace:
    """Reads a trace file.

    Only `experts` must be there. Without `seq` it is one sequence; without `n_expert` (which the
    argument overrides) a layer has as many as the largest id says, the same in all layers.
    Raises TraceError when the file is none, or its arrays do not fit together.
    """
    try:
        with open(path, "rb") as file:
            data = np.load(file, allow_pickle=False)
            if not isinstance(data, np.lib.npyio.NpzFile):
                raise _bad(path, "it holds one array, not named ones")
            arrays: dict[str, npt.NDArray[Any]] = {
                name: data[name] for name in _ARRAYS if name in data.files
            }
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror or error}", "check the path"
        ) from error
    except TraceError:
        raise
    except Exception as error:  # numpy and zipfile fail in many ways on damaged bytes
        raise _bad(path, " ".join(str(error).split()) or "damaged") from error
    if "experts" not in arrays:
        raise _bad(path, "it has no array 'experts'")
    return _checked(path, arrays, n_expert)


def _bad(path: Path, what: str) -> TraceError:
    return TraceError(
        f"{path.name} is not a routing trace: {what}", "make one with `flashmoe trace`"
    )


def _checked(path: Path, arrays: dict[str, npt.NDArray[Any]], given: int | None) -> Trace:
    ids = arrays["experts"]
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape[1:]:
        raise _bad(path, f"'experts' is {ids.dtype} of shape {ids.shape}, not [tokens, layers, k]")
    n_tokens, n_layers, _ = ids.shape
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > NO_EXPERT):
        raise _bad(path, f"'experts' holds {int(ids.min())} to {int(ids.max())}")
    experts = ids.astype(np.uint16)
    known = experts[experts != NO_EXPERT]
    most = int(known.max()) + 1 if known.size else 1
    counts = arrays.get("n_expert", np.full(n_layers, most))
    if given is not None:
        counts = np.full(n_layers, given)
    if counts.shape != (n_layers,) or counts.dtype.kind not in "iu":
        raise _bad(path, f"'n_expert' has shape {counts.shape} for {n_layers} layers")
    seq = arrays.get("seq", np.array([0, n_tokens]))
    if seq.ndim != 1 or seq.dtype.kind not in "iu" or len(seq) < 2:
        raise _bad(path, f"'seq' is {seq.dtype} of shape {seq.shape}")
    if seq[0] != 0 or seq[-1] != n_tokens or (np.diff(seq.astype(np.int64)) < 0).any():
        raise _bad(path, f"'seq' does not go from 0 to {n_tokens}")
    layers = arrays.get("layers", np.arange(n_layers))
    if layers.shape != (n_layers,) or layers.dtype.kind not in "iu":
        raise _bad(path, f"'layers' has shape {layers.shape} for {n_layers} layers")
    probs = arrays.get("probs")
    if probs is not None and (probs.shape != ids.shape or probs.dtype.kind != "f"):
        raise _bad(path, f"'probs' is {probs.dtype} of shape {probs.shape}")
    phase = arrays.get("phase")
    if phase is not None and (phase.shape != (n_tokens,) or phase.dtype.kind not in "iub"):
        raise _bad(path, f"'phase' is {phase.dtype} of shape {phase.shape}")
    for layer in range(n_layers):
        column = experts[:, layer]
        if ((column >= counts[layer]) & (column != NO_EXPERT)).any():
            raise _bad(path, f"layer {layer} uses an expert beyond its {int(counts[layer])}")
    return Trace(
        experts,
        seq.astype(np.int64),
        counts.astype(np.int32),
        layers.astype(np.int32),
        None if probs is None else probs.astype(np.float16),
        str(arrays.get("fingerprint", "")),
        None if phase is None else (phase != 0).astype(np.uint8),
    )


def check_target(path: Path) -> None:
    """Raises TraceError where `write_trace` could not write, before there is anything to lose; also
    for a file that is no trace, such as the model.
    """
    check_writable(path)
    if os.path.isfile(path) and path.stat().st_size > 0 and not zipfile.is_zipfile(path):
        raise TraceError(
            f"{path}: a file that is no trace is there already", "give another name, or delete it"
        )


def check_writable(path: Path) -> None:
    """Raises TraceError where no file could be written, or replaced."""
    if os.path.isdir(path):
        raise TraceError(f"cannot write {path}: it is a folder", "give the name of a file")
    if not os.access(path.parent, os.W_OK):
        what = "no such folder" if not path.parent.exists() else "no permission"
        raise TraceError(f"cannot write {path}: {what}", "give another path")


def write_trace(path: Path, trace: Trace) -> None:
    """Writes a trace file, compressed; it appears under its name only when complete."""
    arrays: dict[str, Any] = {
        "experts": trace.experts,
        "seq": trace.seq,
        "n_expert": trace.n_expert,
        "layers": trace.layers,
        "fingerprint": np.array(trace.fingerprint),
    }
    if trace.probs is not None:
        arrays["probs"] = trace.probs
    if trace.phase is not None:
        arrays["phase"] = trace.phase
    try:
        with replacing(path) as part, open(part, "wb") as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise TraceError(
            f"cannot write {path}: {error.strerror or error}", "give another path, or make room"
        ) from error

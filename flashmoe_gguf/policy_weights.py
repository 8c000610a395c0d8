"""What a policy has learned, kept in a file between runs: safetensors with one tensor.

| name, metadata   | what                                                                     |
|------------------|--------------------------------------------------------------------------|
| tensor `weights` | f32 [n], the numbers of the policy's `save` (native/policy.h)            |
| `policy`         | its name                                                                 |
| `schema`         | what the numbers mean; another number is refused, not converted          |
| `fingerprint`    | of the model that it was learned with, which no other model may use      |

A run that is given no file uses one per model and policy in the user's cache directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from flashmoe_gguf.cache_dir import cache_dir
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.replacing import replacing

# Of the features and the order of the numbers that each policy in C saves.
SCHEMAS = {"learned": "4", "flashmoe": "1"}

Floats = npt.NDArray[np.float32]


def weights_path(policy: str, fingerprint: str) -> Path:
    """Where weights are kept when no file is given."""
    return cache_dir() / "policies" / f"{policy}-{fingerprint}.safetensors"


def save_weights(path: Path, weights: Floats, *, policy: str, fingerprint: str) -> None:
    """Writes the file as a whole or not at all, with its folder; raises TraceError."""
    metadata = {"policy": policy, "schema": _schema(policy), "fingerprint": fingerprint}
    data = save({"weights": np.ascontiguousarray(weights, np.float32)}, metadata)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(data)
    except OSError as error:
        raise TraceError(
            f"cannot write {path}: {error.strerror or error}", "choose another --policy-file"
        ) from error


def load_weights(path: Path, *, policy: str, fingerprint: str) -> Floats:
    """The numbers [n] that `save_weights` wrote for this policy and model.

    Raises TraceError when there is no such file, when it is damaged, and when it is another
    policy's, another model's or of another version.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = file.metadata() or {}
            _check(path, metadata, "policy", policy)
            _check(path, metadata, "schema", _schema(policy))
            _check(path, metadata, "fingerprint", fingerprint)
            weights: npt.NDArray[Any] = file.get_tensor("weights")
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, TypeError) as error:
        raise _refused(path, f"it is damaged or of another kind: {error}") from error
    if weights.dtype != np.float32 or weights.ndim != 1:
        raise _refused(path, f"its weights are {weights.dtype} of shape {weights.shape}")
    return weights


def forget_weights(path: Path) -> bool:
    """Removes the file; False when there was none. Raises TraceError when it cannot."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise TraceError(f"cannot remove {path}: {error.strerror or error}") from error
    return True


@dataclass(frozen=True)
class PolicyMemory:
    """The file of one policy and model. One that the user gave must be right; the one in the cache
    directory may be missing, of another version, or impossible to write.
    """

    path: Path
    policy: str
    fingerprint: str
    is_given: bool

    def load(self) -> Floats | None:
        """What it holds; None when there is nothing yet. Raises TraceError for a given one."""
        try:
            if not self.path.exists():
                return None
        except OSError as error:  # a folder that may not be entered
            if self.is_given:
                raise TraceError(f"cannot read {self.path}: {error.strerror or error}") from error
            return None
        try:
            return load_weights(self.path, policy=self.policy, fingerprint=self.fingerprint)
        except TraceError:
            if self.is_given:
                raise
            return None

    def save(self, weights: Floats) -> None:
        """Replaces the file. Raises TraceError for a given one."""
        try:
            save_weights(self.path, weights, policy=self.policy, fingerprint=self.fingerprint)
        except TraceError:
            if self.is_given:
                raise

    def forget(self) -> None:
        """Removes the file. Raises TraceError when it cannot."""
        forget_weights(self.path)


def _schema(policy: str) -> str:
    if policy not in SCHEMAS:
        raise TraceError(f"policy {policy} learns nothing that a file could keep")
    return SCHEMAS[policy]


_WORDS = {
    "policy": "it was learned by policy {0}, not {1}",
    "schema": "it is of version {0}, and this program reads version {1}",
    "fingerprint": "it was learned with another model (fingerprint {0}, not {1})",
}


def _check(path: Path, metadata: dict[str, str], key: str, wanted: str) -> None:
    found = metadata.get(key)
    if found is None:
        raise _refused(path, f"it does not say its {key}")
    if found != wanted:
        shown = found if found.isprintable() and len(found) <= 64 else "unknown"
        raise _refused(path, _WORDS[key].format(shown, wanted))


def _refused(path: Path, why: str) -> TraceError:
    return TraceError(
        f"{path.name} does not fit this run: {why}",
        "give another --policy-file, or remove this one",
    )

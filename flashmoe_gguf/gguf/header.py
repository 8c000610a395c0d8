"""What a GGUF header says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from gguf.constants import GGML_QUANT_SIZES

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf.cursor import DAMAGED, shown

# ggml type -> name, elements per block, bytes per block. The pinned llama.cpp has types that
# some releases of gguf-py lack; theirs are from ggml-common.h.
GGML_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
        42: ("Q2_0", 64, 18),
        **{int(t): (t.name, elements, size) for t, (elements, size) in GGML_QUANT_SIZES.items()},
    }
)

_MAX_NAME = 64  # of an architecture; llama.cpp's longest has 16 characters


@dataclass(frozen=True)
class ArraySummary:
    """Stands for an array of more than `MAX_ARRAY` elements, which was skipped, not read."""

    element_type: str
    length: int


Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | tuple[Scalar, ...] | ArraySummary


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in ggml order (fastest first), `offset` from the start of its file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    type_name: str
    offset: int
    nbytes: int
    shard: int


@dataclass(frozen=True)
class Shard:
    """One file of a model; `data_offset` is where its tensor data starts."""

    path: Path
    size_bytes: int
    version: int
    alignment: int
    data_offset: int


@dataclass(frozen=True)
class Header:
    """All shards of one model. `metadata` is the first shard's, in file order."""

    path: Path
    shards: tuple[Shard, ...]
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        """`general.architecture`; raises ModelFileError where that is missing or no name."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelFileError(
                f"{shown(self.path)}: the file names no architecture (general.architecture)",
                "this GGUF holds no model: it may be an importance matrix, adapter or vocabulary",
            )
        # It becomes part of messages and of the names of keys.
        if len(value) > _MAX_NAME or not value.isprintable():
            raise ModelFileError(
                f"{shown(self.path)}: the architecture is no name: {shown(value)}", DAMAGED
            )
        return value

    def get(self, key_suffix: str) -> Value | None:
        """The value of `{architecture}.{key_suffix}`, None where there is none."""
        return self.metadata.get(f"{self.architecture}.{key_suffix}")

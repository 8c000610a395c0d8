"""Where experts lie in a packed file: its `flashmoe.*` keys and tensors, read and checked.

What the format is, and how files are written, stands in `flashmoe_gguf.pack`. This module only
finds parts, blocks and checksums, for everything that reads experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import GGML_TYPES, Header, TensorInfo
from flashmoe_gguf.gguf.cursor import shown

VERSION = 1
PREFIX = "flashmoe."

_I8, _I64 = 24, 27
_ALIGN = 4096
_COLUMNS = {
    "tensor": str,
    "type": int,
    "ne0": int,
    "ne1": int,
    "n_expert": int,
    "block_offset": int,
    "expert_bytes": int,
    "layer": int,
    "family": str,
}


@dataclass(frozen=True)
class Located:
    """One expert tensor as the source had it, and where its experts lie now.

    Expert e is at `tensor.offset + e * stride` of the file `tensor.shard`.
    """

    tensor: TensorInfo
    stride: int


@dataclass(frozen=True)
class PackedInfo:
    """What a packed file says of itself. `sums_offset`: XXH3-64 per part and expert, u64 each,
    in the order of `parts`, from the start of the file.
    """

    version: int
    fingerprint: str
    source_files: tuple[str, ...]
    parts: tuple[Located, ...]
    sums_offset: int


def read_packed(header: Header) -> PackedInfo | None:
    """The packed parts of a model, None when it is not packed. Raises ModelFileError."""
    version = header.metadata.get("flashmoe.version")
    if version is None:
        return None
    if version != VERSION:
        raise ModelFileError(
            f"{shown(header.path)}: packed with format version {shown(version)}, "
            f"this program knows {VERSION}",
            "install a newer flashmoe-gguf, or unpack the file with the one that packed it",
        )
    tensors = {t.name: t for t in header.tensors}
    parts = tuple(_locate(header, tensors, row) for row in _rows(header))
    sums = tensors.get("flashmoe.sums")
    n_sums = sum(p.tensor.shape[2] for p in parts)
    if sums is None or sums.ggml_type != _I64 or sums.shape != (n_sums,):
        raise _error(header, f"flashmoe.sums does not hold {n_sums} checksums")
    fingerprint = header.metadata.get("flashmoe.source.fingerprint")
    files = header.metadata.get("flashmoe.source.files")
    if not isinstance(fingerprint, str) or not isinstance(files, tuple):
        raise _error(header, "it does not say what it was packed from")
    return PackedInfo(VERSION, fingerprint, tuple(map(str, files)), parts, sums.offset)


def _error(header: Header, what: str) -> ModelFileError:
    return ModelFileError(
        f"{shown(header.path)}: {what}", "the packed file is damaged: pack the model again"
    )


def _rows(header: Header) -> Iterator[dict[str, object]]:
    columns = {}
    for name, kind in _COLUMNS.items():
        values = header.metadata.get(f"flashmoe.parts.{name}")
        if not isinstance(values, tuple) or any(type(v) is not kind for v in values):
            raise _error(header, f"flashmoe.parts.{name} is missing or of a wrong type")
        columns[name] = values
    if len({len(values) for values in columns.values()}) != 1 or not columns["tensor"]:
        raise _error(header, "the columns of flashmoe.parts differ in length, or are empty")
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _locate(header: Header, tensors: dict[str, TensorInfo], row: dict[str, object]) -> Located:
    name, family = str(row["tensor"]), str(row["family"])
    number = {k: v for k, v in row.items() if isinstance(v, int)}
    block = tensors.get(f"flashmoe.blk.{number['layer']}.{family}")
    if block is None or block.ggml_type != _I8 or len(block.shape) != 2:
        raise _error(header, f"the blocks of {shown(name)} are not there")
    block_bytes, n_expert = block.shape
    shape = (number["ne0"], number["ne1"], number["n_expert"])
    kind = GGML_TYPES.get(number["type"])
    if kind is None or min(shape) <= 0 or math.prod(shape) >= 1 << 62 or shape[0] % kind[1]:
        raise _error(header, f"the type or shape of {shown(name)} is impossible")
    type_name, elements, nbytes = kind
    expert_bytes = shape[0] // elements * nbytes * shape[1]
    start = number["block_offset"]
    if (
        expert_bytes != number["expert_bytes"]
        or shape[2] != n_expert
        or start % _ALIGN
        or block_bytes % _ALIGN
        or block.offset % _ALIGN
        or not 0 <= start <= block_bytes - expert_bytes
    ):
        raise _error(header, f"{shown(name)} does not fit its blocks")
    tensor = TensorInfo(
        name=name,
        shape=shape,
        ggml_type=number["type"],
        type_name=type_name,
        offset=block.offset + start,
        nbytes=expert_bytes * n_expert,
        shard=block.shard,
    )
    return Located(tensor, block_bytes)

"""Where experts lie in a packed file: its `flashmoe.*` keys and tensors, read and checked.

What the format is, and how files are written, stands in `flashmoe_gguf.pack`. This module only
finds parts, blocks and checksums, for everything that reads experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import GGML_TYPES, Header, Shard, TensorInfo
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.stripes import experts_in, find_stripes

VERSION = 1
PREFIX = "flashmoe."

_I8, _I64 = 24, 27
_ALIGN = 4096
_FINGERPRINT = re.compile("[0-9a-f]{32}")  # XXH3-128
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
class Place:
    """An offset in one of a model's files, which count from 0: its shards, then its stripes."""

    file: int
    offset: int


def place_of(places: Sequence[Place], stride: int, expert: int) -> Place:
    """Where one of the experts lies that `places` has in turn, `stride` apart in each file."""
    row, column = divmod(expert, len(places))
    return Place(places[column].file, places[column].offset + row * stride)


@dataclass(frozen=True)
class Located:
    """One expert tensor as the source had it, and where its experts lie now, see `place_of`.

    `tensor.shard` and `.offset` are those of the first.
    """

    tensor: TensorInfo
    stride: int
    places: tuple[Place, ...]


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
    stripes: tuple[Shard, ...] = ()


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
    stripes = find_stripes(header)
    holders = [{t.name: t for t in stripe.tensors} for stripe in stripes] or [tensors]
    parts = tuple(_locate(header, holders, 1 if stripes else 0, row) for row in _rows(header))
    sums = tensors.get("flashmoe.sums")
    n_sums = sum(p.tensor.shape[2] for p in parts)
    if sums is None or sums.ggml_type != _I64 or sums.shape != (n_sums,):
        raise _error(header, f"flashmoe.sums does not hold {n_sums} checksums")
    fingerprint = header.metadata.get("flashmoe.source.fingerprint")
    files = header.metadata.get("flashmoe.source.files")
    # Files are named after it, so that no other text may pass.
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise _error(header, "flashmoe.source.fingerprint is missing or no fingerprint")
    if not isinstance(files, tuple):
        raise _error(header, "it does not say what it was packed from")
    return PackedInfo(
        VERSION,
        fingerprint,
        tuple(map(str, files)),
        parts,
        sums.offset,
        tuple(stripe.shards[0] for stripe in stripes),
    )


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


def _locate(
    header: Header,
    holders: Sequence[Mapping[str, TensorInfo]],
    first_file: int,
    row: dict[str, object],
) -> Located:
    """`holders` are the tensors of the files that hold blocks, from `first_file` on."""
    name, family = str(row["tensor"]), str(row["family"])
    number = {k: v for k, v in row.items() if isinstance(v, int)}
    shape = (number["ne0"], number["ne1"], number["n_expert"])
    kind = GGML_TYPES.get(number["type"])
    if kind is None or min(shape) <= 0 or math.prod(shape) >= 1 << 62 or shape[0] % kind[1]:
        raise _error(header, f"the type or shape of {shown(name)} is impossible")
    type_name, elements, nbytes = kind
    expert_bytes = shape[0] // elements * nbytes * shape[1]
    start = number["block_offset"]
    places, block_bytes = [], 0
    for i, tensors in enumerate(holders):
        n_here = experts_in(i, len(holders), shape[2])
        block = tensors.get(f"flashmoe.blk.{number['layer']}.{family}")
        if n_here == 0:
            places.append(Place(first_file + i, 0))
            continue
        if block is None or block.ggml_type != _I8 or len(block.shape) != 2:
            raise _error(header, f"the blocks of {shown(name)} are not there")
        block_bytes = block_bytes or block.shape[0]
        if block.shape != (block_bytes, n_here) or block.offset % _ALIGN:
            raise _error(header, f"{shown(name)} does not fit its blocks")
        places.append(Place(first_file + i, block.offset + start))
    if (
        expert_bytes != number["expert_bytes"]
        or start % _ALIGN
        or block_bytes % _ALIGN
        or not 0 <= start <= block_bytes - expert_bytes
    ):
        raise _error(header, f"{shown(name)} does not fit its blocks")
    tensor = TensorInfo(
        name=name,
        shape=shape,
        ggml_type=number["type"],
        type_name=type_name,
        offset=places[0].offset,
        nbytes=expert_bytes * shape[2],
        shard=places[0].file,
    )
    return Located(tensor, block_bytes, tuple(places))

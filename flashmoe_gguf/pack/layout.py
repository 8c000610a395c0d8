"""Where everything of a packed file lies: pure planning over the headers of its source.

The same source gives the same layout and the same header bytes. No file is touched here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from flashmoe_gguf.gguf import Shard, TensorInfo
from flashmoe_gguf.pack import encode
from flashmoe_gguf.packed import VERSION

ALIGNMENT = 4096  # a page, and the logical block of every drive that direct I/O meets
SUM_BYTES = 8
MAX_GAPS = 1 << 18  # twice the tensors that a file may have
GAP_HEAD = struct.Struct("<QQ")  # offset in the source file, bytes that follow

_I8, _I64 = 24, 27


@dataclass(frozen=True)
class Span:
    """Bytes of one source file."""

    shard: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class SourceGroup:
    """The tensors that hold one group of experts, in the order of use."""

    layer: int
    family: str
    tensors: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class Source:
    """What is to be packed: all that its files say of themselves.

    `key_spans` are those of the first header. `gaps` are the stretches of non-zero bytes
    outside headers and tensors, in order.
    """

    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    headers: tuple[bytes, ...]
    key_spans: Mapping[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    groups: tuple[SourceGroup, ...]
    gaps: tuple[Span, ...]

    @cached_property
    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for shard, header in zip(self.shards, self.headers, strict=True):
            digest.update(struct.pack("<Q", shard.size_bytes))
            digest.update(header)
        return digest.hexdigest()


@dataclass(frozen=True)
class PackedPart:
    """One weight matrix of a group. `first_sum` is the index of expert 0's checksum."""

    tensor: TensorInfo
    block_offset: int
    expert_bytes: int
    first_sum: int


@dataclass(frozen=True)
class PackedGroup:
    """Expert e's block is `block_bytes` long and lies at `offset + e * block_bytes`."""

    layer: int
    family: str
    n_expert: int
    block_bytes: int
    offset: int
    parts: tuple[PackedPart, ...]

    @property
    def expert_bytes(self) -> int:
        """Of all parts of all experts, without padding."""
        return sum(p.expert_bytes for p in self.parts) * self.n_expert


@dataclass(frozen=True)
class DenseTensor:
    """A tensor that is copied as it is; `offset` is its place in the packed file."""

    tensor: TensorInfo
    offset: int


@dataclass(frozen=True)
class GapTensor:
    """The non-zero bytes of one source file that belong to nothing, in one tensor."""

    offset: int
    spans: tuple[Span, ...]

    def records(self) -> Iterator[tuple[int, Span]]:
        """Each span with the place of its record; its bytes follow GAP_HEAD."""
        at = self.offset
        for span in self.spans:
            yield at, span
            at += GAP_HEAD.size + span.nbytes


@dataclass(frozen=True)
class Layout:
    """All of a packed file; offsets are from its start, and `header` its first bytes."""

    header: bytes
    total_bytes: int
    dense: tuple[DenseTensor, ...]
    groups: tuple[PackedGroup, ...]
    sums_offset: int
    n_sums: int
    header_offsets: tuple[int, ...]
    gaps: tuple[GapTensor, ...]


def padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def header_name(shard: int) -> str:
    return f"flashmoe.header.{shard}"


def gaps_name(shard: int) -> str:
    return f"flashmoe.gaps.{shard}"


class _Table:
    """The tensor table as it grows; `at` counts from the start of the data."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.at = 0

    def add(self, name: str, shape: Sequence[int], ggml_type: int, nbytes: int) -> int:
        """Append a tensor; returns its offset in the data."""
        offset = self.at
        self.rows.append(encode.tensor(name, shape, ggml_type, offset))
        self.at += padded(nbytes)
        return offset


def plan_layout(source: Source) -> Layout:
    """The packed file of `source`."""
    table = _Table()
    in_groups = {t.name for group in source.groups for t in group.tensors}
    dense = [
        (t, table.add(t.name, t.shape, t.ggml_type, t.nbytes))
        for t in source.tensors
        if t.name not in in_groups
    ]
    groups: list[PackedGroup] = []
    n_sums = 0
    for group in source.groups:
        planned = _plan_group(group, n_sums)
        name = f"flashmoe.blk.{group.layer}.{group.family}"
        shape = (planned.block_bytes, planned.n_expert)
        offset = table.add(name, shape, _I8, planned.block_bytes * planned.n_expert)
        groups.append(_moved(planned, offset))
        n_sums += len(planned.parts) * planned.n_expert
    sums = table.add("flashmoe.sums", (n_sums,), _I64, n_sums * SUM_BYTES)
    headers = [
        table.add(header_name(i), (len(header),), _I8, len(header))
        for i, header in enumerate(source.headers)
    ]
    gaps: list[GapTensor] = []
    for i in range(len(source.shards)):
        spans = tuple(span for span in source.gaps if span.shard == i)
        if spans:
            nbytes = sum(GAP_HEAD.size + span.nbytes for span in spans)
            gaps.append(GapTensor(table.add(gaps_name(i), (nbytes,), _I8, nbytes), spans))
    keys = [*_source_keys(source), *_own_keys(source, groups)]
    head = encode.start(len(table.rows), len(keys)) + b"".join(keys) + b"".join(table.rows)
    base = padded(len(head))
    return Layout(
        header=head.ljust(base, b"\0"),
        total_bytes=base + table.at,
        dense=tuple(DenseTensor(t, base + offset) for t, offset in dense),
        groups=tuple(_moved(group, base) for group in groups),
        sums_offset=base + sums,
        n_sums=n_sums,
        header_offsets=tuple(base + offset for offset in headers),
        gaps=tuple(GapTensor(base + gap.offset, gap.spans) for gap in gaps),
    )


def _moved(group: PackedGroup, by: int) -> PackedGroup:
    return PackedGroup(
        group.layer,
        group.family,
        group.n_expert,
        group.block_bytes,
        group.offset + by,
        group.parts,
    )


def _plan_group(group: SourceGroup, first_sum: int) -> PackedGroup:
    n_expert = group.tensors[0].shape[2]
    parts, at = [], 0
    for i, tensor in enumerate(group.tensors):
        expert_bytes = tensor.nbytes // n_expert
        parts.append(PackedPart(tensor, at, expert_bytes, first_sum + i * n_expert))
        at += padded(expert_bytes)
    return PackedGroup(group.layer, group.family, n_expert, at, 0, tuple(parts))


def _source_keys(source: Source) -> list[bytes]:
    """The source's own keys, and the alignment in its place or at the end."""
    alignment = encode.u32("general.alignment", ALIGNMENT)
    keys = []
    for key, (start, end) in source.key_spans.items():
        if key == "general.alignment":
            keys.append(alignment)
        elif not key.startswith("split."):
            keys.append(source.headers[0][start:end])
    return keys if "general.alignment" in source.key_spans else [*keys, alignment]


def _own_keys(source: Source, groups: Sequence[PackedGroup]) -> list[bytes]:
    rows = [(group, part) for group in groups for part in group.parts]
    parts = "flashmoe.parts."
    return [
        encode.u32("flashmoe.version", VERSION),
        encode.strings("flashmoe.source.files", source.names),
        encode.u64s("flashmoe.source.sizes", [s.size_bytes for s in source.shards]),
        encode.string("flashmoe.source.fingerprint", source.fingerprint),
        encode.strings(parts + "tensor", [p.tensor.name for _, p in rows]),
        encode.u32s(parts + "layer", [g.layer for g, _ in rows]),
        encode.strings(parts + "family", [g.family for g, _ in rows]),
        encode.u32s(parts + "type", [p.tensor.ggml_type for _, p in rows]),
        encode.u64s(parts + "ne0", [p.tensor.shape[0] for _, p in rows]),
        encode.u64s(parts + "ne1", [p.tensor.shape[1] for _, p in rows]),
        encode.u64s(parts + "n_expert", [g.n_expert for g, _ in rows]),
        encode.u64s(parts + "block_offset", [p.block_offset for _, p in rows]),
        encode.u64s(parts + "expert_bytes", [p.expert_bytes for _, p in rows]),
        encode.u32s(parts + "shard", [p.tensor.shard for _, p in rows]),
        encode.u64s(parts + "source_offset", [p.tensor.offset for _, p in rows]),
    ]

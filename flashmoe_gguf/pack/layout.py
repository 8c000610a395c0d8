"""Where everything of a packed file lies: pure planning over the headers of its source.

The same source gives the same layout and the same header bytes. No file is touched here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import xxhash

from flashmoe_gguf.gguf import Shard, TensorInfo
from flashmoe_gguf.pack import encode
from flashmoe_gguf.packed import VERSION, Place, place_of
from flashmoe_gguf.stripes import experts_in

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
    """Expert e's block is `block_bytes` long and lies at `block(e)`.

    Files count from 0: the packed file, then its stripes.
    """

    layer: int
    family: str
    n_expert: int
    block_bytes: int
    places: tuple[Place, ...]
    parts: tuple[PackedPart, ...]

    def block(self, expert: int) -> Place:
        return place_of(self.places, self.block_bytes, expert)

    @property
    def offset(self) -> int:
        """Of expert 0's block; without stripes the others follow."""
        return self.places[0].offset

    @property
    def expert_bytes(self) -> int:
        """Of all parts of all experts, without padding."""
        return sum(p.expert_bytes for p in self.parts) * self.n_expert


@dataclass(frozen=True)
class DenseTensor:
    """A tensor that is copied as it is; `offset` is its place in the packed file, `sum_offset`
    that of its checksum.
    """

    tensor: TensorInfo
    offset: int
    sum_offset: int


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
class Stripe:
    """One of the files that hold the blocks in turn: blocks and nothing else."""

    path: str
    header: bytes
    total_bytes: int


@dataclass(frozen=True)
class Layout:
    """All of a packed file; offsets are from its start, and `header` its first bytes."""

    header: bytes
    total_bytes: int
    dense: tuple[DenseTensor, ...]
    groups: tuple[PackedGroup, ...]
    sums_offset: int
    header_offsets: tuple[int, ...]
    gaps: tuple[GapTensor, ...]
    stripes: tuple[Stripe, ...] = ()

    @property
    def packed_bytes(self) -> int:
        """Of all files."""
        return self.total_bytes + sum(stripe.total_bytes for stripe in self.stripes)


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

    def header(self, keys: Sequence[bytes]) -> bytes:
        """All that comes before the data."""
        head = encode.start(len(self.rows), len(keys)) + b"".join(keys) + b"".join(self.rows)
        return head.ljust(padded(len(head)), b"\0")


def plan_layout(source: Source, stripes: Sequence[str] = ()) -> Layout:
    """The packed file of `source`, its blocks spread over the files `stripes` if there are any."""
    table = _Table()
    spread = [_Table() for _ in stripes]
    in_groups = {t.name for group in source.groups for t in group.tensors}
    dense = [
        (t, table.add(t.name, t.shape, t.ggml_type, t.nbytes))
        for t in source.tensors
        if t.name not in in_groups
    ]
    groups: list[PackedGroup] = []
    n_sums = 0
    for group in source.groups:
        planned = _plan_group(group, n_sums, spread or [table], 1 if stripes else 0)
        groups.append(planned)
        n_sums += len(planned.parts) * planned.n_expert
    sums = table.add("flashmoe.sums", (n_sums,), _I64, n_sums * SUM_BYTES)
    dense_sums = (
        table.add("flashmoe.dense_sums", (len(dense),), _I64, len(dense) * SUM_BYTES)
        if dense
        else 0
    )
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
    header = table.header([*_source_keys(source), *_own_keys(source, groups, stripes)])
    stripe_headers = [
        its.header(_stripe_keys(source, i, len(spread))) for i, its in enumerate(spread)
    ]
    base = len(header)
    bases = [base, *map(len, stripe_headers)]
    return Layout(
        header=header,
        total_bytes=base + table.at,
        dense=tuple(
            DenseTensor(t, base + offset, base + dense_sums + SUM_BYTES * i)
            for i, (t, offset) in enumerate(dense)
        ),
        groups=tuple(_moved(group, bases) for group in groups),
        sums_offset=base + sums,
        header_offsets=tuple(base + offset for offset in headers),
        gaps=tuple(GapTensor(base + gap.offset, gap.spans) for gap in gaps),
        stripes=tuple(
            Stripe(path, head, len(head) + its.at)
            for path, head, its in zip(stripes, stripe_headers, spread, strict=True)
        ),
    )


def _moved(group: PackedGroup, bases: Sequence[int]) -> PackedGroup:
    """With offsets from the starts of the files, whose data begins at `bases`."""
    places = tuple(Place(place.file, bases[place.file] + place.offset) for place in group.places)
    return replace(group, places=places)


def _plan_group(
    group: SourceGroup, first_sum: int, tables: Sequence[_Table], first_file: int
) -> PackedGroup:
    """Its blocks go into `tables` in turn, which are those of the files from `first_file` on."""
    n_expert = group.tensors[0].shape[2]
    parts, at = [], 0
    for i, tensor in enumerate(group.tensors):
        expert_bytes = tensor.nbytes // n_expert
        parts.append(PackedPart(tensor, at, expert_bytes, first_sum + i * n_expert))
        at += padded(expert_bytes)
    name = f"flashmoe.blk.{group.layer}.{group.family}"
    places = []
    for i, table in enumerate(tables):
        n_here = experts_in(i, len(tables), n_expert)
        offset = table.add(name, (at, n_here), _I8, at * n_here) if n_here else 0
        places.append(Place(first_file + i, offset))
    return PackedGroup(group.layer, group.family, n_expert, at, tuple(places), tuple(parts))


def _stripe_keys(source: Source, index: int, count: int) -> list[bytes]:
    return [
        encode.u32("general.alignment", ALIGNMENT),
        encode.u32("flashmoe.version", VERSION),
        encode.u32("flashmoe.stripe.index", index),
        encode.u32("flashmoe.stripe.count", count),
        encode.string("flashmoe.source.fingerprint", source.fingerprint),
    ]


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


def _own_keys(source: Source, groups: Sequence[PackedGroup], stripes: Sequence[str]) -> list[bytes]:
    rows = [(group, part) for group in groups for part in group.parts]
    parts = "flashmoe.parts."
    return [
        encode.u32("flashmoe.version", VERSION),
        encode.strings("flashmoe.source.files", source.names),
        encode.u64s("flashmoe.source.sizes", [s.size_bytes for s in source.shards]),
        encode.string("flashmoe.source.fingerprint", source.fingerprint),
        *([encode.strings("flashmoe.stripes", stripes)] if stripes else []),
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

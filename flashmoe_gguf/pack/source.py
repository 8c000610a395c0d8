"""Reading what is to be packed: headers, and the few bytes that belong to no tensor."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashmoe_gguf.errors import ModelFileError, PackError
from flashmoe_gguf.gguf import Shard, TensorInfo, read_header
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.gguf.table import FileTable, parse_table
from flashmoe_gguf.pack.files import CHUNK_BYTES, open_source, read_chunks, read_exact
from flashmoe_gguf.pack.layout import MAX_GAPS, Source, SourceGroup, Span
from flashmoe_gguf.packed import PREFIX
from flashmoe_gguf.store import read_geometry

_MAX_FILES = 4096  # arrays longer than that are not read back


def read_source(path: str | os.PathLike[str]) -> Source:
    """All that planning needs to know of a model: one file, or the first of its shards.

    Reads headers and the gaps between tensors. Raises ModelFileError, and PackError for a model
    without experts or one that is packed already.
    """
    name = shown(path)
    header = read_header(path)
    ours = [k for k in header.metadata if k.startswith(PREFIX)]
    if "flashmoe.version" in ours:
        raise PackError(f"{name}: this file is packed already", "use it as it is, or unpack it")
    ours += [t.name for t in header.tensors if t.name.startswith(PREFIX)]
    if ours:
        raise PackError(
            f"{name}: the file uses the name {shown(ours[0])}, which packing needs",
            "give the original model",
        )
    geometry = read_geometry(path)
    if not geometry.is_moe:
        raise PackError(
            f"{name}: this model has no experts, so there is nothing to pack",
            "it runs as it is: give flashmoe pack a Mixture-of-Experts model",
        )
    shards = geometry.header.shards
    if len(shards) > _MAX_FILES:
        raise PackError(f"{name}: the model has more than {_MAX_FILES} parts", "merge them first")
    tensors = {t.name: t for t in geometry.header.tensors}
    groups = tuple(
        SourceGroup(g.layer, g.family, tuple(tensors[p.tensor] for p in g.parts))
        for g in geometry.groups
    )
    headers = tuple(read_raw_header(shard) for shard in shards)
    table = parse_raw_header(shards[0].path, headers[0], shards[0].size_bytes, 0)
    gaps = tuple(
        span
        for number, shard in enumerate(shards)
        for span in _find_gaps(shard, number, geometry.header.tensors)
    )
    if len(gaps) > MAX_GAPS:
        raise PackError(
            f"{name}: the file has more bytes outside its tensors than can be kept",
            "write it anew with gguf-py or llama-gguf-split",
        )
    return Source(
        names=tuple(_plain_name(shard.path) for shard in shards),
        shards=shards,
        headers=headers,
        key_spans=table.key_spans,
        tensors=geometry.header.tensors,
        groups=groups,
        gaps=gaps,
    )


def read_raw_header(shard: Shard) -> bytes:
    """Everything of a file before its data."""
    fd = open_source(shard.path)
    try:
        return read_exact(fd, min(shard.data_offset, shard.size_bytes), 0, shard.path)
    finally:
        os.close(fd)


def parse_raw_header(path: Path, header: bytes, size: int, number: int) -> FileTable:
    """Read the header of a file of `size` bytes called `path`; raises ModelFileError."""
    return parse_table(path, io.BytesIO(header), size, number)


def gap_regions(shard: Shard, number: int, tensors: Sequence[TensorInfo]) -> list[Span]:
    """The stretches of a file that neither its header nor a tensor covers, in order."""
    regions = []
    at = shard.data_offset
    for tensor in tensors:
        if tensor.shard == number:
            regions.append(Span(number, at, tensor.offset - at))
            at = tensor.offset + tensor.nbytes
    regions.append(Span(number, at, shard.size_bytes - at))
    return [region for region in regions if region.nbytes > 0]


def _find_gaps(shard: Shard, number: int, tensors: Sequence[TensorInfo]) -> Iterator[Span]:
    """Non-zero stretches between tensors, at most CHUNK_BYTES each."""
    fd = open_source(shard.path)
    try:
        for region in gap_regions(shard, number, tensors):
            for at, data in read_chunks(fd, region.nbytes, region.offset, shard.path):
                used = data.strip(b"\0")
                if used:
                    skipped = len(data) - len(data.lstrip(b"\0"))
                    yield Span(number, region.offset + at + skipped, len(used))
    finally:
        os.close(fd)


def check_spans(source: Source) -> None:
    """Raise ModelFileError unless the gaps are where a file can have gaps, in order."""
    regions = [
        region
        for number, shard in enumerate(source.shards)
        for region in gap_regions(shard, number, source.tensors)
    ]
    regions.reverse()
    before = Span(0, 0, 0)
    for span in source.gaps:
        while regions and (regions[-1].shard, regions[-1].end) < (span.shard, span.end):
            regions.pop()
        inside = (
            bool(regions)
            and regions[-1].shard == span.shard
            and regions[-1].offset <= span.offset
            and 0 < span.nbytes <= CHUNK_BYTES
            and (before.shard, before.end) <= (span.shard, span.offset)
        )
        if not inside:
            raise ModelFileError(
                f"{shown(source.shards[0].path)}: the stored gaps overlap other bytes",
                "the packed file is damaged: pack the model again",
            )
        before = span


def _plain_name(path: Path) -> str:
    try:
        path.name.encode()
    except UnicodeEncodeError:
        raise PackError(f"{shown(path)}: the name is not valid UTF-8", "rename the file") from None
    return path.name

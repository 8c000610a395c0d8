"""Opening a packed file, trusting nothing in it.

The source's headers, which the file carries, are read as strictly as any model's; from them the
whole packed header is planned again, and must be the one that is there, byte for byte.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flashmoe_gguf.errors import ModelFileError, PackError
from flashmoe_gguf.gguf import Header, TensorInfo, Value, read_header
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import open_source, read_exact
from flashmoe_gguf.pack.layout import (
    GAP_HEAD,
    MAX_GAPS,
    Layout,
    Source,
    SourceGroup,
    Span,
    gaps_name,
    header_name,
    plan_layout,
)
from flashmoe_gguf.pack.source import check_spans, parse_raw_header
from flashmoe_gguf.packed import VERSION
from flashmoe_gguf.store import FAMILIES
from flashmoe_gguf.stripes import find_stripes, recorded_stripes, refuse_stripe

_HINT = "the packed file is damaged: copy it again, or pack the model again"
_MAX_HEADER_BYTES = 256 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class PackedFile:
    """A packed file whose header is right, as are those of its `stripes`; what its data is
    worth, only the checksums tell.
    """

    path: Path
    source: Source
    layout: Layout
    stripes: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """In the order in which a `Place` counts them."""
        return (self.path, *self.stripes)


def open_packed(path: str | os.PathLike[str]) -> PackedFile:
    """Open a packed file; raises ModelFileError, PackError where it is none or too new."""
    where = Path(path)
    header = read_header(where)
    _check_version(header)
    refuse_stripe(header)
    if len(header.shards) != 1:
        raise _damaged(where, "a packed file is never split")
    names = _list(header, "flashmoe.source.files", str)
    sizes = _list(header, "flashmoe.source.sizes", int)
    if not names or len(names) != len(sizes) or len(set(names)) != len(names):
        raise _damaged(where, "the list of source files is wrong")
    for name in names:
        if not name or Path(name).name != name or name == ".." or {"\\", "\0"} & set(name):
            raise _damaged(where, f"{shown(name)} is not the name of a source file")
    tensors = {t.name: t for t in header.tensors}
    fd = open_source(where)
    try:
        source = _read_source(header, tensors, fd, names, sizes)
        start = read_exact(fd, header.shards[0].data_offset, 0, where)
    finally:
        os.close(fd)
    if source.fingerprint != header.metadata.get("flashmoe.source.fingerprint"):
        raise _damaged(where, "the stored source headers do not have the stored fingerprint")
    check_spans(source)
    try:
        layout = plan_layout(source, recorded_stripes(header))
    except struct.error:  # numbers that no real file has
        raise _damaged(where, "the sizes of the source files are impossible") from None
    if layout.dense and "flashmoe.dense_sums" not in tensors:
        raise ModelFileError(
            f"{shown(where)}: packed before dense tensors had checksums",
            "it runs; to verify or unpack it take the version of flashmoe-gguf that packed it",
        )
    if layout.header != start:
        raise _damaged(where, "the header is not the one that its source gives")
    if layout.total_bytes != header.shards[0].size_bytes:
        raise _damaged(
            where,
            f"the file has {header.shards[0].size_bytes:,} bytes, not {layout.total_bytes:,}",
        )
    return PackedFile(where, source, layout, _open_stripes(header, layout))


def _open_stripes(header: Header, layout: Layout) -> tuple[Path, ...]:
    """Where the stripes are now, all with the header that is planned."""
    paths = []
    for stripe, planned in zip(find_stripes(header), layout.stripes, strict=True):
        fd = open_source(stripe.path)
        try:
            start = read_exact(fd, stripe.shards[0].data_offset, 0, stripe.path)
        finally:
            os.close(fd)
        if start != planned.header:
            raise _damaged(stripe.path, "the header is not the one that the source gives")
        size = stripe.shards[0].size_bytes
        if size != planned.total_bytes:
            raise _damaged(stripe.path, f"the file has {size:,} bytes, not {planned.total_bytes:,}")
        paths.append(stripe.path)
    return tuple(paths)


def _check_version(header: Header) -> None:
    """Raise PackError for a file that is not packed, or by a newer program."""
    version = header.metadata.get("flashmoe.version")
    if version is None:
        raise PackError(
            f"{shown(header.path)}: this is not a packed file", "flashmoe pack makes one"
        )
    if type(version) is not int or version < 1:
        raise _damaged(header.path, "flashmoe.version is not a version")
    if version > VERSION:
        raise PackError(
            f"{shown(header.path)}: packed by a newer version: its format is {version}, "
            f"known is {VERSION}",
            "update flashmoe-gguf",
        )


def _read_source(
    header: Header,
    tensors: dict[str, TensorInfo],
    fd: int,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
) -> Source:
    headers, tables = [], []
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        stored = tensors.get(header_name(i))
        if stored is None or stored.nbytes > _MAX_HEADER_BYTES:
            raise _damaged(header.path, f"the header of {shown(name)} is missing")
        raw = read_exact(fd, stored.nbytes, stored.offset, header.path)
        # Named after the packed file, whose damage it is; the source may not exist any more.
        table = parse_raw_header(header.path, raw, size, i)
        if min(table.shard.data_offset, size) != len(raw):
            raise _damaged(header.path, f"the header of {shown(name)} has the wrong length")
        headers.append(raw)
        tables.append(table)
    originals = [t for table in tables for t in table.tensors]
    if len({t.name for t in originals}) != len(originals):
        raise _damaged(header.path, "two source files have a tensor of the same name")
    return Source(
        names=names,
        shards=tuple(table.shard for table in tables),
        headers=tuple(headers),
        key_spans=tables[0].key_spans,
        tensors=tuple(originals),
        groups=_groups(header, originals),
        gaps=tuple(_gaps(header.path, tensors, fd, len(names))),
    )


def _groups(header: Header, originals: Iterable[TensorInfo]) -> tuple[SourceGroup, ...]:
    by_name = {t.name: t for t in originals}
    names = _list(header, "flashmoe.parts.tensor", str)
    layers = _list(header, "flashmoe.parts.layer", int)
    families = _list(header, "flashmoe.parts.family", str)
    right = len(names) == len(layers) == len(families) == len(set(names)) > 0
    if not right or min(layers) < 0:
        raise _damaged(header.path, "the table of parts is wrong")
    found: dict[tuple[int, str], list[TensorInfo]] = {}
    for name, layer, family in zip(names, layers, families, strict=True):
        tensor = by_name.get(name)
        if tensor is None or len(tensor.shape) != 3 or family not in FAMILIES:
            raise _damaged(header.path, f"the source has no experts called {shown(name)}")
        found.setdefault((layer, family), []).append(tensor)
    groups = []
    for (layer, family), tensors in found.items():
        if len({t.shape[2] for t in tensors}) != 1:
            raise _damaged(header.path, f"the parts of layer {layer} differ in experts")
        groups.append(SourceGroup(layer, family, tuple(tensors)))
    return tuple(groups)


def _gaps(path: Path, tensors: dict[str, TensorInfo], fd: int, n_files: int) -> Iterable[Span]:
    count = 0
    for i in range(n_files):
        tensor = tensors.get(gaps_name(i))
        at = tensor.offset if tensor else 0
        end = at + tensor.nbytes if tensor else 0
        while at < end:
            count += 1
            if end - at < GAP_HEAD.size or count > MAX_GAPS:
                raise _damaged(path, "the stored gaps are wrong")
            offset, nbytes = GAP_HEAD.unpack(read_exact(fd, GAP_HEAD.size, at, path))
            at += GAP_HEAD.size + nbytes
            if at > end:
                raise _damaged(path, "the stored gaps are wrong")
            yield Span(i, offset, nbytes)


def _list(header: Header, key: str, kind: type[T]) -> tuple[T, ...]:
    value: Value | None = header.metadata.get(key)
    if not isinstance(value, tuple):
        raise _damaged(header.path, f"{key} is missing or not a list")
    items = tuple(v for v in value if type(v) is kind)
    if len(items) != len(value):
        raise _damaged(header.path, f"{key} has values of another type")
    return items


def _damaged(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{shown(path)}: {what}", _HINT)

"""From a stock model file, or its shards, to a packed one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from flashmoe_gguf.errors import FlashMoEError, PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import writing
from flashmoe_gguf.pack.in_place import is_begun, pack_in_place
from flashmoe_gguf.pack.journal import Task
from flashmoe_gguf.pack.layout import Layout, Source, plan_layout
from flashmoe_gguf.pack.opening import open_packed
from flashmoe_gguf.pack.partial import Counter, PartialFile, journal_path, partial_path
from flashmoe_gguf.pack.source import read_source
from flashmoe_gguf.pack.steps import plan_steps
from flashmoe_gguf.pack.striping import check_stripe_targets, stripe_paths
from flashmoe_gguf.pack.writer import Progress


@dataclass(frozen=True)
class PackReport:
    """What packing gave. `packed_bytes` counts `stripes` too; `resumed_bytes` of the source were
    copied by an earlier run; with `already_there` nothing was done at all.
    """

    out: Path
    source_bytes: int
    packed_bytes: int
    groups: int
    blocks: int
    fingerprint: str
    resumed_bytes: int = 0
    already_there: bool = False
    in_place: bool = False
    stripes: tuple[Path, ...] = ()


def pack_model(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    in_place: bool = False,
    force: bool = False,
    stripes: Sequence[str | os.PathLike[str]] = (),
) -> PackReport:
    """Write the packed file `out` of the model `source`, a GGUF file or the first of its shards.

    Written to `out`.partial and renamed when it is whole. Stopped at any point, even by a power
    cut, the same call goes on after the last finished layer. `in_place` gives back the space of
    the original while it is copied, and deletes it in the end: from the first layer on, only
    the same call again makes a usable file of the two halves. `force` replaces an `out` that
    exists. `stripes` are folders, best one per drive: the experts are spread over one file in
    each, named after `out`, and `out` keeps the rest.

    `progress` gets the bytes copied and the bytes in all, many times a second; what it raises
    ends the call. Memory: the headers and one part of one expert. Raises ModelFileError for
    what is wrong with the source, PackError for what is wrong with the target.
    """
    target = Path(out)
    if target.is_dir():
        raise PackError(f"{shown(target)}: this is a folder", "name the packed file")
    if stripes and in_place:
        raise PackError(
            f"{shown(target)}: packing in place cannot spread experts over stripes",
            "leave out --in-place, or --stripe",
        )
    if is_begun(target):
        if not in_place:
            raise PackError(
                f"{shown(target)}: packing in place was begun and is not done",
                "run the same command again with --in-place to finish it",
            )
        packed, resumed = pack_in_place(Path(source), target, None, progress)
        return _report(target, packed.source, packed.layout, resumed, in_place=True)
    what = read_source(source)
    layout = plan_layout(what, stripe_paths(what, target, stripes))
    _check_names(what, layout, target)
    if target.exists() and not force:
        _check_existing(what, layout, target, in_place)
        _drop_stale_journal(target)
        return _report(target, what, layout, 0, already_there=True)
    if in_place:
        packed, resumed = pack_in_place(Path(source), target, what, progress)
        return _report(target, packed.source, packed.layout, resumed, in_place=True)
    if not force:
        check_stripe_targets(layout)
    resumed = _pack(what, layout, target, progress)
    return _report(target, what, layout, resumed)


def _pack(source: Source, layout: Layout, out: Path, progress: Progress | None) -> int:
    """Pack, leaving the source as it is; returns the bytes that an earlier run had copied."""
    stamps = _stamps(source)
    task = Task(source.fingerprint, xxhash.xxh3_128_hexdigest(layout.header), False, stamps)
    partial = PartialFile(out, layout)
    try:
        try:
            partial.require_space(task)
        except PackError:
            if not partial.used_bytes:
                partial.path.unlink()  # made just now
            raise
        partial.take_up(task)
        steps = plan_steps(layout)
        pending = partial.pending(steps)
        counter = Counter(steps, pending, progress)
        writer = partial.writer(source, [shard.path for shard in source.shards])
        try:
            partial.write_start(writer)
            for step in pending:
                writer.write_step(step, counter.add)
                partial.commit(step.name)
        finally:
            writer.close()
        if _stamps(source) != stamps:
            raise PackError(
                f"{shown(source.shards[0].path)}: the model was changed while it was packed",
                "run this again when nothing writes to it",
            )
        partial.finish()
        partial.drop_journal()
        return counter.resumed
    finally:
        partial.close()


def _stamps(source: Source) -> tuple[tuple[int, int], ...]:
    """Size and time of change of each file."""
    stats = [os.stat(shard.path) for shard in source.shards]
    return tuple((stat.st_size, stat.st_mtime_ns) for stat in stats)


def _check_names(source: Source, layout: Layout, out: Path) -> None:
    finals = [out, *(Path(stripe.path) for stripe in layout.stripes)]
    named = [journal_path(out), *finals, *map(partial_path, finals)]
    ours = [path for path in named if path.exists()]
    for shard in source.shards:
        if any(os.path.samefile(path, shard.path) for path in ours):
            raise PackError(
                f"{shown(out)}: source and target are the same file",
                "give the packed file another name with -o",
            )


def _check_existing(source: Source, layout: Layout, out: Path, in_place: bool) -> None:
    """Return if `out` is what would be made; raises PackError."""
    hint = "delete it, choose another name with -o, or use --force to replace it"
    try:
        packed = open_packed(out)
    except FlashMoEError:
        raise PackError(f"{shown(out)}: a file of this name is there already", hint) from None
    if packed.source.fingerprint != source.fingerprint:
        if packed.source.names == source.names:
            raise PackError(
                f"{shown(out)}: the model has changed since this file was packed from it", hint
            )
        raise PackError(f"{shown(out)}: this file was packed from another model", hint)
    if packed.layout.header != layout.header:
        raise PackError(f"{shown(out)}: this file was packed in another way", hint)
    if in_place:
        raise PackError(
            f"{shown(out)}: the packed file is there already, so nothing is packed in place",
            "check it with flashmoe verify, then delete the original yourself",
        )


def _drop_stale_journal(out: Path) -> None:
    """A run that was killed just after its last step but one left it behind."""
    if not partial_path(out).exists():
        with writing(journal_path(out)):
            journal_path(out).unlink(missing_ok=True)


def _report(
    out: Path,
    source: Source,
    layout: Layout,
    resumed: int,
    *,
    already_there: bool = False,
    in_place: bool = False,
) -> PackReport:
    return PackReport(
        out=out,
        source_bytes=sum(shard.size_bytes for shard in source.shards),
        packed_bytes=layout.packed_bytes,
        groups=len(layout.groups),
        blocks=sum(group.n_expert for group in layout.groups),
        fingerprint=source.fingerprint,
        resumed_bytes=resumed,
        already_there=already_there,
        in_place=in_place,
        stripes=tuple(Path(stripe.path) for stripe in layout.stripes),
    )

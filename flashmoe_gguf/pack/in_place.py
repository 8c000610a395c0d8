"""Packing that gives back the space of the original as it goes, and can be killed at any point.

Steps are done from the end of the source to its start. Once a step's blocks are on the disk and
the journal says so, the source files are cut to what the steps that are left still read. So at
every moment each layer is whole in the original or whole in NAME.gguf.partial, and the disk
holds one layer more than one copy. The partial file carries the source's headers from its first
step on, so a later run needs nothing but the journal, that file and what is left of the
original. The originals are deleted after the packed file has its name; the journal goes last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import xxhash

from flashmoe_gguf.errors import PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import open_source, require_space, sync_folder, writing
from flashmoe_gguf.pack.journal import START, Journal, Task
from flashmoe_gguf.pack.layout import Source, plan_layout
from flashmoe_gguf.pack.opening import PackedFile, open_packed
from flashmoe_gguf.pack.partial import Counter, PartialFile, journal_path, partial_path
from flashmoe_gguf.pack.steps import Step, in_place_peak, in_place_steps, plan_steps
from flashmoe_gguf.pack.writer import Progress


def is_begun(out: Path) -> bool:
    """Whether originals may be gone already in favour of `out` or its partial file."""
    journal = Journal.resume(journal_path(out))
    if journal is None:
        return False
    journal.close()
    return journal.task.in_place and START in journal.done


def pack_in_place(
    path: Path, out: Path, source: Source | None, progress: Progress | None
) -> tuple[PackedFile, int]:
    """Begin (with `source`) or go on (without); returns what was made, and the bytes that were
    done before. Raises ModelFileError, PackError.
    """
    if source is not None:
        packed = PackedFile(partial_path(out), source, plan_layout(source))
        paths = [shard.path for shard in source.shards]
        _check_originals(paths)
    else:
        named = out if not partial_path(out).exists() else partial_path(out)
        packed = open_packed(named)
        paths = [path.parent / name for name in packed.source.names]
        if path.name not in packed.source.names:
            raise PackError(
                f"{shown(path)}: {shown(out)} is being packed in place from "
                f"{shown(packed.source.names[0])}",
                "give that file, or another name with -o",
            )
        if named == out:
            total = sum(s.source_bytes for s in plan_steps(packed.layout))
            _delete_originals(packed, paths, out)
            return packed, total
    resumed = _copy(packed, paths, out, progress, begin=source is not None)
    _delete_originals(packed, paths, out)
    return packed, resumed


def _copy(
    packed: PackedFile,
    paths: Sequence[Path],
    out: Path,
    progress: Progress | None,
    *,
    begin: bool,
) -> int:
    source, layout = packed.source, packed.layout
    digest = xxhash.xxh3_128_hexdigest(layout.header)
    partial = PartialFile(out, layout)  # nobody else writes it from here on
    try:
        if begin:  # what was begun otherwise holds nothing that is not in the original
            partial.clear()
        steps = plan_steps(layout)
        _require_space(partial, packed, steps, paths, out)
        partial.take_up(Task(source.fingerprint, digest, True, ()))
        pending = partial.pending(steps)
        _check_rest(packed, paths, pending)
        counter = Counter(steps, pending, progress)
        writer = partial.writer(source, paths)
        try:
            partial.write_start(writer)
            for step, needed in in_place_steps(pending, len(paths)):
                writer.write_step(step, counter.add)
                partial.commit(step.name)
                _cut(source, paths, needed)
        finally:
            writer.close()
        partial.finish()
        return counter.resumed
    finally:
        partial.close()


def _check_originals(paths: Sequence[Path]) -> None:
    """Raise PackError for files that cannot, or should not, be cut and deleted."""
    for path in paths:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) or found.st_nlink > 1:
            raise PackError(
                f"{shown(path)}: this file has other names, whose owners would lose it",
                "pack without --in-place, or make a copy first",
            )
        os.close(open_source(path, os.O_RDWR))


def _check_rest(packed: PackedFile, paths: Sequence[Path], pending: Sequence[Step]) -> None:
    """Raise PackError unless what is left of the originals is what pending steps read."""
    shards = {span.shard for step in pending for span in step.spans}
    for i in sorted(shards):
        if not _is_original(packed, paths[i], i):
            raise PackError(
                f"{shown(paths[i])}: this is not the file whose packing in place was begun",
                "put that file back where it was",
            )


def _is_original(packed: PackedFile, path: Path, number: int) -> bool:
    """Whether a file starts with the right header, and is not longer than it was."""
    header = packed.source.headers[number]
    if not path.exists() or os.stat(path).st_size > packed.source.shards[number].size_bytes:
        return False
    fd = open_source(path)
    try:
        return os.pread(fd, len(header), 0) == header
    finally:
        os.close(fd)


def _cut(source: Source, paths: Sequence[Path], needed: Sequence[int]) -> None:
    """Shorten the originals; their headers stay, to know them by."""
    for path, length, header in zip(paths, needed, source.headers, strict=True):
        keep = max(length, len(header))
        if os.path.exists(path) and os.stat(path).st_size > keep:
            with writing(path):
                os.truncate(path, keep)


def _delete_originals(packed: PackedFile, paths: Sequence[Path], out: Path) -> None:
    for i, path in enumerate(paths):
        if _is_original(packed, path, i):
            with writing(path):
                os.unlink(path)
    sync_folder(paths[0].parent)
    with writing(journal_path(out)):
        os.unlink(journal_path(out))


def _require_space(
    partial: PartialFile,
    packed: PackedFile,
    steps: Sequence[Step],
    paths: Sequence[Path],
    out: Path,
) -> None:
    journal = Journal.resume(journal_path(out))
    done = journal.done if journal else set()
    if journal:
        journal.close()
    pending = [step for step in steps if step.name not in done]
    sizes = [os.stat(path).st_size if path.exists() else 0 for path in paths]
    peak = in_place_peak(pending, sizes, 4096)
    layout = packed.layout
    if os.stat(paths[0].parent).st_dev != os.stat(out.parent).st_dev:
        peak = sum(step.packed_bytes for step in pending)  # what is freed is freed elsewhere
    if START not in done:
        peak += len(layout.header) + layout.total_bytes - layout.sums_offset
    try:
        require_space(out.parent, peak)
    except PackError:
        if not partial.used_bytes:
            partial.path.unlink()
        raise

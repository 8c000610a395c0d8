"""Checks every block of a packed file against its checksums, several at a time."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from flashmoe_gguf.pack.files import opened, read_exact
from flashmoe_gguf.pack.layout import SUM_BYTES, Layout, PackedGroup, PackedPart
from flashmoe_gguf.pack.opening import PackedFile, open_packed
from flashmoe_gguf.pack.writer import Progress

_AT_ONCE_BYTES = 64 << 20  # blocks that are read together, beyond one per thread
_MAX_DAMAGES = 10_000


@dataclass(frozen=True)
class Damage:
    """A part whose bytes are not those that were packed; `tensor` is "" for the zeros between."""

    layer: int
    family: str
    expert: int
    tensor: str

    def __str__(self) -> str:
        block = " (second block)" if self.family == "chexps" else ""
        return f"layer {self.layer}{block} expert {self.expert} ({self.tensor or 'padding'})"


@dataclass(frozen=True)
class VerifyReport:
    """`damages` are in the order of the file, at most the first ten thousand."""

    path: Path
    blocks: int
    block_bytes: int
    damaged_blocks: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


def verify_model(
    packed: str | os.PathLike[str], *, n_threads: int = 4, progress: Progress | None = None
) -> VerifyReport:
    """Read every block from the disk and compare.

    The header and the stored source headers are checked too, and raise ModelFileError where they
    are wrong, PackError for a file that is not packed or by a newer version; so does a drive
    that cannot read. Dense tensors have no checksums. Memory: a few blocks.
    """
    file = open_packed(packed)
    layout = file.layout
    total = sum(g.block_bytes * g.n_expert for g in layout.groups)
    done = 0
    damages: list[Damage] = []
    damaged_blocks = 0
    if progress is not None:
        progress(0, total)
    with opened(file.files) as fds, _threads(n_threads) as pool:
        if hasattr(os, "posix_fadvise"):  # what is in memory says nothing about the disk
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        check = _Check(fds, file)
        work = _work(layout)
        at_once = max(layout.groups, key=lambda g: g.block_bytes).block_bytes
        ahead = n_threads + _AT_ONCE_BYTES // at_once
        waiting = [pool.submit(check.block, *item) for item in islice(work, ahead)]
        waiting.reverse()
        while waiting:
            nbytes, found = waiting.pop().result()
            following = next(work, None)
            if following is not None:
                waiting.insert(0, pool.submit(check.block, *following))
            damaged_blocks += bool(found)
            damages += found[: _MAX_DAMAGES - len(damages)]
            done += nbytes
            if progress is not None:
                progress(done, total)
    return VerifyReport(
        file.path, sum(g.n_expert for g in layout.groups), total, damaged_blocks, tuple(damages)
    )


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count, thread_name_prefix="verify")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _work(layout: Layout) -> Iterator[tuple[PackedGroup, int]]:
    return ((group, expert) for group in layout.groups for expert in range(group.n_expert))


class _Check:
    """Checks blocks, from any thread."""

    def __init__(self, fds: Sequence[int], file: PackedFile) -> None:
        self._fds = fds
        self._file = file
        self._lock = threading.Lock()
        self._sums_of: tuple[PackedGroup, list[tuple[int, ...]]] | None = None

    def block(self, group: PackedGroup, expert: int) -> tuple[int, list[Damage]]:
        """The bytes read, and what is wrong with one expert's block."""
        at = group.block(expert)
        fd, path = self._fds[at.file], self._file.files[at.file]
        data = memoryview(read_exact(fd, group.block_bytes, at.offset, path))
        found = []
        ends = [p.block_offset for p in group.parts[1:]] + [group.block_bytes]
        for part, sums, end in zip(group.parts, self._sums(group), ends, strict=True):
            used = part.block_offset + part.expert_bytes
            if xxhash.xxh3_64_intdigest(data[part.block_offset : used]) != sums[expert]:
                found.append(Damage(group.layer, group.family, expert, part.tensor.name))
            if any(data[used:end]):
                found.append(Damage(group.layer, group.family, expert, ""))
        return group.block_bytes, found

    def _sums(self, group: PackedGroup) -> list[tuple[int, ...]]:
        """The stored checksums, per part, per expert; those of the last group are kept."""
        with self._lock:
            if self._sums_of is None or self._sums_of[0] is not group:
                sums = [
                    read_sums(self._fds[0], self._file.path, self._file.layout, group, part)
                    for part in group.parts
                ]
                self._sums_of = (group, sums)
            return self._sums_of[1]


def read_sums(
    fd: int, path: Path, layout: Layout, group: PackedGroup, part: PackedPart
) -> tuple[int, ...]:
    """The checksum of a part of each expert."""
    at = layout.sums_offset + SUM_BYTES * part.first_sum
    return struct.unpack(
        f"<{group.n_expert}Q", read_exact(fd, SUM_BYTES * group.n_expert, at, path)
    )

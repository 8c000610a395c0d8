"""Checks every block and dense tensor of a packed file against its checksum, several at a time."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import xxhash

from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import opened, read_chunks, read_exact
from flashmoe_gguf.pack.layout import SUM_BYTES, DenseTensor, Layout, PackedGroup, PackedPart
from flashmoe_gguf.pack.opening import PackedFile, open_packed
from flashmoe_gguf.pack.writer import Progress

_AT_ONCE_BYTES = 64 << 20  # blocks that are read together, beyond one per thread
_MAX_DAMAGES = 10_000


@dataclass(frozen=True)
class Damage:
    """A part of an expert, or a dense tensor, whose bytes are not those that were packed; `tensor`
    is "" for the zeros between parts.
    """

    tensor: str
    layer: int | None = None
    family: str = ""
    expert: int | None = None

    def __str__(self) -> str:
        if self.expert is None:
            return f"tensor {shown(self.tensor)}"
        block = " (second block)" if self.family == "chexps" else ""
        return f"layer {self.layer}{block} expert {self.expert} ({self.tensor or 'padding'})"


@dataclass(frozen=True)
class VerifyReport:
    """`damages` are in the order of the file, at most the first ten thousand; `tensors` are the
    dense ones.
    """

    path: Path
    blocks: int
    block_bytes: int
    damaged_blocks: int
    tensors: int
    tensor_bytes: int
    damaged_tensors: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages


def verify_model(
    packed: str | os.PathLike[str], *, n_threads: int = 4, progress: Progress | None = None
) -> VerifyReport:
    """Read every block and every dense tensor from the disk and compare.

    Not the bytes that source files had between their tensors. The header and the stored source
    headers are checked too, and raise ModelFileError where they are wrong, PackError for a file
    that is not packed or by a newer version; so does a drive that cannot read. Memory: a few
    blocks.
    """
    file = open_packed(packed)
    layout = file.layout
    block_bytes = sum(g.block_bytes * g.n_expert for g in layout.groups)
    tensor_bytes = sum(dense.tensor.nbytes for dense in layout.dense)
    total = block_bytes + tensor_bytes
    done = 0
    damages: list[Damage] = []
    damaged_blocks = damaged_tensors = 0
    if progress is not None:
        progress(0, total)
    with opened(file.files) as fds, _threads(n_threads) as pool:
        if hasattr(os, "posix_fadvise"):  # what is in memory says nothing about the disk
            for fd in fds:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        check = _Check(fds, file)
        work = check.work(layout)
        at_once = max(layout.groups, key=lambda g: g.block_bytes).block_bytes
        ahead = n_threads + _AT_ONCE_BYTES // at_once
        waiting = [pool.submit(item) for item in islice(work, ahead)]
        waiting.reverse()
        while waiting:
            nbytes, found = waiting.pop().result()
            following = next(work, None)
            if following is not None:
                waiting.insert(0, pool.submit(following))
            if found and found[0].expert is None:
                damaged_tensors += 1
            elif found:
                damaged_blocks += 1
            damages += found[: _MAX_DAMAGES - len(damages)]
            done += nbytes
            if progress is not None:
                progress(done, total)
    return VerifyReport(
        file.path,
        sum(g.n_expert for g in layout.groups),
        block_bytes,
        damaged_blocks,
        len(layout.dense),
        tensor_bytes,
        damaged_tensors,
        tuple(damages),
    )


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(count, thread_name_prefix="verify")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Check:
    """Checks blocks and tensors, from any thread."""

    def __init__(self, fds: Sequence[int], file: PackedFile) -> None:
        self._fds = fds
        self._file = file
        self._lock = threading.Lock()
        self._sums_of: tuple[PackedGroup, list[tuple[int, ...]]] | None = None

    def work(self, layout: Layout) -> Iterator[Callable[[], tuple[int, list[Damage]]]]:
        """All there is to check, in the order of the file."""
        for dense in layout.dense:
            yield partial(self.dense, dense)
        for group in layout.groups:
            for expert in range(group.n_expert):
                yield partial(self.block, group, expert)

    def dense(self, dense: DenseTensor) -> tuple[int, list[Damage]]:
        """The bytes read, and what is wrong with one dense tensor."""
        fd, path = self._fds[0], self._file.path
        digest = xxhash.xxh3_64()
        for _, data in read_chunks(fd, dense.tensor.nbytes, dense.offset, path):
            digest.update(data)
        right = digest.intdigest() == read_dense_sum(fd, path, dense)
        return dense.tensor.nbytes, [] if right else [Damage(dense.tensor.name)]

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
                found.append(Damage(part.tensor.name, group.layer, group.family, expert))
            if any(data[used:end]):
                found.append(Damage("", group.layer, group.family, expert))
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


def read_dense_sum(fd: int, path: Path, dense: DenseTensor) -> int:
    """The checksum of a dense tensor."""
    return int(struct.unpack("<Q", read_exact(fd, SUM_BYTES, dense.sum_offset, path))[0])

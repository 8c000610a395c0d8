"""How fast a file can be read: random aligned reads by a few threads, as the expert cache does.

It measures what a model's own file gives on its own drive, and owns nothing else. What a drive or
a virtual machine's host caches below the operating system cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashmoe_gguf.errors import DiskError

ALIGNMENT = 4096  # what direct I/O asks of offsets, sizes and buffers on every usual drive

_HUGE_PAGE = 2 << 20
# More than processors cache: experts go to memory.
_MEMORY_BYTES = 64 << 20
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Bandwidth:
    """What reads of `request_bytes` by `depth` threads gave."""

    request_bytes: int
    depth: int
    bytes_per_second: float


def read_bandwidth(
    path: Path,
    *,
    request_bytes: int = 1 << 20,
    depth: int = 4,
    seconds: float = 1.0,
    direct: bool = True,
) -> float:
    """Bytes per second of random aligned reads of an existing file by `depth` threads.

    Every block of the file is read once, in random order, and again from the start while there is
    time: about `seconds`, and one request at the least. `direct` goes past the page cache. Without
    it the file's pages are dropped before every round and the kernel's readahead is off, so that
    what is measured is the drive; pages that a running program has mapped stay, and flatter it.

    Raises DiskError for a file that cannot be read, that is shorter than one request, for a file
    system without direct I/O if `direct`, and for sizes and depths that make no sense.
    """
    if request_bytes <= 0 or request_bytes % ALIGNMENT:
        raise DiskError(f"reads of {request_bytes} bytes", f"give a multiple of {ALIGNMENT}")
    if depth < 1 or not seconds > 0:
        raise DiskError(
            f"{depth} threads for {seconds} seconds", "give at least one, and some time"
        )
    if not direct and not hasattr(os, "posix_fadvise"):
        raise DiskError("this system cannot drop a file's pages from its cache", "read directly")
    file = _open(path, direct)
    try:
        n_blocks = os.fstat(file).st_size // request_bytes
        if not n_blocks:
            raise DiskError(
                f"{path}: shorter than one read of {request_bytes} bytes", "take a larger file"
            )
        return _measure(path, file, n_blocks, request_bytes, depth, seconds, direct)
    finally:
        os.close(file)


def measure_grid(
    path: Path,
    sizes: Iterable[int],
    depths: Iterable[int],
    seconds: float,
    *,
    direct: bool = True,
) -> list[Bandwidth]:
    """`read_bandwidth` for every size at every depth, `seconds` each; sizes that the file is too
    short for are left out. Raises DiskError as it does, also when no size is left.
    """
    depths = tuple(depths)
    try:
        length = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    rows = [
        Bandwidth(
            size,
            depth,
            read_bandwidth(path, request_bytes=size, depth=depth, seconds=seconds, direct=direct),
        )
        for size in sizes
        if size <= length
        for depth in depths
    ]
    if not rows:
        raise DiskError(f"{path}: shorter than every size to measure", "take a larger file")
    return rows


def direct_io_problem(path: Path) -> str:
    """Why direct reads of this file do not work, in a few words; "" when they do.

    Some file systems refuse at opening and some at the first read, so one block is read.
    Raises DiskError for a file that cannot be read at all or is shorter than a block.
    """
    if not _O_DIRECT:
        return "this system has no O_DIRECT"
    if not path.is_file() or path.stat().st_size < ALIGNMENT:
        raise DiskError(f"{path}: no file of {ALIGNMENT} bytes or more", "take a larger file")
    try:
        file = os.open(path, os.O_RDONLY | _O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise _unreadable(path, error) from None
        return "the file system refuses to open files for it"
    try:
        with mmap.mmap(-1, ALIGNMENT) as buffer:
            os.preadv(file, [buffer], 0)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise _unreadable(path, error) from None
        return f"the drive refuses reads of {ALIGNMENT} bytes"
    finally:
        os.close(file)
    return ""


def _open(path: Path, direct: bool) -> int:
    if direct and not _O_DIRECT:
        raise _no_direct(path)
    try:
        return os.open(path, os.O_RDONLY | (_O_DIRECT if direct else 0))
    except OSError as error:
        if direct and error.errno in _REFUSED:
            raise _no_direct(path) from None
        raise _unreadable(path, error) from None


def _measure(
    path: Path,
    file: int,
    n_blocks: int,
    request_bytes: int,
    depth: int,
    seconds: float,
    direct: bool,
) -> float:
    """Whole rounds over the file until the time is up; only the reading is timed."""
    done_bytes, elapsed = 0, 0.0
    order = list(range(n_blocks))
    n_buffers = max(depth, _MEMORY_BYTES // request_bytes)
    memory = _memory(request_bytes * n_buffers)
    whole = memoryview(memory)
    buffers = [whole[i * request_bytes : (i + 1) * request_bytes] for i in range(n_buffers)]
    try:
        if not direct:
            os.fsync(file)  # pages that wait to be written cannot be dropped
        with ThreadPoolExecutor(depth) as pool:
            while elapsed < seconds:
                if not direct:
                    _drop_pages(file)
                random.shuffle(order)
                blocks = _Shared(iter(order))
                started = time.perf_counter()
                deadline = started + seconds - elapsed
                readers = [
                    pool.submit(_read_blocks, file, buffers, blocks, deadline) for _ in range(depth)
                ]
                done_bytes += sum(reader.result() for reader in readers)
                elapsed += time.perf_counter() - started
    except OSError as error:
        if direct and error.errno in _REFUSED:
            raise _no_direct(path) from None
        raise _unreadable(path, error) from None
    finally:
        for view in (*buffers, whole):
            view.release()
        memory.close()
    return done_bytes / elapsed


def _memory(n_bytes: int) -> mmap.mmap:
    """Touched memory on huge pages where there are any, as native/memory.c takes it for the cache:
    on small ones a direct read of 1 MiB spends half of its time on their 256 addresses.
    """
    size = -(-n_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory[::ALIGNMENT] = bytes(len(memory) // ALIGNMENT)
    return memory


class _Shared:
    """An iterator that several threads take from."""

    def __init__(self, items: Iterator[int]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def take(self) -> int | None:
        with self._lock:
            return next(self._items, None)


def _read_blocks(file: int, buffers: Sequence[memoryview], blocks: _Shared, deadline: float) -> int:
    """One thread's share of a round, in bytes: until no block is left or the time is up."""
    done = 0
    while (block := blocks.take()) is not None:
        buffer = buffers[block % len(buffers)]
        n = os.preadv(file, [buffer], block * len(buffer))
        if n != len(buffer):
            raise OSError(errno.EIO, "the file became shorter")
        done += n
        if time.perf_counter() >= deadline:
            break
    return done


def _drop_pages(file: int) -> None:
    """And no reading ahead into the next round's blocks."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


def _no_direct(path: Path) -> DiskError:
    return DiskError(f"{path}: its file system has no direct I/O", "measure buffered reads instead")


def _unreadable(path: Path, error: OSError) -> DiskError:
    return DiskError(f"{path}: cannot read: {error.strerror or error}", "check the path")

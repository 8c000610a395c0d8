"""Writing files of gigabytes without going through the page cache.

Through it, copying costs six times the processor time of making the random weights,
and a model as large as memory would push everything else out of it. Where the file
system has no direct writes (tmpfs, other systems), they are buffered.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import TracebackType

_FLAGS = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)
_BLOCK = 4096
_BUFFER_BYTES = 8 << 20


class DirectWriter:
    """Appends to a file, from its end, in large aligned writes.

    The file has its bytes, and has them on disk, only after `close`; raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = path.stat().st_size // _BLOCK * _BLOCK
        try:
            self._fd = os.open(path, _FLAGS | _DIRECT)
        except OSError:
            self._fd = os.open(path, _FLAGS)
        # Page-aligned, as direct writes want it.
        self._view = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        with path.open("rb") as file:
            file.seek(self._written)
            started = file.read(_BLOCK)
        self._filled = len(started)
        self._view[: self._filled] = started

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._fd)

    @property
    def n_bytes(self) -> int:
        """Size of the file with all that was appended."""
        return self._written + self._filled

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while data:
            count = min(len(data), _BUFFER_BYTES - self._filled)
            self._view[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == _BUFFER_BYTES:
                self._put(_BUFFER_BYTES)
                self._filled = 0

    def _finish(self) -> None:
        size = self.n_bytes
        self._put(-(-self._filled // _BLOCK) * _BLOCK)
        self._filled = 0
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def _put(self, count: int) -> None:
        """Writes the first `count` bytes of the buffer, whole blocks."""
        os.lseek(self._fd, self._written, os.SEEK_SET)
        left = self._view[:count]
        while left:
            try:
                done = os.write(self._fd, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not _DIRECT:
                    raise
                # Larger blocks than ours, or the rest of a short write: go on buffered.
                direct, self._fd = self._fd, os.open(self._path, _FLAGS)
                os.close(direct)
                os.lseek(self._fd, self._written + count - len(left), os.SEEK_SET)
                done = os.write(self._fd, left)
            left = left[done:]
        self._written += count

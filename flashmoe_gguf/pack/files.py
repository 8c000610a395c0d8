"""Exact reads and writes of open files, with errors that say which file and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flashmoe_gguf.errors import FlashMoEError, ModelFileError, PackError
from flashmoe_gguf.gguf.cursor import shown

CHUNK_BYTES = 4 << 20
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def open_source(path: Path, flags: int = os.O_RDONLY) -> int:
    """A file descriptor of a model file; raises ModelFileError, PackError for one to write."""
    try:
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        if flags != os.O_RDONLY:
            raise write_error(path, error) from None
        raise ModelFileError(
            f"{shown(path)}: cannot open: {error.strerror}", "check the path"
        ) from None


@contextmanager
def opened(paths: Sequence[Path]) -> Iterator[list[int]]:
    """File descriptors of model files to read; raises ModelFileError."""
    with ExitStack() as stack:
        fds = []
        for path in paths:
            fds.append(open_source(path))
            stack.callback(os.close, fds[-1])
        yield fds


def open_target(path: Path, flags: int = 0) -> int:
    """A file descriptor to read and write, made if it is not there; raises PackError."""
    try:
        wanted = os.O_RDWR | os.O_CREAT | flags | getattr(os, "O_CLOEXEC", 0)
        return os.open(path, wanted, 0o666)
    except OSError as error:
        raise write_error(path, error) from None


def read_exact(fd: int, nbytes: int, offset: int, path: Path) -> bytes:
    """`nbytes` from `offset`; raises ModelFileError where the file ends sooner or fails."""
    parts: list[bytes] = []
    left = nbytes
    while left:
        try:
            part = os.pread(fd, min(left, 1 << 30), offset)
        except OSError as error:
            raise ModelFileError(
                f"{shown(path)}: cannot read at offset {offset:,}: {error.strerror}",
                "check the drive and the file",
            ) from None
        if not part:
            raise ModelFileError(
                f"{shown(path)}: the file ends at {offset:,}, {left:,} bytes too soon",
                "it was changed meanwhile, or is damaged",
            )
        parts.append(part)
        left -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_chunks(fd: int, nbytes: int, offset: int, path: Path) -> Iterator[tuple[int, bytes]]:
    """The same in pieces of at most CHUNK_BYTES, each with how far it is from `offset`."""
    for at in range(0, nbytes, CHUNK_BYTES):
        yield at, read_exact(fd, min(CHUNK_BYTES, nbytes - at), offset + at, path)


def write_exact(fd: int, data: bytes, offset: int, path: Path) -> None:
    """All of `data`; raises PackError."""
    view = memoryview(data)
    with writing(path):
        while view:
            done = os.pwrite(fd, view, offset)
            view = view[done:]
            offset += done


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the operating system says about `path` becomes a PackError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> FlashMoEError:
    """The error of a file or folder that cannot be written."""
    name = shown(path)
    if error.errno in _FULL:
        return PackError(f"{name}: no space left on the disk", "free some, then run this again")
    if error.errno == errno.EFBIG:
        return PackError(f"{name}: files may not be that large here", "raise the limit: ulimit -f")
    if error.errno in _READ_ONLY:
        hint = "choose another place with -o, or make this one writable"
        return PackError(f"{name}: cannot be written: {error.strerror}", hint)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        folder = shown(path.parent)
        return PackError(f"{name}: there is no folder {folder}", "make it, or choose another")
    return PackError(f"{name}: cannot be written: {error.strerror}", "check the disk and the path")


def sync_folder(folder: Path) -> None:
    """Have renames and deletions in `folder` reach the disk, where that can be asked for."""
    try:
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync folders
            raise write_error(folder, error) from None
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """What can still be written to the disk of `folder`; raises PackError."""
    with writing(folder / "."):
        stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def used_bytes(fd: int) -> int:
    """What a file, possibly with holes, takes on the disk."""
    return os.fstat(fd).st_blocks * 512


def require_space(folder: Path, needed: int) -> None:
    """Raise PackError unless `needed` bytes more fit on the disk of `folder`."""
    free = free_bytes(folder)
    if needed > free:
        raise PackError(
            f"{shown(folder)}: {_size(needed)} are needed on this disk and {_size(free)} are free",
            f"free {_size(needed - free)} more, or choose another disk with -o",
        )


def _size(nbytes: int) -> str:
    """ "1.50 GiB"; the budget module's own is not below us."""
    value, unit = float(nbytes), "bytes"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{value:.3g} {unit}"

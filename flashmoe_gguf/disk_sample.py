"""A file to measure a folder's drive with: a model that lies there, or one made for the purpose."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashmoe_gguf.errors import DiskError

SAMPLE_BYTES = 256 << 20  # more than what a drive's own small cache holds
_LEAST_BYTES = 64 << 20
_SPARE_BYTES = 256 << 20  # a drive must not be filled for a measurement
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A file of `size_bytes`; `made` says that it was written for the measurement."""

    path: Path
    size_bytes: int
    made: bool


@contextmanager
def sample_file(folder: Path, largest: int = SAMPLE_BYTES) -> Iterator[Sample]:
    """The largest GGUF in `folder`, or else a file of random bytes that is gone afterwards.

    The file that is made has no name in the folder, so that nothing is left behind whatever
    happens. It takes `largest` bytes, or 64 MiB where there is no room for more. Raises DiskError
    for a folder that cannot be read or written, or that has no room.
    """
    found = _existing(folder)
    if found is not None:
        yield found
        return
    size = _room(folder, largest)
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the next with closes it
    except OSError as error:
        raise DiskError(
            f"{folder}: cannot write a file to measure with: {error.strerror}",
            "name a folder that can be written to, or one with a model in it",
        ) from None
    with file:
        try:
            for _ in range(size // _CHUNK_BYTES):
                file.write(os.urandom(_CHUNK_BYTES))  # zeros may not reach the drive
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise DiskError(
                f"{folder}: cannot write {size} bytes to measure with: {error.strerror}",
                "free some space, or name another folder",
            ) from None
        yield Sample(Path(f"/proc/self/fd/{file.fileno()}"), size, made=True)


def _existing(folder: Path) -> Sample | None:
    try:
        sizes = [(p.stat().st_size, p) for p in folder.iterdir() if p.suffix == ".gguf"]
    except OSError as error:
        raise DiskError(
            f"{folder}: cannot look into it: {error.strerror}", "name an existing folder"
        ) from None
    files = [(size, p) for size, p in sizes if size >= _LEAST_BYTES and not _has_holes(p)]
    return Sample(max(files)[1], max(files)[0], made=False) if files else None


def _has_holes(path: Path) -> bool:
    """Reading holes measures memory. Compressed files look the same, and mislead as much."""
    status = path.stat()
    return 512 * getattr(status, "st_blocks", status.st_size) < 0.9 * status.st_size


def _room(folder: Path, largest: int) -> int:
    free = shutil.disk_usage(folder).free - _SPARE_BYTES
    if free < min(_LEAST_BYTES, largest):
        raise DiskError(
            f"{folder}: no room for a file of {_LEAST_BYTES >> 20} MiB to measure with",
            "free some space, or name a folder with a model in it",
        )
    return largest if free >= largest else _LEAST_BYTES

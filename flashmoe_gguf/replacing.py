"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, flush: bool = False) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if all goes well, and goes if not.

    flush: it is on disk before it does. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        if flush:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def first_bytes(path: Path, n: int) -> bytes:
    """The first `n` bytes of what a new file would replace; none where there is no file. Raises
    OSError.
    """
    if not os.path.isfile(path):
        return b""
    with path.open("rb") as file:
        return file.read(n)

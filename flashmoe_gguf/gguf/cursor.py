"""Opening a model file and reading it front to back, so that no input does harm."""

from __future__ import annotations

import difflib
import io
import os
import stat
import struct
from itertools import islice
from pathlib import Path

from flashmoe_gguf.errors import ModelFileError

DAMAGED = "the file is damaged: download or copy it again"

# Limits no real model comes near (the largest headers are some 50 MB), so that a hostile file
# costs seconds and megabytes at the most.
_MAX_HEADER_BYTES = 256 << 20
_MAX_KEPT_BYTES = 128 << 20
_CHUNK_BYTES = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def shown(thing: object) -> str:
    """`thing` fit for one line of an error message: no control characters, not endless."""
    text = str(thing)
    if not text.isprintable():
        text = ascii(text)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"


def open_file(path: Path) -> tuple[io.FileIO, int]:
    """The open file and its size in bytes; only regular, non-empty files get through."""
    name = shown(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{name}: this is a folder, not a file", _names_hint(path, ""))
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{name}: this is not a regular file", "give a .gguf file")
        # Not blocking, in case the file was replaced by a FIFO since stat.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        file = io.FileIO(os.open(path, flags), "rb")
        try:
            size = os.fstat(file.fileno()).st_size
        except OSError:
            file.close()
            raise
    except FileNotFoundError:
        raise ModelFileError(f"{name}: no such file", _names_hint(path.parent, path.name)) from None
    except PermissionError:
        raise ModelFileError(f"{name}: permission denied", "make the file readable") from None
    except OSError as error:
        raise ModelFileError(f"{name}: cannot open: {error.strerror}", "check the path") from None
    except ValueError:  # a NUL or a lone surrogate in the path
        raise ModelFileError(f"{name}: not a valid path", "check the path") from None
    if size == 0:
        file.close()
        raise ModelFileError(f"{name}: the file is empty", DAMAGED)
    return file, size


def _names_hint(folder: Path, wanted: str) -> str:
    """Name up to three GGUF files of `folder`, those most like `wanted` first."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in islice(entries, 10_000) if e.name.endswith(".gguf"))
    except FileNotFoundError:
        return f"there is no folder {shown(folder)}"
    except (OSError, ValueError):
        return "check the path"
    if not names:
        return "that folder has no .gguf files; check the path"
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[:3]
    return f"that folder has {', '.join(map(shown, close))}"


class Cursor:
    """Reads a file's header front to back through one buffer.

    `what` names the thing being read, for the message if the file ends inside it.
    """

    def __init__(self, path: Path, file: io.FileIO | io.BytesIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._base = 0  # file offset of the buffer's first byte
        self._buffer = b""
        self._at = 0
        self._kept = 0

    @property
    def offset(self) -> int:
        return self._base + self._at

    @property
    def left(self) -> int:
        return self._size - self.offset

    def error(self, what: str, hint: str = DAMAGED) -> ModelFileError:
        return ModelFileError(f"{shown(self._path)}: {what}", hint)

    def keep(self, nbytes: int, what: str) -> None:
        """Count memory that stays in use after reading; raises beyond the limit."""
        self._kept += nbytes
        if self._kept > _MAX_KEPT_BYTES:
            raise self.error(f"more metadata than any model has, at {what}")

    def require(self, nbytes: int, what: str) -> None:
        """Raise unless the file has `nbytes` more, and a header may be that long."""
        if nbytes > self.left:
            raise self.error(
                f"the file ends inside its header: {what} needs {nbytes:,} bytes at offset "
                f"{self.offset:,}, {self.left:,} are left"
            )
        if self.offset + nbytes > _MAX_HEADER_BYTES:
            raise self.error(f"the header is longer than any model's, at {what}")

    def _fill(self, nbytes: int, what: str) -> None:
        """Have the next `nbytes` in the buffer."""
        if self._at + nbytes <= len(self._buffer):
            return
        self.require(nbytes, what)
        parts = [self._buffer[self._at :]]
        have = len(parts[0])
        self._base, self._at = self.offset, 0
        while have < nbytes:
            try:
                part = self._file.read(max(nbytes - have, _CHUNK_BYTES))
            except OSError as error:
                raise self.error(
                    f"cannot read at offset {self._base + have:,}: {error.strerror}",
                    "check the drive and the file",
                ) from None
            if not part:
                raise self.error("the file became shorter while it was read", "try again")
            parts.append(part)
            have += len(part)
        self._buffer = b"".join(parts)

    def take(self, nbytes: int, what: str) -> bytes:
        self._fill(nbytes, what)
        self._at += nbytes
        return self._buffer[self._at - nbytes : self._at]

    def peek(self, nbytes: int, what: str) -> bytes:
        self._fill(nbytes, what)
        return self._buffer[self._at : self._at + nbytes]

    def u32(self, what: str) -> int:
        (value,) = _U32.unpack(self.take(4, what))
        return int(value)

    def u64(self, what: str) -> int:
        (value,) = _U64.unpack(self.take(8, what))
        return int(value)

    def skip(self, nbytes: int, what: str) -> None:
        self.require(nbytes, what)
        self._at += nbytes
        if self._at > len(self._buffer):
            self._base, self._at, self._buffer = self.offset, 0, b""
            self._file.seek(self._base)

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings, reading their lengths only: some 60 ns each."""
        length_at = _U64.unpack_from
        while count:
            self._fill(8, what)
            buffer, at = self._buffer, self._at
            last = len(buffer) - 8
            while count and at <= last:
                at += 8 + length_at(buffer, at)[0]
                count -= 1
            self.skip(at - self._at, what)

    def text(self, what: str, limit: int) -> str:
        """A string that must be UTF-8 without NULs, such as a name; `limit` in bytes."""
        length = self.u64(what)
        if length > limit:
            raise self.error(f"{what} is {length:,} bytes long, more than the {limit:,} allowed")
        self.keep(64 + length, what)
        try:
            text = self.take(length, what).decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None
        if "\0" in text:
            raise self.error(f"{what} has a NUL byte in it")
        return text

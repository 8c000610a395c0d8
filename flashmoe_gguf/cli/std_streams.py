"""Stdin, stdout and stderr as they may come: closed, or full. Python makes closed ones None."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from flashmoe_gguf.errors import OptionError


class _ClosedInput(io.TextIOWrapper):
    """Takes the place of a stdin that was closed when the program started."""


def fill_closed() -> None:
    """Puts the null device where a standard stream is closed.

    Its file descriptor is filled too: the next file that is opened would get it otherwise, and
    llama.cpp's log would be written into that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = _ClosedInput(io.BufferedReader(io.FileIO(os.devnull)), encoding="utf-8")
    if sys.stdout is None:
        sys.stdout = _null()
    if sys.stderr is None:
        sys.stderr = _null()


def need_stdin() -> None:
    """Raises OptionError when stdin was closed when the program started."""
    if isinstance(sys.stdin, _ClosedInput):
        raise OptionError(
            "stdin is closed, there is nothing to read", "give a pipe or a file: < FILE"
        )


def stdout_fails() -> bool:
    """Whether what waits to be written to stdout cannot be."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return True
    return False


def drop(stream: TextIO) -> None:
    """What is left in a stream's buffer must not fail again when Python exits."""
    with suppress(OSError, ValueError):  # it may have no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def _null() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")

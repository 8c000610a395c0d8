"""Where everything but the answer is written: stderr, as a terminal or as plain lines."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.text import Text

Rows = list[tuple[str, str]]


class Screen:
    """A console over a copy of stderr: llama_cpp silences the real one while it loads."""

    def __init__(self) -> None:
        self._own = _copy_of_stderr()
        self._file = self._own or sys.stderr
        self.console = Console(
            file=self._file, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self.is_terminal = self._file.isatty() and not self.console.is_dumb_terminal

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._own is not None:
            self._own.close()

    def line(self, text: str, style: str = "") -> None:
        """One line; `style` counts on terminals only."""
        self.console.print(Text(text, style))
        self._file.flush()

    def note(self, text: str) -> None:
        """Something the user should see."""
        self.line(text, "yellow")

    def error(self, message: str, hint: str) -> None:
        """An error that does not end the program."""
        self.line(f"error: {message}", "red")
        if hint:
            self.line(f"hint: {hint}")

    def rows(self, rows: Rows) -> None:
        """Labels and values in two columns."""
        for text in format_rows(rows):
            self.line(text, "dim")


def count(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_rows(rows: Rows) -> list[str]:
    """Labels padded to one width, then the values; a row without a label continues the last."""
    width = max((len(label) for label, _ in rows), default=0)
    return [f"{label:<{width}}  {value}".rstrip() for label, value in rows]


def format_table(table: list[list[str]], indent: str = "") -> list[str]:
    """Columns as wide as they need to be, the first aligned left and the others too."""
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return [
        (indent + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True))).rstrip()
        for row in table
    ]


def _copy_of_stderr() -> TextIO | None:
    """A text file over a duplicate of fd 2; None where sys.stderr is something else (tests)."""
    try:
        if sys.stderr.fileno() != 2:
            return None
        return open(
            os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1
        )
    except (OSError, ValueError, AttributeError):
        return None

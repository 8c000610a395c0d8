"""Paths as arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import click

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.gguf.cursor import shown

# Linux, Documentation/admin-guide/devices.txt: the memory devices zero, full, random and urandom.
_ENDLESS = frozenset(os.makedev(1, minor) for minor in (5, 7, 8, 9))


class FilePath(click.Path):
    """A path that is not empty, as the library would take "" for the current folder, and no device
    that could be read for ever.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        with suppress(OSError, ValueError):  # whoever opens it says it better
            if os.stat(value).st_rdev in _ENDLESS:
                self.fail(f"{os.fspath(value)} never ends.", param, ctx)
        return super().convert(value, param, ctx)


def refuse_to_replace(out: str, inputs: Iterable[str | None]) -> None:
    """Raises OptionError when what is to be written is one of the files that are read."""
    for path in inputs:
        same = False
        with suppress(OSError):  # whoever opens them says it better
            same = path is not None and os.path.samefile(out, path)
        if same:
            raise OptionError(
                f"{shown(out)}: it is read here, and would be written over",
                "give another name for what is written",
            )

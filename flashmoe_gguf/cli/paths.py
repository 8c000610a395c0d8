"""Paths as arguments."""

from __future__ import annotations

import os
from typing import Any

import click


class FilePath(click.Path):
    """A path that is not empty: the library would take "" for the current folder."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        return super().convert(value, param, ctx)

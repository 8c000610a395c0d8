"""The one place where errors become text and exit codes. Users see no traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

import click

from flashmoe_gguf.errors import FlashMoEError

BAD_INPUT = 2
UNEXPECTED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Commands(click.Group):
    """A group whose commands may raise; click itself handles its usage errors, also with 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added, not by the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlashMoEError as error:
            report(error)
            ctx.exit(BAD_INPUT)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read our output has left
                _drop_stdout()
                ctx.exit(UNEXPECTED)
            _report_unexpected(error)
            ctx.exit(UNEXPECTED)
        except Exception as error:
            _report_unexpected(error)
            ctx.exit(UNEXPECTED)


def report(error: FlashMoEError) -> None:
    """Two lines on stderr: what went wrong, and what to do about it where that is known."""
    color = False if os.environ.get("NO_COLOR") else None
    label = click.style("error:", fg="red", bold=True)
    click.echo(f"{label} {error.message}", err=True, color=color)
    if error.hint:
        label = click.style("hint:", bold=True)
        click.echo(f"{label} {error.hint}", err=True, color=color)


def _report_unexpected(error: Exception) -> None:
    if os.environ.get("FLASHMOE_TRACEBACK"):
        traceback.print_exception(error)
    text = " ".join(str(error).split())
    report(
        FlashMoEError(
            f"{type(error).__name__}: {text}" if text else type(error).__name__,
            "this is not expected; FLASHMOE_TRACEBACK=1 shows where it happened",
        )
    )


def _drop_stdout() -> None:
    """What is left in stdout's buffer must not fail again when Python exits."""
    with suppress(OSError, ValueError):  # it may have no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, sys.stdout.fileno())
        finally:
            os.close(null)

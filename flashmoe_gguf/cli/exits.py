"""The one place where errors become text and exit codes. Users see no traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any

import click

from flashmoe_gguf.cli.std_streams import drop, fill_closed, stdout_fails
from flashmoe_gguf.errors import FlashMoEError

BAD_INPUT = 2
UNEXPECTED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells count


# What only writing fails with.
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


class Commands(click.Group):
    """A group whose commands may raise; click itself handles its usage errors, also with 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added, not by the alphabet."""
        return list(self.commands)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        fill_closed()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # --help and --version write before there is a command
            sys.exit(_os_error(error))

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
            ctx.exit(_os_error(error))
        except MemoryError:
            report(
                FlashMoEError(
                    f"not enough memory for {ctx.info_name} {ctx.invoked_subcommand}",
                    "close other programs, or try it with a smaller model or smaller numbers",
                )
            )
            ctx.exit(BAD_INPUT)
        except Exception as error:
            _report_unexpected(error)
            ctx.exit(UNEXPECTED)


def _os_error(error: OSError) -> int:
    """Reports an error of the system's that no command has handled; returns the exit code."""
    if error.errno == errno.EPIPE:  # whoever read our output has left
        drop(sys.stdout)
    elif error.filename is None and (error.errno in _FULL or stdout_fails()):
        drop(sys.stdout)
        report(FlashMoEError(f"cannot write to stdout: {error.strerror}", "check where it goes"))
    else:
        _report_unexpected(error)
    return UNEXPECTED


def report(error: FlashMoEError) -> None:
    """Two lines on stderr: what went wrong, and what to do about it where that is known."""
    color = False if os.environ.get("NO_COLOR") else None
    lines = [f"{click.style('error:', fg='red', bold=True)} {error.message}"]
    if error.hint:
        lines.append(f"{click.style('hint:', bold=True)} {error.hint}")
    try:
        for line in lines:
            click.echo(line, err=True, color=color)
    except OSError:  # stderr is full or gone; the exit code still tells
        drop(sys.stderr)


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

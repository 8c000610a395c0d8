"""Runs long commands and keeps saying how far they are.

Owns: the one line format of the build's messages, and running a child process so
that something is printed every few seconds even while the child is silent.
"""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

MARK = "flashmoe build:"
PERIOD_SECONDS = 4.0

_START = time.monotonic()
_NINJA = re.compile(r"^\[ *(\d+)/(\d+)\] ")
_TAIL_LINES = 60


class CommandError(Exception):
    """A command could not be started or returned non-zero; carries the end of its output."""


def say(text: str) -> None:
    """Print one progress line: mark, seconds since this process started, text."""
    print(f"{MARK} {time.monotonic() - _START:5.0f} s  {text}", flush=True)


def stream(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, period: float = PERIOD_SECONDS
) -> Iterator[str | None]:
    """Run ``command``; yield its output lines, and None whenever ``period`` seconds were silent.

    stderr is merged into stdout. Raises CommandError at the end on a non-zero status.
    """
    try:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise CommandError(f"cannot run {command[0]}: {error.strerror}") from error
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line.rstrip("\n"))
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                line = lines.get(timeout=period)
            except queue.Empty:
                yield None
                continue
            if line is None:
                break
            yield line
        reader.join()
        assert child.stdout is not None
        child.stdout.close()
        status = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if status:
        raise CommandError(f"{Path(command[0]).name} ended with status {status}")


def run(label: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run ``command`` with its whole output in ``log`` and a condensed line every few seconds.

    Ninja's ``[n/m]`` becomes ``label n/m``. Raises CommandError with the output from the
    first failure on, or its end.
    """
    said = time.monotonic()
    state = "..."
    failed = False
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    say(f"{label} ...")
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in stream(command, env=env):
                if line is not None:
                    file.write(line + "\n")
                    if match := _NINJA.match(line):
                        state = f"{match.group(1)}/{match.group(2)}"
                    if line.startswith("FAILED:") and not failed:
                        failed = True
                        tail.clear()
                    if not failed or len(tail) < _TAIL_LINES:
                        tail.append(line)
                if time.monotonic() - said >= PERIOD_SECONDS:
                    said = time.monotonic()
                    say(f"{label} {state}")
    except CommandError as error:
        raise CommandError("\n".join([*tail, f"{label}: {error}; whole output: {log}"])) from None

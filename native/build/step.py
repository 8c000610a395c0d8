"""Runs one set-up step for the Makefile: little output, never silence, all of it on failure.

    python step.py LABEL LOG COMMAND...

Prints the label, the build's own progress lines, pip's collecting and installing lines
and, when nothing of that came for a while, the elapsed time. The whole output goes to
LOG; when the command fails its end is printed too.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

import progress

_SHOWN = (progress.MARK, "Downloading ", "Building wheel", "Installing collected", "error:")
_SILENT_SECONDS = 5.0
_TAIL_LINES = 80
_WIDTH = 110


def main(label: str, log: Path, command: list[str]) -> int:
    """Run ``command``; returns 0, or 1 after printing the end of its output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started = said = time.monotonic()
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    cause = ""
    print(f"== {label}", flush=True)
    try:
        with log.open("w", encoding="utf-8") as file:
            for line in progress.stream(command, period=1.0):
                now = time.monotonic()
                if line is not None:
                    file.write(line + "\n")
                    tail.append(line)
                    _, found, text = line.partition(f"{progress.MARK} error: ")
                    if found:
                        cause = f"{text}\n"
                    if line.lstrip().startswith(_SHOWN):
                        said = now
                        print(f"   {line.strip()[:_WIDTH]}", flush=True)
                if now - said >= _SILENT_SECONDS:
                    said = now
                    print(f"   ... {now - started:.0f} s", flush=True)
    except progress.CommandError as error:
        print("\n".join(tail))
        print(f"== {label}: failed ({error}); whole output: {log}\n{cause}", end="", flush=True)
        return 1
    print(f"== {label}: done in {time.monotonic() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))

"""What of a packed file is already written: a text file beside it, a line per finished step.

The first line says what is being made; a partial file and a journal of something else do not
belong together. A line counts once its line break is there, so a torn one does not.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmoe_gguf.pack.files import open_target, sync_folder, write_exact, writing

START = "start"  # the step that writes everything but dense tensors, blocks and sums
WHOLE = "whole"  # with stripes: all steps are done, and the files are getting their names


@dataclass(frozen=True)
class Task:
    """What is made. `layout` is a hash of the packed header, `stamps` size and time of change
    of each source file; in place they change, and are left empty.
    """

    fingerprint: str
    layout: str
    in_place: bool
    stamps: tuple[tuple[int, int], ...]
    journal_version: int = 1


class Journal:
    """An open journal; `done` are the names of finished steps."""

    def __init__(self, path: Path, fd: int, task: Task, done: set[str], end: int) -> None:
        self.path = path
        self.task = task
        self.done = done
        self._fd = fd
        self._end = end

    @staticmethod
    def begin(path: Path, task: Task) -> Journal:
        """A new one, on the disk under its name with its first line; raises PackError."""
        fd = open_target(path, os.O_TRUNC)
        journal = Journal(path, fd, task, set(), 0)
        journal._append(asdict(task))
        sync_folder(path.parent)
        return journal

    @staticmethod
    def resume(path: Path) -> Journal | None:
        """The one that is there; None where there is none, or no valid one."""
        if not path.exists():
            return None
        fd = open_target(path)
        with writing(path):
            data = os.read(fd, 64 << 20)
        lines = data.split(b"\n")[:-1]
        try:
            entries = [json.loads(line) for line in lines]
            first = entries[0]
            first["stamps"] = tuple((int(a), int(b)) for a, b in first["stamps"])
            task = Task(**first)
            done = {str(entry["done"]) for entry in entries[1:]}
        except (ValueError, TypeError, KeyError, IndexError):
            os.close(fd)
            return None
        return Journal(path, fd, task, done, sum(len(line) + 1 for line in lines))

    def finish_step(self, name: str) -> None:
        """Record a step whose bytes are on the disk."""
        self._append({"done": name})
        self.done.add(name)

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        write_exact(self._fd, line, self._end, self.path)
        self._end += len(line)
        with writing(self.path):
            os.ftruncate(self._fd, self._end)  # what a torn line left behind
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

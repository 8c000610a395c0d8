"""The file under its temporary name, with its journal: opened, resumed, finished.

NAME.gguf.partial is as long as the packed file from the start, and full of holes; its journal
is NAME.gguf.partial.journal. Only a finished file gets the name NAME.gguf.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flashmoe_gguf.errors import PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import open_target, sync_folder, used_bytes, write_error, writing
from flashmoe_gguf.pack.journal import START, Journal, Task
from flashmoe_gguf.pack.layout import Layout, Source
from flashmoe_gguf.pack.steps import Step
from flashmoe_gguf.pack.writer import Progress, Writer

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def partial_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def journal_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial.journal")


class PartialFile:
    """A packed file in the making. Closing keeps what is done; `finish` gives it its name."""

    def __init__(self, out: Path, layout: Layout) -> None:
        """Open or make it, for this process alone; raises PackError."""
        self.path = partial_path(out)
        self.journal: Journal | None = None
        self._out = out
        self._layout = layout
        self._fd = open_target(self.path)
        if fcntl is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._fd)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise write_error(self.path, error) from None
                raise PackError(
                    f"{shown(self.path)}: another process is writing this file",
                    "wait until it is done",
                ) from None

    @property
    def used_bytes(self) -> int:
        """What it takes on the disk by now."""
        return used_bytes(self._fd)

    def take_up(self, task: Task) -> None:
        """Go on with what the journal says is done of the same task, or begin anew."""
        journal = Journal.resume(journal_path(self._out))
        with writing(self.path):
            length = os.fstat(self._fd).st_size
        if journal is not None and (journal.task, length) == (task, self._layout.total_bytes):
            self.journal = journal
            return
        if journal is not None:
            journal.close()
        with writing(self.path):
            # In this order: a journal must never speak of bytes that are gone.
            journal_path(self._out).unlink(missing_ok=True)
            sync_folder(self.path.parent)
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self._layout.total_bytes)
            os.fsync(self._fd)
        self.journal = Journal.begin(journal_path(self._out), task)

    def writer(self, source: Source, paths: Sequence[Path]) -> Writer:
        return Writer(source, self._layout, paths, self._fd, self.path)

    def pending(self, steps: Sequence[Step]) -> list[Step]:
        assert self.journal is not None
        done = self.journal.done
        return [step for step in steps if step.name not in done]

    def write_start(self, writer: Writer) -> None:
        """The first step, unless it is done."""
        assert self.journal is not None
        if START not in self.journal.done:
            writer.write_start()
            self.commit(START)

    def commit(self, step: str) -> None:
        """The step's bytes reach the disk, then the journal says so."""
        assert self.journal is not None
        with writing(self.path):
            os.fsync(self._fd)
        self.journal.finish_step(step)

    def finish(self) -> None:
        """Its final name. The journal stays, see `drop_journal`."""
        with writing(self.path):
            os.fsync(self._fd)
            os.replace(self.path, self._out)
        sync_folder(self.path.parent)

    def drop_journal(self) -> None:
        with writing(journal_path(self._out)):
            journal_path(self._out).unlink(missing_ok=True)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        os.close(self._fd)


class Counter:
    """Counts copied bytes for a progress callback."""

    def __init__(self, steps: Sequence[Step], pending: Sequence[Step], tell: Progress | None):
        self.total = sum(step.source_bytes for step in steps)
        self.resumed = self.total - sum(step.source_bytes for step in pending)
        self._done = self.resumed
        self._tell = tell
        self.add(0)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._tell is not None:
            self._tell(self._done, self.total)

"""The file under its temporary name, with its journal: opened, resumed, finished.

NAME.gguf.partial is as long as the packed file from the start, and full of holes; its journal
is NAME.gguf.partial.journal. Only a finished file gets the name NAME.gguf. Stripes are made the
same way, each in its folder, with the one journal; once all are whole it says so, and then they
are renamed, so that a run that was killed in between knows which of them it finds renamed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from flashmoe_gguf.errors import PackError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack.files import (
    open_target,
    require_space,
    sync_folder,
    used_bytes,
    write_error,
    writing,
)
from flashmoe_gguf.pack.journal import START, WHOLE, Journal, Task
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
    """A packed file in the making, and its stripes. Closing keeps what is done; `finish` gives
    them their names, that of the packed file last.
    """

    def __init__(self, out: Path, layout: Layout) -> None:
        """Open or make the packed file itself, for this process alone; raises PackError."""
        self.path = partial_path(out)
        self.journal: Journal | None = None
        self._out = out
        self._finals = [out, *(Path(stripe.path) for stripe in layout.stripes)]
        self._paths = [partial_path(final) for final in self._finals]
        self._sizes = [layout.total_bytes, *(stripe.total_bytes for stripe in layout.stripes)]
        self._layout = layout
        self._fds = [_open_alone(self.path)]

    @property
    def used_bytes(self) -> int:
        """What the packed file itself takes on the disk by now."""
        return used_bytes(self._fds[0])

    def require_space(self, task: Task) -> None:
        """Raise PackError unless all files fit on their disks, counting what they take by now."""
        found = self._found(task)
        if found is not None:
            found.close()
            if WHOLE in found.done:
                return
        needed: dict[int, tuple[Path, int]] = {}
        for path, size in zip(self._paths, self._sizes, strict=True):
            with writing(path):
                device = os.stat(path.parent).st_dev
                used = os.stat(path).st_blocks * 512 if path.exists() else 0
            folder, nbytes = needed.get(device, (path.parent, 0))
            needed[device] = folder, nbytes + size - used
        for folder, nbytes in needed.values():
            require_space(folder, nbytes)

    def take_up(self, task: Task) -> None:
        """Go on with what the journal says is done of the same task, or begin anew."""
        self.journal = self._found(task)
        if self.journal is not None:
            if WHOLE not in self.journal.done:
                self._open_stripes()
            return
        self.clear()
        self._open_stripes()
        for path, fd, size in zip(self._paths, self._fds, self._sizes, strict=True):
            with writing(path):
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
                os.fsync(fd)
        for path in self._paths[1:]:
            sync_folder(path.parent)
        self.journal = Journal.begin(journal_path(self._out), task)

    def clear(self) -> None:
        """Forgets what an earlier run has written into the packed file itself."""
        with writing(self.path):
            # In this order: a journal must never speak of bytes that are gone.
            journal_path(self._out).unlink(missing_ok=True)
            sync_folder(self.path.parent)
            os.ftruncate(self._fds[0], 0)

    def _found(self, task: Task) -> Journal | None:
        """The journal that is there, if it and the files are of the same task."""
        journal = Journal.resume(journal_path(self._out))
        if journal is None:
            return None
        if journal.task == task and self._are_there(renamed=WHOLE in journal.done):
            return journal
        journal.close()
        return None

    def _are_there(self, *, renamed: bool) -> bool:
        """Whether all files have the right length; where `renamed`, under either name."""
        for path, final, size in zip(self._paths, self._finals, self._sizes, strict=True):
            named = final if renamed and not path.exists() else path
            if not named.exists() or os.stat(named).st_size != size:
                return False
        return True

    def _open_stripes(self) -> None:
        self._fds += map(_open_alone, self._paths[1:])

    def writer(self, source: Source, paths: Sequence[Path]) -> Writer:
        return Writer(source, self._layout, paths, self._fds, self._paths)

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
        self._sync()
        self.journal.finish_step(step)

    def _sync(self) -> None:
        for path, fd in zip(self._paths, self._fds, strict=False):
            with writing(path):
                os.fsync(fd)

    def finish(self) -> None:
        """The final names. The journal stays, see `drop_journal`."""
        assert self.journal is not None
        self._sync()
        if self._layout.stripes and WHOLE not in self.journal.done:
            self.journal.finish_step(WHOLE)
        for path, final in reversed(list(zip(self._paths, self._finals, strict=True))):
            if path.exists():  # else an earlier run has renamed it, and was killed then
                with writing(final):
                    os.replace(path, final)
                sync_folder(path.parent)

    def drop_journal(self) -> None:
        with writing(journal_path(self._out)):
            journal_path(self._out).unlink(missing_ok=True)

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()
        while self._fds:
            os.close(self._fds.pop())


def _open_alone(path: Path) -> int:
    """Open or make a file that no other process may write meanwhile; raises PackError."""
    fd = open_target(path)
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise write_error(path, error) from None
            raise PackError(
                f"{shown(path)}: another process is writing this file",
                "wait until it is done",
            ) from None
    return fd


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

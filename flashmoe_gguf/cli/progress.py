"""Progress on stderr: a bar on a terminal, elsewhere a plain line at least every two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.screen import Screen

_LINE_SECONDS = 2.0  # between plain lines
_BAR_SECONDS = 0.2  # between updates of the bar
_BAR_AFTER_SECONDS = 0.4  # what is done sooner shows no bar


@dataclass(frozen=True)
class State:
    """How far something is: `done` of `total`, which are tokens, bytes or shares of the whole.

    `total` 0: not known; `words` say what is going on. `before` was done by an earlier run, and
    says nothing about the rate of this one.
    """

    done: float = 0.0
    total: float = 0.0
    tokens: bool = False
    words: str = ""
    nbytes: bool = False
    before: float = 0.0


class ByteCount:
    """Takes the (done, total) calls of the code that copies; `state` is for an Activity."""

    def __init__(self) -> None:
        self._seen: tuple[int, int, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        before = self._seen[2] if self._seen else done
        self._seen = (done, total, before)

    def state(self) -> State | None:
        if self._seen is None:
            return None
        done, total, before = self._seen
        return State(done, total, nbytes=True, before=before)


class Activity:
    """Shows `poll()` from a thread while the block runs; `stop()` ends it early, for good.

    `poll` is called from that thread and must be quick; None means that nothing is known yet.
    """

    def __init__(self, screen: Screen, label: str, poll: Callable[[], State | None]) -> None:
        self._screen = screen
        self._label = label
        self._poll = poll
        self._ended = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Activity:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the bar away; nothing is written after this returns."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):  # nobody reads stderr any more
            if self._screen.is_terminal:
                self._run_bar()
            else:
                self._run_lines()

    def _run_lines(self) -> None:
        while not self._ended.wait(_LINE_SECONDS):
            self._screen.line(f"{self._label}: {self._text(self._poll())}")

    def _run_bar(self) -> None:
        if self._ended.wait(_BAR_AFTER_SECONDS):
            return
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._screen.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bar:
            task = bar.add_task(self._label, total=None, text="")
            while True:
                state = self._poll()
                total = state.total if state and state.total else None
                done = state.done if state else 0.0
                bar.update(task, total=total, completed=done, text=self._text(state))
                if self._ended.wait(_BAR_SECONDS):
                    return

    def _text(self, state: State | None) -> str:
        return progress_text(state, time.monotonic() - self._started)


def progress_text(state: State | None, seconds: float) -> str:
    """Share done, rate and time left after so many seconds, as far as they are known."""
    elapsed = format_seconds(seconds)
    if state is None:
        return elapsed
    parts = [state.words] if state.words else []
    if state.total and state.tokens:
        parts.append(f"{state.done:.0f} of {state.total:.0f} tokens")
    elif state.total:
        parts.append(f"{100 * state.done / state.total:.0f} %")
    here = state.done - state.before
    if state.tokens and here > 0 and seconds > 0:
        parts.append(f"{format_rate(here / seconds)} tok/s")
    if state.nbytes and here > 0 and seconds > 0:
        parts.append(f"{format_size(here / seconds)}/s")
    if state.total and here > 0:
        left = seconds * (state.total - state.done) / here
        parts.append(f"{format_seconds(left)} left")
    else:
        parts.append(elapsed)
    return ", ".join(parts)


def format_rate(rate: float) -> str:
    """Three digits."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def format_seconds(seconds: float) -> str:
    """ "7 s" or "2 min 5 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"

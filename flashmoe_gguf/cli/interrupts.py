"""Ctrl-C as a flag, for code that llama.cpp calls back: an exception would be lost there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_flag(then: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """While the block runs, Ctrl-C sets the event and calls `then` instead of raising.

    An exception raised inside a callback of llama.cpp's would be lost.
    """
    pressed = threading.Event()

    def on_interrupt(_number: int, _frame: FrameType | None) -> None:
        pressed.set()
        if then is not None:
            then()

    if threading.current_thread() is not threading.main_thread():
        yield pressed  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)

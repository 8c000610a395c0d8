"""The governor: gives slots back when memory runs short, and takes them again later.

The plan was made when the model was loaded. If others on the machine or in the cgroup need
memory since then, the kernel would evict something: file pages, or a process. Giving slots back
first costs hits, but no cliff.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from flashmoe_gguf.budget import RESERVE_BYTES, GroupCost
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.host import MemoryLimit, available_memory, process_memory

INTERVAL_SECONDS = 1.0

# Two models of a process that look at once would both give back what one of them has to.
_one_at_a_time = threading.Lock()
if hasattr(os, "register_at_fork"):  # a child's first governor must not wait for the parent's

    def _forget_lock() -> None:
        global _one_at_a_time
        _one_at_a_time = threading.Lock()

    os.register_at_fork(after_in_child=_forget_lock)


class Slots(Protocol):
    """What the governor needs of a stream."""

    def open_bytes(self) -> int:
        """Slots that can be used now."""

    def resize(self, slots: tuple[int, ...]) -> None:
        """Uses so many slots per group from now on."""


def slots_within(
    planned: Sequence[int], groups: Sequence[GroupCost], nbytes: int
) -> tuple[int, ...]:
    """The most of the planned slots that fit in so many bytes, with about the same share of each
    group's.
    """
    slots = list(planned)
    excess = sum(g.slot_bytes * n for g, n in zip(groups, slots, strict=True)) - nbytes
    while excess > 0 and any(slots):
        # the group that has kept the largest share of its plan gives one
        i = max(range(len(slots)), key=lambda j: slots[j] / planned[j] if planned[j] else -1.0)
        slots[i] -= 1
        excess -= groups[i].slot_bytes
    return tuple(slots)


def wanted_bytes(open_bytes: int, room_bytes: int, limit_bytes: int) -> int:
    """How many bytes of slots there should be.

    `room_bytes` is what the process could still take of `limit_bytes` before the kernel has to
    evict, once all open slots are filled. Below a low mark slots are given back up to the middle;
    above a high mark they are taken again down to the middle, so that it does not swing.
    """
    # always less than the reserve that a plan leaves: a limit of just the budget closes nothing
    low = min((16 << 20) + limit_bytes // 200, RESERVE_BYTES * 5 // 6)
    high, middle = 3 * low, 2 * low
    if low <= room_bytes <= high:
        return open_bytes
    return max(0, open_bytes + room_bytes - middle)


class Governor:
    """A thread that looks at memory every second. `close()` ends it."""

    def __init__(
        self,
        stream: Slots,
        planned: Sequence[int],
        groups: Sequence[GroupCost],
        *,
        memory: Callable[[], MemoryLimit] = available_memory,
        committed: Callable[[], int] = lambda: process_memory()[0],
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._stream = weakref.ref(stream)
        self._planned = tuple(planned)
        self._groups = tuple(groups)
        self._memory, self._committed, self._interval = memory, committed, interval
        self._slots = self._planned
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashmoe-governor", daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Looks once, and resizes if it must."""
        stream = self._stream()
        if stream is None:
            self._stop.set()
            return
        if not _one_at_a_time.acquire(blocking=False):
            return  # at the next look
        try:
            self._follow(stream)
        finally:
            _one_at_a_time.release()

    def _follow(self, stream: Slots) -> None:
        limit = self._memory()
        open_bytes = stream.open_bytes()
        wanted = wanted_bytes(open_bytes, limit.limit_bytes - self._committed(), limit.limit_bytes)
        if wanted == open_bytes:
            return  # to share out thousands of slots anew takes long
        slots = slots_within(self._planned, self._groups, wanted)
        # again while less is closed than asked for: slots that are in use close at a later call
        if slots != self._slots or self._still_open(stream, slots):
            stream.resize(slots)
            self._slots = slots

    def _still_open(self, stream: Slots, slots: tuple[int, ...]) -> bool:
        most = sum(g.slot_bytes * n for g, n in zip(self._groups, slots, strict=True))
        return stream.open_bytes() > most

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.step()
            except (FlashMoEError, OSError):
                return  # closed meanwhile, or the system tells nothing

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

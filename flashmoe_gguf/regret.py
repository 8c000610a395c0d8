"""The regret gauge: how the cache did on the last tokens, against what others would have done.

The routing of the last decoded tokens is replayed in the background, through LRU, decayed LFU and
Belady's optimal policy with the same slots, which need not cache an expert that is needed late.
Decoding only writes the routing down.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import simulate
from flashmoe_gguf.errors import FlashMoEError

WINDOW_TOKENS = 1024
# New tokens that are worth another replay, which takes about 50 ms of one core.
AGAIN_TOKENS = 512
LEAST_TOKENS = 64
INTERVAL_SECONDS = 2.0

Experts = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Regret:
    """Hit rates, 0 to 1, over the last `tokens` decoded tokens: as it was, and replayed.

    A replay starts with an empty cache, so it gets the first quarter of the window to warm up.
    """

    tokens: int
    actual: float
    lru: float
    dlfu: float
    belady: float

    @property
    def gap_closed(self) -> float | None:
        """How far from LRU (0) to Belady (1); None where both are the same."""
        gap = self.belady - self.lru
        return (self.actual - self.lru) / gap if gap > 0 else None


def measure_regret(
    experts: Experts,
    hits: npt.NDArray[np.uint32],
    n_expert: npt.NDArray[np.int32],
    n_slots: npt.NDArray[np.int32],
) -> Regret | None:
    """Replays a window. experts [n, n_groups, k], hits [n], n_expert and n_slots [n_groups].

    None when nothing was looked up.
    """
    n = len(experts)
    warm = n // 4
    rates = {}
    lookups = 0
    for policy in ("lru", "dlfu", "belady"):
        counts = simulate(
            policy,
            experts,
            np.zeros(1, np.int64),
            n_expert,
            n_slots,
            bypass=policy == "belady",
            count_from=warm,
        )
        lookups = int(counts.lookups.sum())
        if lookups == 0:
            return None
        rates[policy] = float(counts.hits.sum()) / lookups
    return Regret(n - warm, float(hits[warm:].sum()) / lookups, **rates)


class Window(Protocol):
    """What the gauge needs of a stream."""

    def window_tokens(self) -> int:
        """Decoded tokens so far."""

    def window(self) -> tuple[Experts, npt.NDArray[np.uint32]]:
        """(experts [n, n_groups, k], hits [n]) of the last of them."""

    def n_slots(self) -> npt.NDArray[np.int32]:
        """[n_groups], as of now"""


class RegretGauge:
    """A thread of lowest priority that replays the window now and then. `close()` ends it.

    n_expert [n_groups]. It does not keep the stream alive.
    """

    def __init__(
        self,
        stream: Window,
        n_expert: npt.NDArray[np.int32],
        *,
        interval: float = INTERVAL_SECONDS,
    ) -> None:
        self._stream, self._n_expert = weakref.ref(stream), n_expert
        self._interval = interval
        self._measured_at = 0
        self._regret: Regret | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashmoe-regret", daemon=True)
        self._thread.start()

    @property
    def regret(self) -> Regret | None:
        """The last measurement; None before the first."""
        return self._regret

    def step(self) -> None:
        """Replays the window if enough is new."""
        stream = self._stream()
        if stream is None:
            self._stop.set()
            return
        tokens = stream.window_tokens()
        wanted = AGAIN_TOKENS if self._measured_at else LEAST_TOKENS
        if tokens - self._measured_at < wanted:
            return
        experts, hits = stream.window()
        n_slots = stream.n_slots()
        del stream  # the replay takes a while, and whoever drops the stream waits for nobody
        self._regret = measure_regret(experts, hits, self._n_expert, n_slots)
        self._measured_at = tokens

    def _run(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._stop.wait(self._interval):
            try:
                self.step()
            except FlashMoEError:
                return  # closed meanwhile

    def close(self) -> None:
        """Ends the thread and waits for it."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

"""lfu: the expert used least often since the start leaves (native/policy_lfu.c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy


class Lfu(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._clock = 0
        self._n_uses = [np.zeros(n, np.int64) for n in n_expert]
        self._last_use = [np.zeros(n, np.int64) for n in n_expert]

    def on_hit(self, layer: int, expert: int) -> None:
        self._clock += 1
        self._n_uses[layer][expert] += 1
        self._last_use[layer][expert] = self._clock

    on_miss = on_hit

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        n_uses, last_use = self._n_uses[layer], self._last_use[layer]
        candidates = np.flatnonzero(may_leave)
        return int(min(candidates, key=lambda e: (n_uses[e], last_use[e]), default=-1))

"""lru: the least recently used expert leaves (native/policy_lru.c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy, lowest


class Lru(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._clock = 0
        self._last_use = [np.zeros(n, np.int64) for n in n_expert]  # 0: not since it left

    def on_hit(self, layer: int, expert: int) -> None:
        self._clock += 1
        self._last_use[layer][expert] = self._clock

    on_miss = on_hit

    def on_insert(self, layer: int, expert: int) -> None:
        if self._last_use[layer][expert] == 0:
            self.on_hit(layer, expert)

    def on_remove(self, layer: int, expert: int) -> None:
        self._last_use[layer][expert] = 0

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        return lowest(self._last_use[layer], may_leave)

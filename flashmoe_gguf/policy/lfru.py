"""lfru: uses so far over tokens since the last one; the lowest leaves (native/policy_lfru.c)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy


class Lfru(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._token = [0] * len(self.n_expert)
        self._n_uses = [[0] * n for n in n_expert]
        self._last_token = [[-1] * n for n in n_expert]

    def on_hit(self, layer: int, expert: int) -> None:
        self._n_uses[layer][expert] += 1
        self._last_token[layer][expert] = self._token[layer]

    on_miss = on_hit

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        def score(expert: int) -> Fraction:
            age = self._token[layer] - self._last_token[layer][expert]
            return Fraction(self._n_uses[layer][expert], age)

        return min(np.flatnonzero(may_leave).tolist(), key=score, default=-1)

    def end_token(self, layer: int) -> None:
        self._token[layer] += 1

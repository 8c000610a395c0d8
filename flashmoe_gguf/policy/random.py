"""random: any expert leaves, by lot (native/policy_random.c); splitmix64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy

_MASK = (1 << 64) - 1


class Lots:
    """The pseudo-random numbers of native/policy.c: fm_policy_draw."""

    def __init__(self, state: int) -> None:
        self._state = state & _MASK

    def draw(self) -> int:
        """The next one, 64 bits."""
        self._state = x = (self._state + 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
        return x ^ x >> 31


class Random(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int], seed: int = 0) -> None:
        super().__init__(n_expert, n_slots)
        seeds = Lots(seed)
        self._lots = [Lots(seeds.draw()) for _ in n_expert]

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        candidates = np.flatnonzero(may_leave)
        if not candidates.size:
            return -1
        return int(candidates[self._lots[layer].draw() % candidates.size])

"""lecar: LeCaR of Vietri et al., HotStorage 2018 (native/policy_lecar.c says what differs)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy
from flashmoe_gguf.policy.random import Lots

LEARNING_RATE = 0.45
DISCOUNT_BASE = 0.005


class _Layer:
    def __init__(self, n_slots: int, seed: int) -> None:
        self.n_slots = n_slots
        self.lots = Lots(seed)
        self.discount = DISCOUNT_BASE ** (1.0 / n_slots) if n_slots else 0.0
        self.lru_weight = 0.5
        self.clock = 0
        self.last_use: dict[int, int] = {}
        self.n_uses: dict[int, int] = {}
        self.sent_by_lru: dict[int, int] = {}  # when, oldest first
        self.sent_by_lfu: dict[int, int] = {}
        self.named = -1
        self.sender: dict[int, int] | None = None

    def use(self, expert: int) -> None:
        self.clock += 1
        self.n_uses[expert] = self.n_uses.get(expert, 0) + 1
        self.last_use[expert] = self.clock

    def gain(self, left_at: int) -> float:
        regret = math.pow(self.discount, float(self.clock - left_at))
        return math.exp(LEARNING_RATE * regret)


class Lecar(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int], seed: int = 0) -> None:
        super().__init__(n_expert, n_slots)
        seeds = Lots(seed)
        self._layers = [_Layer(n, seeds.draw()) for n in n_slots]

    def on_hit(self, layer: int, expert: int) -> None:
        self._layers[layer].use(expert)

    def on_miss(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        lru, lfu = state.lru_weight, 1.0 - state.lru_weight
        if expert in state.sent_by_lru:
            lfu *= state.gain(state.sent_by_lru.pop(expert))
            state.lru_weight = lru / (lru + lfu)
        elif expert in state.sent_by_lfu:
            lru *= state.gain(state.sent_by_lfu.pop(expert))
            state.lru_weight = lru / (lru + lfu)
        else:
            state.n_uses.pop(expert, None)
        state.use(expert)

    def on_insert(self, layer: int, expert: int) -> None:
        self._layers[layer].sent_by_lru.pop(expert, None)
        self._layers[layer].sent_by_lfu.pop(expert, None)

    def on_remove(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        history = state.sender if expert == state.named else None
        state.named = -1
        if history is None:
            state.n_uses.pop(expert, None)
            return
        if len(history) >= state.n_slots:
            oldest = min(history, key=lambda e: (history[e], e))
            del history[oldest], state.n_uses[oldest]
        history[expert] = state.clock

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        state = self._layers[layer]
        candidates: list[int] = np.flatnonzero(may_leave).tolist()

        def age(expert: int) -> int:
            return state.last_use.get(expert, 0)

        lru = min(candidates, key=age, default=-1)
        lfu = min(candidates, key=lambda e: (state.n_uses.get(e, 0), age(e)), default=-1)
        by_lru = (state.lots.draw() >> 11) * 2.0**-53 < state.lru_weight
        state.named = lru if by_lru else lfu
        state.sender = state.sent_by_lru if by_lru else state.sent_by_lfu
        if lru == lfu:
            state.sender = None
        return state.named

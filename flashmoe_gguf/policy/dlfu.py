"""dlfu: the expert with the lowest moving average of use leaves (native/policy_dlfu.c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashmoe_gguf.policy.base import MayLeave, Policy, lowest

DECAY = np.float32(0.95)


class Dlfu(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._use = [np.zeros(n, np.float32) for n in n_expert]

    def on_hit(self, layer: int, expert: int) -> None:
        self._use[layer][expert] += np.float32(1)

    on_miss = on_hit

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        return lowest(self._use[layer], may_leave)

    def end_token(self, layer: int) -> None:
        use = self._use[layer]
        use[:] = np.where(use < np.float32(1e-30), np.float32(0), use * DECAY)

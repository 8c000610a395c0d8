"""least-stale: what the last two tokens did not use leaves in the order in which it came
(native/policy_least_stale.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_gguf.policy.base import MayLeave, Policy


class LeastStale(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._current: list[set[int]] = [set() for _ in n_expert]
        self._before: list[set[int]] = [set() for _ in n_expert]
        self._ended = [False] * len(self.n_expert)
        self._arrived: list[list[int]] = [[] for _ in n_expert]  # oldest first

    def on_hit(self, layer: int, expert: int) -> None:
        if self._ended[layer]:
            self._before[layer], self._current[layer] = self._current[layer], set()
            self._ended[layer] = False
        self._current[layer].add(expert)

    on_miss = on_hit

    def on_insert(self, layer: int, expert: int) -> None:
        self._arrived[layer].append(expert)

    def on_remove(self, layer: int, expert: int) -> None:
        self._arrived[layer].remove(expert)

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        fresh = self._current[layer] | self._before[layer]
        candidates = [e for e in self._arrived[layer] if may_leave[e]]
        return next((e for e in candidates if e not in fresh), next(iter(candidates), -1))

    def end_token(self, layer: int) -> None:
        if self._ended[layer]:  # a token without experts
            self._before[layer], self._current[layer] = self._current[layer], set()
        self._ended[layer] = True

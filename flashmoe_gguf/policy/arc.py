"""arc: ARC of Megiddo and Modha, FAST 2003 (native/policy_arc.c says what differs)."""

from __future__ import annotations

from collections.abc import Sequence

from flashmoe_gguf.policy.base import MayLeave, Policy


class _Layer:
    """The four lists, oldest first, and the target size of T1."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.target = 0.0
        self.from_b2 = False
        self.token_ended = False

    def begin_use(self) -> None:
        if self.token_ended:
            self.token_ended = self.from_b2 = False

    def trim(self) -> None:
        while len(self.t1) + len(self.b1) > self.n_slots and self.b1:
            self.b1.pop(0)
        while len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.n_slots:
            ghosts = self.b2 or self.b1
            if not ghosts:
                break
            ghosts.pop(0)


class Arc(Policy):
    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        self._layers = [_Layer(n) for n in n_slots]

    def on_hit(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        state.begin_use()
        (state.t1 if expert in state.t1 else state.t2).remove(expert)
        state.t2.append(expert)

    def on_miss(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        state.begin_use()
        n1, n2 = len(state.b1), len(state.b2)
        if expert in state.b1:
            state.target = min(float(state.n_slots), state.target + max(n2 / n1, 1.0))
            state.b1.remove(expert)
            state.b1.append(expert)
        elif expert in state.b2:
            state.target = max(0.0, state.target - max(n1 / n2, 1.0))
            state.from_b2 = True
            state.b2.remove(expert)
            state.b2.append(expert)

    def on_insert(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        for ghosts in (state.b1, state.b2):
            if expert in ghosts:
                ghosts.remove(expert)
                state.t2.append(expert)
                break
        else:
            state.t1.append(expert)
        state.trim()

    def on_remove(self, layer: int, expert: int) -> None:
        state = self._layers[layer]
        if expert in state.t1:
            state.t1.remove(expert)
            state.b1.append(expert)
        else:
            state.t2.remove(expert)
            state.b2.append(expert)
        state.trim()

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        state = self._layers[layer]
        n1 = len(state.t1)
        above = n1 > state.target or (state.from_b2 and n1 > 0 and n1 >= state.target)
        order = state.t1 + state.t2 if above else state.t2 + state.t1
        return next((e for e in order if may_leave[e]), -1)

    def end_token(self, layer: int) -> None:
        self._layers[layer].token_ended = True

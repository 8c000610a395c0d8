"""flashmoe: the network of arXiv 2601.17063, as a table (native/policy_flashmoe.c)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.policy.base import MayLeave, Policy, lowest

MAX_AGE = 512
N_SHARES = 33


class Flashmoe(Policy):
    """table [n_layers, MAX_AGE, N_SHARES]: how far away the next use is said to be; None: LRU."""

    def __init__(
        self,
        n_expert: Sequence[int],
        n_slots: Sequence[int],
        table: npt.NDArray[np.float32] | None = None,
    ) -> None:
        super().__init__(n_expert, n_slots)
        self._table = table
        self._n_tokens = [0] * len(n_expert)
        self._last = [np.zeros(n, np.int64) for n in n_expert]
        self._uses = [np.zeros(n, np.uint32) for n in n_expert]
        self._resident = [np.zeros(n, np.bool_) for n in n_expert]

    def on_hit(self, layer: int, expert: int) -> None:
        self._last[layer][expert] = self._n_tokens[layer] + 1
        self._uses[layer][expert] += 1

    on_miss = on_hit

    def on_insert(self, layer: int, expert: int) -> None:
        self._resident[layer][expert] = True

    def on_remove(self, layer: int, expert: int) -> None:
        self._resident[layer][expert] = False

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        last, uses = self._last[layer], self._uses[layer]
        ages = np.where(last > 0, self._n_tokens[layer] - last, MAX_AGE).clip(1, MAX_AGE)
        if self._table is None:
            return lowest(-ages, may_leave)
        most = np.float32(uses[self._resident[layer]].max(initial=0))
        shares = uses.astype(np.float32) / most if most > 0 else np.zeros(len(uses), np.float32)
        places = shares * np.float32(N_SHARES - 1)
        nodes = np.minimum(places.astype(np.int32), N_SHARES - 2)
        parts = places - nodes.astype(np.float32)
        rows = self._table[layer, ages - 1]
        low = np.take_along_axis(rows, nodes[:, None], axis=1)[:, 0]
        high = np.take_along_axis(rows, nodes[:, None] + 1, axis=1)[:, 0]
        return lowest(-(low + parts * (high - low)), may_leave)

    def end_token(self, layer: int) -> None:
        self._n_tokens[layer] += 1

    def begin_sequence(self) -> None:
        for uses in self._uses:
            uses[:] = 0

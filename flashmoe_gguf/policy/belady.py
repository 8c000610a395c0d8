"""belady: what is needed again last leaves (native/policy_belady.c); the look into the future."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.policy.base import MayLeave, Policy, lowest

NEVER = np.iinfo(np.int32).max
_NO_EXPERT = 0xFFFF


def next_use(experts: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """When each use's expert is used next in its layer: a token index, or NEVER.

    experts [n_tokens, n_layers, k], 65535: none, for which this is NEVER; the result has its shape.
    """
    n_tokens, n_layers, _ = experts.shape
    result = np.full(experts.shape, NEVER, np.int32)
    coming = np.full((n_layers, _NO_EXPERT + 1), NEVER, np.int32)
    layers = np.arange(n_layers)[:, None]
    for token in range(n_tokens - 1, -1, -1):
        result[token] = coming[layers, experts[token]]
        coming[layers, experts[token]] = token
        coming[:, _NO_EXPERT] = NEVER
    return result


class Belady(Policy):
    """Follows one trace, from its first token on. experts [n_tokens, n_layers, k]."""

    def __init__(
        self,
        n_expert: Sequence[int],
        n_slots: Sequence[int],
        experts: npt.NDArray[np.uint16],
    ) -> None:
        super().__init__(n_expert, n_slots)
        self._experts = experts
        self._next_use = next_use(experts)
        self._token = [0] * len(self.n_expert)
        self._next = [np.full(n, NEVER, np.int32) for n in n_expert]

    def on_hit(self, layer: int, expert: int) -> None:
        token = self._token[layer]
        place = self._experts[token, layer].tolist().index(expert)
        self._next[layer][expert] = self._next_use[token, layer, place]

    on_miss = on_hit

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        return lowest(-self._next[layer], may_leave)

    def end_token(self, layer: int) -> None:
        self._token[layer] += 1

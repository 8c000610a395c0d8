"""What a policy in Python looks like, whether it is a twin of one in C or a user's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MayLeave = npt.NDArray[np.bool_]


class Policy:
    """Who leaves the cache. Layers and experts are counted from 0, and each layer has a cache.

    For each token and layer it is told what the token uses, expert after expert (`on_hit` for a
    resident one, `on_miss` for another), then `end_token`. Then, for each missing expert in turn,
    `victim` and `on_remove` when there is no free slot, and `on_insert`. A batch of prompt tokens
    passes a layer at once: all its tokens are told first.

    A user's policy need not inherit from this; it needs `victim`, and what else it lacks is not
    called. It is called by computing threads and must not use the model that it serves.
    """

    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        """n_expert, n_slots [n_layers]: experts that a layer has, and that its cache holds."""
        self.n_expert = list(n_expert)
        self.n_slots = list(n_slots)

    def on_hit(self, layer: int, expert: int) -> None:
        """The current token uses an expert that is resident."""

    def on_miss(self, layer: int, expert: int) -> None:
        """The current token uses an expert that is not resident."""

    def on_insert(self, layer: int, expert: int) -> None:
        """An expert became resident."""

    def on_remove(self, layer: int, expert: int) -> None:
        """An expert stopped being resident."""

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        """An expert e with may_leave[e], or -1 when there is none.

        may_leave [n_expert] is valid during the call only.
        """
        raise NotImplementedError

    def end_token(self, layer: int) -> None:
        """The layer has seen all experts of one token."""

    def begin_sequence(self) -> None:
        """Tokens of another request follow."""


def lowest(scores: npt.NDArray[np.generic], may_leave: MayLeave) -> int:
    """The candidate with the lowest score, the lower number of two that are equal; or -1."""
    candidates = np.flatnonzero(may_leave)
    return int(candidates[scores[candidates].argmin()]) if candidates.size else -1

"""The least that any cache of so many slots must read: Belady's misses on a recorded routing, where
an expert that is needed late enough is not cached at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import simulate
from flashmoe_gguf.trace import NO_EXPERT, Trace


def belady_misses(
    experts: npt.NDArray[np.integer[Any]], n_slots: int, first: int = 0, last: int | None = None
) -> int:
    """Misses of tokens [first, last) in one layer with `n_slots` slots, of all that are there or
    come keeping those used soonest (Belady 1966, with bypass).

    experts [n_tokens, k]: what each token uses, NO_EXPERT where fewer. The cache starts empty at
    token 0. A missing expert need not be cached, as with policies that turn experts away.
    """
    n_tokens = len(experts)
    known = experts[experts != NO_EXPERT]
    n_expert = np.array([int(known.max()) + 1 if known.size else 1], np.int32)
    slots = np.minimum(np.array([n_slots], np.int32), n_expert)

    def from_token(at: int) -> int:
        if at >= n_tokens:
            return 0
        counts = simulate(
            "belady",
            experts[:, None].astype(np.uint16),
            np.zeros(1, np.int64),
            n_expert,
            slots,
            bypass=True,
            count_from=at,
        )
        return int((counts.lookups - counts.hits).sum())

    return from_token(first) - (from_token(last) if last is not None else 0)


def belady_miss_bytes(
    trace: Trace, slots: Mapping[int, int], expert_bytes: Mapping[int, int], first: int, n: int
) -> float | None:
    """Bytes per token that Belady would read for tokens [first, first + n) of a trace, or those of
    them that it has.

    `slots` and `expert_bytes` by layer. None when the trace lacks a layer, or all of these tokens.
    """
    columns = {int(layer): i for i, layer in enumerate(trace.layers)}
    n = min(n, trace.n_tokens - first)
    if n < 1 or not set(slots) <= set(columns):
        return None
    total = sum(
        belady_misses(trace.experts[:, columns[layer]], n_slots, first, first + n)
        * expert_bytes[layer]
        for layer, n_slots in slots.items()
    )
    return total / n

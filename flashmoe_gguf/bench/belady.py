"""The least that any cache of so many slots must read: Belady's misses on a recorded routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.trace import NO_EXPERT, Trace

_NEVER = 1 << 60


def belady_misses(
    experts: npt.NDArray[np.integer[Any]], n_slots: int, first: int = 0, last: int | None = None
) -> int:
    """Misses of tokens [first, last) in one layer with `n_slots` slots, evicting what is used
    farthest in the future (Belady 1966).

    experts [n_tokens, k]: what each token uses, NO_EXPERT where fewer. The cache starts empty at
    token 0. A token's experts are looked up together, and all of them stay for the next token where
    they have room; with fewer slots than that, the ones used soonest do.
    """
    tokens = [[int(e) for e in row if e != NO_EXPERT] for row in experts]
    last = len(tokens) if last is None else min(last, len(tokens))
    next_use = _next_uses(tokens)
    resident: dict[int, int] = {}
    misses = 0
    for at, row in enumerate(tokens[:last]):
        if at >= first:
            misses += sum(e not in resident for e in row)
        used = dict(zip(row, next_use[at], strict=True))
        resident.update(used)
        keep = used if len(used) <= n_slots else {}
        while len(resident) > n_slots:
            victim = max((e for e in resident if e not in keep), key=resident.__getitem__)
            del resident[victim]
    return misses


def _next_uses(tokens: list[list[int]]) -> list[list[int]]:
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for at in range(len(tokens) - 1, -1, -1):
        uses.append([seen.get(e, _NEVER) for e in tokens[at]])
        seen.update(dict.fromkeys(tokens[at], at))
    uses.reverse()
    return uses


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

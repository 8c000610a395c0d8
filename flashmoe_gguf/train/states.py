"""What the paper's network sees and should answer for every expert at every token, as cells.

The two inputs are recency 1 / age and use count over the largest count in the cache. Ages are whole
numbers and counts fall into bins, so that a layer of any trace comes down to a few thousand cells
with how often each was met and the mean answer there: training on them is training on every state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.policy.flashmoe import MAX_AGE
from flashmoe_gguf.trace import Trace

N_COUNT_BINS = 32
_EXACT_AGES = 16  # 1 / age hardly changes beyond: wider bins do

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Cells:
    """States of one layer that have about the same inputs.

    index [n_cells]: the bin, ascending. inputs [n_cells, 2]: mean recency and mean count share;
    answers, weights [n_cells]: the mean of what should be answered there, and how many states
    there were.
    """

    index: npt.NDArray[np.int64]
    inputs: Floats
    answers: Floats
    weights: Floats


def _age_bins() -> npt.NDArray[np.int64]:
    """The bin of each age from 0 to MAX_AGE: one each at first, then an eighth wider each."""
    ages = np.arange(MAX_AGE + 1)
    wide = _EXACT_AGES + np.log(np.maximum(ages, _EXACT_AGES) / _EXACT_AGES) / np.log(1.125)
    return np.where(ages <= _EXACT_AGES, ages, np.ceil(wide)).astype(np.int64)


AGE_BIN = _age_bins()
_N_AGE_BINS = int(AGE_BIN.max()) + 1


def uses(trace: Trace, layer: int) -> Bools:
    """Whether each token uses each expert of a layer. [n_tokens, n_expert]"""
    n = int(trace.n_expert[layer])
    used = np.zeros((trace.n_tokens, n + 1), np.bool_)
    ids = np.minimum(trace.experts[:, layer].astype(np.int64), n)
    np.put_along_axis(used, ids, True, axis=1)
    return used[:, :n]


def distances(used: Bools) -> npt.NDArray[np.int32]:
    """Tokens until each expert is used again; 0x7FFFFFFF: never. [n_tokens, n_expert]

    This is Belady's look into the future: of the candidates the one with the largest leaves.
    """
    n_tokens = len(used)
    never = np.int32(0x7FFFFFFF)
    at = np.where(used, np.arange(n_tokens, dtype=np.int32)[:, None], never)
    coming = np.minimum.accumulate(at[::-1], axis=0)[::-1]
    result = np.full(used.shape, never, np.int32)
    result[:-1] = np.where(
        coming[1:] == never, never, coming[1:] - np.arange(n_tokens - 1, dtype=np.int32)[:, None]
    )
    return result


def residents(used: Bools, victims: npt.NDArray[np.uint16]) -> Bools:
    """What a cache held when it was asked for victims at each token. [n_tokens, n_expert]

    victims [n_tokens, k]: who left at each token, NO_EXPERT where nobody did. All that a token
    uses is admitted; the state is the one before anything came or left.
    """
    n_tokens, n = used.shape
    left = np.zeros((n_tokens, n + 1), np.bool_)
    np.put_along_axis(left, np.minimum(victims.astype(np.int64), n), True, axis=1)
    order = np.arange(1, n_tokens + 1, dtype=np.int32)[:, None]
    last_used = np.maximum.accumulate(np.where(used, order, 0), axis=0)
    last_left = np.maximum.accumulate(np.where(left[:, :n], order, 0), axis=0)
    after = last_used > last_left
    return np.concatenate([np.zeros((1, n), np.bool_), after[:-1]])


@dataclass(frozen=True)
class Inputs:
    """Inputs of the network after each token. ages, shares [n_tokens, n_expert]."""

    ages: npt.NDArray[np.int32]
    shares: Floats


def inputs(trace: Trace, used: Bools, resident: Bools) -> Inputs:
    """Ages from 1 to MAX_AGE (0: in use), and counts over the largest count in the cache.

    Counts begin anew with each sequence: of all tokens so far they say less, see docs/POLICIES.md.
    """
    n_tokens = len(used)
    order = np.arange(1, n_tokens + 1, dtype=np.int32)[:, None]
    last = np.maximum.accumulate(np.where(used, order, 0), axis=0)
    ages = np.where(last > 0, np.minimum(order - last, MAX_AGE), MAX_AGE).astype(np.int32)
    counts = np.cumsum(used, axis=0, dtype=np.int32)
    before = np.concatenate([np.zeros((1, used.shape[1]), np.int32), counts])
    sequence = np.searchsorted(trace.seq, np.arange(n_tokens), side="right") - 1
    counts = counts - before[trace.seq[sequence]]
    most = np.where(resident, counts, 0).max(axis=1, keepdims=True)
    return Inputs(ages, (counts / np.maximum(most, 1)).astype(np.float32))


def cells(found: Inputs, chosen: Bools, answers: Floats) -> Cells:
    """The states in `chosen` [n_tokens, n_expert], binned. answers: of each state."""
    ages, shares = found.ages[chosen], found.shares[chosen]
    # an expert that is not in the cache may have more uses than those that are
    bins = np.minimum(np.rint(shares * N_COUNT_BINS), N_COUNT_BINS).astype(np.int64)
    index = AGE_BIN[ages] * (N_COUNT_BINS + 1) + bins
    ones = np.ones(len(index), np.float32)
    recency = (1.0 / np.maximum(ages, 1)).astype(np.float32)
    return _means(index, np.stack([recency, shares], axis=1), answers[chosen], ones)


def _means(index: npt.NDArray[np.int64], inputs: Floats, answers: Floats, weights: Floats) -> Cells:
    size = _N_AGE_BINS * (N_COUNT_BINS + 1)
    total = np.bincount(index, weights, size)
    kept = np.flatnonzero(total)

    def mean(values: Floats) -> Floats:
        sums = np.bincount(index, values.astype(np.float64) * weights, size)
        means: Floats = (sums[kept] / total[kept]).astype(np.float32)
        return means

    return Cells(
        kept,
        np.stack([mean(inputs[:, 0]), mean(inputs[:, 1])], axis=1),
        mean(answers),
        total[kept].astype(np.float32),
    )


def merge(parts: list[Cells]) -> Cells:
    """Cells of several caches together."""
    return _means(
        np.concatenate([part.index for part in parts]),
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.answers for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )

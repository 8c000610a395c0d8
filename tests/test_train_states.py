"""What the network is trained on, against states worked out one by one."""

from __future__ import annotations

import numpy as np
import pytest

from flashmoe_gguf._native import simulate
from flashmoe_gguf.policy.flashmoe import MAX_AGE
from flashmoe_gguf.trace import NO_EXPERT, Trace
from flashmoe_gguf.train.states import (
    AGE_BIN,
    cells,
    distances,
    inputs,
    merge,
    residents,
    uses,
)

N_EXPERT, N_SLOTS = 12, 5


def make_trace(n_tokens: int = 400, seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    weights = random.random((2, N_EXPERT)) ** 3
    experts = np.stack(
        [
            [
                random.choice(N_EXPERT, 3, replace=False, p=weights[layer] / weights[layer].sum())
                for layer in range(2)
            ]
            for _ in range(n_tokens)
        ]
    ).astype(np.uint16)
    experts[random.random(experts.shape) < 0.05] = NO_EXPERT
    counts = np.full(2, N_EXPERT, np.int32)
    seq = np.array([0, n_tokens // 4, n_tokens // 4, n_tokens], np.int64)
    return Trace(experts, seq, counts, np.arange(2, dtype=np.int32))


TRACE = make_trace()


def test_uses() -> None:
    used = uses(TRACE, 1)
    for token in range(0, TRACE.n_tokens, 7):
        expected = set(TRACE.experts[token, 1].tolist()) - {NO_EXPERT}
        assert set(np.flatnonzero(used[token]).tolist()) == expected


def test_distances() -> None:
    used = uses(TRACE, 0)
    found = distances(used)
    for token in range(0, TRACE.n_tokens, 5):
        for expert in range(N_EXPERT):
            later = np.flatnonzero(used[token + 1 :, expert])
            assert found[token, expert] == (later[0] + 1 if later.size else 0x7FFFFFFF)


@pytest.mark.parametrize("policy", ["lru", "dlfu", "belady"])
def test_states_of_a_cache(policy: str) -> None:
    """Ages, shares and residents as a cache that is run by hand has them."""
    sizes = np.full(2, N_SLOTS, np.int32)
    starts = TRACE.seq[:-1]
    counts = simulate(policy, TRACE.experts, starts, TRACE.n_expert, sizes, victims=True)
    assert counts.victims is not None
    for layer in range(2):
        used = uses(TRACE, layer)
        held = residents(used, counts.victims[:, layer])
        found = inputs(TRACE, used, held)
        resident: set[int] = set()
        n_uses, last = np.zeros(N_EXPERT), np.full(N_EXPERT, -1)
        for token in range(TRACE.n_tokens):
            if token in starts:
                n_uses[:] = 0
            now = set(TRACE.experts[token, layer].tolist()) - {NO_EXPERT}
            n_uses[list(now)] += 1
            last[list(now)] = token
            assert set(np.flatnonzero(held[token]).tolist()) == resident
            most = max((n_uses[e] for e in resident), default=0)
            shares = n_uses / max(most, 1)
            ages = np.where(last >= 0, token - last, MAX_AGE)
            assert np.allclose(found.shares[token], shares)
            assert found.ages[token].tolist() == ages.tolist()
            left = set(counts.victims[token, layer].tolist()) - {NO_EXPERT}
            resident = (resident | now) - left
            assert len(resident) <= N_SLOTS


def test_cells_keep_every_state() -> None:
    used = uses(TRACE, 0)
    held = np.ones_like(used)
    found = inputs(TRACE, used, held)
    answers = np.random.default_rng(1).random(used.shape).astype(np.float32)
    whole = cells(found, ~used, answers)
    assert whole.weights.sum() == (~used).sum()
    assert len(whole.weights) < (~used).sum() / 4
    assert np.isclose((whole.weights * whole.answers).sum(), answers[~used].sum(), rtol=1e-5)
    recency = 1 / found.ages[~used]
    assert np.isclose((whole.weights * whole.inputs[:, 0]).sum(), recency.sum(), rtol=1e-5)
    some = cells(found, ~used & (np.arange(len(used)) < 50)[:, None], answers + 1)
    both = merge([some, whole])
    assert np.array_equal(both.index, whole.index)
    assert both.weights.sum() == whole.weights.sum() + some.weights.sum()
    sums = [(part.weights * part.answers).sum() for part in (both, whole, some)]
    assert np.isclose(sums[0], sums[1] + sums[2], rtol=1e-5)


def test_age_bins_are_fine_where_it_matters() -> None:
    ages = np.arange(1, MAX_AGE + 1)
    assert AGE_BIN[:17].tolist() == list(range(17))
    assert (np.diff(AGE_BIN) >= 0).all() and AGE_BIN[MAX_AGE] < 60
    for number in np.unique(AGE_BIN[1:]):
        inside = ages[AGE_BIN[1:] == number]
        assert inside[-1] / inside[0] <= 1.14

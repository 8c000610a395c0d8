"""The policy `learned` on whole traces: what it reaches, and that it looks at nothing to come."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from flashmoe_gguf._native import simulate
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.simulate import half
from flashmoe_gguf.trace import Trace, read_trace

TRACES = os.environ.get("FLASHMOE_TRACES")
N_EXPERT, K, N_LAYERS = 32, 4, 6

Experts = npt.NDArray[np.uint16]


def hits(experts: Experts, policy: str, n_slots: int, *, bypass: bool = False) -> float:
    """Share of all lookups, from a cold cache."""
    n = experts.shape[1]
    sizes = np.full(n, N_EXPERT, np.int32), np.full(n, n_slots, np.int32)
    counts = simulate(policy, experts, np.zeros(1, np.int64), *sizes, bypass=bypass)
    return float(counts.hits.sum() / counts.lookups.sum())


def told_by_the_token(n_tokens: int) -> Experts:
    """Routing in which the next token's experts follow from this one's, and nothing else tells
    them: no expert is used more often than another, or sooner again.

    [n_tokens, N_LAYERS, K]
    """
    rng = np.random.default_rng(5)
    n_kinds = 24
    uses = np.stack(
        [[rng.permutation(N_EXPERT)[:K] for _ in range(N_LAYERS)] for _ in range(n_kinds)]
    )
    follows = rng.permuted(np.tile(np.arange(n_kinds), (n_kinds, 1)), axis=1)[:, :2]
    kinds = [0]
    for pick in rng.integers(0, 2, n_tokens - 1):
        kinds.append(int(follows[kinds[-1], pick]))
    return uses[kinds].astype(np.uint16)


@pytest.mark.parametrize("n_slots", [8, 16])
def test_context_says_what_recency_and_frequency_do_not(n_slots: int) -> None:
    experts = told_by_the_token(3000)
    dlfu = hits(experts, "dlfu", n_slots)
    best = hits(experts, "belady", n_slots)
    assert hits(experts, "learned", n_slots) > dlfu + 0.4 * (best - dlfu)


@pytest.mark.parametrize("n_slots", [8, 16])
def test_where_context_says_little_it_costs_little(n_slots: int) -> None:
    experts = synthetic_trace(4000, N_LAYERS, N_EXPERT, K, seed=3)
    learned = hits(experts, "learned", n_slots)
    assert learned > hits(experts, "dlfu", n_slots) - 0.002
    assert learned > hits(experts, "lru", n_slots) + 0.01


def test_nothing_to_come_is_looked_at() -> None:
    """Other tokens from some point on change no victim before it."""
    experts = synthetic_trace(900, N_LAYERS, N_EXPERT, K, seed=4)
    sizes = np.full(N_LAYERS, N_EXPERT, np.int32), np.full(N_LAYERS, 8, np.int32)
    other = np.concatenate([experts[:600], synthetic_trace(300, N_LAYERS, N_EXPERT, K, seed=5)])
    begins = np.array([0, 300], np.int64)
    whole, cut = (
        simulate("learned", e, begins, *sizes, victims=True).victims for e in (experts, other)
    )
    assert whole is not None and cut is not None
    assert np.array_equal(whole[:600], cut[:600])
    assert not np.array_equal(whole[600:], cut[600:])


def rates(trace: Trace, *, bypass: bool = False) -> list[float]:
    """Percent hits at a quarter and half of the experts."""
    found = []
    for n_slots in (trace.n_expert // 4, trace.n_expert // 2):
        counts = simulate(
            "learned", trace.experts, trace.seq[:-1], trace.n_expert, n_slots, bypass=bypass
        )
        found.append(100 * counts.hits.sum() / counts.lookups.sum())
    return found


@pytest.mark.skipif(
    not TRACES, reason="FLASHMOE_TRACES does not name the folder with the recorded traces"
)
def test_recorded_traces() -> None:
    folder = Path(TRACES or "")
    test = half(read_trace(folder / "gpt-oss-20b_48seqs.npz", 32), "test")
    assert rates(test) == pytest.approx([70.60, 91.67], abs=0.05)
    assert rates(test, bypass=True) == pytest.approx([72.20, 91.87], abs=0.05)
    olmoe = read_trace(folder / "olmoe-1b-7b-0125_decode_16x64x8.npz", 64)
    assert rates(olmoe) == pytest.approx([64.1, 83.3], abs=0.1)

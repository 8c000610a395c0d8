"""Generated traces have the statistics of recorded ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flashmoe_gguf.bench.synthetic_trace import STATISTICS, statistics_for, synthetic_trace
from flashmoe_gguf.errors import OptionError

Used = npt.NDArray[np.bool_]


def used(trace: npt.NDArray[np.uint16], n_expert: int) -> Used:
    """[tokens, layers, experts]"""
    out = np.zeros((*trace.shape[:2], n_expert), bool)
    np.put_along_axis(out, trace.astype(np.int64), True, axis=2)
    return out


def hit_rate(use: Used, slots: int, policy: str) -> float:
    """Percent of the experts used that a cache of so many slots per layer holds."""
    n_tokens = len(use)
    never = 10 * n_tokens
    next_use = np.full(use.shape, never)
    for token in range(n_tokens - 2, -1, -1):
        next_use[token] = np.where(use[token + 1], token + 1, next_use[token + 1])
    resident = np.zeros(use.shape[1:], bool)
    score = np.zeros(use.shape[1:])
    hits = 0
    for token, now in enumerate(use):
        hits += int((resident & now).sum())
        resident |= now
        if policy == "lru":
            score[now] = token + 1
        elif policy == "dlfu":
            score = 0.95 * score + now
        else:
            score = -next_use[token]
        # What the token has used stays; then the best scores of those that are there.
        rank = np.where(resident, score, -2 * never) + 5 * never * now
        kept = np.argpartition(-rank, slots - 1, axis=1)[:, :slots]
        stays = np.zeros_like(resident)
        np.put_along_axis(stays, kept, True, axis=1)
        resident &= stays
    return 100 * hits / int(use.sum())


# Of the recorded traces, at a quarter and a half of the experts; docs/SYNTHETIC.md has the rest.
RECORDED: dict[str, tuple[tuple[int, int, int, int], dict[str, tuple[float, float]]]] = {
    "gpt-oss-20b": (
        (1280, 24, 32, 4),
        {"lru": (63.7, 89.1), "dlfu": (67.9, 90.8), "belady": (76.4, 94.7)},
    ),
    "olmoe": (
        (299, 16, 64, 8),
        {"lru": (59.7, 79.4), "dlfu": (62.0, 82.1), "belady": (72.3, 89.9)},
    ),
    "qwen3-30b": (
        (128, 48, 128, 6),
        {"lru": (80.5, 91.2), "dlfu": (82.2, 91.3), "belady": (88.1, 91.6)},
    ),
    "kimi-linear": (
        (300, 26, 256, 8),
        {"lru": (72.9, 86.7), "dlfu": (73.9, 86.9), "belady": (84.3, 91.0)},
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_hit_rates_are_those_of_the_recorded_trace(name: str) -> None:
    sizes, recorded = RECORDED[name]
    use = used(synthetic_trace(*sizes, statistics=STATISTICS[name]), sizes[2])
    for policy, rates in recorded.items():
        for share, rate in zip((4, 2), rates, strict=True):
            assert hit_rate(use, sizes[2] // share, policy) == pytest.approx(rate, abs=3), policy


def test_rows_are_distinct_experts() -> None:
    trace = synthetic_trace(300, 4, 32, 4, seed=2)
    assert trace.shape == (300, 4, 4) and trace.dtype == np.uint16
    assert trace.max() < 32
    assert (np.diff(np.sort(trace.astype(int), axis=2), axis=2) > 0).all()
    assert synthetic_trace(5, 2, 3, 3).shape == (5, 2, 3)  # every expert, every time


def test_structure_comes_from_its_parameters() -> None:
    """Neighbours overlap, some experts are popular, and the layers before tell the next."""

    def look(**changes: Any) -> tuple[float, float, float]:
        statistics = replace(STATISTICS["gpt-oss-20b"], **changes)
        use = used(synthetic_trace(400, 6, 32, 4, statistics=statistics, seed=5), 32)
        overlap = (use[1:] & use[:-1]).sum() / use[1:].sum()
        counts = np.sort(use.sum(axis=0), axis=1)[:, ::-1]
        popular = counts[:, :8].sum() / counts.sum()
        before = use[:, :5].reshape(400, -1).astype(np.float32)
        alike = np.tril(before @ before.T, -1)[1:].argmax(axis=1)
        context = (use[1:, 5] & use[alike, 5]).sum() / use[1:, 5].sum()
        return float(overlap), float(popular), float(context)

    overlap, popular, context = look()
    flat = look(popularity=0.0, signal=0.0)
    assert flat == pytest.approx((0.125, 0.3, 0.125), abs=0.06)
    assert overlap > 0.3 and popular > 0.4 and context > overlap + 0.1
    alone = look(neighbour=0.0, topic=0.0, sequence=0.0, follow=0.0)
    assert alone[0] < overlap - 0.05
    assert look(popularity=20.0)[1] > 0.8


def test_the_same_seed_gives_the_same_trace() -> None:
    first = synthetic_trace(20, 2, 8, 2, seed=1)
    assert np.array_equal(first, synthetic_trace(20, 2, 8, 2, seed=1))
    assert not np.array_equal(first, synthetic_trace(20, 2, 8, 2, seed=2))


def test_statistics_are_those_of_the_nearest_model() -> None:
    names = {n: statistics_for(n) for n in (1, 8, 32, 64, 128, 256, 1024)}
    assert names[8] is names[32] is STATISTICS["gpt-oss-20b"]
    assert names[64] is STATISTICS["olmoe"] and names[128] is STATISTICS["qwen3-30b"]
    assert names[256] is names[1024] is STATISTICS["kimi-linear"]


@pytest.mark.parametrize("sizes", [(0, 1, 8, 2), (9, 1, 2, 3), (9, 1, 8, 0)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(OptionError, match="no trace of"):
        synthetic_trace(*sizes)

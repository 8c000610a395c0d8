"""flashmoe_gguf.simulate: rates that are known, sizes, halves, bytes; the recorded traces."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashmoe_gguf import OptionError
from flashmoe_gguf._native import policy_names, simulate
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.simulate import (
    Replay,
    Size,
    expert_bytes_of,
    half,
    parse_sizes,
    policies_to_run,
    replay,
    replay_all,
)
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.trace import Trace, read_trace

TRACES = os.environ.get("FLASHMOE_TRACES")
needs_traces = pytest.mark.skipif(
    not TRACES, reason="FLASHMOE_TRACES does not name the folder with the recorded traces"
)

# Hits of each policy on generated routing with 8 and 16 slots for 32 experts, as counted by the
# library when it agreed with the recorded traces below and, victim for victim, with the twins.
GOLDEN: dict[str, tuple[int, int]] = {
    "lru": (30320, 39982),
    "lfu": (33344, 42522),
    "dlfu": (32420, 41334),
    "arc": (30413, 39978),
    "lecar": (31774, 41491),
    "lfru": (32299, 41641),
    "least-stale": (29890, 38640),
    "random": (29887, 38736),
    "belady": (36392, 44231),
    "belady-bypass": (37605, 44419),
}
GOLDEN_LOOKUPS = 4000 * 3 * 4

# Percent hits at 25 % and 50 % of the experts; then LRU's victims back within 5 tokens.
RECORDED = {
    "gpt-oss-20b_48seqs": (
        32,
        {"lru": (63.7, 89.1), "lfu": (63.8, 87.3), "belady": (76.4, 94.7)},
        (62.4, 85.9),
        (56.3, 37.5),
    ),
    "olmoe-1b-7b-0125_decode_16x64x8": (
        64,
        {"lru": (59.7, 79.4), "lfu": (59.9, 80.6), "dlfu": (62.0, 82.1), "belady": (72.3, 89.9)},
        (57.9, 77.5),
        (42.7, 40.2),
    ),
    "kimi-linear-48b_decode_26x256x8": (
        256,
        {"lru": (72.9, 86.7), "lfu": (73.8, 87.7), "dlfu": (73.9, 86.9), "belady": (84.3, 91.0)},
        (69.5, 84.7),
        (13.7, 7.7),
    ),
}
QUARTER, HALF = parse_sizes("25%,50%")


@functools.cache
def generated(n_tokens: int = 300, n_seq: int = 6) -> Trace:
    """Experts that are popular, each in its layer, and some that stay for the next token.

    `random.Random.random` gives the same numbers in every version of Python.
    """
    source = random.Random(3)
    experts = np.empty((n_tokens, 3, 4), np.uint16)
    before: list[list[int]] = [[0, 1, 2, 3] for _ in range(3)]
    for token in range(n_tokens):
        for layer in range(3):
            chosen = [e for e in before[layer] if source.random() < 0.4]
            while len(chosen) < 4:
                expert = (int(32 * source.random() * source.random()) + 5 * layer) % 32
                chosen += [expert] if expert not in chosen else []
            experts[token, layer] = before[layer] = chosen
    seq = np.linspace(0, n_tokens, n_seq + 1).astype(np.int64)
    return Trace(experts, seq, np.full(3, 32, np.int32), np.arange(3, dtype=np.int32))


def rates(trace: Trace, policy: str) -> tuple[float, float]:
    quarter, half = (replay(trace, policy, size).hit_rate for size in (QUARTER, HALF))
    return round(100 * quarter, 1), round(100 * half, 1)


@pytest.mark.parametrize("policy", [*policy_names(), "belady", "belady-bypass"])
def test_golden_counts(policy: str) -> None:
    if policy not in GOLDEN:
        pytest.skip("its own tests hold its figures")
    trace = generated(4000)
    results = [replay(trace, policy, size) for size in (QUARTER, HALF)]
    assert [int(r.counts.lookups.sum()) for r in results] == [GOLDEN_LOOKUPS] * 2
    assert tuple(int(r.counts.hits.sum()) for r in results) == GOLDEN[policy]


# Hits with 16 and 24 of 32 slots, of 181,488 lookups: the embedded model's prompts and answers.
EMBEDDED = {
    "lru": (112975, 151799),
    "lfu": (117152, 155212),
    "dlfu": (115709, 153781),
    "arc": (112985, 151774),
    "lecar": (114940, 153993),
    "lfru": (117189, 154753),
    "least-stale": (113203, 149392),
    "random": (112671, 149155),
    "belady": (133557, 167082),
    "belady-bypass": (146185, 169095),
}


@pytest.mark.parametrize("policy", EMBEDDED)
def test_golden_trace_of_the_embedded_model(policy: str) -> None:
    """`flashmoe trace` of the embedded model with the first 12 of its calibration prompts."""
    trace = read_trace(Path(__file__).parent / "data" / "embedded.npz")
    results = [replay(trace, policy, Size(str(n), number=n)) for n in (16, 24)]
    assert [int(r.counts.lookups.sum()) for r in results] == [181488] * 2
    assert tuple(int(r.counts.hits.sum()) for r in results) == EMBEDDED[policy]


def test_learned_beats_the_others_on_the_embedded_model() -> None:
    trace = read_trace(Path(__file__).parent / "data" / "embedded.npz")
    for n, column in ((16, 0), (24, 1)):
        hits = int(replay(trace, "learned", Size(str(n), number=n)).counts.hits.sum())
        assert hits > 1.03 * EMBEDDED["dlfu"][column]


@needs_traces
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_traces(name: str) -> None:
    n_expert, expected, by_lot, refetched = RECORDED[name]
    trace = read_trace(Path(TRACES or "") / f"{name}.npz", n_expert)
    for policy, want in expected.items():
        assert rates(trace, policy) == pytest.approx(want, abs=0.051), policy
    assert rates(trace, "random") == pytest.approx(by_lot, abs=0.3)
    back = [100 * replay(trace, "lru", size).refetch_rate for size in (QUARTER, HALF)]
    assert back == pytest.approx(refetched, abs=0.051)


@needs_traces
def test_the_held_out_half_of_a_recorded_trace() -> None:
    trace = half(read_trace(Path(TRACES or "") / "gpt-oss-20b_48seqs.npz", 32), "test")
    assert len(trace.seq) == 25
    assert rates(trace, "lru") == (63.1, 88.8)
    assert rates(trace, "dlfu") == pytest.approx((67.4, 90.7), abs=0.051)
    assert rates(trace, "belady") == (76.0, 94.5)


def test_counting_begins_later_but_the_cache_is_warm() -> None:
    trace = generated()
    sizes = trace.n_expert, np.full(3, 8, np.int32)
    whole = simulate("lru", trace.experts, trace.seq, *sizes)
    first = simulate("lru", trace.experts[:100], np.zeros(1, np.int64), *sizes)
    rest = simulate("lru", trace.experts, trace.seq, *sizes, count_from=100)
    assert (first.hits + rest.hits).tolist() == whole.hits.tolist()
    assert rest.lookups.tolist() == [800] * 3


def test_progress_is_told_to_the_end() -> None:
    trace = generated(1500)
    told: list[tuple[str, int]] = []
    replay_all(trace, ["lru", "dlfu"], [QUARTER], progress=lambda *p: told.append(p))
    assert told[0][0] == "lru" and told[-1] == ("dlfu", 3000)
    assert [done for _, done in told] == sorted({done for _, done in told})
    assert len(told) > 4


def test_the_best_come_first_and_more_slots_hit_more() -> None:
    blocks = replay_all(generated(), policies_to_run([], bypass=False), parse_sizes("25%,50%,32"))
    for block in blocks:
        assert block[0].policy == "belady-bypass" or block[0].hit_rate == block[1].hit_rate
        assert [r.hit_rate for r in block] == sorted((r.hit_rate for r in block), reverse=True)
    best = [block[0].hit_rate for block in blocks]
    assert best == sorted(best)
    assert all(int(r.counts.evicted.sum()) == 0 for r in blocks[2])  # each expert has its slot


def test_missed_bytes() -> None:
    sizes = np.array([10, 20, 40], np.int64)
    result = replay(generated(), "lru", QUARTER, expert_bytes=sizes)
    missed = result.counts.lookups - result.counts.hits
    assert result.missed_bytes == int((missed * sizes).sum())
    assert replay(generated(), "lru", QUARTER).missed_bytes is None


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("25%", [8, 2, 1]),
        ("12.5%", [4, 1, 1]),
        ("18.75%", [6, 2, 1]),
        ("50 %", [16, 4, 1]),
        ("100%", [32, 8, 1]),
        ("5", [5, 5, 1]),
        ("99", [32, 8, 1]),
    ],
)
def test_sizes(text: str, slots: list[int]) -> None:
    assert parse_sizes(text)[0].slots(np.array([32, 8, 1], np.int32)).tolist() == slots


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-5", "a", "1.5", "25%,,50%", "5 10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="is not a cache size"):
        parse_sizes(text)


def test_halves() -> None:
    trace = generated()
    order = np.random.default_rng(0).permutation(6)
    test, train = half(trace, "test"), half(trace, "train")
    assert np.array_equal(test.experts, trace.select(np.sort(order[3:])).experts)
    assert np.array_equal(train.experts, trace.select(np.sort(order[:3])).experts)
    assert test.n_tokens + train.n_tokens == trace.n_tokens
    assert np.array_equal(half(trace, "0").experts, test.experts)
    assert not np.array_equal(half(trace, "1").experts, test.experts)
    with pytest.raises(OptionError, match="no part of a trace"):
        half(trace, "validation")
    with pytest.raises(TraceError, match="one sequence"):
        half(trace.select([0]), "test")


def test_which_policies_run() -> None:
    plain = [name for name in policy_names() if name != "flashmoe"]
    assert policies_to_run([], False) == [*plain, "belady", "belady-bypass"]
    with pytest.raises(OptionError, match="flashmoe decides nothing before it is trained"):
        policies_to_run(["flashmoe"], False)
    assert policies_to_run(["dlfu", "a.b:C", "dlfu"], False) == ["dlfu", "a.b:C", "lru", "belady"]
    assert policies_to_run(["belady", "lfu"], True) == ["lfu", "lru", "belady-bypass"]
    with pytest.raises(OptionError, match="no policy 'mru'"):
        policies_to_run(["mru"], False)


def test_bypass_goes_to_every_policy() -> None:
    """Belady's gains by it; lru's victim is never one of those that were just used."""
    trace = generated()

    def hits(policy: str, bypass: bool) -> int:
        return int(replay(trace, policy, QUARTER, bypass=bypass).counts.hits.sum())

    assert hits("belady", True) == hits("belady-bypass", False) > hits("belady", False)
    assert hits("lru", True) == hits("lru", False)
    assert hits("dlfu", True) != hits("dlfu", False)


def test_a_python_policy_that_fails_is_told() -> None:
    result = replay(generated(), "flashmoe_gguf.policy.base:Policy", QUARTER)
    assert isinstance(result, Replay)
    assert result.policy_failure == "NotImplementedError"


def test_bytes_of_a_model(tiny_model: Callable[[str], Path]) -> None:
    geometry = read_geometry(tiny_model("mixed"))
    experts = synthetic_trace(5, 2, 8, 2)
    layers = np.array([0, 1], np.int32)
    trace = Trace(experts, np.array([0, 5]), np.array([8, 8], np.int32), layers)
    sizes = expert_bytes_of(trace, geometry)
    assert sizes.tolist() == [g.expert_bytes for g in geometry.groups[:2]]
    assert sizes[0] != sizes[1]
    other = Trace(experts, np.array([0, 5]), np.array([8, 9], np.int32), layers)
    with pytest.raises(TraceError, match=r"layer 1 of the trace has 9 experts, .* 8 experts"):
        expert_bytes_of(other, geometry)
    beyond = Trace(experts, np.array([0, 5]), np.array([8, 8], np.int32), layers + 2)
    with pytest.raises(TraceError, match=r"layer 3 .* no experts"):
        expert_bytes_of(beyond, geometry)


def test_arrays_that_do_not_fit() -> None:
    trace = generated()
    eight = np.full(3, 8, np.int32)
    with pytest.raises(OptionError, match="2 sizes for a trace of shape"):
        simulate("lru", trace.experts, trace.seq, trace.n_expert[:2], eight[:2])
    with pytest.raises(OptionError, match="does not fit"):
        simulate("lru", trace.experts, trace.seq, eight, eight)
    with pytest.raises(OptionError, match="no eviction policy 'mru'"):
        simulate("mru", trace.experts, trace.seq, trace.n_expert, eight)
    assert Size("8", number=8).slots(trace.n_expert).tolist() == [8] * 3

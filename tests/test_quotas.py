"""Slots by miss curves: where they go, and when the even plan stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmoe_gguf import Llama, OptionError
from flashmoe_gguf.auto_policy import keep_recent, recent_file
from flashmoe_gguf.budget import Fixed, GroupCost, Plan, make_plan
from flashmoe_gguf.cli.plan_text import plan_rows
from flashmoe_gguf.quotas import (
    LEAST_TOKENS,
    Curves,
    _lower_hull,
    known_curves,
    measure_curves,
    order_by_curves,
    planned,
    slots_for_share,
)
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.trace import NO_EXPERT, Trace

MIB = 1 << 20
FIXED = Fixed(process=60 * MIB, dense=500 * MIB, context=100 * MIB, ring=24 * MIB)
N_EXPERT, TOP_K = 16, 2
QUIET: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def routing(n_tokens: int, ranges: tuple[int, ...], n_expert: int = N_EXPERT) -> Trace:
    """Layer i draws its experts evenly from the first `ranges[i]`; 0: it routes nothing."""
    rng = np.random.default_rng(7)
    experts = np.full((n_tokens, len(ranges), TOP_K), NO_EXPERT, np.uint16)
    for layer, used in enumerate(ranges):
        if used:
            for row in experts[:, layer]:
                row[:] = rng.choice(used, TOP_K, replace=False)
    return Trace(
        experts,
        np.array([0, n_tokens]),
        np.full(len(ranges), n_expert, np.int32),
        np.arange(len(ranges), dtype=np.int32),
    )


def test_curves_fall_from_all_to_nothing() -> None:
    curves = measure_curves(routing(600, (4, 16)))
    assert curves.n_tokens == 600
    for missed in curves.misses:
        assert missed.shape == (N_EXPERT + 1,)
        assert missed[0] == TOP_K and missed[-1] == 0
        saved = -np.diff(missed)
        assert (saved >= -1e-12).all()
        assert (np.diff(saved) <= 1e-12).all()  # never more than the slot before
    narrow, wide = curves.misses
    assert narrow[8] < wide[8]


def test_little_routing_says_that_layers_are_more_alike() -> None:
    few, many = (measure_curves(routing(n, (4, 16))) for n in (100, 4000))

    def apart(curves: Curves) -> float:
        return float(curves.misses[1][8] - curves.misses[0][8])

    assert 0 < apart(few) < 0.5 * apart(many)


def test_a_layer_without_routing_has_no_say() -> None:
    curves = measure_curves(routing(600, (4, 0, 16)))
    assert not curves.misses[1].any()
    assert curves.misses[0][8] == pytest.approx(
        measure_curves(routing(600, (4, 0, 16))).misses[0][8]
    )  # and the same each time
    assert measure_curves(routing(600, (0, 0))).misses[0].sum() == 0


def test_the_hull_lies_below_every_point() -> None:
    xs, ys = [0, 2, 4, 6, 8], [8.0, 7.0, 2.0, 2.5, 0.0]
    hull = _lower_hull(xs, ys)
    assert hull == ([0, 4, 8], [8.0, 2.0, 0.0])


def test_a_share_is_rounded_to_the_nearest_and_up_from_the_middle() -> None:
    n_expert = np.array([50, 20, 8, 8], np.int32)
    assert slots_for_share(n_expert, 0.25).tolist() == [13, 5, 2, 2]
    assert slots_for_share(n_expert, 0.125).tolist() == [6, 3, 1, 1]
    assert slots_for_share(n_expert, 0.001).tolist() == [1, 1, 1, 1]


def test_slots_go_where_they_save_most() -> None:
    groups = [GroupCost(MIB, N_EXPERT)] * 2
    curves = measure_curves(routing(4000, (4, 16)))
    order = order_by_curves(groups, [MIB] * 2, curves, TOP_K)
    assert sorted(order) == [0] * N_EXPERT + [1] * N_EXPERT
    assert sorted(order[: 2 * TOP_K]) == [0] * TOP_K + [1] * TOP_K
    # four slots are all that layer 0 has a use for
    plan = make_plan(FIXED.total + 16 * MIB, FIXED, groups, order)
    assert plan.slots[0] < 8 < plan.slots[1] and sum(plan.slots) == 16


def test_bytes_count_not_experts() -> None:
    """Two layers that miss alike: slots of the one whose experts lie loosely save less each."""
    groups = [GroupCost(2 * MIB, N_EXPERT), GroupCost(MIB, N_EXPERT)]
    curve = np.linspace(2, 0, N_EXPERT + 1)
    order = order_by_curves(groups, [MIB] * 2, Curves((curve, curve), 1000), TOP_K)
    rest = order[2 * TOP_K :]
    assert rest == [1] * (N_EXPERT - TOP_K) + [0] * (N_EXPERT - TOP_K)


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.integers(1, 4 * MIB), min_size=3, max_size=3),
    rest=st.integers(0, 200 * MIB),
    more=st.integers(0, 200 * MIB),
    ranges=st.tuples(*[st.sampled_from([0, 2, 3, 8, 16])] * 3),
)
def test_more_memory_never_caches_less(
    costs: list[int], rest: int, more: int, ranges: tuple[int, ...]
) -> None:
    groups = [GroupCost(cost, N_EXPERT) for cost in costs]
    order = order_by_curves(groups, costs, measure_curves(routing(64, ranges)), TOP_K)
    small, large = (
        make_plan(FIXED.total + size, FIXED, groups, order) for size in (rest, rest + more)
    )
    assert all(a <= b for a, b in zip(small.slots, large.slots, strict=True))
    assert large.total_bytes <= FIXED.total + rest + more
    if large.slot_bytes < large.all_slot_bytes:
        assert FIXED.total + rest + more - large.total_bytes < max(costs)


def test_groups_outside_the_graph_get_nothing() -> None:
    groups = [GroupCost(MIB, N_EXPERT), GroupCost(MIB, 0)]
    order = order_by_curves(groups, [MIB] * 2, measure_curves(routing(600, (8, 0))), TOP_K)
    assert set(order) == {0} and len(order) == N_EXPERT


def test_what_is_known_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = routing(LEAST_TOKENS, (4, 16))
    assert known_curves("model", known.n_expert) is None
    keep_recent("model", known.experts[:-1], known.n_expert, known.layers)
    assert known_curves("model", known.n_expert) is None  # a token too few
    keep_recent("model", known.experts, known.n_expert, known.layers)
    curves = known_curves("model", known.n_expert)
    assert curves is not None and curves.n_tokens == LEAST_TOKENS
    assert known_curves("model", known.n_expert + 1) is None
    recent_file("model").write_bytes(b"damaged")
    assert known_curves("model", known.n_expert) is None


def test_a_model_is_planned_by_its_own_routing(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tiny_model("qwen3moe")
    geometry = read_geometry(path)
    n_expert = geometry.n_expert
    groups = [GroupCost(MIB, n_expert)] * len(geometry.groups)
    ram = FIXED.total + (n_expert // 2 * len(groups)) * MIB

    def plan(quotas: str = "auto", ram: int = ram) -> tuple[tuple[int, ...], int]:
        made = planned(ram, FIXED, groups, geometry, TOP_K, quotas)
        return made.slots, made.quota_tokens

    even = (n_expert // 2,) * len(groups)
    assert plan() == (even, 0)
    kinds = (3,) + (n_expert,) * (len(groups) - 1)
    known = routing(2000, kinds, n_expert)
    keep_recent(geometry.fingerprint, known.experts, known.n_expert, known.layers)
    slots, n_tokens = plan()
    assert n_tokens == 2000 and slots[0] < n_expert // 2 and sum(slots) == sum(even)
    assert plan("even") == (even, 0)
    everything = (n_expert,) * len(groups)
    assert plan(ram=FIXED.total + 1000 * MIB) == (everything, 0)
    assert plan(ram=FIXED.total) == ((0,) * len(groups), 0)


def test_loading_uses_them_and_says_so(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tiny_model("qwen3moe")
    geometry = read_geometry(path)
    known = routing(2000, (3,) + (geometry.n_expert,) * (len(geometry.groups) - 1), 10)
    assert geometry.n_expert == 10
    fingerprint = geometry.fingerprint
    keep_recent(fingerprint, known.experts, known.n_expert, known.layers)

    def half(_ram: int, fixed: Fixed, groups: list[GroupCost], *rest: Any) -> Plan:
        """The process itself varies by more than this model has: half of the experts, exactly."""
        everything = sum(g.slot_bytes * g.n_expert for g in groups)
        return planned(fixed.total + everything // 2, fixed, groups, *rest)

    monkeypatch.setattr("flashmoe_gguf.loading.planned", half)
    for quotas, used in (("auto", 2000), ("even", 0)):
        llm = Llama(str(path), ram="2G", quotas=quotas, learn=False, **QUIET)
        assert llm.plan is not None and llm.plan.quota_tokens == used
        assert (llm.plan.slots[0] < min(llm.plan.slots[1:])) == bool(used)
        llm.eval([1, 2, 3])
        stats = llm.stats()
        assert stats is not None and stats.lookups > 0
        rows = plan_rows(
            geometry, streamed=True, plan=llm.plan, budgeted=True, stats=stats, settings=""
        )
        said = "slots by the routing of the last 2,000 tokens" in dict(rows)["cache"]
        assert said == bool(used)
        llm.close()
    with pytest.raises(OptionError, match="quotas 'some'"):
        Llama(str(path), quotas="some", **QUIET)

"""The budget is a pure function: sizes in, slots out, and a floor that says what it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_gguf import BudgetError, OptionError
from flashmoe_gguf.budget import (
    Fixed,
    GroupCost,
    check_floor,
    fixed_slots_plan,
    format_size,
    kv_bytes_at_least,
    make_plan,
    parse_ram,
    parse_size,
)
from flashmoe_gguf.host import _cgroups, available_memory, default_budget
from flashmoe_gguf.store import read_geometry

MIB = 1 << 20
FIXED = Fixed(process=60 * MIB, dense=500 * MIB, context=100 * MIB, ring=24 * MIB)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("1.5GiB", 3 << 29),
        ("900M", 900 << 20),
        ("900MB", 900 << 20),
        ("64K", 64 << 10),
        ("12345", 12345),
        (12345, 12345),
        (".5T", 1 << 39),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("ram", "size"), [(None, None), ("auto", None), (" AUTO ", None), ("1M", 1 << 20), (7, 7)]
)
def test_auto_is_what_the_machine_allows(ram: object, size: int | None) -> None:
    assert parse_ram(ram) == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "8X", "-1G", "0", "G", "1e9", "8 G B", "nan", "1.2.3G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="not an amount of memory"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


groups = st.lists(
    st.builds(
        GroupCost, slot_bytes=st.integers(1, 40 * MIB), n_expert=st.sampled_from([0, 8, 32, 128])
    ),
    min_size=1,
    max_size=48,
)


@given(groups=groups, rest=st.integers(0, 1 << 36))
def test_a_plan_spends_what_is_left_and_no_more(groups: list[GroupCost], rest: int) -> None:
    plan = make_plan(FIXED.total + rest, FIXED, groups)
    assert plan.total_bytes <= FIXED.total + rest
    assert all(0 <= n <= g.n_expert for n, g in zip(plan.slots, groups, strict=True))
    assert plan.slot_bytes == sum(n * g.slot_bytes for n, g in zip(plan.slots, groups, strict=True))
    # less than one slot is left, unless all are had
    left = FIXED.total + rest - plan.total_bytes
    if any(n < g.n_expert for n, g in zip(plan.slots, groups, strict=True)):
        assert left < max(g.slot_bytes for g in groups if g.n_expert)
    # and every group has the same share of its experts, to within a slot
    shares = [(n, g.n_expert) for n, g in zip(plan.slots, groups, strict=True) if g.n_expert]
    for n, n_expert in shares:
        for other, others in shares:
            assert n / n_expert <= (other + 1) / others + 1e-12


@given(groups=groups, rest=st.integers(0, 1 << 34), more=st.integers(0, 1 << 34))
def test_more_memory_never_caches_less(groups: list[GroupCost], rest: int, more: int) -> None:
    small = make_plan(FIXED.total + rest, FIXED, groups)
    large = make_plan(FIXED.total + rest + more, FIXED, groups)
    assert all(a >= b for a, b in zip(large.slots, small.slots, strict=True))
    assert large.cached_share <= 1.0


@given(below=st.integers(1, FIXED.total))
def test_below_the_floor(below: int) -> None:
    with pytest.raises(BudgetError) as caught:
        make_plan(FIXED.total - below, FIXED, [GroupCost(MIB, 8)])
    message = str(caught.value)
    for piece in ("floor", "dense weights 500 MiB", "context", "ring", "process", "reserve"):
        assert piece in message
    hinted = parse_size(re.search(r"--ram (\d+M)", message)[1])  # type: ignore[index]
    check_floor(hinted, FIXED)  # what the hint says is enough
    with pytest.raises(BudgetError):
        check_floor(hinted - 2 * MIB, FIXED)


def test_at_the_floor_there_is_a_plan_without_slots() -> None:
    check_floor(FIXED.total, FIXED)
    assert make_plan(FIXED.total, FIXED, [GroupCost(MIB, 8)]).slots == (0,)


def test_given_slots() -> None:
    costs = [GroupCost(MIB, 8), GroupCost(2 * MIB, 4)]
    plan = fixed_slots_plan(FIXED, costs, 6)
    assert plan.slots == (6, 4)
    assert plan.slot_bytes == 14 * MIB
    assert plan.ram_bytes == plan.total_bytes == FIXED.total + 14 * MIB
    with pytest.raises(OptionError):
        fixed_slots_plan(FIXED, costs, -1)


def test_context_size_from_the_header(tiny_model: Callable[[str], Path]) -> None:
    header = read_geometry(tiny_model("qwen3moe")).header
    keys = ("block_count", "attention.head_count_kv", "embedding_length", "attention.head_count")
    layers, heads, n_embd, q_heads = (header.get(key) for key in keys)
    assert isinstance(layers, int) and isinstance(heads, int)
    assert isinstance(n_embd, int) and isinstance(q_heads, int)
    width = n_embd // q_heads
    assert kv_bytes_at_least(header, 1000) == layers * heads * width * 2 * 2 * 1000
    # unknown rather than wrong: a sliding window keeps less
    windowed = {**header.metadata, f"{header.architecture}.attention.sliding_window": 128}
    assert kv_bytes_at_least(replace(header, metadata=windowed), 1000) == 0


def test_what_comes_on_top_is_only_in_the_hint() -> None:
    with pytest.raises(BudgetError, match="floor of at least") as caught:
        check_floor(MIB, FIXED, uncounted=1000 * MIB)
    assert f"--ram {-(-(FIXED.total + 1000 * MIB) // MIB)}M" in caught.value.hint


def test_cgroups_of_both_versions(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("7:cpu,memory:/a/b\n3:pids:/x\n0::/c/d\n")
    v1 = "cache 1\ntotal_inactive_file 300\ntotal_active_file 200\nactive_file 9\n"
    v2 = "anon 1\nactive_file 7\ninactive_file 3\n"
    for path, text in {
        "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "memory/a/memory.limit_in_bytes": "9000",
        "memory/a/memory.usage_in_bytes": "4000",
        "memory/a/memory.stat": v1,
        "memory/a/b/memory.limit_in_bytes": "7000",
        "c/memory.max": "5000",
        "c/memory.current": "1000",
        "c/memory.stat": v2,
        "c/d/memory.max": "max",
        "c/d/memory.high": "4000",
        "c/d/memory.current": "600",
    }.items():
        file = tmp_path / "fs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    # limit, and what is used beyond page cache
    assert sorted(_cgroups(tmp_path / "fs", membership)) == [
        (4000, 600),
        (5000, 990),
        (7000, 0),
        (9000, 3500),
    ]
    assert _cgroups(tmp_path / "fs", tmp_path / "none") == []


def test_the_default_budget_leaves_room_for_others() -> None:
    assert 0 < default_budget().limit_bytes < available_memory().limit_bytes


def test_auto_in_python_means_none(tiny_model: Callable[[str], Path]) -> None:
    from flashmoe_gguf import Llama

    path = str(tiny_model("qwen3moe"))
    sizes = []
    for ram in ("auto", None):
        llm = Llama(path, ram=ram, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False)
        assert llm.plan is not None
        sizes.append(llm.plan.ram_bytes)
        llm.close()
    assert sizes[0] == pytest.approx(sizes[1], rel=0.2)
    # as with None, slots may be given
    llm = Llama(path, ram="auto", n_slots=2, n_ctx=64, n_threads=1, verbose=False)
    assert llm.plan is not None and set(llm.plan.slots) == {2}
    llm.close()


@pytest.mark.parametrize("more", [(), ("--n-slots", "2")])
def test_auto_on_the_command_line(more: tuple[str, ...], tiny_model: Callable[[str], Path]) -> None:
    from cli_tools import flashmoe

    arguments = ("--tokens", "1,2,3", "-n", "1", "-t", "1", "-c", "64", "--ram", "auto")
    result = flashmoe("run", tiny_model("qwen3moe"), *arguments, *more)
    assert result.exit_code == 0, result.output
    assert ("budget" in result.stderr) == (not more)

"""What a plan says of a model: sizes, hit rates, speeds, and advice that is worth following."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_gguf.budget import Plan, RunSizes, estimate_fixed, parse_size, plan_model
from flashmoe_gguf.errors import BudgetError
from flashmoe_gguf.host import MemoryLimit
from flashmoe_gguf.models import known_models
from flashmoe_gguf.plan import (
    LayerCost,
    Machine,
    Subject,
    expected_hit_rate,
    known_subject,
    make_forecast,
    memory_bandwidth,
    read_subject,
    seconds_per_token,
    speed,
    verdict,
)
from flashmoe_gguf.plan.curves import REFERENCES
from flashmoe_gguf.plan.forecast import advice, ladder
from sparse_models import make_sparse

GIB = 1 << 30
RUN = RunSizes(n_ctx=4096, n_ubatch=512, n_threads=8)
BUDGETS = [size * GIB for size in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)]
SUBJECTS = {name: known_subject(model) for name, model in known_models().items()}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """The model of docs/BENCHMARKS.md."""
    return read_subject(make_sparse(tmp_path_factory.mktemp("sparse") / "m.gguf"))


def plan_or_none(subject: Subject, ram_bytes: int, run: RunSizes = RUN) -> Plan | None:
    try:
        return plan_model(subject.sizes, run, ram_bytes)
    except BudgetError:
        return None


@pytest.mark.parametrize("name", SUBJECTS)
def test_budgets_from_2_to_512_gib(name: str) -> None:
    subject = SUBJECTS[name]
    fixed = estimate_fixed(subject.sizes, RUN)
    before: Plan | None = None
    for ram_bytes in BUDGETS:
        plan = plan_or_none(subject, ram_bytes)
        if plan is None:
            assert ram_bytes < fixed.total and before is None  # the floor, and once above, always
            continue
        assert plan.total_bytes <= ram_bytes
        if before is not None:
            assert all(a >= b for a, b in zip(plan.slots, before.slots, strict=True))
        if any(n < subject.n_expert for n in plan.slots):
            most = max(group.slot_bytes for group in subject.sizes.groups)
            assert ram_bytes - plan.total_bytes < most
        before = plan
    assert before is not None and set(before.slots) == {subject.n_expert}  # 512 GiB hold them all


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_floor_of_known_models_is_sharp(name: str) -> None:
    subject = SUBJECTS[name]
    floor = estimate_fixed(subject.sizes, RUN).total
    assert floor < 8 * GIB
    assert sum(plan_model(subject.sizes, RUN, floor).slots) == 0
    with pytest.raises(BudgetError, match="below the floor"):
        plan_model(subject.sizes, RUN, floor - 1)
    assert verdict(subject, RUN, floor - 1) == "too big"
    assert verdict(subject, RUN, floor) == "streams"
    full = floor + sum(g.slot_bytes * g.n_expert for g in subject.sizes.groups)
    assert verdict(subject, RUN, full - 1) == "streams"
    assert verdict(subject, RUN, full) == "fits"


@pytest.mark.parametrize(
    "change",
    [{"n_ctx": 8192}, {"n_ubatch": 1024}, {"n_threads": 64}, {"n_ctx": 2048, "n_ubatch": 2048}],
)
def test_what_takes_more_memory_leaves_no_more_slots(change: dict[str, int]) -> None:
    for subject in SUBJECTS.values():
        usual, more = (
            plan_or_none(subject, 12 * GIB, run) for run in (RUN, replace(RUN, **change))
        )
        if usual is None or more is None:
            assert more is None
        elif replace(RUN, **change).n_ctx >= RUN.n_ctx:
            assert all(a <= b for a, b in zip(more.slots, usual.slots, strict=True))


def test_flash_attention_takes_less() -> None:
    for subject in SUBJECTS.values():
        long = replace(RUN, n_ctx=32768)
        assert (
            estimate_fixed(subject.sizes, replace(long, flash_attn=True)).total
            < estimate_fixed(subject.sizes, long).total
        )


def test_a_header_and_the_table_of_models_agree(replay: Subject) -> None:
    """The generated model has gpt-oss-20b's routing, other widths; the same rules apply to both."""
    assert (replay.n_expert, replay.top_k, len(replay.layers)) == (32, 4, 24)
    part = 2048 * 1536 * 144 // 256
    assert replay.part_bytes == part
    assert replay.token_bytes == 24 * 4 * 3 * part
    assert {g.slot_bytes for g in replay.sizes.groups} == {3 * (part + 4096)}
    assert replay.sizes.kv_values == 24 * 4 * 128 * 2
    assert replay.embedding_bytes == replay.sizes.n_vocab * 2048 * 2
    assert replay.sizes.n_vocab == 1500 + 259
    known = SUBJECTS["gpt-oss-20b"]
    assert (known.n_expert, known.top_k, len(known.layers)) == (32, 4, 24)
    assert known.token_bytes == 24 * 4 * 3 * (2880 * 2880 * 136 // 256)


@pytest.mark.parametrize("kind", ["qwen3moe", "grovemoe", "nogate", "deepseek2lite-like", "split"])
def test_slots_and_ring_are_those_of_a_loaded_model(
    kind: str, tiny_model: Callable[[str], Path]
) -> None:
    from flashmoe_gguf import Llama

    path = tiny_model(kind)
    subject = read_subject(path)
    llm = Llama(str(path), n_ctx=64, n_slots=1, n_threads=1, n_threads_batch=1, verbose=False)
    try:
        assert llm.plan is not None
        assert subject.sizes.ring_bytes == llm.plan.fixed.ring
        assert subject.sizes.dense_bytes == llm.plan.fixed.dense
        assert sum(g.slot_bytes for g in subject.sizes.groups) == llm.plan.slot_bytes
    finally:
        llm.close()


def test_the_context_is_about_what_a_load_measures(tmp_path: Path) -> None:
    """In a process of its own: a load after another reuses memory that the first has freed."""
    import subprocess
    import sys

    path = make_sparse(tmp_path / "m.gguf")
    run = RunSizes(n_ctx=1024, n_ubatch=128, n_threads=2)
    code = (
        f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}\n"
        "from flashmoe_gguf import Llama\n"
        f"llm = Llama({str(path)!r}, n_slots=0, n_ctx=1024, n_ubatch=128, n_threads=2, "
        "n_threads_batch=2, verbose=False)\n"
        "print(llm.plan.fixed.context, llm.plan.fixed.process)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    context, process = map(int, done.stdout.split())
    fixed = estimate_fixed(read_subject(path).sizes, run)
    assert abs(fixed.context - context) < 32 << 20
    assert process < fixed.process + (32 << 20)


def test_the_curves_go_through_the_reference_points() -> None:
    for reference in REFERENCES:
        assert reference.hit_rate(0.25) == pytest.approx(reference.at_quarter)
        assert reference.hit_rate(0.5) == pytest.approx(reference.at_half)
        assert (reference.hit_rate(0), reference.hit_rate(1)) == (0, 1)
        own = expected_hit_rate(
            reference.n_expert // 4, reference.n_expert, reference.top_k, reference.architecture
        )
        assert own.expected == pytest.approx(reference.at_quarter)


@given(
    n_expert=st.sampled_from([8, 32, 64, 128, 256, 512]),
    top_k=st.integers(1, 8),
    architecture=st.sampled_from(["", "gpt-oss", "olmoe"]),
)
def test_hit_rates_rise_with_slots(n_expert: int, top_k: int, architecture: str) -> None:
    rates = [expected_hit_rate(n, n_expert, top_k, architecture) for n in range(n_expert + 1)]
    for name in ("expected", "low", "high"):
        values = [getattr(rate, name) for rate in rates]
        assert values == sorted(values)
        assert (values[0], values[-1]) == (0, 1)
    for n, rate in enumerate(rates):
        assert rate.low - 1e-9 <= rate.expected <= rate.high + 1e-9
        assert rate.high <= n / top_k


def test_seconds_of_a_token_by_hand() -> None:
    layer = LayerCost(expert_bytes=100, n_expert=8, top_k=2)
    machine = Machine(disk_bytes_per_second=50.0, memory_bytes_per_second=200.0)
    # all hit: 200 bytes of experts and 300 of dense weights from memory
    assert seconds_per_token([layer], [1.0], 300, machine) == pytest.approx(2.5)
    # none hits: two reads of two seconds hide the second of computing
    assert seconds_per_token([layer], [0.0], 300, machine) == pytest.approx(1.5 + 4)
    # half: none, one or two reads in 1, 2, 1 of 4 cases
    assert seconds_per_token([layer], [0.5], 0, machine) == pytest.approx((1 + 2 * 2 + 4) / 4)


@given(hits=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_more_hits_are_never_slower(hits: list[float]) -> None:
    layer = LayerCost(expert_bytes=5_000_000, n_expert=32, top_k=4)
    machine = Machine(2e9, 25e9)
    few, many = sorted(hits)
    slow, fast = (seconds_per_token([layer] * 3, [h] * 3, 0, machine) for h in (few, many))
    assert fast <= slow + 1e-12


@pytest.mark.parametrize(
    ("ram", "measured", "hits"), [(1_700_000_000, 15.7, 0.792), (2_200_000_000, 20.2, 0.892)]
)
def test_predictions_against_what_was_measured(
    replay: Subject, ram: int, measured: float, hits: float
) -> None:
    """docs/BENCHMARKS.md, the first tables: 34.6 tok/s all in RAM, a drive of 2.7 GB/s."""
    weights = replay.sizes.dense_bytes - replay.embedding_bytes + replay.token_bytes
    run = RunSizes(n_ctx=1024, n_ubatch=128, n_threads=2)
    machine = Machine(2.7e9, 34.6 * weights)
    # as any model with this routing would be judged, and as one whose routing is known
    for subject, margin in ((replay, 0.05), (replace(replay, architecture="gpt-oss"), 0.16)):
        forecast = make_forecast(subject, run, ram, machine)
        assert forecast.speed is not None
        assert forecast.speed.expected == pytest.approx(measured, rel=margin)
        assert forecast.hit_rate.expected == pytest.approx(hits, abs=0.07)
        assert forecast.speed.low < measured < 1.06 * forecast.speed.high


def test_all_in_ram_is_the_speed_of_memory(replay: Subject) -> None:
    forecast = make_forecast(replay, RUN, 16 * GIB, Machine(1e9, 25e9))
    weights = replay.sizes.dense_bytes - replay.embedding_bytes + replay.token_bytes
    assert forecast.speed is not None
    assert forecast.speed.expected == pytest.approx(25e9 / weights)
    assert forecast.missed_bytes == 0
    assert forecast.hit_rate.expected == 1


def test_the_ladder_climbs(replay: Subject) -> None:
    machine = Machine(2e9, 25e9)
    for subject in (replay, *SUBJECTS.values()):
        first = make_forecast(subject, RUN, 512 * GIB, machine)
        steps = ladder(subject, RUN, first.floor_bytes, first.full_bytes, machine)
        assert len(steps) >= 3
        speeds = [step.speed.expected for step in steps if step.speed]
        assert speeds == sorted(speeds) and len(speeds) == len(steps)
        assert steps[-1].hit_rate.expected == 1


def test_a_curve_of_one_s_own(replay: Subject) -> None:
    forecast = make_forecast(replay, RUN, 3 * GIB, None, curve=lambda share: share)
    assert forecast.speed is None
    assert forecast.hit_rate.expected == pytest.approx(forecast.plan.cached_share, abs=0.02)


@pytest.mark.parametrize(
    ("machine", "words"), [(Machine(0.5e9, 25e9), "the drive"), (Machine(50e9, 5e9), "memory and")]
)
def test_advice_names_what_sets_the_pace(replay: Subject, machine: Machine, words: str) -> None:
    forecast = make_forecast(replay, RUN, 2_500_000_000, machine)
    text = advice(replay, RUN, forecast, machine)
    assert text.startswith(words)
    if found := re.search(r"--ram (\S+) would give about (\S+) tok/s", text):
        then = make_forecast(replay, RUN, parse_size(found[1]), machine).speed
        assert then is not None and forecast.speed is not None
        assert then.expected == pytest.approx(float(found[2]), rel=0.03)
        assert then.expected > 1.04 * forecast.speed.expected
    else:
        assert words == "memory and"


def test_advice_for_much_memory_and_for_little(replay: Subject) -> None:
    everything = make_forecast(replay, RUN, 16 * GIB, None)
    assert "everything fits" in advice(replay, RUN, everything, None)
    some = make_forecast(replay, RUN, 2 * GIB, None)
    assert "everything resident takes --ram 4." in advice(replay, RUN, some, None)
    floor = estimate_fixed(replay.sizes, RUN).total
    little = make_forecast(replay, RUN, floor + (200 << 20), None)
    text = advice(replay, RUN, little, None)
    assert "the context takes more than the cache: with --" in text
    # nothing is left to make smaller
    least = RunSizes(n_ctx=1024, n_ubatch=64, n_threads=1, flash_attn=True)
    floor = estimate_fixed(replay.sizes, least).total
    bare = make_forecast(replay, least, floor, None)
    assert "fewer experts than a token uses" in advice(replay, least, bare, None)
    small = RunSizes(n_ctx=256, n_ubatch=32, n_threads=1)
    floor = estimate_fixed(replay.sizes, small).total
    tight = make_forecast(replay, small, floor + (130 << 20), None)
    assert "fewer experts than a token uses (4)" in advice(replay, small, tight, None)


def test_a_dense_model_needs_no_streaming(tmp_path: Path) -> None:
    import gguf_files

    keys = {
        "general.architecture": gguf_files.string("llama"),
        "llama.block_count": gguf_files.u32(1),
    }
    path = gguf_files.Gguf(keys).write(tmp_path / "dense.gguf")
    subject = read_subject(path)
    assert (subject.layers, subject.part_bytes, subject.sizes.ring_bytes) == ((), 0, 0)
    forecast = make_forecast(subject, RUN, GIB, Machine(1e9, 1e9))
    assert "no routed experts" in advice(subject, RUN, forecast, None)


def test_memory_bandwidth_is_a_bandwidth() -> None:
    assert 1e8 < memory_bandwidth(1, seconds=0.01) < 1e13


def test_measuring_memory_takes_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    taken = []
    real = np.ones
    monkeypatch.setattr(speed.np, "ones", lambda n: taken.append(8 * n) or real(1))
    limit = MemoryLimit(800 << 20, "the cgroup's limit")
    monkeypatch.setattr(speed, "available_memory", lambda: limit)
    memory_bandwidth(64, seconds=0.001)
    assert len(taken) == 64 and sum(taken) <= 200 << 20

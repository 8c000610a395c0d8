"""`flashmoe tune`: the search, the file that it keeps, and who uses it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gguf_files
from cli_tools import assert_error, flashmoe
from flashmoe_gguf import FlashMoEError, Llama, OptionError, tuning
from flashmoe_gguf.bench import arm as arm_process
from flashmoe_gguf.bench.arm import Arm
from flashmoe_gguf.bench.cases import parse_arm
from flashmoe_gguf.bench.limit import Unlimited
from flashmoe_gguf.bench.tuner import (
    DEFAULTS,
    DEPTHS,
    FINAL_ROUNDS,
    REQUEST_SIZES,
    Stage,
    arm_for,
    search,
    stages_for,
)
from flashmoe_gguf.cli import tune as tune_command
from flashmoe_gguf.cli.plan_text import plan_rows
from flashmoe_gguf.cli.screen import Screen
from flashmoe_gguf.disk import Bandwidth
from flashmoe_gguf.settings import StreamSettings
from flashmoe_gguf.store import Geometry, read_geometry
from flashmoe_gguf.tuning import (
    Kept,
    Tuning,
    forget_tuning,
    load_tuning,
    save_tuning,
    tuned_file,
    tuning_words,
)

FOUND = Tuning(n_workers=2, request_bytes=512 << 10)
KEPT = Kept(FOUND, 1 << 30, 10.0, 12.0)
QUIET: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture
def geometry(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Geometry:
    """Of a tiny model, with a cache directory that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_geometry(tiny_model("qwen3moe"))


class Machine:
    """Answers for real runs: tok/s by what is set, and a clock that each run moves on."""

    def __init__(self, speed: Callable[[Tuning, int], float], seconds: float = 1.0) -> None:
        self._speed, self._seconds = speed, seconds
        self.now = 0.0
        self.calls: list[tuple[list[Tuning], int]] = []

    def __call__(self, tunings: Sequence[Tuning], n_rounds: int) -> list[tuple[float, ...]]:
        self.calls.append((list(tunings), n_rounds))
        self.now += self._seconds * n_rounds * len(tunings)
        return [tuple(self._speed(t, i) for i in range(n_rounds)) for t in tunings]

    def clock(self) -> float:
        return self.now


STAGES = [
    Stage("n_workers", (1, 2, 4, 8)),
    Stage("request_bytes", (256 << 10, 512 << 10)),
    Stage("lookahead", ("off",)),
]


def test_the_best_of_each_setting_is_taken_on() -> None:
    def speed(t: Tuning, _run: int) -> float:
        readers = {1: 9.0, 2: 12.0, 4: 10.0, 8: 11.0}[t.n_workers]
        return readers * (1.1 if t.request_bytes == 512 << 10 else 1.0)

    machine = Machine(speed)
    found = search(STAGES, machine, 1000.0, machine.clock)
    assert found.best == found.candidate == FOUND
    assert found.gain == pytest.approx(0.32) and not found.untried
    assert len(found.before) == len(found.after) == FINAL_ROUNDS[1]
    assert [t.field for t in found.trials if t.kept] == [s.field for s in STAGES]
    # what an earlier stage found is what later ones build on
    assert all(t.n_workers == 2 for t in machine.calls[2][0])
    assert machine.calls[-1][0] == [DEFAULTS, FOUND]


def test_chance_is_not_taken_for_a_gain() -> None:
    machine = Machine(lambda t, _run: 10.2 if t.n_workers == 8 else 10.0)
    found = search(STAGES, machine, 1000.0, machine.clock)
    assert found.best == found.candidate == DEFAULTS and found.gain == 0
    assert found.before == found.after == ()  # there was nothing to compare


def test_what_does_not_last_is_not_kept() -> None:
    """Faster while it was tried, and as the defaults when both take turns at the end."""
    machine = Machine(lambda t, _run: 10.0)
    lucky = Machine(lambda t, _run: 20.0 if t.n_workers == 8 else 10.0)

    def measure(tunings: Sequence[Tuning], n_rounds: int) -> list[tuple[float, ...]]:
        last = n_rounds >= FINAL_ROUNDS[0]
        return (machine if last else lucky)(tunings, n_rounds)

    found = search(STAGES, measure, 1000.0, lambda: machine.now + lucky.now)
    assert found.candidate.n_workers == 8 and found.best == DEFAULTS

    # a better median of runs that win now and then
    uneven = {DEFAULTS: (10, 10, 10, 20, 20, 20, 10), replace(DEFAULTS, n_workers=8): (11,) * 7}

    def swinging(tunings: Sequence[Tuning], n_rounds: int) -> list[tuple[float, ...]]:
        if n_rounds < FINAL_ROUNDS[0]:
            return lucky(tunings, n_rounds)
        return [tuple(map(float, uneven[t][:n_rounds])) for t in tunings]

    found = search(STAGES[:1], swinging, lucky.now + 1000.0, lucky.clock)
    assert statistics.median(found.after) > statistics.median(found.before) * 1.03
    assert found.best == DEFAULTS


def test_what_there_is_no_time_for_is_said() -> None:
    machine = Machine(lambda t, _run: float(t.n_workers))
    found = search(STAGES, machine, 12.0, machine.clock)
    assert found.untried == ("request_bytes", "lookahead")
    assert found.best.n_workers == 8 and len(found.after) == FINAL_ROUNDS[0]
    with pytest.raises(OptionError, match="no time to try anything: one run takes 1 s") as caught:
        machine = Machine(lambda t, _run: 1.0)
        search(STAGES, machine, 3.0, machine.clock)
    hinted = float(caught.value.hint.split()[2])
    machine = Machine(lambda t, _run: 1.0)
    assert search(STAGES, machine, hinted, machine.clock).trials  # what it says is enough


def grid_of(speed: Callable[[int, int], float]) -> list[Bandwidth]:
    return [Bandwidth(s, d, speed(s, d)) for s in REQUEST_SIZES for d in DEPTHS]


def test_what_the_drive_is_slow_with_is_not_tried() -> None:
    def values(field: str, grid: list[Bandwidth], part: int) -> tuple[Any, ...]:
        return next(s.values for s in stages_for(grid, part) if s.field == field)

    parallel = grid_of(lambda size, depth: 1e9 * min(depth, 4) / 4)
    assert values("n_workers", parallel, 8 << 20) == (4, 8)
    assert values("request_bytes", parallel, 8 << 20) == (256 << 10, 512 << 10, 2 << 20)
    large = grid_of(lambda size, depth: float(size))
    assert values("request_bytes", large, 8 << 20) == (2 << 20,)
    # a read ends with the part: larger requests than that are all the same
    assert values("request_bytes", [], 700 << 10) == (256 << 10, 512 << 10)
    assert values("request_bytes", [], 100 << 10) == ()
    assert values("n_workers", [], 100 << 10) == DEPTHS


def test_what_was_found_is_kept_and_forgotten(geometry: Geometry) -> None:
    assert load_tuning(geometry) is None and not forget_tuning(geometry)
    path = save_tuning(geometry, KEPT)
    assert path == tuned_file(geometry) and path.stat().st_size < 1000
    assert load_tuning(geometry) == KEPT
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert forget_tuning(geometry) and load_tuning(geometry) is None


@pytest.mark.parametrize("key", ["version", "host", "cpu", "drive", "format"])
def test_elsewhere_it_says_nothing(geometry: Geometry, key: str) -> None:
    path = save_tuning(geometry, KEPT)
    document = json.loads(path.read_text())
    assert document[key] != ""
    path.write_text(json.dumps(document | {key: "another"}))
    assert load_tuning(geometry) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"n_workers": 0},
        {"n_workers": "2"},
        {"n_workers": True},
        {"request_bytes": 1000},
        {"lookahead": "much"},
        {"policy": "belady"},
        {"policy": ["lru"]},
        {"unknown": 1},
        None,
    ],
)
def test_a_damaged_file_says_nothing(geometry: Geometry, settings: Any) -> None:
    path = save_tuning(geometry, KEPT)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"settings": settings}))
    assert load_tuning(geometry) is None
    for text in ("", "[]", "{", "null", "\0"):
        path.write_text(text)
        assert load_tuning(geometry) is None
    path.write_bytes(b"\xff\xfe")
    assert load_tuning(geometry) is None


def test_a_cache_that_cannot_be_written(geometry: Geometry, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FlashMoEError, match="cannot write"):
        save_tuning(geometry, KEPT)
    assert load_tuning(geometry) is None


def test_what_the_user_says_comes_first() -> None:
    kept = replace(KEPT, tuning=Tuning(2, 512 << 10, "off", "dlfu"))
    every, words = StreamSettings().tuned(kept)
    assert (every.n_workers, every.lookahead, every.policy) == (2, "off", "dlfu")
    assert words == "2 readers, 512 KiB a read, lookahead off, policy dlfu"
    some, words = StreamSettings(policy="lru", n_workers=3).tuned(kept)
    assert (some.policy, some.n_workers, some.request_bytes) == ("lru", 3, 512 << 10)
    assert words == "512 KiB a read, lookahead off"
    trained, _ = StreamSettings(policy_file="of the learned policy").tuned(kept)
    assert (trained.policy, trained.n_workers) == ("auto", 2)
    none, words = StreamSettings().tuned(None)
    assert (none.n_workers, none.request_bytes) == (tuning.N_WORKERS, tuning.REQUEST_BYTES)
    assert words == "" == tuning_words(DEFAULTS)


def threads_now() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def readers() -> int:
    """Threads of this process, when those that were about to end have ended."""
    for _ in range(50):
        before = threads_now()
        time.sleep(0.1)
        if threads_now() == before:
            break
    return threads_now()


def test_loading_uses_it_and_says_so(geometry: Geometry) -> None:
    def load(**options: Any) -> tuple[int, str, str]:
        before = readers()
        llm = Llama(str(geometry.header.path), n_slots=4, learn=False, **QUIET, **options)
        llm.eval([1, 2, 3])
        threads = readers() - before
        stats = llm.stats()
        assert stats is not None
        rows = plan_rows(
            geometry, streamed=True, plan=llm.plan, budgeted=False, stats=stats, settings=""
        )
        llm.close()
        return threads, stats.tuned, dict(rows)["cache"]

    threads, words, row = load()
    assert words == "" and "tuned" not in row
    save_tuning(geometry, KEPT)
    fewer, words, row = load()
    assert words == "2 readers, 512 KiB a read" and row.endswith("; tuned: " + words)
    assert threads - fewer == tuning.N_WORKERS - 2
    assert load(n_workers=3, request_bytes=4096)[:2] == (threads - tuning.N_WORKERS + 3, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_workers": 0}, "0 reading threads"),
        ({"n_workers": 65}, "65 reading threads"),
        ({"n_workers": 2.0}, "2.0 reading threads"),
        ({"request_bytes": 5000}, "reads of 5000 bytes"),
        ({"request_bytes": 0}, "reads of 0 bytes"),
        ({"request_bytes": 2 << 30}, "reads of 2147483648 bytes"),
    ],
)
def test_numbers_that_cannot_be(geometry: Geometry, options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Llama(str(geometry.header.path), n_slots=4, **QUIET, **options)


def test_arms_take_the_settings() -> None:
    assert parse_arm("workers=2,request=512K").changes == (
        ("n_workers", 2),
        ("request_bytes", 512 << 10),
    )
    for text in ("workers=0", "workers=65", "request=1000", "request=big", "workers=two"):
        with pytest.raises(OptionError):
            parse_arm(text)
    arm = arm_for(Arm("", "model.gguf", 8), Tuning(2, 512 << 10, "off", "dlfu"))
    assert arm.name == "workers=2,request=512K,lookahead=off,policy=dlfu"
    assert dict(parse_arm(arm.name).changes) == {
        "n_workers": arm.n_workers,
        "request_bytes": arm.request_bytes,
        "lookahead": arm.lookahead,
        "policy": arm.policy,
    }


# Stands in for a run: two readers are fast, and one that is told to gives other logits.
_ARM = """
import json, sys
arm = json.load(sys.stdin)
fast = arm["n_workers"] == 2
logits = "abxd" if arm["lookahead"] == "{odd}" else "abcd"
print(json.dumps({{"event": "result", "result": {{
    "logits": list(logits), "tokens": [1, 2, 3, 4], "n_gen": 3, "n_warmup": 0,
    "decode_tok_s": 2.0 if fast else 1.0, "lookups": 5, "process_swap_bytes": 0,
    "group_slots": {slots}, "policy": "lru", "io_mode": "direct", "missed_bytes": 1,
}}}}), flush=True)
"""


@pytest.fixture
def tune(geometry: Geometry, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`flashmoe tune` on a tiny model with runs that say what they are told to."""

    def run(*arguments: str, odd: str = "", slots: int = 2) -> Any:
        script = _ARM.format(odd=odd, slots=[slots] * len(geometry.decode_groups))
        monkeypatch.setattr(arm_process, "command", lambda: [sys.executable, "-S", "-c", script])
        monkeypatch.setattr("flashmoe_gguf.bench.limit.find_limiter", Unlimited)
        # what a drive gives is chance in a test, and decides what is tried
        monkeypatch.setattr(tune_command, "_grid", lambda *_: [])
        return flashmoe(
            "tune", geometry.header.path, "--ram", "300M", "-t", "1", "-c", "256", *arguments
        )

    return run


def test_the_command(tune: Callable[..., Any], geometry: Geometry) -> None:
    done = tune("--json", "--seconds", "3600")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["settings"]["n_workers"] == 2 and result["gain"] == 1.0
    assert result["file"] == str(tuned_file(geometry))
    assert {t["setting"] for t in result["tried"]} >= {"n_workers", "lookahead", "policy"}
    kept = load_tuning(geometry)
    assert kept is not None
    assert (kept.tuning, kept.ram_bytes) == (Tuning(n_workers=2), 300 << 20)
    assert (kept.before_tok_s, kept.after_tok_s) == (1.0, 2.0)

    done = tune("--seconds", "3600")
    assert "defaults 1 tok/s, 2 readers 2 tok/s: +100.0 %" in done.stdout
    assert "same output: yes (4 steps of " in done.stdout and "kept in " in done.stdout

    done = tune("--forget")
    assert done.stdout == "forgot what was found for qwen3moe.gguf\n"
    assert load_tuning(geometry) is None
    assert tune("--forget").stdout == "qwen3moe.gguf was not tuned\n"
    assert json.loads(tune("--forget", "--json").stdout) == {"forgotten": False}


def test_the_drive_is_measured_on_the_model(geometry: Geometry) -> None:
    with Screen() as screen:
        grid = tune_command._grid(geometry, 0.16, screen)
    size = geometry.files[0].size_bytes
    sizes = [s for s in REQUEST_SIZES if s <= size]
    assert sizes and [(r.request_bytes, r.depth) for r in grid] == [
        (s, d) for s in sizes for d in DEPTHS
    ]
    assert all(row.bytes_per_second > 0 for row in grid)
    title, *rows = tune_command._grid_lines(grid)[1:]
    assert title.split("  ")[0] == "drive, GB/s" and len(rows) == len(sizes)


def test_other_output_is_an_error(tune: Callable[..., Any], geometry: Geometry) -> None:
    done = tune("--seconds", "3600", odd="off")
    assert_error(done, "gave other logits", "no speed is reported")
    assert load_tuning(geometry) is None


def test_bad_input(tune: Callable[..., Any], geometry: Geometry, tmp_path: Path) -> None:
    assert_error(
        tune("--seconds", "3600", slots=geometry.n_expert),
        "all experts fit into 300 MiB",
        "give the --ram",
    )
    assert_error(tune("--gen", "256"), "do not fit into a context of 256", "smaller --gen")
    assert_error(flashmoe("tune", tmp_path / "none.gguf"), "none.gguf", "")
    keys = {
        "general.architecture": gguf_files.string("llama"),
        "llama.block_count": gguf_files.u32(1),
    }
    tensor = gguf_files.Tensor("output.weight", (32, 4), gguf_files.F32)
    dense = gguf_files.Gguf(keys, [tensor]).write(tmp_path / "dense.gguf")
    assert_error(flashmoe("tune", dense), "has no experts", "llama.cpp")
    assert_error(tune("--ram", "much"), "'much' is not an amount of memory", "8G")


def test_for_real(geometry: Geometry) -> None:
    """Two real runs with different readers: the same output, and each gets what it should."""
    from flashmoe_gguf.bench.runner import Progress
    from flashmoe_gguf.bench.tuner import Decodes

    base = Arm(
        "", str(geometry.header.path), 4, range(4), n_prompt=4, n_ctx=64, n_threads=1, n_slots=4
    )
    decodes = Decodes(base, geometry, 1 << 30, Unlimited(), {}, Progress())
    speeds = decodes([DEFAULTS, FOUND], 1)
    assert [len(s) for s in speeds] == [1, 1] and decodes.gate.longest == 5
    assert [row["workers"] for row in decodes.rows] == [4, 2]
    assert [row["request_bytes"] for row in decodes.rows] == [1 << 20, 512 << 10]

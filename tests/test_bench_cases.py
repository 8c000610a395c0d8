"""Which arms run under which limits, where they run, and the comparison of two files of rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashmoe_gguf.bench import arm as arm_process
from flashmoe_gguf.bench import machine
from flashmoe_gguf.bench.arm import STOCK, STOCK_DEFAULT, STREAMED, Arm
from flashmoe_gguf.bench.cases import (
    ARMS,
    NamedArm,
    fits_in_memory,
    is_replay,
    make_cases,
    model_bytes,
    parse_arm,
    prompt_of,
    sweep_limits,
)
from flashmoe_gguf.bench.compare import compare, read_rows
from flashmoe_gguf.bench.gate import OutputDiffersError
from flashmoe_gguf.bench.limit import V2
from flashmoe_gguf.bench.plot import draw, need_matplotlib
from flashmoe_gguf.bench.runner import Bench, Progress, run_arm, write_rows
from flashmoe_gguf.bench.summary import summarise
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.hardware import cpu_name
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.store import read_geometry

MIB = 1 << 20
BASE = Arm("", "m.gguf", 8, n_threads=2)


def test_settings_of_a_named_arm() -> None:
    assert parse_arm("policy=lru, slots=4") == NamedArm(
        "policy=lru,slots=4", False, (("policy", "lru"), ("n_slots", 4))
    )
    assert parse_arm("layout=packed,io=buffered") == NamedArm(
        "layout=packed,io=buffered", True, (("io", "buffered"),)
    )
    assert parse_arm("lookahead=router:2").changes == (("lookahead", "router:2"),)
    assert parse_arm("lookahead=off,threads=3").changes == (("lookahead", "off"), ("n_threads", 3))
    assert not parse_arm("layout=in-place").packed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is no setting of an arm"),
        ("lru", "'lru' is no setting of an arm"),
        ("policy=", "'policy=' is no setting"),
        ("colour=red", "KEY one of policy, policy_file, layout, io, slots, threads, lookahead"),
        ("slots=-1", "slots=-1 in --arm is no whole number (give one from 0 on)"),
        ("threads=0", "no whole number (give one from 1 on)"),
        ("lookahead=maybe", "lookahead 'maybe'"),
        ("io=mmap", "io is one of auto, direct, buffered"),
        ("layout=striped", "layout is one of packed, in-place"),
        ("io=auto,io=direct", "io is given twice"),
        ("layout=packed,layout=packed", "layout is given twice"),
    ],
)
def test_settings_that_are_none(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_arm(text)
    assert words in str(caught.value)


def test_the_arms_of_a_round() -> None:
    named = [parse_arm("slots=4"), parse_arm("layout=packed,threads=1")]
    cases = make_cases(BASE, [100, 200], named=named, packed=Path("p.gguf"))
    assert [(c.name, c.arm.kind, c.limit_bytes, c.layout) for c in cases[:6]] == [
        ("in-ram", STOCK, None, "in place"),
        ("stock", STOCK, 100, "in place"),
        ("stock-default", STOCK_DEFAULT, 100, "in place"),
        ("streamed", STREAMED, 100, "in place"),
        ("slots=4", STREAMED, 100, "in place"),
        ("layout=packed,threads=1", STREAMED, 100, "packed"),
    ]
    assert [c.limit_bytes for c in cases[6:]] == [200] * 5
    assert [c.arm.ram for c in cases[:4]] == [None, None, None, 100]
    assert cases[4].arm.n_slots == 4 and cases[4].arm.model == "m.gguf"
    assert cases[5].arm.n_threads == 1 and cases[5].arm.model == "p.gguf"


def test_arms_that_are_left_out() -> None:
    def names(*limits: int | None, **more: Any) -> list[str]:
        return [c.name for c in make_cases(BASE, limits, **more)]

    assert names(100, fits=False) == ["stock", "stock-default", "streamed"]
    assert names(None) == ["stock", "stock-default", "streamed"]  # stock is in RAM then
    assert names(100, arms=["streamed"]) == ["streamed"]
    assert names(100, arms=["stock"], named=[parse_arm("io=direct")]) == ["stock", "io=direct"]
    with pytest.raises(OptionError, match="no arm streams"):
        names(100, arms=["stock"])
    with pytest.raises(OptionError, match="two arms called io=direct"):
        names(100, named=[parse_arm("io=direct"), parse_arm("io=direct")])
    assert set(ARMS) == {"stock", "stock-default", "streamed", "in-ram"}


def test_limits_of_a_sweep() -> None:
    limits = sweep_limits(100 * MIB, 1000 * MIB, 5)
    assert limits == [100 * MIB, 350 * MIB, 600 * MIB, 850 * MIB, 1100 * MIB]
    assert sweep_limits(100 * MIB + 1, 1000 * MIB, 1) == [101 * MIB]
    assert sweep_limits(300 * MIB, MIB, 2) == [300 * MIB, 300 * MIB]


def test_what_is_known_of_a_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model("split")
    geometry = read_geometry(path)
    size = model_bytes(geometry)
    assert size == sum(f.stat().st_size for f in path.parent.glob("*.gguf"))
    assert fits_in_memory(geometry, 2 << 30) and not fits_in_memory(geometry, 1 << 30)
    assert not is_replay(geometry)
    assert prompt_of(geometry, 3, None) == (range(3), "")  # it has no vocabulary
    with pytest.raises(OptionError, match="cannot read text"):
        prompt_of(geometry, 3, "text")
    facts = machine.facts(geometry)
    assert facts["model_bytes"] == size and facts["n_expert"] == geometry.n_expert
    assert len(facts["patch_hash"]) == 64 and facts["cpu"] and facts["file_system"]
    packed = pack_model(path, tmp_path / "packed.gguf")
    again = machine.facts(read_geometry(packed.out))
    assert again["fingerprint"] == facts["fingerprint"] == packed.fingerprint
    bandwidth = machine.disk_bandwidth(path, 0.01)
    assert bandwidth is not None and bandwidth > 0
    (tmp_path / "short").write_bytes(b"x")
    assert machine.disk_bandwidth(tmp_path / "short") is None


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nmodel name\t: A Fast One\n")
    assert cpu_name(info) == "A Fast One"
    assert cpu_name(tmp_path / "none") != ""


def test_time_left_is_estimated_from_what_arms_took(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(n_rounds=2, n_arms=3)
    assert progress.share == (0.0, 0.0)
    monkeypatch.setattr("time.monotonic", lambda: 104.0)
    progress.taken, progress.to_run = {0: [10.0], 1: [30.0]}, [2]
    progress.arm_number, progress.arm_began, progress.seconds_done = 2, 100.0, 40.0
    assert progress.share == (44.0, 40.0 + 20.0 + 60.0)
    progress.arm_began = 0.0  # it takes longer than thought
    assert progress.share == (60.0, 120.0)


def test_streamed_arms_are_tried_under_their_lowest_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[str, int, int | None]] = []

    def run_arm(arm: Arm, limit: int | None, *_more: Any) -> tuple[dict[str, int] | None, None]:
        tried.append((arm.name, arm.n_gen, limit))
        return (None if limit == 50 else {}), None

    monkeypatch.setattr("flashmoe_gguf.bench.runner.run_arm", run_arm)
    cases = make_cases(BASE, [200, 100, 300], named=[parse_arm("slots=1")])
    Bench(cases, 1, V2(tmp_path), {}).check()
    assert tried == [("streamed", 0, 100), ("slots=1", 0, 100)]
    with pytest.raises(FlashMoEError, match="streamed was killed while it loaded: 50 B"):
        Bench(make_cases(BASE, [50]), 1, V2(tmp_path), {}).check()


# Tells what an arm finds in its cache directory and its policy file, and adds to both.
_LOOK = """
import json, os, sys
arm = json.load(sys.stdin)
found = sorted(os.listdir(arm["cache"]))
policy = arm["policy_file"] and open(arm["policy_file"]).read()
for name in (arm["policy_file"], arm["cache"] + "/learned"):
    if name: open(name, "a").write("more")
print(json.dumps({"event": "result", "result": {"found": found, "policy": policy}}))
"""


def test_no_run_learns_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_process, "command", lambda: [sys.executable, "-S", "-c", _LOOK])
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    (tmp_path / "weights").write_text("weights")

    def run(arm: Arm) -> dict[str, Any] | None:
        return run_arm(arm, None, V2(tmp_path), Progress())[0]

    for _ in range(2):
        assert run(BASE) == {"found": [], "policy": None}
        (named,) = make_cases(BASE, [100], arms=[], named=[parse_arm("policy_file=weights")])
        arm = replace(named.arm, policy_file=str(tmp_path / named.arm.policy_file))
        assert run(arm) == {"found": ["policy"], "policy": "weights"}
    with pytest.raises(OptionError, match="cannot read none"):
        run(replace(BASE, policy_file="none"))


def row(arm: str, tok_s: float | None, **more: Any) -> dict[str, Any]:
    values = {
        "arm": arm,
        "kind": STREAMED,
        "limit_bytes": 100,
        "policy": "lru",
        "fingerprint": "f",
        "model_bytes": 7,
        "layout": "in place",
        "n_warmup": 0,
        "n_gen": 4,
        "token_hash": "t",
        "decode_tok_s": tok_s,
    }
    return {**values, **more}


def test_rows_that_can_be_compared() -> None:
    first = [row("s", 1.0), row("s", 3.0), row("s", 2.0), row("x", 9.0, kind=STOCK)]
    second = [row("s", 6.0)]
    found = compare(first, second)
    (pair,) = found.pairs
    assert pair.medians("decode_tok_s") == (2.0, 6.0)
    assert pair.medians("hit_rate") == (None, None)
    assert found.alone == ("x",)


def test_rows_that_differ_in_the_compared_key() -> None:
    first = [row("policy=lru", 1.0), row("stock", 5.0, kind=STOCK, policy=None)]
    second = [row("policy=dlfu", 2.0, policy="dlfu"), row("stock", 5.5, kind=STOCK, policy=None)]
    with pytest.raises(OptionError, match=r"rows of policy=lru differ in policy \(lru and dlfu\)"):
        compare(first[:1], second[:1])
    found = compare(first, second, ["policy"])
    assert {(p.arm, p.other_arm) for p in found.pairs} == {
        ("policy=lru", "policy=dlfu"),
        ("stock", "stock"),
    }
    packed = [row("layout=packed", 2.0, layout="packed", model_bytes=8)]
    assert compare(first[:1], packed, ["layout"]).pairs  # it is larger: that follows


def test_rows_that_differ_in_more_are_refused() -> None:
    other = row("s", 2.0, policy="dlfu", limit_bytes=200)
    with pytest.raises(OptionError) as caught:
        compare([row("s", 1.0)], [other], ["policy"])
    assert caught.value.message == "the rows of s differ in limit_bytes (100 and 200)"
    assert caught.value.hint.endswith("--key limit_bytes")
    with pytest.raises(OptionError, match="limit_bytes"):  # one arm of two is enough
        compare([row("s", 1.0), row("a", 1.0, kind=STOCK)], [other, row("a", 1.0, kind=STOCK)],
                ["policy"])  # fmt: skip
    with pytest.raises(OptionError, match="'decode_tok_s' is no condition"):
        compare([row("s", 1.0)], [other], ["decode_tok_s"])


def test_rows_of_other_tokens_are_refused() -> None:
    with pytest.raises(OutputDiffersError, match="gave different tokens"):
        compare([row("s", 1.0)], [row("s", 1.0, token_hash="u")])
    assert compare([row("s", 1.0)], [row("s", 1.0, token_hash="u", n_gen=5)]).pairs  # other steps
    killed = {**row("s", None), "failed": "killed"}
    del killed["token_hash"]
    assert compare([row("s", 1.0)], [killed]).pairs


def test_files_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [row("s", 1.0)])
    write_rows(path, [row("s", 2.0)])
    assert [r["decode_tok_s"] for r in read_rows(path)] == [1.0, 2.0]
    for text in ("", "no json", "[1]", json.dumps({"no": "arm"})):
        path.write_text(text)
        with pytest.raises(OptionError, match="does not hold the rows"):
            read_rows(path)
    with pytest.raises(OptionError, match="cannot read"):
        read_rows(tmp_path / "none")
    with pytest.raises(FlashMoEError, match="cannot write"):
        write_rows(tmp_path / "no" / "rows.jsonl", [])


@pytest.mark.parametrize("limits", [[100 * MIB], [100 * MIB, 200 * MIB]])
def test_the_picture(limits: list[int], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [row("in-ram", 9.0, kind=STOCK, limit_bytes=None), row("x", 0.0, failed="killed")]
    rows += [row("s", t, limit_bytes=limit) for limit in limits for t in (1.0, 2.0)]
    draw(summarise(rows), "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlashMoEError, match="cannot write"):
        draw(summarise(rows), "title", tmp_path / "no" / "plot.png")


def test_no_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(OptionError, match="not installed") as caught:
        need_matplotlib()
    assert "flashmoe-gguf[plot]" in caught.value.hint

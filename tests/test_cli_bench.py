"""`flashmoe bench`: for real in a cgroup where one can be made, and with arms that misbehave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from click.testing import Result

import test_bench_limit
from cli_tools import assert_error, command, flashmoe, make_replay_model
from flashmoe_gguf.bench import arm as arm_process
from flashmoe_gguf.bench.limit import V1, V2
from flashmoe_gguf.bench.runner import Progress
from flashmoe_gguf.cli import bench as bench_command
from flashmoe_gguf.cli.bench import progress_state
from flashmoe_gguf.cli.progress import progress_text
from flashmoe_gguf.trace import Trace, write_trace

v1 = test_bench_limit.v1

QUICK = ("--prompt", "4", "--gen", "8", "-t", "1", "--cold", "advise")

# Stands in for an arm: what it does depends on its name. `logits`, `tokens`: a letter per step.
_ARM = """
import json, os, shutil, sys
arm = json.load(sys.stdin)
does = {does!r}.get(arm["name"], {{}})
def say(**event): print(json.dumps(event), flush=True)
if "error" in does:
    say(event="error", message=does["error"], hint="do not")
    sys.exit(2)
if arm["n_gen"] == 0:
    say(event="result", result={{"floor_bytes": 100 << 20}})
    sys.exit()
if arm["trace"]: shutil.copy({trace!r}, arm["trace"])
with open({log!r}, "a") as file: file.write(arm["name"] + "\\n")
if "exit" in does: sys.exit(does["exit"])
say(event="progress", phase="decoding", done=1, total=9)
if "signal" in does:
    print('{{"event": "resu', end="", flush=True)
    os.kill(os.getpid(), does["signal"])
logits = does.get("logits", "abcdefghi")
streamed = arm["kind"] == "streamed"
say(event="result", result={{
    "logits": list(logits), "tokens": [ord(c) for c in does.get("tokens", logits)],
    "n_gen": len(logits) - 1, "n_warmup": 0, "decode_tok_s": does.get("tok_s", 2.0),
    "prefill_tok_s": 4.0, "load_seconds": 1.0, "first_token_seconds": 2.0, "hit_rate": None,
    "process_swap_bytes": 0, "bytes_written": does.get("written", 0), "bytes_read": 800,
    "lookups": does.get("lookups", 5) if streamed else None,
    **({{"group_slots": [4] * does.get("groups", 2), "n_slots": 4, "missed_bytes": 80,
        "policy": arm["policy"], "io_mode": "direct"}} if streamed else {{}}),
}})
"""

Run = Callable[..., Result]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]) -> Run:
    """`flashmoe bench` on a tiny model, with stand-in arms and a stand-in for the kernel's cgroup
    files; `does` says what an arm does by its name. Arms that ran are in the file `log`."""
    root = tmp_path / "cgroup"
    root.mkdir()
    routing = Trace(
        np.tile(np.array([0, 1, 2], np.uint16), (12, 3, 1)),
        np.array([0, 12]),
        np.full(3, 10, np.int32),
        np.arange(3, dtype=np.int32),
    )
    write_trace(tmp_path / "routing.npz", routing)
    (root / "cgroup.subtree_control").write_text("memory")

    def run(*arguments: str | Path, model: Path | None = None, **does: Any) -> Result:
        script = _ARM.format(
            does=does.get("does", {}),
            log=str(tmp_path / "log"),
            trace=str(tmp_path / "routing.npz"),
        )
        monkeypatch.setattr(arm_process, "command", lambda: [sys.executable, "-S", "-c", script])
        monkeypatch.setattr(bench_command, "find_limiter", lambda: V2(root))
        monkeypatch.setattr(bench_command, "disk_bandwidth", lambda _path: 1e9)
        models = () if "--synthetic" in arguments else (model or tiny_model("qwen3moe"),)
        limit = () if {"--ram", "--sweep"} & {*map(str, arguments)} else ("--ram", "200M")
        return flashmoe("bench", *models, *limit, *QUICK, *arguments)

    return run


def ran(tmp_path: Path) -> list[str]:
    """The arms of the rounds; the run that records the routing comes before them."""
    recording, *arms = (tmp_path / "log").read_text().splitlines()
    assert recording.endswith(" (recording)")
    return arms


def test_the_real_thing(v1: V1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_replay_model(tmp_path / "replay.gguf", 96)
    rows_file, picture = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    done = flashmoe(
        "bench", model, "--ram", "256M", *QUICK, "--rounds", "1", "--arms", "stock,streamed,in-ram",
        "--arm", "policy=lru,slots=2", "--arm", "layout=packed", "--jsonl", rows_file,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("replay.gguf, ") and lines[0].endswith("1 round, cgroup v1")
    assert "same output: yes (9 steps against stock llama.cpp" in done.stdout
    rows = {row["arm"]: row for row in map(json.loads, rows_file.read_text().splitlines())}
    assert list(rows) == ["in-ram", "stock", "streamed", "policy=lru,slots=2", "layout=packed"]
    assert len({row["token_hash"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["killed"] is False and row["round"] == 0 and row["n_gen"] == 8
        assert row["decode_tok_s"] > 0 and row["peak_bytes"] > 16 << 20 and row["swap_bytes"] == 0
        assert (row["n_prompt"], row["n_threads"], row["cold"]) == (4, 1, "advise")
    few = rows["policy=lru,slots=2"]
    assert few["peak_bytes"] <= few["limit_bytes"] == 256 << 20
    assert (few["policy"], few["n_slots"], few["layout"]) == ("lru", 2, "in place")
    # lru caches all that a token uses; turning some away saves reads
    assert 0 < few["belady_miss_bytes"] < few["missed_bytes"] / 8
    assert (
        few["efficiency"] > 0
        and few["roofline_tok_s"] > 0
        and few["lookups"] > 0
        and few["missed_bytes"] > 0
    )
    assert rows["layout=packed"]["layout"] == "packed"
    assert rows["layout=packed"]["fingerprint"] == few["fingerprint"]
    assert rows["in-ram"]["limit_bytes"] is None and rows["stock"]["io_mode"] == "mmap"

    # what policies have learned in one run is not there for the next, nor for the user
    assert [p.suffix for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [".gguf"]

    same = flashmoe("bench", "compare", rows_file, rows_file)
    assert same.exit_code == 0 and "1.000" in same.stdout, same.output
    assert not picture.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_in_the_middle(number: int, v1: V1, tmp_path: Path) -> None:
    model = make_replay_model(tmp_path / "replay.gguf", 96)
    routing = tmp_path / "routing.npz"
    np.savez(routing, experts=np.zeros((8, 3, 1), np.uint16))
    arguments = ("bench", model, "--ram", "1G", *QUICK, "--arms", "streamed", "--gen", "20000",
                 "--trace", routing)  # fmt: skip
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        group = Path("/sys/fs/cgroup/memory") / f"flashmoe-bench-{bench.pid}"
        said = next(line for line in bench.stderr if line.startswith("measuring"))
        children = psutil.Process(bench.pid).children(recursive=True)
        assert "streamed" in said and group.exists() and children
        bench.send_signal(number)
        assert bench.wait(60) == 130
    assert not group.exists()
    assert not any(child.is_running() for child in children)


def test_table_rows_and_picture(fake: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    does = {"streamed": {"tok_s": 24.0}, "stock": {"written": 4096}}
    done = fake("--rounds", "2", "--jsonl", rows, "--plot", picture, does=does)
    assert done.exit_code == 0, done.output
    order = ["in-ram", "stock", "stock-default", "streamed"]
    order += [*order[1:], order[0]]  # none always follows the same one
    assert ran(tmp_path) == order
    assert [json.loads(line)["arm"] for line in rows.read_text().splitlines()] == order
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    cells = [cell.strip() for cell in table[-1].split("|")[1:-1]]
    assert cells[:4] == ["streamed", "200 MiB", "24.0 [24.0 24.0]", "12x"]
    assert "same output: yes (9 steps against stock llama.cpp" in done.stdout
    assert "stock-default: the first 9 of 9 greedy tokens are the same" in done.stdout
    assert "stock, 200 MiB: wrote 4 KiB at the most" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_json(fake: Run) -> None:
    done = fake("--json", "--rounds", "1", "--arms", "streamed", "--arm", "policy=lru")
    found = json.loads(done.stdout)
    assert [arm["arm"] for arm in found["arms"]] == ["streamed", "policy=lru"]
    assert found["arms"][0]["decode_tok_s"] == [2.0, 2.0, 2.0]
    assert found["same_output"] == {
        "steps_against_stock": 0,
        "steps": 9,
        "stock_default_tokens": None,
    }
    assert found["conditions"]["limiter"] == "cgroup v2" and found["disk_bytes_per_second"] == 1e9


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ({"streamed": {"logits": "abcX"}}, "streamed gave another token than in-ram at step 3"),
        ({"stock": {"logits": "Xb", "tokens": "ab"}}, "stock gave other logits than in-ram at ste"),
        ({"streamed": {"lookups": 0}}, "streamed did not stream"),
        ({"streamed": {"exit": 3}}, "streamed ended with code 3: no message"),
        ({"stock": {"exit": "what now"}}, "stock ended with code 1: what now"),
    ],
)
def test_no_speed_without_the_same_output(
    does: dict[str, Any], words: str, fake: Run, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    done = fake("--jsonl", rows, does=does)
    assert done.exit_code == 1
    assert done.stdout == "" and rows.read_text() == ""
    assert words in done.stderr and "hint: no speed is reported" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_arm_that_is_killed_is_reported_and_not_run_again(fake: Run, tmp_path: Path) -> None:
    does = {"stock": {"signal": 9}, "stock-default": {"signal": 11}}
    done = fake("--rounds", "3", "--jsonl", tmp_path / "rows.jsonl", does=does)
    assert done.exit_code == 0, done.output
    assert ran(tmp_path) == [
        *("in-ram", "stock", "stock-default", "streamed"),
        *("streamed", "in-ram"),
        *("in-ram", "streamed"),
    ]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["failed"], r["killed"]) for r in rows if "failed" in r] == [
        ("killed", True),
        ("crashed, signal 11", False),
    ]
    table = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if "|" in line}
    assert "killed" in table["stock"] and "crashed, signal 11" in table["stock-default"]
    assert "same output: yes (9 steps" in done.stdout  # in-ram is stock too


def test_a_bench_without_streaming_has_failed(fake: Run) -> None:
    done = fake("--rounds", "2", does={"streamed": {"signal": 9}})
    assert done.exit_code == 1
    assert "| streamed" in done.stdout and "same output: unknown" in done.stdout
    alone = fake("--arms", "streamed", does={"streamed": {"signal": 9}})
    assert alone.exit_code == 1
    assert [line.split("|")[1:-1] for line in alone.stdout.splitlines() if "killed" in line] == [
        [" streamed ", " 200 MiB ", " killed          "]
    ]


def test_a_sweep(fake: Run, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    done = fake("--sweep", "1", "--rounds", "1", "--arms", "stock,streamed")
    assert done.exit_code == 0, done.output
    assert "limits: 102 MiB" in done.stderr  # the floor, and 2 %
    assert ran(tmp_path) == ["stock", "streamed"]


def test_an_arm_that_cannot_run_is_found_first(fake: Run, tmp_path: Path) -> None:
    done = fake("--arm", "policy=none", does={"policy=none": {"error": "there is no such policy"}})
    assert_error(done, "the arm policy=none: there is no such policy", "do not")
    assert not (tmp_path / "log").exists()


def test_a_synthetic_model_has_a_roofline(
    fake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = fake(
        "--synthetic", "custom", "--shape", "n_layer=2,n_expert=8,top_k=2,width=256,"
        "expert_width=256,n_head=4,n_head_kv=2", "--json", "--rounds", "1",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    arms = {arm["arm"]: arm for arm in json.loads(done.stdout)["arms"]}
    # 1 / 2.0 seconds of compute; what Belady reads of 8 small experts is far less at 1 GB/s
    assert arms["streamed"]["roofline_tok_s"] == [2.0, 2.0, 2.0]
    assert arms["stock"]["roofline_share"] == [1.0, 1.0, 1.0]
    assert len(list((tmp_path / "cache").rglob("*.gguf"))) == 1


def test_models_and_files_that_do_not_fit(
    fake: Run, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    from flashmoe_gguf.pack import pack_model

    model, other = tiny_model("qwen3moe"), tiny_model("granite")
    packed = pack_model(other, tmp_path / "other.packed.gguf").out
    assert_error(fake(model=packed), "stock llama.cpp cannot load it", "--arms streamed")
    assert fake("--arms", "streamed", "--rounds", "1", model=packed).exit_code == 0
    wrong = fake("--arm", "layout=packed", "--packed", packed)
    assert_error(wrong, f"was not packed from {model.name}", "flashmoe pack")
    text = tmp_path / "text"
    text.write_text("words")
    assert_error(fake("--prompt-file", text), "cannot read text", "--prompt-file")
    assert_error(fake("--trace", text), "is not a routing trace", "flashmoe trace")
    assert_error(fake("--jsonl", tmp_path / "no" / "rows"), "cannot write", "folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ram", "8G"], "Give MODEL, or --synthetic NAME"),
        (["m.gguf", "--synthetic", "olmoe", "--ram", "8G"], "Give MODEL, or --synthetic NAME"),
        (["m.gguf"], "Give a memory limit"),
        (["m.gguf", "--ram", "8G", "--sweep", "4"], "Give a memory limit"),
        (["m.gguf", "--ram", "8G", "--shape", "n_layer=2"], "--shape needs --synthetic custom"),
        (["m.gguf", "--sweep", "4", "--slots", "2"], "--slots and --sweep exclude"),
        (["m.gguf", "--ram", "8G", "--packed", "p.gguf"], "--packed needs --arm layout=packed"),
        (["m.gguf", "--ram", "much"], "'much' is not an amount of memory"),
        (["m.gguf", "--ram", "auto"], "hint: for example 8G or 900M\n"),
        (["m.gguf", "--ram", "8G", "--arms", "stock,fast"], "there is no arm 'fast'"),
        (["m.gguf", "--ram", "8G", "--arm", "x=1"], "'x=1' is no setting of an arm"),
        (["m.gguf", "--ram", "8G", "--ctx", "100"], "64 + 0 + 512 tokens do not fit"),
        (["compare", "none.jsonl", "none.jsonl"], "cannot read none.jsonl"),
        (["compare", "a"], "Missing argument"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    done = flashmoe("bench", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_no_limit_no_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    find = bench_command.find_limiter
    monkeypatch.setattr(bench_command, "find_limiter", lambda: find(tmp_path, is_root=False))
    done = flashmoe("bench", "m.gguf", "--ram", "8G")
    assert_error(done, "no memory limit can be set here", "run it as root")


def test_compare(tmp_path: Path, fake: Run) -> None:
    first, second, third = (tmp_path / f"{n}.jsonl" for n in "abc")
    quick = ("--rounds", "1", "--arms", "stock,streamed")
    assert fake(*quick, "--jsonl", first).exit_code == 0
    does = {"streamed": {"tok_s": 3.0}}
    assert fake(*quick, "--jsonl", second, "--slots", "3", does=does).exit_code == 0
    does = {"streamed": {"logits": "abcdefghX"}, "stock": {"logits": "a"}}
    assert fake(*quick, "--jsonl", third, does=does).exit_code == 0
    refused = flashmoe("bench", "compare", first, second)
    assert_error(refused, "the rows of streamed differ in slots (None and 3)", "--key slots")
    done = flashmoe("bench", "compare", first, second, "--key", "slots")
    assert done.exit_code == 0, done.output
    line = next(x for x in done.stdout.splitlines() if "streamed" in x and "decode" in x)
    assert [cell.strip() for cell in line.split("|")[1:-1]] == [
        *("streamed", "200 MiB", "decode tok/s", "2.00", "3.00", "1.500")
    ]
    found = json.loads(
        flashmoe("bench", "compare", first, second, "--key", "slots", "--json").stdout
    )
    assert {pair["arm"]: pair["decode_tok_s"] for pair in found["pairs"]} == {
        "stock": [2.0, 2.0],
        "streamed": [2.0, 3.0],
    }
    differs = flashmoe("bench", "compare", first, third)
    assert differs.exit_code == 1 and differs.stdout == ""
    assert "the arm streamed gave different tokens in the two files" in differs.stderr


def test_what_the_progress_line_says() -> None:
    progress = Progress(1, 5, "streamed", 2, 4, "decoding", 100, 512)
    text = progress_text(progress_state(progress), 12.0)
    assert text == "round 2 of 5, arm 3 of 4 (streamed), decoding 100 of 512 tokens, 12 s"
    progress.taken, progress.to_run = {n: [10.0] for n in range(4)}, [2, 3]
    progress.seconds_done, progress.arm_began = 60.0, 0.0
    text = progress_text(progress_state(progress), 70.0)
    assert text.endswith("decoding 100 of 512 tokens, 35 %, 2 min 10 s left")

"""One arm of a bench in this process, the gate, the bounds: the parts that need no cgroup."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashmoe_gguf.bench import arm as arm_process
from flashmoe_gguf.bench.arm import STOCK, STOCK_DEFAULT, STREAMED, Arm, run, to_json
from flashmoe_gguf.bench.belady import belady_miss_bytes, belady_misses
from flashmoe_gguf.bench.bounds import add_bounds
from flashmoe_gguf.bench.gate import Gate, Output, OutputDiffersError
from flashmoe_gguf.bench.summary import as_dict, summarise, worst_step
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.trace import NO_EXPERT, Trace

MIB = 1 << 20


def output(arm: str, logits: str, tokens: str | None = None, **more: Any) -> Output:
    """One letter per step."""
    kind = more.pop("kind", STOCK)
    lookups = more.pop("lookups", 1 if kind == STREAMED else None)
    return Output(arm, kind, logits, [ord(c) for c in tokens or logits], lookups)


def test_arms_that_agree_as_far_as_they_go() -> None:
    gate = Gate()
    for arm, logits, kind in (
        ("stock", "abc", STOCK),
        ("streamed", "abcdef", STREAMED),
        ("short", "ab", STREAMED),
        ("in-ram", "abcde", STOCK),
    ):
        gate.add(output(arm, logits, kind=kind))
    assert (gate.steps, gate.longest) == (5, 6)
    assert gate.same_tokens() is None


@pytest.mark.parametrize(
    ("logits", "tokens", "words"),
    [
        ("Xbc", "abc", "b gave other logits than a at step 0 (the prompt)"),
        ("abX", "abc", "b gave other logits than a at step 2 (token 2 after the prompt)"),
        ("abX", "abX", "b gave another token than a at step 2 (token 2 after the prompt)"),
        ("abc", "abX", "b gave another token than a at step 2"),
    ],
)
def test_arms_that_differ(logits: str, tokens: str, words: str) -> None:
    gate = Gate()
    gate.add(output("a", "abc"))
    with pytest.raises(OutputDiffersError, match="no speed is reported") as caught:
        gate.add(output("b", logits, tokens, kind=STREAMED))
    assert words in caught.value.message


def test_what_a_short_arm_could_not_show_is_found_by_the_next() -> None:
    gate = Gate()
    gate.add(output("a", "ab"))
    gate.add(output("b", "abcd", kind=STREAMED))
    with pytest.raises(OutputDiffersError, match="c gave other logits than b at step 3"):
        gate.add(output("c", "abcX", "abcd", kind=STREAMED))


@pytest.mark.parametrize("lookups", [0, None])
def test_an_arm_that_did_not_stream(lookups: int | None) -> None:
    with pytest.raises(OutputDiffersError, match="the arm s did not stream"):
        Gate().add(output("s", "abc", kind=STREAMED, lookups=lookups))


def test_repacked_weights_are_counted_and_not_held_to_the_rest() -> None:
    gate = Gate()
    gate.add(output("stock-default", "XYZ", "abX", kind=STOCK_DEFAULT))
    assert gate.same_tokens() is None  # nothing to compare with yet
    gate.add(output("stock", "abcd"))
    assert gate.same_tokens() == (2, 3)
    assert gate.steps == 0


def run_arm(**changes: Any) -> dict[str, Any]:
    return run(Arm("s", **{"n_gen": 6, "prompt": range(8), "n_prompt": 8, **changes}))


def test_a_streamed_arm_reports(tiny_model: Callable[[str], Path]) -> None:
    events: list[dict[str, Any]] = []
    arm = Arm(
        "s",
        str(tiny_model("qwen3moe")),
        6,
        range(8),
        n_prompt=8,
        n_warmup=2,
        n_slots=4,
        n_threads=1,
    )
    got = run(arm, events.append)
    assert len(got["logits"]) == len(got["tokens"]) == 1 + 2 + 6
    assert got["lookups"] > 0 and got["n_slots"] == 4 and set(got["group_slots"]) == {4}
    assert got["decode_tok_s"] > 0 and got["read_amplification"] >= 1.0
    assert got["missed_bytes"] > 0 and got["bytes_written"] is not None
    assert 0 < got["load_seconds"] < got["first_token_seconds"]
    assert (got["n_warmup"], got["n_gen"]) == (2, 6)
    phases = list(dict.fromkeys(e["phase"] for e in events))
    assert phases == ["loading", "prefill", "warming up", "decoding"]


def test_time_is_up_after_one_token(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("qwen3moe"))
    got = run_arm(model=model, n_gen=6, n_warmup=5, n_slots=4, seconds=0.0, n_threads=1)
    assert (got["n_warmup"], got["n_gen"], len(got["tokens"])) == (0, 1, 2)


def test_the_prompt_again(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model": str(tiny_model("qwen3moe")), "n_slots": 4, "n_threads": 1, "n_warmup": 2}
    once = run_arm(**changes)
    twice = run_arm(**changes, again=True)
    assert "prefill_again_tok_s" not in once and twice["prefill_again_tok_s"] > 0
    for key in ("logits", "tokens", "n_gen", "lookups"):
        assert twice[key] == once[key]
    numbers = map(str, range(100))
    monkeypatch.setattr(arm_process.xxhash, "xxh3_64_hexdigest", lambda data: next(numbers))
    with pytest.raises(FlashMoEError, match="other logits when it was computed again"):
        run_arm(**changes, again=True)


def test_settings_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashmoe_gguf.llama

    given: dict[str, Any] = {}

    def model(path: str, **options: Any) -> None:
        given.update(options, path=path)

    monkeypatch.setattr(flashmoe_gguf.llama, "Llama", model)
    settings: dict[str, Any] = {"policy": "lru", "io": "buffered", "lookahead": "router:2"}
    arm_process.load(Arm("s", "m.gguf", 1, ram=100, n_threads=3, n_ubatch=64, **settings))
    assert given.items() >= {**settings, "path": "m.gguf", "ram": 100, "n_slots": None}.items()
    assert given.items() >= {"n_threads": 3, "n_threads_batch": 3, "n_ubatch": 64}.items()
    arm_process.load(Arm("s", "m.gguf", 1, ram=100, n_slots=4))
    assert (given["ram"], given["n_slots"]) == (None, 4)  # they exclude each other


class Reader:
    """Tokenizes words, after a start token."""

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        return [1, *(len(word) for word in text.split())] if text else []

    def n_vocab(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("n", "tokens"), [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 3, 2]), (6, [1, 2, 3, 2, 3, 2])]
)
def test_text_is_cut_or_repeated(n: int, tokens: list[int]) -> None:
    arm = Arm("s", "m", 1, text="ab abc", n_prompt=n)
    assert arm_process.prompt_tokens(arm, Reader()) == tokens


def test_prompts_that_are_ids_or_nothing() -> None:
    assert arm_process.prompt_tokens(Arm("s", "m", 1, prompt=range(8, 12)), Reader()) == [
        8,
        9,
        0,
        1,
    ]
    with pytest.raises(OptionError, match="no tokens"):
        arm_process.prompt_tokens(Arm("s", "m", 1, text=""), Reader())


def test_what_the_kernel_counts(tmp_path: Path) -> None:
    io = tmp_path / "io"
    io.write_text("rchar: 9\nread_bytes: 4096\nwrite_bytes: 12\ncancelled_write_bytes: 0\n")
    assert arm_process.io_bytes(io) == (4096, 12)
    assert arm_process.io_bytes(tmp_path / "none") is None
    status = tmp_path / "status"
    status.write_text("Name:\tpython\n\nVmSwap:\t      12 kB\n")
    assert arm_process.swapped_bytes(status) == 12 << 10
    assert arm_process.swapped_bytes(io) is None


def test_the_age_of_a_process(tmp_path: Path) -> None:
    code = "from flashmoe_gguf.bench.arm import process_age as a; print(a())"
    code = f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}; {code}"
    begun = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert 0.0 < float(said) <= time.monotonic() - begun + 0.02  # it is told in ticks of 10 ms
    assert arm_process.process_age(tmp_path / "none") > 0.0


def test_an_arm_survives_json() -> None:
    arm = Arm("s", "m", 4, range(3), lookahead="2", seconds=1.5)
    again = Arm(**json.loads(to_json(arm)))
    assert again == Arm("s", "m", 4, [0, 1, 2], lookahead="2", seconds=1.5)


def brute_force(tokens: list[list[int]], n_slots: int) -> int:
    """The least misses over every choice of what is kept after each token."""
    from functools import cache
    from itertools import combinations

    @cache
    def least(at: int, resident: frozenset[int]) -> int:
        if at == len(tokens):
            return 0
        row = frozenset(tokens[at])
        all_of = sorted(resident | row)
        choices = combinations(all_of, min(n_slots, len(all_of)))
        return len(row - resident) + min(least(at + 1, frozenset(c)) for c in choices)

    return least(0, frozenset())


@pytest.mark.parametrize("n_slots", [0, 1, 2, 3, 4, 6])
def test_belady_is_the_least(n_slots: int) -> None:
    rng = np.random.default_rng(n_slots)
    experts = np.stack([rng.permutation(6)[:2] for _ in range(14)])
    assert belady_misses(experts, n_slots) == brute_force(experts.tolist(), n_slots)


def test_belady_counts_a_window() -> None:
    experts = np.array([[0, 1], [0, 2], [0, 1], [3, NO_EXPERT]])
    assert [belady_misses(experts, 3, i, i + 1) for i in range(4)] == [2, 1, 0, 1]
    assert belady_misses(experts, 3) == 4
    assert belady_misses(experts, 2, 2) == 1  # 2 was not cached in place of 1


def trace_of(experts: Any, layers: list[int]) -> Trace:
    experts = np.asarray(experts, np.uint16)
    counts = np.full(len(layers), 8, np.int32)
    return Trace(experts, np.array([0, len(experts)]), counts, np.array(layers, np.int32))


def test_belady_bytes_per_token() -> None:
    trace = trace_of([[[0], [0]], [[1], [0]], [[2], [1]]], [1, 2])
    bytes_of = {1: 100, 2: 10}
    assert belady_miss_bytes(trace, {1: 1, 2: 1}, bytes_of, 1, 2) == (200 + 10) / 2
    assert belady_miss_bytes(trace, {1: 1, 2: 1}, bytes_of, 2, 2) == 110  # it has one of the two
    assert belady_miss_bytes(trace, {1: 1, 2: 1}, bytes_of, 3, 2) is None
    assert belady_miss_bytes(trace, {0: 1, 1: 1}, bytes_of, 0, 1) is None  # no such layer


def row(arm: str, tok_s: float, limit: int | None = 100, **more: Any) -> dict[str, Any]:
    return {
        "arm": arm,
        "kind": STOCK,
        "limit_bytes": limit,
        "decode_tok_s": tok_s,
        "n_prompt": 1,
        "n_warmup": 0,
        "n_gen": 2,
        **more,
    }


def test_bounds() -> None:
    trace = trace_of([[[0]], [[1]], [[2]]], [0])
    streamed = row("s", 8.0, kind=STREAMED, group_slots=[1], missed_bytes=600)
    rows = [row("in-ram", 20.0, None), row("stock", 1.0), streamed]
    rows += [{"arm": "x", "kind": STOCK_DEFAULT, "limit_bytes": 100, "failed": "killed"}]
    add_bounds(rows, 3000.0, trace, {0: 200})
    in_ram, stock, ours, killed = rows
    assert in_ram["roofline_tok_s"] is None and in_ram["in_ram_seconds"] == 0.05
    assert ours["belady_miss_bytes"] == 200.0
    assert ours["roofline_tok_s"] == pytest.approx(15.0)  # 200 / 3000 is more than 0.05
    assert ours["roofline_share"] == pytest.approx(8 / 15)
    assert ours["efficiency"] == pytest.approx(0.1 * 8)  # 300 bytes a token
    assert stock["roofline_share"] == pytest.approx(1 / 15) and stock["efficiency"] is None
    assert killed["roofline_share"] is None


@pytest.mark.parametrize("lacking", ["in-ram", "bandwidth", "trace"])
def test_bounds_that_cannot_be_known(lacking: str) -> None:
    trace = trace_of([[[0]], [[1]], [[2]]], [0])
    streamed = row("s", 8.0, kind=STREAMED, group_slots=[1], missed_bytes=600)
    rows = [] if lacking == "in-ram" else [row("in-ram", 20.0, None)]
    bandwidth = None if lacking == "bandwidth" else 3000.0
    add_bounds([*rows, streamed], bandwidth, None if lacking == "trace" else trace, {0: 200})
    assert streamed["roofline_tok_s"] is None and streamed["roofline_share"] is None
    assert (streamed["efficiency"] is None) == (lacking != "trace")


def test_summary() -> None:
    rows = [
        row("stock", 1.0),
        row("s", 10.0, n_slots=4),
        row("stock", 3.0),
        row("s", 30.0, n_slots=4),
        row("stock", 2.0),
        row("s", 80.0, n_slots=4),
        row("s", 15.0, 200),
        row("x", 0.0, failed="killed, out of memory"),
    ]
    stock, ours, more, killed = lines = summarise(rows)
    spread = ours.spread("decode_tok_s")
    assert spread is not None and (spread.least, spread.median, spread.most) == (10, 30, 80)
    assert stock.ratio == 1.0 and ours.ratio == 15.0 and more.ratio is None
    assert ours.step_ratio is None and more.step_ratio == 0.5
    assert worst_step(lines, "s") == more and worst_step(lines, "stock") is None
    assert killed.failed == "killed, out of memory" and killed.spread("decode_tok_s") is None
    found = as_dict(lines)[1]
    assert found["decode_tok_s"] == [30, 10, 80] and found["hit_rate"] is None
    assert json.dumps(found)

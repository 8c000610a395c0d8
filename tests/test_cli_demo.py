"""`flashmoe demo`: both arms, the comparison, and what happens when it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_tools import flashmoe, lines_like, make_replay_model
from flashmoe_gguf.bench.synthetic import replay_text
from flashmoe_gguf.cli import demo, demo_arm
from flashmoe_gguf.cli.demo_arm import Request, Result, peak_memory, run_arm

TABLE = [
    r" {16}flashmoe +stock llama\.cpp",
    r"prompt +[\d.]+ tok/s +[\d.]+ tok/s",
    r"answer +[\d.]+ tok/s +[\d.]+ tok/s",
    r"memory, peak +[\d.]+ MiB +[\d.]+ MiB",
    r"experts cached  {n_slots} of {n_expert} per layer +-",
    r"hit rate +[\d.]+ % +-",
    r"read from disk +[\d.]+ [KM]iB +-",
    r"",
    r"same output: {verdict}",
    r"",
    r"The model is \S+\.gguf: every command takes it\.",
    r"It is far smaller than any memory: it shows function and exactness, not speed\.",
    r"Speed shows on models larger than memory: flashmoe chat MODEL\.gguf --ram 8G",
]


def table(n_slots: int, n_expert: int, verdict: str) -> list[str]:
    values = {"{n_slots}": str(n_slots), "{n_expert}": str(n_expert), "{verdict}": verdict}
    lines = TABLE
    for name, value in values.items():
        lines = [line.replace(name, value) for line in lines]
    return lines


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in the embedded one's place."""
    path = make_replay_model(tmp_path / "replay.gguf", 300)
    monkeypatch.setattr(demo, "_make_model", lambda _screen: str(path))
    return path


def test_same_output(replay: Path) -> None:
    result = flashmoe("demo", "-t", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "> What is the capital of England?"
    assert len(lines[1]) == 64 and lines[1] in replay_text(0, 300)
    verdict = r"yes \(64 tokens, all logits bit for bit\)"
    assert lines_like("\n".join(lines[3:]), table(4, 8, verdict)), result.stdout
    assert result.stderr == "chatting with 4 of 8 experts cached\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: {"logits": [*r.logits[:2], "0" * 64, *r.logits[3:]]}, "from token 3 on"),
        (lambda r: {"tokens": r.tokens[:-1], "logits": r.logits[:-1]}, "64 tokens here, 63 there"),
    ],
)
def test_a_difference_is_exit_code_1(
    change: Callable[[Result], dict[str, Any]],
    words: str,
    replay: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def altered(request: Request, on_piece: Callable[[str], None]) -> Result:
        result = run_arm(request, on_piece)
        return dataclasses.replace(result, **change(result)) if request.n_slots is None else result

    monkeypatch.setattr(demo, "run_arm", altered)
    result = flashmoe("demo", "-t", "1")
    assert result.exit_code == 1
    verdict = next(line for line in result.stdout.splitlines() if line.startswith("same output"))
    assert verdict.startswith("same output: no (") and words in verdict


def test_an_arm_that_fails(replay: Path) -> None:
    result = flashmoe("demo", "-t", "1", "-p", "x" * 2000)
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "error: the question takes 2050 tokens, the demo has room for 960\n"
        "hint: ask something shorter\n"
    )


def test_an_arm_that_dies(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_arm, "_START", "raise SystemExit('no luck')")
    result = flashmoe("demo", "-t", "1")
    assert result.exit_code == 2
    assert "error: the run with flashmoe ended with code 1: no luck\n" in result.stderr


def test_peak_memory_is_this_process_own(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmPeak:\t9999 kB\nVmHWM:\t  2048 kB\n")
    assert peak_memory(status) == 2 << 20
    assert peak_memory(tmp_path / "none") > 1 << 20


@pytest.mark.embedded
def test_the_embedded_model(embedded_model: Path) -> None:
    result = flashmoe("demo", "-t", "1")
    assert result.exit_code == 0, result.output
    assert "London" in result.stdout
    assert "same output: yes" in result.stdout

"""Progress: what it says, and that a pipe gets plain lines and a fast task none."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from flashmoe_gguf.chat import Summary
from flashmoe_gguf.cli import progress
from flashmoe_gguf.cli.answering import summary_line
from flashmoe_gguf.cli.progress import Activity, State, format_rate, format_seconds, progress_text
from flashmoe_gguf.cli.screen import Screen, format_rows, format_table


@pytest.mark.parametrize(
    ("state", "seconds", "text"),
    [
        (None, 3.2, "3 s"),
        (State(words="making the context"), 4.0, "making the context, 4 s"),
        (State(0.25, 1.0), 10.0, "25 %, 30 s left"),
        (State(0.0, 1.0), 1.0, "0 %, 1 s"),
        (State(512, 2048, tokens=True), 4.0, "512 of 2048 tokens, 128 tok/s, 12 s left"),
        (State(0, 2048, tokens=True), 4.0, "0 of 2048 tokens, 4 s"),
        (State(1, 1000, tokens=True), 2.0, "1 of 1000 tokens, 0.50 tok/s, 33 min 18 s left"),
        (State(0.5, 1.0, words="fitting"), 60.0, "fitting, 50 %, 1 min 0 s left"),
    ],
)
def test_text(state: State | None, seconds: float, text: str) -> None:
    assert progress_text(state, seconds) == text


def test_rates_and_times() -> None:
    assert [format_rate(r) for r in (1234.5, 99.96, 12.34, 1.234, 0)] == [
        "1234",
        "100.0",
        "12.3",
        "1.23",
        "0.00",
    ]
    assert [format_seconds(s) for s in (0.4, 59.4, 61, 3600)] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "60 min 0 s",
    ]


def test_lines_are_at_most_two_seconds_apart() -> None:
    assert progress._LINE_SECONDS <= 2.0
    assert progress._BAR_AFTER_SECONDS + progress._BAR_SECONDS < 2.0


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.001)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    enough = threading.Event()
    asked = []

    def poll() -> State:
        asked.append(1)
        if len(asked) == 4:
            enough.set()
        return State(len(asked), 8, tokens=True)

    with Screen() as screen, Activity(screen, "prompt", poll):
        assert enough.wait(60)
    lines = said.getvalue().splitlines()
    assert lines[0].startswith("prompt: 1 of 8 tokens, ")
    assert lines[2].startswith("prompt: 3 of 8 tokens, ")
    assert "\x1b" not in said.getvalue()


def test_what_is_done_at_once_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    with Screen() as screen, Activity(screen, "loading", lambda: None) as activity:
        activity.stop()
        activity.stop()
    assert said.getvalue() == ""


def test_columns() -> None:
    assert format_rows([("a", "1"), ("bbb", "2")]) == ["a    1", "bbb  2"]
    assert format_table([["", "x"], ["long", "y"], ["z", ""]]) == ["      x", "long  y", "z"]


def test_summary_without_a_cache() -> None:
    summary = Summary(5, 0.5, 1, 0, 0.0, "stop", None)
    assert summary_line(summary) == "prompt 5 tokens, 10.0 tok/s; answer 1 token"

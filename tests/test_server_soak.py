"""Many clients at once for a while; FLASHMOE_SOAK_SECONDS makes it longer (180 in CI)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmoe_gguf.server.soak import Client, Job, Soak, jobs, said
from server_tools import Command

SECONDS = float(os.environ.get("FLASHMOE_SOAK_SECONDS", "6"))


def test_soak(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_gguf.server.soak._PROGRESS_SECONDS", 1.0)
    told: list[float] = []
    options = ("--n-slots", "3", "-t", "1", "-c", "2048", "--repeatable")
    with Command(chat_model, *options) as server:
        server.wait_ready()
        report = Soak(server.url, server.pid, n_clients=8).run(
            SECONDS, lambda left, report: told.append(left)
        )
        assert told == sorted(told, reverse=True) and told[0] < SECONDS
        assert report.problems == {}
        assert report.answers > 8 and report.left > 0 and report.refused > 0
        assert report.resident_bytes[0] > 0 and report.fds[0] > 0
        server.signal()
        assert server.exit_code() == 0
        assert not any("Traceback" in line for line in server.lines)


def test_it_finds_what_is_wrong(chat_model: Path) -> None:
    """An answer that differs, a status that differs, and a server that is gone."""
    with Command(chat_model, "--n-slots", "3", "-t", "1", "-c", "2048") as server:
        server.wait_ready()
        soak = Soak(server.url, server.pid, n_clients=1)
        soak._jobs = jobs()[:2]
        soak._expected = ["never said", soak._jobs[1]]
        soak._check(0, 200, "something else")
        soak._check(1, 500, "an error")
        soak._samples = [(1 << 20, 10)] * 4 + [(200 << 20, 90)] * 2
        soak._compare_samples()
        found = " ".join(soak._problems)
        for words in ("is not 'never said'", "gave 500", "resident bytes grew", "descriptors grew"):
            assert words in found
    gone = Soak(server.url, os.getpid(), n_clients=1)
    gone._client(0)
    assert any("Connection" in problem for problem in gone._problems)


def test_it_ends_when_no_client_is_left(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Command(chat_model, "--n-slots", "3", "-t", "1", "-c", "2048") as server:
        server.wait_ready()
        soak = Soak(server.url, server.pid, n_clients=2)
        soak._jobs = jobs()[:1]
        monkeypatch.setattr(soak, "_check", lambda index, status, text: 1 / 0)
        monkeypatch.setattr("flashmoe_gguf.server.soak._LEAVE_SHARE", 0.0)
        report = soak.run(600.0)
    assert report.seconds < 60.0 and report.answers == 0
    assert report.problems == {"ZeroDivisionError: division by zero": 2}


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashmoe_gguf.server.soak", str(tmp_path / "no.gguf")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "no.gguf" in ended.stderr and "hint:" in ended.stderr
    assert ended.stderr.endswith("flashmoe serve ended with 2\n")


def test_half_a_stream_is_no_answer() -> None:
    job = Job("/v1/chat/completions", {"stream": True})
    whole = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n'
    assert said(job, 200, whole) == "a"
    assert said(job, 200, whole[:-20]) == ["the stream has no end"]
    assert said(job, 200, b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n') == ["x"]
    Client("http://127.0.0.1:1").close()

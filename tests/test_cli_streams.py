"""Standard streams that are closed or full: one line, or nothing, and never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli_tools import command, make_replay_model
from flashmoe_gguf.bench.synthetic import replay_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")

full_device = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
GREEDY = ("--temp", "0", "-t", "1", "-n", "3")
CLOSED = "error: stdin is closed, there is nothing to read\nhint: give a pipe or a file: < FILE\n"
FULL = "error: cannot write to stdout: No space left on device\nhint: check where it goes\n"


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_replay_model(tmp_path_factory.mktemp("replay") / "replay.gguf", 60)


def shell(redirect: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command with its streams redirected by a shell."""
    line = f"exec {shlex.join(command(*arguments))} {redirect}"
    done = subprocess.run(
        ["sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_stdin_closed_where_it_is_needed(replay: Path) -> None:
    assert shell("<&-", "run", replay, "-f", "-") == (2, "", CLOSED)
    assert shell("<&-", "chat", replay) == (2, "", CLOSED)


def test_stdin_closed_where_it_is_not(replay: Path) -> None:
    code, out, _ = shell("<&-", "run", replay, "-p", replay_text(0, 1), *GREEDY)
    assert (code, out) == (0, replay_text(1, 3) + "\n")


def test_stdin_that_cannot_be_read(replay: Path) -> None:
    for_writing = "0>/dev/null"
    code, out, said = shell(for_writing, "run", replay, "-f", "-")
    assert (code, out) == (2, "")
    assert said.startswith("error: -: cannot read: ") and "Traceback" not in said
    code, out, said = shell(for_writing, "chat", replay, *GREEDY)
    assert (code, out) == (2, "")
    assert said.splitlines()[-2].startswith("error: cannot read stdin: ")


def test_stdout_closed(replay: Path) -> None:
    code, out, said = shell(">&-", "run", replay, "-p", replay_text(0, 1), *GREEDY)
    assert (code, out) == (0, "")
    assert said.splitlines()[-1].startswith("prompt 1 token, ")
    assert shell(">&-", "inspect", replay) == (0, "", "")


def test_stderr_closed(replay: Path) -> None:
    run = ("run", replay, "-p", replay_text(0, 1), *GREEDY)
    assert shell("2>&-", *run) == (0, replay_text(1, 3) + "\n", "")
    assert shell("2>&-", "inspect", replay.with_name("none.gguf")) == (2, "", "")


def test_all_closed(replay: Path) -> None:
    run = ("run", replay, "-p", replay_text(0, 1), *GREEDY)
    assert shell("<&- >&- 2>&-", *run) == (0, "", "")


@full_device
def test_stdout_full(replay: Path) -> None:
    code, _, said = shell(">/dev/full", "run", replay, "-p", replay_text(0, 1), *GREEDY)
    assert code == 1
    assert said.endswith(FULL) and "Traceback" not in said
    assert shell(">/dev/full", "inspect", replay) == (1, "", FULL)
    assert shell(">/dev/full", "--help") == (1, "", FULL)
    assert shell(">/dev/full", "run", "--help") == (1, "", FULL)


@full_device
def test_stderr_full(replay: Path) -> None:
    assert shell("2>/dev/full", "inspect", replay.with_name("none.gguf")) == (2, "", "")

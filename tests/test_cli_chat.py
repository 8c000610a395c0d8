"""`flashmoe chat`, through a pipe and in a terminal."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_tools import Terminal, assert_error, flashmoe, lines_like, make_replay_model
from flashmoe_gguf.bench.synthetic import replay_text
from flashmoe_gguf.cli import loading

GREEDY = ("--temp", "0", "-t", "1")
SUMMARY = r"prompt \d+ tokens?, [\d.]+ tok/s; answer \d+ tokens?, .*; read .*; waited \d+ %"
CHATML = "the model has no chat template, so it is chatted with in ChatML"

# A byte is one token to this model, and its answers only depend on the last one: the newline that
# ends ChatML's "<|im_start|>assistant\n".
N_TEMPLATE = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")

in_a_terminal = pytest.mark.skipif(sys.platform == "win32", reason="no pty on Windows")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_replay_model(tmp_path_factory.mktemp("replay") / "replay.gguf", 1000)


@pytest.fixture(scope="module")
def long_replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers take seconds, so that Ctrl-C finds them unfinished."""
    return make_replay_model(tmp_path_factory.mktemp("long") / "long.gguf", 6000)


@pytest.fixture(scope="module")
def answer(replay: Path) -> str:
    """What the model says to anything, as far as 12 tokens go."""
    return flashmoe("run", replay, "-p", "\n", "-n", "12", *GREEDY).stdout


def chat(model: Path, *lines: str, options: tuple[str, ...] = ()) -> Any:
    stdin = "".join(f"{line}\n" for line in lines)
    return flashmoe("chat", model, "-n", "12", *GREEDY, *options, stdin=stdin)


def test_each_line_is_a_turn(replay: Path, answer: str) -> None:
    result = chat(replay, "first", "", "  second  ")
    assert result.exit_code == 0
    assert result.stdout == answer * 2
    plan, said = result.stderr.splitlines()[:4], result.stderr.splitlines()[4:]
    assert [line.split()[0] for line in plan] == ["model", "memory", "cache", "run"]
    # what is in the context is not computed again: of the first turn, only the end of its answer
    first, second = N_TEMPLATE + 5, N_TEMPLATE + 6 + len("<|im_end|>\n") + 1
    assert lines_like(
        "\n".join(said),
        [
            CHATML,
            rf"prompt {first} tokens, .*; answer 12 tokens, .*",
            rf"prompt {second} tokens, .*; answer 12 tokens, .*",
        ],
    ), result.stderr


def test_commands(replay: Path, answer: str) -> None:
    result = chat(replay, "/stats", "hello", "/clear", "hello", "/nonsense", "/help", "/quit", "x")
    assert result.exit_code == 0
    assert result.stdout == answer * 2
    said = result.stderr.splitlines()[5:]
    assert lines_like(
        "\n".join(said),
        [
            # free slots may be filled in the background from the start
            r"tokens  0 computed",
            r"hits    - in decode, - in all",
            r"read    [\d.]+ \w+ in \d+ requests, [\d.]+ \w+ of it experts",
            r"waited  compute threads slept for experts 0 times, 0\.00 s",
            r"cache   \d+ experts came, 0 left, 0 were used without being kept",
            r"policy  learned: no routing of this model is known yet",
            r"memory  experts [\d.]+ \w+ of [\d.]+ MiB, dense .*, ring [\d.]+ MiB, budget .*",
            r"I/O     (direct|buffered)",
            SUMMARY,
            r"the conversation is forgotten",
            SUMMARY,
            r"there is no command /nonsense; /help lists them",
            r"/stats  what the expert cache has done so far",
            r"/clear  forget the conversation",
            r"/help   this list",
            r"/quit   leave; Ctrl-D does too",
        ],
    ), result.stderr


def test_stats_show_no_budget_that_nothing_obeys(replay: Path) -> None:
    said = chat(replay, "/stats", options=("--n-slots", "2")).stderr.splitlines()
    assert len([line for line in said if line.startswith("memory ")]) == 2  # the plan's, the stats'
    assert not any("budget" in line for line in said)


def test_a_full_context(replay: Path) -> None:
    result = chat(replay, "a" * 130, "b" * 20, "c" * 300, options=("--ctx", "256", "-n", "-1"))
    assert result.exit_code == 0
    full = "the context of 256 tokens is full"
    cut = f"{full}, so the answer ends here; the oldest turns are dropped with your next message, "
    dropped = f"{full}: dropped 1 turn, oldest first; /clear starts afresh, --ctx gives more"
    notes = [line for line in result.stderr.splitlines() if line.startswith(full)]
    assert notes == [cut + "/clear starts afresh", dropped, cut + "/clear starts afresh"]
    n_tokens = N_TEMPLATE + 300
    assert result.stderr.endswith(
        f"error: the message takes {n_tokens} tokens with its template, the context holds 256\n"
        "hint: make it shorter, or start again with a larger --ctx\n"
    )


def test_an_expert_that_cannot_be_read(
    replay: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = loading._load

    def load_with_a_fault(*arguments: Any) -> Any:
        llm = load(*arguments)
        llm._experts.native.set_fault(errno=errno.EIO, after=30, count=1)
        return llm

    monkeypatch.setattr(loading, "_load", load_with_a_fault)
    result = chat(replay, "one", "two", options=("--n-slots", "0"))
    assert result.exit_code == 0
    assert result.stdout.endswith(answer)
    assert lines_like(
        "\n".join(result.stderr.splitlines()[5:]),
        [
            r"error: cannot read expert \d of layer \d \(blk\.\d\.ffn_\w+\.weight\) "
            rf"from {replay}: Input/output error",
            r"hint: the tokens of this step were discarded; check the drive and the file, then .*",
            r"the unfinished turn was forgotten",
            SUMMARY,
        ],
    ), result.stderr


def test_errors_before_the_chat(replay: Path, tmp_path: Path) -> None:
    assert_error(chat(tmp_path / "none.gguf", "hi"), "none.gguf: no such file", "")
    assert_error(chat(replay, "hi", options=("--ram", "9M")), "below the floor", "give --ram")


@in_a_terminal
def test_a_conversation_in_a_terminal(replay: Path, answer: str) -> None:
    with Terminal("chat", replay, "-n", "12", *GREEDY) as terminal:
        terminal.expect(r"/help lists the commands.*\n> $")
        terminal.send("hello\n")
        terminal.expect(f"hello\r\n(.|\n|\r)*{answer.strip()}\r\n")
        terminal.expect(r"answer 12 tokens(.|\n|\r)*\n> $")
        terminal.send("/stats\n")
        terminal.expect(r"I/O +(direct|buffered)(.|\n|\r)*\n> $")
        terminal.send("\x04")  # Ctrl-D
        assert terminal.exit_code() == 0


@in_a_terminal
def test_ctrl_c_stops_the_answer_and_not_the_chat(long_replay: Path) -> None:
    options = ("--ctx", "0", "--n-slots", "0", *GREEDY)
    with Terminal("chat", long_replay, *options) as terminal:
        terminal.expect(r"\n> $")
        terminal.send("hello\n")
        terminal.expect("[\u4e00-\u9fff]{20}")
        terminal.send("\x03")
        shown = terminal.expect(r"stopped(.|\n|\r)*answer \d+ tokens(.|\n|\r)*\n> $")
        assert len(shown) < 5000
        # the chat goes on, and remembers
        terminal.send("and then?\n")
        terminal.expect("[\u4e00-\u9fff]{20}")
        terminal.send("\x03")
        terminal.expect(r"stopped(.|\n|\r)*\n> $")
        terminal.send("/quit\n")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.rest


@in_a_terminal
def test_ctrl_c_at_the_prompt_twice_leaves(replay: Path) -> None:
    with Terminal("chat", replay, "-n", "3", *GREEDY) as terminal:
        terminal.expect(r"\n> $")
        terminal.interrupt_prompt()
        terminal.expect(r"Ctrl-C again or /quit leaves(.|\n|\r)*\n> $")
        terminal.send("hello\n")  # a line between the two starts the count anew
        terminal.expect(r"answer 3 tokens(.|\n|\r)*\n> $")
        terminal.interrupt_prompt()
        terminal.expect(r"Ctrl-C again or /quit leaves(.|\n|\r)*\n> $")
        terminal.interrupt_prompt()
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.rest


@pytest.mark.embedded
def test_the_embedded_model_knows_london(embedded_model: Path) -> None:
    result = flashmoe(
        "chat", embedded_model, "-n", "40", *GREEDY, stdin="What is the capital of England?\n"
    )
    assert result.exit_code == 0
    assert "London" in result.stdout


def test_replay_answers_are_what_the_tests_think(answer: str) -> None:
    assert len(answer) == 13 and answer.strip() in replay_text(0, 1000)

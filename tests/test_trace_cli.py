"""`flashmoe trace` and --trace: what lands in the file, what is said, and what is refused."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_tools import Terminal, assert_error, flashmoe, lines_like, make_replay_model
from flashmoe_gguf.bench.synthetic import synthetic_trace
from flashmoe_gguf.trace import NO_EXPERT, read_trace

N_TOKENS = 300
KNOWN = np.sort(synthetic_trace(N_TOKENS, 3, 8, 2), axis=2)
ONE_THREAD = ("--threads", "1", "--n-slots", "4")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "replay.gguf"
    make_replay_model(path, N_TOKENS)
    return path


def text(first: int, n: int) -> str:
    """Text of so many of the replay model's tokens."""
    return "".join(chr(0x4E00 + i) for i in range(first, first + n))


def test_prompts_and_their_answers(replay: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"id": 1, "input": text(0, 4)}, {"input": text(99, 3)}, {"input": text(7, 1)}]
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    out = tmp_path / "t.npz"
    result = flashmoe(
        *("trace", replay, "--prompts", prompts, "--field", "input", "--raw", "--limit", "2"),
        *("-n", "10", "-o", out, *ONE_THREAD),
    )
    assert result.exit_code == 0, result.output
    assert lines_like(
        result.stdout,
        [
            r"trace +.*t\.npz",
            r"tokens +\d+, 18 of them of answers",
            "sequences +2",
            "layers +3",
            "experts +2 of 8",
            "probabilities +no",
        ],
    ), result.stdout
    trace = read_trace(out)
    first, second = (trace.select([i]) for i in (0, 1))
    for part, start, n_prompt in ((first, 0, 4), (second, 99, 3)):
        answer = part.phase == 1
        at = range(start + n_prompt, start + n_prompt + 9)  # the tenth is never computed
        assert np.array_equal(np.sort(part.experts[answer], axis=2), KNOWN[list(at)])


def test_a_text_in_pieces(replay: Path, tmp_path: Path) -> None:
    words = tmp_path / "text"
    words.write_text(text(0, 250), encoding="utf-8")
    out = tmp_path / "t.npz"
    options = ("-o", out, "--ctx", "100", "--batch", "33", "--ubatch", "33", *ONE_THREAD)
    result = flashmoe("trace", replay, "--text", words, "--max-tokens", "230", "--probs", *options)
    assert result.exit_code == 0, result.output
    assert "probabilities  yes" in result.stdout
    trace = read_trace(out)
    sizes = np.diff(trace.seq)
    assert trace.n_tokens == 230 and len(set(sizes[:-1])) == 1
    assert trace.phase is not None and not trace.phase.any()
    ids = np.sort(trace.experts[:, :2].astype(int), axis=2)
    assert np.array_equal(ids, KNOWN[:230, :2])
    assert (trace.experts[:, 2] == NO_EXPERT).mean() > 0.9  # all but the last of each batch
    assert trace.probs is not None and np.isfinite(trace.probs[:, :2]).all()


def test_run_and_chat_record(replay: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    greedy = ("--temp", "0", "-n", "6", "--trace", out, *ONE_THREAD)
    result = flashmoe("run", replay, "-p", text(0, 2), *greedy)
    assert result.exit_code == 0, result.output
    trace = read_trace(out)
    assert trace.phase is not None and trace.phase.sum() == 5
    assert result.stderr.splitlines()[-1] == f"trace: {trace.n_tokens} tokens in {out}"
    result = flashmoe("chat", replay, *greedy, stdin="one\n/clear\ntwo\n")
    assert result.exit_code == 0, result.output
    assert read_trace(out).phase.sum() > 5


def test_imported_routes(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("token,layer,expert\n0,0,1\n0,0,2\n", encoding="utf-8")
    out = tmp_path / "t.npz"
    result = flashmoe("trace", "--import", tmp_path / "r.csv", "--n-expert", "9", "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "tokens         1\n" in result.stdout and "experts        2 of 9\n" in result.stdout
    assert read_trace(out).experts.tolist() == [[[1, 2]]]
    bad = flashmoe("trace", "--import", tmp_path / "none.csv", "-o", out)
    assert_error(bad, "cannot read", "check the path")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m.gguf", "-o", "t"], "Give one of --prompts, --text and --import"),
        (["m.gguf", "--text", "a", "--prompts", "b", "-o", "t"], "Give one of --prompts"),
        (["m.gguf", "--text", "a"], "Missing option '-o'"),
        (["--text", "a", "-o", "t"], "Missing argument 'MODEL'"),
        (["m.gguf", "--import", "a", "-o", "t"], "--import takes no MODEL"),
        (["m.gguf", "--text", "a", "-o", "t", "--field", "b"], "need --prompts"),
        (["m.gguf", "--text", "a", "-o", "t", "--n-expert", "4"], "--n-expert needs --import"),
        (["m.gguf", "--text", "a", "-o", "t", "--no-stream"], "No such option '--no-stream'"),
        (["m.gguf", "--text", "a", "-o", "t", "-s", "1"], "--seed means nothing with --text."),
        (["--import", "a", "-o", "t", "--ram", "8G"], "--ram means nothing with --import."),
        (["--import", "a", "-o", "t", "--probs"], "--probs means nothing with --import."),
        (["m.gguf", "--text", "a", "-o", ""], "the path is empty"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    result = flashmoe("trace", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr


def test_bad_input(replay: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.npz"
    empty = tmp_path / "empty"
    empty.write_text("", encoding="utf-8")
    long = tmp_path / "long"
    long.write_text(text(0, 200), encoding="utf-8")
    small = ("--ctx", "32", "-o", out, *ONE_THREAD)
    nowhere = flashmoe("trace", replay, "--text", long, "-o", tmp_path / "none" / "t.npz")
    assert "no such folder" in nowhere.stderr and nowhere.exit_code == 2
    assert "no prompts" in flashmoe("trace", replay, "--prompts", empty, *small).stderr
    result = flashmoe("trace", replay, "--prompts", long, "--raw", "--ctx", "100", "-o", out)
    assert result.exit_code == 2 and "no prompt could be used" in result.stderr
    result = flashmoe("run", replay, "-p", "a", "--trace", tmp_path)
    assert result.exit_code == 2 and "it is a folder" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no pty on Windows")
def test_ctrl_c_keeps_what_was_recorded(replay: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("\n".join([text(0, 1)] * 10_000), encoding="utf-8")
    out = tmp_path / "t.npz"
    arguments = ("trace", replay, "--prompts", prompts, "--raw", "-o", out, *ONE_THREAD)
    with Terminal(*arguments) as terminal:
        terminal.expect(r"recording .*[1-9]\d* of 10000 prompts, \d+ tokens, [\d.]+ tok/s, .* left")
        terminal.send("\x03")
        terminal.expect(r"trace: \d+ tokens in ")
        assert terminal.exit_code() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.rest
    trace = read_trace(out)
    assert trace.n_tokens > 100
    assert np.array_equal(np.sort(trace.experts[:20], axis=2), KNOWN[:20])


def test_no_output_replaces_what_is_read(replay: Path, tmp_path: Path) -> None:
    model, words = tmp_path / "m.gguf", tmp_path / "words.txt"
    model.write_bytes(replay.read_bytes())
    words.write_text(text(0, 9), encoding="utf-8")
    link, kept = tmp_path / "link", model.read_bytes()
    link.symlink_to(model)
    run = ("run", model, "-p", text(0, 1), "-n", "2", *ONE_THREAD)
    for out in (model, link, words):
        assert_error(flashmoe(*run, "--trace", out), "no trace is there already", "another name")
        done = flashmoe("trace", model, "--text", words, "-o", out, *ONE_THREAD)
        assert_error(done, "no trace is there already", "another name")
    assert_error(flashmoe("trace", "--import", words, "-o", words), "no trace is there", "")
    trace = tmp_path / "t.npz"
    for _ in range(2):  # a trace may be replaced
        done = flashmoe("trace", model, "--text", words, "-o", trace, *ONE_THREAD)
        assert done.exit_code == 0
    bench = ("bench", model, "--ram", "8G")
    for out in (link, words):
        assert_error(flashmoe(*bench, "--jsonl", out), "holds no rows", "another name")
        assert_error(flashmoe(*bench, "--plot", out), "no PNG is there", "another name")
    long = tmp_path / ("x" * 300 + ".png")
    assert_error(flashmoe("simulate", trace, "--plot", long), "File name too long", "")
    assert flashmoe("simulate", trace, "--sizes", "99999999999").exit_code == 0
    assert_error(flashmoe("simulate", trace, "--plot", trace), "would be written over", "")
    train = ("train", trace, "--policy", "learned")
    assert_error(flashmoe(*train, "-o", trace), "would be written over", "another name")
    assert_error(flashmoe(*train, "-o", model), "no policy's is there already", "another name")
    assert model.read_bytes() == kept and words.read_text(encoding="utf-8") == text(0, 9)

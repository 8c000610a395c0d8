"""`flashmoe run`: the answer and only the answer on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gguf_files
from cli_tools import (
    Terminal,
    assert_error,
    command,
    flashmoe,
    flashmoe_child,
    lines_like,
    make_replay_model,
)
from flashmoe_gguf.bench.synthetic import replay_text
from flashmoe_gguf.cli import loading
from flashmoe_gguf.cli.run import _check_empty
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.host import MemoryLimit
from tiny_models import child

GREEDY = ("--temp", "0", "-t", "1")

PLAN = [
    r"model   replay\.gguf, qwen3moe, [\d.]+ MiB, 3 layers, 8 experts, top-2",
    r"memory  [\d.]+ MiB planned: dense [\d.]+ [KM]iB, context [\d.]+ [KM]iB, "
    r"ring [\d.]+ MiB, process [\d.]+ MiB, reserve [\d.]+ MiB, experts [\d.]+ MiB",
    r"cache   4 of 8 experts per layer, 50 % of their bytes; policy lru, I/O buffered",
    r"run     context 512, threads 1, batch 512, ubatch 256, flash attention",
]
SUMMARY = (
    r"prompt 2 tokens, [\d.]+ tok/s; answer 20 tokens, [\d.]+ tok/s; hits [\d.]+ %; "
    r"read [\d.]+ \w+; waited \d+ %"
)


@pytest.fixture(scope="module")
def long_replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its answers take seconds, so that something can happen meanwhile."""
    return make_replay_model(tmp_path_factory.mktemp("long") / "long.gguf", 6000)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_replay_model(tmp_path_factory.mktemp("replay") / "replay.gguf", 600)


def test_whole_output(replay: Path) -> None:
    options = ("--flash-attn", "--n-slots", 4, "--policy", "lru", "--io", "buffered")
    arguments = (*options, "--ctx", 512, "--ubatch", 256, "-n", 20, *GREEDY)
    result = flashmoe("run", replay, "-p", replay_text(0, 2), *map(str, arguments))
    assert result.exit_code == 0
    assert result.stdout == replay_text(2, 20) + "\n"
    assert lines_like(result.stderr, [*PLAN, SUMMARY]), result.stderr


def test_stock_library_gives_the_same(replay: Path) -> None:
    result = flashmoe_child(
        "run", replay, "-p", replay_text(7, 1), "-n", "9", *GREEDY, "--no-stream"
    )
    assert (result.returncode, result.stdout) == (0, replay_text(8, 9) + "\n")
    assert lines_like(
        result.stderr,
        [
            r"model  replay\.gguf, .*",
            r"cache  none: stock llama\.cpp, mmap",
            r"run    context 856, threads 1, batch 512, ubatch 512",
            r"prompt 1 token, [\d.]+ tok/s; answer 9 tokens, [\d.]+ tok/s",
        ],
    ), result.stderr


@pytest.mark.parametrize("kind", ["qwen3moe", "gptoss", "nogate", "grovemoe"])
def test_token_ids(kind: str, tiny_model: Callable[[str], Path]) -> None:
    from flashmoe_gguf.libs import library_dir

    path = tiny_model(kind)
    stock = child.decode(library_dir("stock"), [(path, [5, 6, 7], 3)], greedy=7)[0]
    wanted = [int(row.argmax()) for row in stock.logits]
    result = flashmoe("run", path, "--tokens", "5, 6 7", "-n", "8", "--n-slots", "2", *GREEDY)
    assert result.exit_code == 0
    assert result.stdout == " ".join(map(str, wanted)) + "\n"


def test_prompt_from_a_file_and_from_stdin(replay: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(replay_text(30, 3), encoding="utf-8")
    from_file = flashmoe("run", replay, "-f", tmp_path / "prompt", "-n", "4", *GREEDY)
    from_stdin = flashmoe("run", replay, "-f", "-", "-n", "4", *GREEDY, stdin=replay_text(30, 3))
    assert from_file.stdout == from_stdin.stdout == replay_text(33, 4) + "\n"


def test_the_answer_ends_with_the_model_and_with_stop_texts(replay: Path) -> None:
    to_the_end = flashmoe("run", replay, "-p", replay_text(590, 1), *GREEDY)
    assert to_the_end.stdout == replay_text(591, 9) + "\n"
    stop = ("--stop", replay_text(14, 2), "--stop", "nothing like this")
    stopped = flashmoe("run", replay, "-p", replay_text(10, 1), *stop, *GREEDY)
    assert stopped.stdout == replay_text(11, 3) + "\n"


def test_a_full_context_is_told(replay: Path) -> None:
    prompt = ("-p", replay_text(0, 200))
    result = flashmoe("run", replay, *prompt, "--ctx", "256", *GREEDY)
    assert result.stdout == replay_text(200, 56) + "\n"
    assert result.stderr.endswith("the context of 256 tokens is full; --ctx gives more\n")


def test_chat_uses_a_template(replay: Path) -> None:
    result = flashmoe("run", replay, "--chat", "--system", "s", "-p", "q", "-n", "3", *GREEDY)
    assert result.exit_code == 0
    template = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
    tokens = len((template + "<|im_start|>assistant\n").encode())  # this model's are bytes
    assert f"prompt {tokens} tokens" in result.stderr


def test_a_seed_makes_it_repeatable(replay: Path) -> None:
    hot = ("-p", replay_text(0, 1), "--temp", "60", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    answers = [
        flashmoe("run", replay, *hot, "-n", "12", "-t", "1", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert answers[0] == answers[1] != answers[2]


def test_grammar(replay: Path, tmp_path: Path) -> None:
    grammar = tmp_path / "g.gbnf"
    first, last = replay_text(100, 1), replay_text(300, 1)
    grammar.write_text(f'root ::= "{first}" "{first}" "{last}"', encoding="utf-8")
    arguments = ("run", replay, "-p", replay_text(0, 1), *GREEDY, "--grammar-file", grammar)
    assert flashmoe(*arguments).stdout == first + first + last + "\n"
    grammar.write_text('other ::= "a"', encoding="utf-8")
    assert_error(flashmoe(*arguments), "cannot parse the grammar: ", "a rule named root")
    grammar.write_text("root ::= nowhere", encoding="utf-8")
    result = flashmoe(*arguments)
    assert_error(result, "cannot parse the grammar: Undefined rule identifier 'nowhere'", "GBNF")


def test_json_schema(replay: Path, tmp_path: Path) -> None:
    schema = tmp_path / "s.json"
    schema.write_text('{"type": "boolean"}')
    arguments = ("run", replay, "-p", replay_text(0, 1), *GREEDY, "--json-schema-file", schema)
    result = flashmoe(*arguments)
    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), bool)
    schema.write_text('{"type": ')
    assert_error(flashmoe(*arguments), "the JSON schema cannot be used", "--grammar-file")


def test_bad_options(replay: Path, tiny_model: Callable[[str], Path]) -> None:
    run = ("run", replay, *GREEDY)
    assert_error(flashmoe(*run, "-p", "a" * 900), "takes 900 tokens, the context holds 856", "1280")
    assert_error(flashmoe(*run, "-p", "a", "--policy", "mru"), "no policy 'mru'", "auto, ")
    assert_error(flashmoe(*run, "-p", "a", "--ram", "lots"), "'lots' is not an amount", "8G")
    assert_error(flashmoe(*run, "--tokens", "1;2"), "'1;2' is not a list of token ids", "1,2,3")
    assert_error(flashmoe(*run, "--tokens", "1,859"), "token 859 is not in the", "from 0 to 858")
    assert_error(flashmoe(*run, "-f", "no/file"), "no/file: cannot read: No such file", "path")
    wordless = flashmoe("run", tiny_model("qwen3moe"), "-p", "a")
    assert_error(wordless, "has no vocabulary", "--tokens")


def test_a_budget_below_the_floor(replay: Path) -> None:
    result = flashmoe("run", replay, "-p", "a", "--ram", "20M")
    assert_error(result, "20 MiB of memory is below the floor of", "give --ram")
    assert result.stderr.endswith("--flash-attn and a smaller --ubatch need less too\n")
    for piece in ("dense weights", "context and compute buffers", "read ring", "the process"):
        assert piece in result.stderr


def test_the_budget_is_printed_where_it_is_obeyed(replay: Path) -> None:
    options = ("--ram", "2G", "--ubatch", "4000000000", "--ctx", "300", "-n", "1", *GREEDY)
    result = flashmoe("run", replay, "-p", "a", *options)
    assert result.exit_code == 0
    assert re.search(r"^memory  2 GiB budget, [\d.]+ MiB planned: ", result.stderr, re.M)
    # no batch is larger than the context
    assert "run     context 300, threads 1, batch 300, ubatch 300\n" in result.stderr


def test_batches_end_with_the_context(replay: Path) -> None:
    huge = ("-b", "1000000000", "--ubatch", "400", "-n", "1", *GREEDY)
    result = flashmoe("run", replay, "-p", "a", *huge)
    assert result.exit_code == 0
    assert "context 856, threads 1, batch 856, ubatch 400\n" in result.stderr


def test_too_little_memory_for_the_context(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_gguf import llama

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(llama, "Llama", fail)
    result = flashmoe("run", replay, "-p", "a", "--ctx", "600", *GREEDY)
    assert_error(result, "not enough memory for 600 tokens of context and batches of 512", "--ctx")


def test_an_empty_prompt_is_refused_before_loading(
    replay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_load", pytest.fail)
    empty = flashmoe("run", replay, "-p", "", *GREEDY)
    assert_error(empty, "the prompt is empty", "at least one token")
    assert_error(flashmoe("run", replay, "-f", "-", *GREEDY, stdin=""), "the prompt is empty", "")


@pytest.mark.parametrize(
    ("metadata", "refused"),
    [
        ({}, True),
        ({"tokenizer.ggml.model": "gpt2"}, True),
        ({"tokenizer.ggml.model": "llama"}, False),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": False}, True),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": True}, False),
    ],
)
def test_a_start_token_makes_an_empty_prompt(metadata: dict[str, Any], refused: bool) -> None:
    geometry: Any = SimpleNamespace(header=SimpleNamespace(metadata=metadata))
    with pytest.raises(OptionError) if refused else nullcontext():
        _check_empty(geometry)


def test_a_plan_beyond_what_there_is(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: MemoryLimit(1 << 20, "a test"))
    result = flashmoe("run", replay, "-p", replay_text(0, 1), "-n", "1", *GREEDY)
    assert (result.exit_code, result.stdout) == (0, replay_text(1, 1) + "\n")
    note = (
        r"[\d.]+ [MG]iB are planned, but this process can have 1 MiB \(a test\): "
        r"it may swap or be killed"
    )
    assert lines_like("\n".join(result.stderr.splitlines()[4:-1]), [note]), result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_path_that_is_not_utf8(replay: Path, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.gguf")
    path.symlink_to(replay)
    assert flashmoe("inspect", path).exit_code == 0
    assert_error(flashmoe("run", path, "-p", "a"), "path is not valid UTF-8: ", "rename the file")
    stock = flashmoe_child("run", path, "-p", "a", "--no-stream")
    assert (stock.returncode, stock.stdout) == (2, "")
    assert lines_like(
        stock.stderr,
        [r"error: the model's path is not valid UTF-8: '.*\\udcff\.gguf'", "hint: rename the file"],
    ), stock.stderr


def test_bad_files(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    good = tiny_model("gptoss").read_bytes()
    run = ("--tokens", "1", *GREEDY)
    other = tmp_path / "other.gguf"
    other.write_bytes(good.replace(b"gpt-oss", b"gpt-new"))
    assert_error(flashmoe("run", other, *run), "unknown model architecture: 'gpt-new'", "newer")
    stock = flashmoe_child("run", other, *run, "--no-stream")
    assert (stock.returncode, stock.stdout) == (2, "")
    assert stock.stderr.startswith("error: other.gguf: unknown model architecture: 'gpt-new'\nhint")
    half = tmp_path / "half.gguf"
    half.write_bytes(good[:-999])
    assert_error(flashmoe("run", half, *run), "half.gguf: cut short: 999 of", "interrupted")


def test_an_expert_that_cannot_be_read(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading._load

    def load_with_a_fault(*arguments: Any) -> Any:
        llm = load(*arguments)
        llm._experts.native.set_fault(errno=errno.EIO, after=60, count=1)
        return llm

    monkeypatch.setattr(loading, "_load", load_with_a_fault)
    result = flashmoe("run", replay, "-p", replay_text(0, 1), "--n-slots", "0", *GREEDY)
    assert result.exit_code == 2
    made = result.stdout.strip()
    assert 0 < len(made) < 20 and replay_text(1, 20).startswith(made)
    assert lines_like(
        "\n".join(result.stderr.splitlines()[4:]),
        [r"error: cannot read expert .*: Input/output error", r"hint: the tokens of this step.*"],
    ), result.stderr


def test_an_embedding_model_is_refused(tmp_path: Path) -> None:
    keys = {
        "general.architecture": gguf_files.string("bert"),
        "bert.block_count": gguf_files.u32(1),
        "bert.attention.causal": gguf_files.scalar("bool", False),
    }
    path = gguf_files.Gguf(keys, [gguf_files.Tensor("a", (32,))]).write(tmp_path / "e.gguf")
    assert_error(flashmoe("run", path, "-p", "a"), "makes embeddings, not text", "Python")


def test_other_libraries_loaded_before(replay: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}\n"
        "from flashmoe_gguf.libs import load_llama_cpp\n"
        "load_llama_cpp('stock')\n"
        "from flashmoe_gguf.cli import main\n"
        f"main(['run', {str(replay)!r}, '-p', 'a'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: llama_cpp was imported before with the libraries in ")
    assert "\nhint: " in done.stderr and "Traceback" not in done.stderr


def test_a_reader_that_leaves(long_replay: Path) -> None:
    options = ("-p", replay_text(0, 1), "--ctx", "0", "--n-slots", "0", *GREEDY)
    process = subprocess.Popen(
        command("run", long_replay, *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == replay_text(1, 1)
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert lines_like(said, [r"model .*", r"memory .*", r"cache .*", r"run .*"]), said


@pytest.mark.skipif(sys.platform == "win32", reason="no pty on Windows")
def test_ctrl_c_ends_with_130(long_replay: Path) -> None:
    options = ("-p", replay_text(0, 1), "--ctx", "0", "--n-slots", "0", *GREEDY)
    with Terminal("run", long_replay, *options) as terminal:
        terminal.expect(replay_text(1, 20))
        terminal.send("\x03")
        terminal.expect(r"prompt 1 token, .*answer \d+ tokens")
        assert terminal.exit_code() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.rest


@pytest.mark.skipif(sys.platform == "win32", reason="no pty on Windows")
def test_ctrl_c_in_a_long_prompt(long_replay: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(replay_text(0, 5500), encoding="utf-8")
    slow = ("-f", tmp_path / "prompt", "--ctx", "0", "--n-slots", "0", "--batch", "1", *GREEDY)
    with Terminal("run", long_replay, *slow) as terminal:
        terminal.expect(r"prompt .*[1-9]\d* of 5500 tokens, [\d.]+ tok/s, \d+ s left")
        terminal.send("\x03")
        shown = terminal.expect(r"prompt \d+ tokens, [\d.]+ tok/s; answer 0 tokens; .* waited")
        computed = re.findall(r"prompt (\d+) tokens,", shown)[-1]
        assert 0 < int(computed) < 5500
        assert terminal.exit_code() == 128 + signal.SIGINT
        assert "Traceback" not in terminal.rest

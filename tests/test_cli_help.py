"""Help, versions, and what the command line does before there is a model."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

import pytest
from click.testing import CliRunner

import flashmoe_gguf
import help_texts
from flashmoe_gguf.cli import inspect, main
from flashmoe_gguf.errors import OptionError

TEXTS = help_texts.help_texts()
AGAIN = "python tests/help_texts.py writes it anew"


def test_every_command_has_a_golden_file() -> None:
    assert {path.name for path in help_texts.GOLDEN.glob("help-*.txt")} == set(TEXTS), AGAIN


@pytest.mark.parametrize("name", TEXTS)
def test_help(name: str) -> None:
    assert TEXTS[name] == (help_texts.GOLDEN / name).read_text("utf-8"), AGAIN


def test_the_manual_is_made_from_the_help() -> None:
    assert help_texts.MANUAL.read_text("utf-8") == help_texts.manual(TEXTS), AGAIN


def test_version_names_both_packages() -> None:
    result = CliRunner().invoke(main, ["--version"])
    pin = metadata.version("llama-cpp-python")
    assert result.exit_code == 0
    assert result.stdout == f"flashmoe-gguf {flashmoe_gguf.__version__} (llama-cpp-python {pin})\n"


def test_no_command_shows_the_help() -> None:
    result = CliRunner().invoke(main, [], prog_name="flashmoe", env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert result.output == TEXTS["help-flashmoe.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'MODEL'"),
        (["run", "m.gguf"], "Give the prompt with one of -p, -f and --tokens"),
        (["run", "m.gguf", "-p", "a", "--tokens", "1"], "Give the prompt with one of"),
        (["run", "m.gguf", "-p", "a", "--system", "b"], "--system needs --chat"),
        (["run", "m.gguf", "--tokens", "1", "--chat"], "--tokens takes no --chat"),
        (["run", "m.gguf", "-p", "a", "--no-stream", "--ram", "8G"], "--ram means nothing with"),
        (["run", "m.gguf", "-p", "a", "--no-stream", "--n-slots", "0"], "--n-slots means nothing"),
        (["run", "m.gguf", "-p", "a", "--ram", "8G", "--n-slots", "4"], "--ram and --n-slots excl"),
        (["run", "", "-p", "a"], "'MODEL': the path is empty."),
        (["run", "m.gguf", "-f", ""], "the path is empty."),
        (["chat", ""], "'MODEL': the path is empty."),
        (["inspect", ""], "'MODEL': the path is empty."),
        (["run", "m.gguf", "-p", "a", "--batch", "64", "--ubatch", "128"], "--ubatch is more than"),
        (["run", "m.gguf", "-p", "a", "--temp", "-1"], "-1.0 is not in the range x>=0"),
        (["run", "m.gguf", "-p", "a", "--temp", "nan"], "'nan' is not a finite number"),
        (["run", "m.gguf", "-p", "a", "-t", "513"], "513 is not in the range 1<=x<=512"),
        (["run", "m.gguf", "-p", "a", "--grammar-file", "none"], "File 'none' does not exist"),
        (["chat", "m.gguf", "--io", "mmap"], "'mmap' is not one of"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def raising(error: BaseException) -> Callable[[object], None]:
    def raise_it(_: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, ""),
        (OptionError("one", "two"), 2, "error: one\nhint: two\n"),
        (OptionError("one"), 2, "error: one\n"),
        (
            RuntimeError("one\ntwo"),
            1,
            "error: RuntimeError: one two\n"
            "hint: this is not expected; FLASHMOE_TRACEBACK=1 shows where it happened\n",
        ),
        (
            MemoryError(),
            2,
            "error: not enough memory for flashmoe inspect\n"
            "hint: close other programs, or try it with a smaller model or smaller numbers\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "error: cannot write to stdout: No space left on device\nhint: check where it goes\n",
        ),
        (
            OSError(errno.EIO, "Input/output error"),
            1,
            "error: OSError: [Errno 5] Input/output error\n"
            "hint: this is not expected; FLASHMOE_TRACEBACK=1 shows where it happened\n",
        ),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "read_geometry", raising(error))
    result = CliRunner().invoke(main, ["inspect", "m.gguf"], prog_name="flashmoe")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", said)


def test_a_traceback_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "read_geometry", raising(RuntimeError("one")))
    result = CliRunner().invoke(main, ["inspect", "m"], env={"FLASHMOE_TRACEBACK": "1"})
    assert result.exit_code == 1
    assert "Traceback" in result.stderr and "error: RuntimeError: one\n" in result.stderr


def test_help_and_inspect_load_no_llama_cpp() -> None:
    code = (
        "import sys\n"
        "from flashmoe_gguf.cli import main\n"
        "for arguments in (['--help'], ['run', '--help'], ['inspect', 'missing.gguf']):\n"
        "    main(arguments, standalone_mode=False)\n"
        "assert 'llama_cpp' not in sys.modules\n"
        "print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr

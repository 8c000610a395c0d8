"""The help of every command, as golden files and as docs/CLI.md.

`python tests/help_texts.py` writes them anew; the tests compare.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.testing import CliRunner

from flashmoe_gguf.cli import main

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
MANUAL = ROOT / "docs" / "CLI.md"


def help_text(command: str | None = None) -> str:
    """What `flashmoe [command] --help` prints in 80 columns."""
    arguments = [*([command] if command else []), "--help"]
    result = CliRunner().invoke(main, arguments, prog_name="flashmoe", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def help_texts() -> dict[str, str]:
    """Golden file name -> text, for the program and for each command."""
    assert isinstance(main, click.Group)
    names = main.list_commands(click.Context(main))
    return {
        "help-flashmoe.txt": help_text(),
        **{f"help-{name}.txt": help_text(name) for name in names},
    }


def manual(texts: dict[str, str]) -> str:
    """docs/CLI.md."""
    parts = [
        "# Command line",
        "Made from `--help` by `python tests/help_texts.py`; change the commands, not this page.",
    ]
    for file_name, text in texts.items():
        name = file_name.removeprefix("help-").removesuffix(".txt")
        title = "flashmoe" if name == "flashmoe" else f"flashmoe {name}"
        parts += [f"## {title}", f"```text\n{text.rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    texts = help_texts()
    for old in GOLDEN.glob("help-*.txt"):
        old.unlink()
    for file_name, text in texts.items():
        (GOLDEN / file_name).write_text(text, encoding="utf-8")
    MANUAL.parent.mkdir(exist_ok=True)
    MANUAL.write_text(manual(texts), encoding="utf-8")

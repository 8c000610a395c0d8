"""The documentation is finished: no place left to fill in, links that lead somewhere, and no option
that does not exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from flashmoe_gguf.cli import main
from flashmoe_gguf.cli.bench_compare import bench_compare

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("patches/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"@[A-Z]+@|\bTODO\b|\bFIXME\b", text)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def options_of(command: click.Command) -> set[str]:
    return {name for param in command.params for name in [*param.opts, *param.secondary_opts]}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_options(page: Path) -> None:
    """Of commands that are shown as they would be typed."""
    text = page.read_text(encoding="utf-8")
    in_lines = re.findall(r"\bflashmoe (\w+)\b([^`\n#|]*)", text)
    in_words = re.findall(r"`flashmoe (\w+)\b([^`]*)`", text)
    for name, arguments in [*in_lines, *in_words]:
        given = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", arguments))
        if not given:
            continue
        command = bench_compare if arguments.startswith(" compare ") else main.commands[name]
        assert given <= options_of(command) | {"--help"}, f"flashmoe {name}{arguments}"

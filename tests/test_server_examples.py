"""The programs in examples/, and what the documents show, against a live server."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server_tools import Running, running

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    with running(chat_model, api_key="secret", n_ctx=1024) as server:
        yield server


def run(server: Running, *command: str) -> str:
    env = {**os.environ, "FLASHMOE_URL": server.url, "FLASHMOE_API_KEY": "secret"}
    env |= {"NO_PROXY": "*", "no_proxy": "*", "PYTHONPATH": "", "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run_and_described() -> None:
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert programs == {*EXPECTED, "curl.sh"}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in programs)


EXPECTED = {
    "openai_chat.py": r".+\n\(\d+ tokens, (stop|length)\)\n.*\n\(\d+ tokens\)\n",
    "openai_tools.py": r"add\(\{'first': (\d+), 'second': (\d+)\}\) = \d+\n.*\n",
    "openai_structured.py": r".*: (small|large), (not )?by the sea\n",
    "langchain_chat.py": r".*\n.*\nword='.{0,12}'\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_python(server: Running, name: str) -> None:
    package = "langchain_openai" if name.startswith("langchain") else "openai"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed")
    output = run(server, sys.executable, str(EXAMPLES / name))
    assert re.fullmatch(EXPECTED[name], output, re.DOTALL), output


@needs_curl
def test_curl(server: Running) -> None:
    output = run(server, "sh", str(EXAMPLES / "curl.sh"))
    for words in ('"chat.completion"', "data: [DONE]", '"embedding"', '"ready"', "# HELP flashmoe"):
        assert words in output


def documented() -> list[tuple[str, str]]:
    """(page, command) of every curl that the documents show, between fences."""
    return [
        (page, block)
        for page in ("README.md", "docs/SERVER.md")
        for block in re.findall(r"```\n(curl .*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    ]


@needs_curl
def test_curl_of_the_documents(server: Running) -> None:
    commands = documented()
    assert commands
    for _, command in commands:
        words = [w.replace("http://127.0.0.1:8000", server.url) for w in shlex.split(command)]
        run(server, *words, "--fail-with-body", "-H", "Authorization: Bearer secret")

"""Imports inside the package point one way, from high rank to low.

A module is ranked by its first name under `flashmoe_gguf` and may import only from a strictly
lower rank, or from its own package. A module that is not ranked fails the test, so that
whoever adds one decides where it belongs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "flashmoe_gguf"
SOURCES = Path(__file__).resolve().parent.parent / PACKAGE

# Lowest first. "" is the package's own __init__, which offers Llama to users.
RANKS = (
    ("errors",),
    ("replacing",),
    ("libs", "gguf", "cache_dir", "trace", "host", "disk", "assertions", "hardware"),
    ("lookahead", "ubatch", "grammar"),
    ("stripes", "disk_sample", "devices", "fingerprint"),
    ("_native", "packed"),
    ("store", "models", "regret"),
    ("policy_weights", "auto_policy", "shapes", "stats"),
    ("pack", "budget", "policy", "stock", "tuning"),
    ("settings", "llama_log", "quotas", "placement"),
    ("streaming", "arguments", "governor", "recording"),
    ("loading",),
    ("simulate", "llama", "train"),
    ("",),
    ("chat", "server", "bench", "demo", "doctor", "plan", "hub"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}

# Packages that one part alone may import.
RESERVED = {"cffi": "_native", "_cffi_backend": "_native", "torch": "train"}


def violations(sources: Mapping[str, str]) -> list[str]:
    """What is wrong with `sources`, which maps paths under the package to their text."""
    found = []
    for path, text in sources.items():
        part = part_of(path)
        if part not in RANK:
            found.append(f"{path}: {part} has no rank in tests/test_imports.py")
            continue
        for name, line in imports(path, ast.parse(text)):
            root, _, rest = name.partition(".")
            if root in RESERVED and part != RESERVED[root]:
                found.append(f"{path}:{line}: only {RESERVED[root]} may import {root}")
            if root != PACKAGE:
                continue
            # `from flashmoe_gguf import x` is a module if x is ranked, else of __init__.
            target = rest.partition(".")[0]
            target = target if target in RANK else ""
            if target != part and RANK[target] >= RANK[part]:
                found.append(f"{path}:{line}: {part} may not import {target or PACKAGE}")
    return found


def part_of(path: str) -> str:
    first = Path(path).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Full dotted name and line of every import, those inside functions included."""
    package = [PACKAGE, *Path(path).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += [node.module] if node.module else []
            for alias in node.names:
                yield ".".join([*base, alias.name]), node.lineno
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            called = getattr(function, "attr", getattr(function, "id", ""))
            argument = node.args[0]
            if called in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield str(argument.value), node.lineno


def test_imports_point_one_way() -> None:
    sources = {
        str(path.relative_to(SOURCES)): path.read_text("utf-8") for path in SOURCES.rglob("*.py")
    }
    assert "errors.py" in sources
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("errors.py", "import flashmoe_gguf.gguf"),
        ("gguf/table.py", "from flashmoe_gguf.store import read_geometry"),
        ("gguf/table.py", "from flashmoe_gguf import store"),
        ("gguf/table.py", "from ..store import read_geometry"),
        ("gguf/table.py", "from .. import store"),
        ("store.py", "from .llama import Llama"),
        ("store.py", "from . import models"),
        ("store.py", "def f():\n    if True:\n        from flashmoe_gguf import cli"),
        ("store.py", "from flashmoe_gguf import Llama"),
        ("store.py", "import importlib\nimportlib.import_module('flashmoe_gguf.chat')"),
        ("__init__.py", "from flashmoe_gguf.cli import main"),
        ("__init__.py", "from . import server"),
        ("server/app.py", "from flashmoe_gguf.chat import talk"),
        ("llama.py", "import cffi"),
        ("llama.py", "from cffi import FFI"),
        ("policy/learned.py", "def f():\n    import torch.nn"),
        ("newcomer.py", "import os"),
        ("newcomer/__init__.py", ""),
    ],
)
def test_a_violation_is_caught(path: str, text: str) -> None:
    assert len(violations({path: text})) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("store.py", "import os\nimport numpy as np\nfrom flashmoe_gguf.gguf import read_header"),
        ("gguf/table.py", "from gguf.constants import GGML_QUANT_SIZES"),
        (
            "gguf/table.py",
            "from . import cursor\nfrom .cursor import Cursor\nfrom ..errors import E",
        ),
        ("gguf/__init__.py", "from flashmoe_gguf.gguf.table import read_file"),
        ("__init__.py", "def f():\n    from flashmoe_gguf.llama import Llama"),
        ("cli/run.py", "from flashmoe_gguf import Llama, __version__, chat, store"),
        ("_native.py", "import cffi"),
        ("train/fit.py", "import torch"),
    ],
)
def test_what_is_allowed(path: str, text: str) -> None:
    assert violations({path: text}) == []

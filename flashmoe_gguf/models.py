"""The known models: a typed reader of models.toml.

The file says where each model's GGUF lies on the Hugging Face hub and what its experts look
like, with a source for every table. It is checked on loading, so that a typing error in it is
found by the tests and not by a user. Nothing here touches the network.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from flashmoe_gguf.errors import FlashMoEError, OptionError

# By name, so that a type checker does not ask for tomli where tomllib is at hand.
_toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

_FILE_NAME = "models.toml"
_NAME = re.compile(r"[a-z0-9]+([-.][a-z0-9]+)*")
_HINT = "see the comments in models.toml for its form"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Hub:
    """Where the file is: `pattern` is a glob over the paths in `repository`, and matches all
    shards. `size_bytes` counts them together; None where no source gives it to the byte.
    """

    repository: str
    pattern: str
    quant: str
    source: str
    revision: str | None = None
    size_bytes: int | None = None


@dataclass(frozen=True)
class Shape:
    """`architecture` is llama.cpp's name. `layers` are those that decoding runs, dense ones
    included, token-prediction (MTP) blocks not; `top_k` of `experts` routed experts are used.
    """

    architecture: str
    layers: int
    experts: int
    top_k: int
    source: str


@dataclass(frozen=True)
class KnownModel:
    """One model; `name` is what a user types."""

    name: str
    title: str
    hub: Hub
    shape: Shape


def known_models(path: Path | None = None) -> Mapping[str, KnownModel]:
    """All known models by name, in the order of the file.

    Reads `path`, or else the file installed with the package, or else the one beside the
    package in a source tree. Raises FlashMoEError if it is missing or not as it should be.
    """
    text, where = _read(path)
    try:
        tables = _toml.loads(text)
    except _toml.TOMLDecodeError as error:
        raise FlashMoEError(f"{where}: not TOML: {error}", _HINT) from None
    return {name: _model(f"{where}: {name}", name, table) for name, table in tables.items()}


def find_model(name: str) -> KnownModel:
    """The known model called `name`; raises OptionError, which lists the names there are."""
    models = known_models()
    if name not in models:
        raise OptionError(f"no known model is called {name!r}", f"known: {', '.join(models)}")
    return models[name]


def _read(path: Path | None) -> tuple[str, str]:
    """The text of models.toml, and what to call it in messages."""
    if path is None:
        installed = resources.files("flashmoe_gguf") / _FILE_NAME
        if installed.is_file():
            return installed.read_text("utf-8"), _FILE_NAME
        path = Path(__file__).resolve().parent.parent / _FILE_NAME
    try:
        return path.read_text("utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise FlashMoEError(f"{path}: cannot read: {error}", "reinstall the package") from None


def _model(where: str, name: str, table: Any) -> KnownModel:
    if not _NAME.fullmatch(name):
        raise FlashMoEError(f"{where}: a name is lower-case letters, digits, dashes, dots", _HINT)
    if not isinstance(table, dict):
        raise FlashMoEError(f"{where}: not a table", _HINT)
    if unknown := table.keys() - {"title", "hub", "shape"}:
        raise FlashMoEError(f"{where}: unknown key {sorted(unknown)[0]}", _HINT)
    if not isinstance(table.get("title"), str):
        raise FlashMoEError(f"{where}: title is missing or not a string", _HINT)
    hub = _fill(Hub, f"{where}.hub", table.get("hub"))
    shape = _fill(Shape, f"{where}.shape", table.get("shape"))
    if not hub.pattern.endswith(".gguf"):
        raise FlashMoEError(f"{where}.hub: pattern does not end in .gguf", _HINT)
    if shape.top_k > shape.experts:
        raise FlashMoEError(f"{where}.shape: top_k is above experts", _HINT)
    return KnownModel(name, table["title"], hub, shape)


def _fill(kind: type[_T], where: str, table: Any) -> _T:
    """Make a `kind`, all of whose fields are non-empty strings or positive integers."""
    if not isinstance(table, dict):
        raise FlashMoEError(f"{where}: the table is missing", _HINT)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if unknown := table.keys() - known.keys():
        raise FlashMoEError(f"{where}: unknown key {sorted(unknown)[0]}", _HINT)
    for name, field in known.items():
        if name not in table:
            if field.default is MISSING:
                raise FlashMoEError(f"{where}: {name} is missing", _HINT)
            continue
        value = table[name]
        if str(field.type).startswith("int"):
            if type(value) is not int or value <= 0:
                raise FlashMoEError(f"{where}: {name} is not a positive integer", _HINT)
        elif not isinstance(value, str) or not value.strip():
            raise FlashMoEError(f"{where}: {name} is not a string with text in it", _HINT)
    return kind(**table)

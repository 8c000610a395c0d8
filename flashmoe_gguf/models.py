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


def _q4_k_m(layer: int, n_layers: int) -> tuple[str, str]:
    """Types of (up and gate, down)."""
    eighth = n_layers // 8
    better = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
    return "Q4_K", "Q6_K" if better else "Q4_K"


def _mxfp4(layer: int, n_layers: int) -> tuple[str, str]:
    return "MXFP4", "MXFP4"


QUANTS = {"Q4_K_M": _q4_k_m, "MXFP4": _mxfp4}

# Bytes per 256 values, ggml/src/ggml-common.h; and what takes the place of a type whose blocks do
# not divide a row.
_BYTES_256 = {"Q4_K": 144, "Q6_K": 210, "Q5_0": 176, "Q8_0": 272, "MXFP4": 136}
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def _bytes_256(kind: str, row: int) -> int:
    """Bytes per 256 values of `kind` in rows of this length."""
    return _BYTES_256[_FALLBACK.get(kind, kind) if row % 256 else kind]


@dataclass(frozen=True)
class Hub:
    """Where the file is: `pattern` is a glob over the paths in `repository`, and matches all
    shards. `size_bytes` counts them together; None where no source gives it to the byte, and
    then `about_bytes` may be what its page says.
    """

    repository: str
    pattern: str
    quant: str
    source: str
    revision: str | None = None
    size_bytes: int | None = None
    about_bytes: int | None = None

    @property
    def likely_bytes(self) -> int | None:
        """The best there is."""
        return self.size_bytes or self.about_bytes


@dataclass(frozen=True)
class Shape:
    """`architecture` is llama.cpp's name. `layers` are those that decoding runs, the first
    `dense_layers` without experts included, the last `prediction_layers` (MTP) blocks of the file
    not; `top_k` of `experts` routed experts are used. `width` is the model's, `expert_width` an
    expert's inner one. `kv_width` counts the values of K and V per layer and token that llama.cpp
    keeps, `context` the tokens that the model was made for.
    """

    architecture: str
    layers: int
    experts: int
    top_k: int
    width: int
    expert_width: int
    heads: int
    kv_width: int
    vocabulary: int
    context: int
    source: str
    dense_layers: int | None = None
    prediction_layers: int | None = None


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


def part_bytes(model: KnownModel) -> list[tuple[int, int, int]]:
    """Bytes of one expert's up, gate and down for each layer with experts, MTP blocks last.

    From the shape and llama.cpp's rule for the quantization (src/llama-quant.cpp): Q4_K_M gives
    the down matrices of the first and last eighth of the layers, and of every third between, two
    bits more. A row that is no multiple of 256 falls back to a type with blocks of 32.
    """
    shape = model.shape
    first, n_layers = shape.dense_layers or 0, shape.layers + (shape.prediction_layers or 0)
    elements = shape.width * shape.expert_width
    rows = []
    for layer in range(first, n_layers):
        up, down = QUANTS[model.hub.quant](layer, n_layers)
        in_bytes = elements * _bytes_256(up, shape.width) // 256
        out_bytes = elements * _bytes_256(down, shape.expert_width) // 256
        rows.append((in_bytes, in_bytes, out_bytes))
    return rows


def dense_bytes(model: KnownModel) -> int:
    """What the file holds beside experts: always in memory. As exact as the size is known."""
    size = model.hub.likely_bytes
    assert size is not None  # the reader saw to it
    return max(size - model.shape.experts * sum(map(sum, part_bytes(model))), 0)


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
    if (shape.dense_layers or 0) >= shape.layers:
        raise FlashMoEError(f"{where}.shape: no layer has experts", _HINT)
    if hub.quant not in QUANTS:
        known = ", ".join(QUANTS)
        raise FlashMoEError(f"{where}.hub: quant is none of {known}", "add its mix to models.py")
    if hub.likely_bytes is None:
        raise FlashMoEError(f"{where}.hub: neither size_bytes nor about_bytes is given", _HINT)
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

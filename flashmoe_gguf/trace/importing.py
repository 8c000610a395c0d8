"""Routing that other programs wrote down: CSV and JSON Lines in, a `Trace` out.

| kind | a row or line is | columns or keys (other names) |
|---|---|---|
| CSV, one expert per row | one chosen expert | token (step, position), layer, expert; slot (rank) |
| CSV, a list per row | one token in one layer | token, layer, experts: "3 1 7" or "3;1;7" |
| CSV, a column per expert | one token in one layer | token, layer, expert_0, expert_1, ... |
| JSONL, per layer | one token in one layer | token, layer, experts: [3, 1, 7] |
| JSONL, per token | one token | experts (routes): [[3, 1, 7], [2, 0, 5], ...], a list per layer |
| JSONL, bare | one token | [[3, 1, 7], [2, 0, 5], ...] |

Where they are there, these are used too: seq (sequence, turn, request, prompt_id) for the sequence,
phase (0 or prefill, 1 or decode), weight (prob; as a list: weights, probs) for the router's
probability. In CSV, lines that begin with # may say `n_expert=128`; the first line that does not
names the columns. BigMoeOnEdge's `--route-trace` is of the first kind. Tokens are ordered by their
numbers, sequences by their first appearance; a token or layer that is missing used no expert.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.trace.file import NO_EXPERT, Trace

_NAMES = {
    "token": ("token", "step", "position", "pos", "token_idx", "token_index"),
    "layer": ("layer", "layer_idx", "layer_index", "il"),
    "expert": ("expert", "expert_id"),
    "experts": ("experts", "routes", "expert_ids", "topk_ids"),
    "slot": ("slot", "rank"),
    "seq": ("seq", "sequence", "turn", "request", "prompt_id", "seq_id"),
    "phase": ("phase",),
    "weight": ("weight", "prob", "weights", "probs", "topk_weights"),
}
_PHASES = {"0": 0, "prefill": 0, "prompt": 0, "1": 1, "decode": 1, "answer": 1}
_COUNT = re.compile(r"\bn_expert=(\d+)")
_COLUMN = re.compile(r"(?:expert_?|e_?)(\d+)")
_MOST = 1 << 26  # places of a trace: beyond this a number in the file is wrong


@dataclass
class _Token:
    phase: int | None = None
    layers: dict[int, list[tuple[int, float]]] = field(default_factory=dict)


class _Routes:
    """What was read so far: sequence, token, layer, experts in the router's order."""

    def __init__(self) -> None:
        self._sequences: dict[str, dict[int, _Token]] = {}
        self._slots: dict[tuple[str, int, int], list[int]] = {}

    def add(
        self,
        seq: str,
        token: int,
        layer: int,
        experts: Iterable[int],
        weights: Iterable[float] | None = None,
        phase: int | None = None,
        slot: int | None = None,
    ) -> None:
        entry = self._sequences.setdefault(seq, {}).setdefault(token, _Token())
        if phase is not None:
            entry.phase = phase
        chosen = entry.layers.setdefault(layer, [])
        ids = list(experts)
        if layer < 0 or any(not 0 <= e < NO_EXPERT for e in ids):
            raise ValueError(f"layer {layer} or one of its experts {ids} is out of range")
        shares = [math.nan] * len(ids) if weights is None else list(weights)
        if len(shares) != len(ids):
            raise ValueError(f"{len(ids)} experts have {len(shares)} weights")
        if slot is not None:
            slots = self._slots.setdefault((seq, token, layer), [])
            at = sum(s <= slot for s in slots)
            slots.insert(at, slot)
            chosen[at:at] = zip(ids, shares, strict=True)
        else:
            chosen += zip(ids, shares, strict=True)
        if len({expert for expert, _ in chosen}) < len(chosen):
            raise ValueError(
                f"token {token} uses an expert of layer {layer} twice; where numbers begin again, "
                "a column or key 'seq' tells the sequences apart"
            )

    def trace(self, n_expert: int | None) -> Trace:
        tokens = [[seq[number] for number in sorted(seq)] for seq in self._sequences.values()]
        flat = [token for sequence in tokens for token in sequence]
        layers = sorted({layer for token in flat for layer in token.layers})
        if not layers:
            raise ValueError("it has no routes")
        k = max(len(chosen) for token in flat for chosen in token.layers.values())
        if len(flat) * len(layers) * max(k, 1) > _MOST:
            raise ValueError(
                f"{len(flat)} tokens, {len(layers)} layers and {k} experts are too many"
            )
        shape = (len(flat), len(layers), max(k, 1))
        experts = np.full(shape, NO_EXPERT, np.uint16)
        probs = np.full(shape, np.nan, np.float16)
        column = {layer: i for i, layer in enumerate(layers)}
        for t, token in enumerate(flat):
            for layer, chosen in token.layers.items():
                for i, (expert, weight) in enumerate(chosen):
                    experts[t, column[layer], i] = expert
                    probs[t, column[layer], i] = weight
        known = experts[experts != NO_EXPERT]
        most = int(known.max()) + 1 if known.size else 1
        if n_expert is not None and n_expert < most:
            raise ValueError(f"it uses expert {most - 1} of {n_expert}")
        phases = [token.phase for token in flat]
        return Trace(
            experts,
            np.cumsum([0, *map(len, tokens)]).astype(np.int64),
            np.full(len(layers), n_expert or most, np.int32),
            np.array(layers, np.int32),
            None if np.isnan(probs).all() else probs,
            "",
            None if None in phases else np.array(phases, np.uint8),
        )


def import_routes(path: Path, n_expert: int | None = None) -> Trace:
    """Reads routes of one of the kinds above; `n_expert` is for files that do not say it.

    Raises TraceError for a file that is none of them, naming the line.
    """
    routes = _Routes()
    said: int | None = None
    lines = [0]  # read so far
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if first.lstrip()[:1] in ("{", "["):
                _read_jsonl(_counted(file, lines), routes)
            else:
                said = _read_csv(_counted(file, lines), routes)
        return routes.trace(n_expert or said)
    except OSError as error:
        raise TraceError(
            f"cannot read {path}: {error.strerror or error}", "check the path"
        ) from error
    except (ValueError, KeyError, TypeError, csv.Error, OverflowError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(
            f"{path.name}: these are no routes, line {lines[0]}: {what}",
            "docs/POLICIES.md has the layouts that can be imported",
        ) from error


def _counted(file: Iterable[str], lines: list[int]) -> Iterator[str]:
    for line in file:
        lines[0] += 1
        if line.strip():
            yield line


def _read_csv(file: Iterable[str], routes: _Routes) -> int | None:
    """Adds every row; returns the number of experts where it is said."""
    said: int | None = None
    header: list[str] | None = None
    names: dict[str, str] = {}
    wide: list[str] = []
    for line in file:
        if line.startswith("#"):
            if count := _COUNT.search(line):
                said = int(count[1])
            continue
        cells = next(csv.reader([line], skipinitialspace=True))
        if header is None:
            header = [cell.strip().lower() for cell in cells]
            names = _known(header)
            wide = sorted((h for h in header if _COLUMN.fullmatch(h)), key=_column_number)
            _ = names["token"], names["layer"]
            if not wide:
                _ = names.get("expert") or names["experts"]
            continue
        if len(cells) != len(header):
            raise ValueError(f"{len(cells)} cells under {len(header)} columns")
        _add_row(dict(zip(header, (c.strip() for c in cells), strict=True)), names, wide, routes)
    return said


def _column_number(name: str) -> int:
    match = _COLUMN.fullmatch(name)
    return int(match[1]) if match else -1


def _known(header: Iterable[str]) -> dict[str, str]:
    """Which of these names stands for what."""
    there = list(header)
    return {
        meaning: found
        for meaning, names in _NAMES.items()
        if (found := next((name for name in names if name in there), None)) is not None
    }


def _add_row(row: dict[str, str], names: dict[str, str], wide: list[str], routes: _Routes) -> None:
    weights: list[float] | None = None
    slot: int | None = None
    weight = row[names["weight"]] if "weight" in names else ""
    if "expert" in names:
        experts = [int(row[names["expert"]])]
        slot = int(row[names["slot"]]) if "slot" in names else None
        weights = [float(weight)] if weight else None
    elif "experts" in names:
        experts = [int(cell) for cell in _list(row[names["experts"]])]
        weights = [float(cell) for cell in _list(weight)] if weight else None
    else:
        experts = [int(row[name]) for name in wide if row[name]]
    routes.add(
        row[names["seq"]] if "seq" in names else "",
        int(row[names["token"]]),
        int(row[names["layer"]]),
        experts,
        weights,
        _phase(row[names["phase"]]) if "phase" in names else None,
        slot,
    )


def _list(cell: str) -> list[str]:
    return [word for word in re.split(r"[\s,;|\[\]]+", cell) if word]


def _phase(value: object) -> int:
    known = _PHASES.get(str(value).strip().lower())
    if known is None:
        raise ValueError(f"'{value}' is no phase")
    return known


def _read_jsonl(file: Iterable[str], routes: _Routes) -> None:
    n_tokens: dict[str, int] = {}
    for line in file:
        value = json.loads(line)
        if isinstance(value, list):
            value = {"experts": value}
        if not isinstance(value, dict):
            raise ValueError("neither an object nor a list")
        _add_object(value, routes, n_tokens)


def _add_object(value: dict[str, Any], routes: _Routes, n_tokens: dict[str, int]) -> None:
    names = _known(value)
    seq = str(value[names["seq"]]) if "seq" in names else ""
    phase = _phase(value[names["phase"]]) if "phase" in names else None
    experts = value[names["experts"]]
    weights = value[names["weight"]] if "weight" in names else None
    if not isinstance(experts, list):
        raise ValueError("'experts' is no list")
    if "layer" in names:
        token = _whole(value[names["token"]])
        layer = _whole(value[names["layer"]])
        routes.add(seq, token, layer, map(_whole, experts), weights, phase)
        return
    token = _whole(value[names["token"]]) if "token" in names else n_tokens.get(seq, 0)
    n_tokens[seq] = token + 1
    for layer, ids in enumerate(experts):
        shares = None if weights is None else weights[layer]
        routes.add(seq, token, layer, map(_whole, ids), shares, phase)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value

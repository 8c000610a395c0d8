"""Two files of rows against each other: only what was measured under the same conditions."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_gguf.bench.arm import STOCK_DEFAULT
from flashmoe_gguf.bench.gate import OutputDiffersError
from flashmoe_gguf.errors import OptionError

Row = dict[str, Any]

# What must agree, but for the compared keys: everything that a figure may depend on.
CONDITIONS = (
    "fingerprint",
    "model_bytes",
    "kind",
    "limit_bytes",
    "limiter",
    "cold",
    "layout",
    "policy",
    "policy_file",
    "io_mode",
    "slots",
    "lookahead",
    "workers",
    "request_bytes",
    "n_gpu_layers",
    "n_ctx",
    "n_threads",
    "n_ubatch",
    "n_prompt",
    "n_warmup_asked",
    "n_gen_asked",
    "seconds_cap",
    "again",
    "version",
    "llama_cpp_version",
    "patch_hash",
    "cmake_args",
    "cpu",
    "cpu_count",
    "memory_bytes",
    "kernel",
    "file_system",
    "disk",
)
# A packed file is larger than its source, and nothing else.
_FOLLOWS = {"layout": ("model_bytes",)}


@dataclass(frozen=True)
class Pair:
    """The rows of one arm in both files, which differ in the compared keys alone."""

    arm: str
    other_arm: str
    limit_bytes: int | None
    first: tuple[Row, ...]
    second: tuple[Row, ...]

    def medians(self, key: str) -> tuple[float | None, float | None]:
        """Of one figure, in each file."""
        return _median(self.first, key), _median(self.second, key)


@dataclass(frozen=True)
class Comparison:
    """`alone`: arms of one of the files that the other one does not have at all."""

    pairs: tuple[Pair, ...]
    alone: tuple[str, ...]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file. Raises OptionError for a file that holds none."""
    try:
        lines = path.read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise OptionError(
            f"cannot read {path}: {error.strerror or error}", "check the path"
        ) from error
    except ValueError:
        raise _no_rows(path) from None
    if not rows or not all(isinstance(row, dict) and "arm" in row for row in rows):
        raise _no_rows(path)
    return rows


def _no_rows(path: Path) -> OptionError:
    return OptionError(
        f"{path.name} does not hold the rows of a bench", "make them with: flashmoe bench --jsonl"
    )


def compare(first: Sequence[Row], second: Sequence[Row], keys: Sequence[str] = ()) -> Comparison:
    """Pairs the rows of two files.

    Raises OptionError for a key that is no condition, and when an arm of both files was measured
    under conditions that differ in more than `keys`; OutputDiffersError when a pair gave different
    tokens for as many steps.
    """
    for key in keys:
        if key not in CONDITIONS:
            known = ", ".join(CONDITIONS)
            raise OptionError(f"'{key}' is no condition of a row", f"one of {known}")
    free = {*keys, *(f for key in keys for f in _FOLLOWS.get(key, ()))}
    ours, theirs = _grouped(first, free), _grouped(second, free)
    pairs = [_pair(rows, theirs[identity]) for identity, rows in ours.items() if identity in theirs]
    lonely = [rows for identity, rows in ours.items() if identity not in theirs]
    lonely_there = [rows for identity, rows in theirs.items() if identity not in ours]
    for rows in lonely:
        same_arm = [r for r in lonely_there if r[0]["arm"] == rows[0]["arm"]]
        candidates = same_arm or ([] if pairs else lonely_there)
        if candidates:
            raise _refusal(rows[0], [r[0] for r in candidates], free)
    return Comparison(
        tuple(pairs), tuple(sorted({str(r[0]["arm"]) for r in (*lonely, *lonely_there)}))
    )


def _grouped(rows: Sequence[Row], free: set[str]) -> dict[tuple[Any, ...], list[Row]]:
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        identity = tuple(str(row.get(key)) for key in CONDITIONS if key not in free)
        grouped.setdefault(identity, []).append(row)
    return grouped


def _pair(first: Sequence[Row], second: Sequence[Row]) -> Pair:
    a, b = first[0], second[0]
    if a["kind"] != STOCK_DEFAULT:
        hashes: dict[int, str] = {}
        for row in (*first, *second):
            if row.get("token_hash") is None:
                continue  # it was killed
            steps = int(row["n_warmup"]) + int(row["n_gen"])
            if hashes.setdefault(steps, row["token_hash"]) != row["token_hash"]:
                raise OutputDiffersError(
                    f"the arm {a['arm']} gave different tokens in the two files",
                    "no speed is compared",
                )
    return Pair(a["arm"], b["arm"], a["limit_bytes"], tuple(first), tuple(second))


def _refusal(row: Row, candidates: Sequence[Row], free: set[str]) -> OptionError:
    def differing(other: Row) -> list[str]:
        return [k for k in CONDITIONS if k not in free and row.get(k) != other.get(k)]

    nearest = min(candidates, key=lambda other: len(differing(other)))
    words = [f"{k} ({row.get(k)} and {nearest.get(k)})" for k in differing(nearest)]
    return OptionError(
        f"the rows of {row['arm']} differ in {', '.join(words)}",
        f"measure both alike, or compare by it: --key {differing(nearest)[0]}",
    )


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return statistics.median(values) if values else None

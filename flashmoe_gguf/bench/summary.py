"""Rows of several rounds as one line per arm: medians, their spread, and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_gguf.bench.arm import STOCK

Row = dict[str, Any]
Number = Callable[[Row], float | None]


@dataclass(frozen=True)
class Spread:
    """The median of a figure over rounds, and its extremes."""

    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Line:
    """One arm under one limit. `ratio`: its median tok/s over that of `stock` under the same limit,
    None without one; `step_ratio`: over its own under the limit before, in a sweep.
    """

    arm: str
    limit_bytes: int | None
    rows: tuple[Row, ...]
    failed: str | None
    ratio: float | None = None
    step_ratio: float | None = None

    def spread(self, key: str) -> Spread | None:
        """Of one key of the rows; None where none of them has it."""
        values = [float(row[key]) for row in self.rows if row.get(key) is not None]
        if not values or self.failed:
            return None
        return Spread(statistics.median(values), min(values), max(values))

    def median(self, key: str) -> float | None:
        """Of one key of the rows."""
        spread = self.spread(key)
        return spread.median if spread else None


def summarise(rows: Sequence[Row]) -> list[Line]:
    """A line per arm and limit, in the order of their first rows."""
    grouped: dict[tuple[str, int | None], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["arm"], row["limit_bytes"]), []).append(row)
    plain = {key: _line(*key, of_arm) for key, of_arm in grouped.items()}
    limits = sorted({limit for _, limit in plain if limit is not None})
    lines = []
    for (arm, limit), line in plain.items():
        at = limits.index(limit) if limit is not None else 0
        before = plain.get((arm, limits[at - 1])) if at else None
        lines.append(
            Line(
                arm,
                limit,
                line.rows,
                line.failed,
                _ratio(line, plain.get((STOCK, limit))),
                _ratio(line, before),
            )
        )
    return lines


def _line(arm: str, limit: int | None, rows: Sequence[Row]) -> Line:
    failed = next((str(row["failed"]) for row in rows if "failed" in row), None)
    return Line(arm, limit, tuple(rows), failed)


def _ratio(line: Line, other: Line | None) -> float | None:
    speed = line.median("decode_tok_s")
    base = other.median("decode_tok_s") if other is not None else None
    return speed / base if speed is not None and base else None


def worst_step(lines: Sequence[Line], arm: str) -> Line | None:
    """Where an arm of a sweep loses most against the limit before; None without a sweep."""
    steps = [line for line in lines if line.arm == arm and line.step_ratio is not None]
    return min(steps, key=lambda line: line.step_ratio or 0.0, default=None)


_FIGURES = (
    "decode_tok_s",
    "prefill_tok_s",
    "prefill_again_tok_s",
    "load_seconds",
    "first_token_seconds",
    "hit_rate",
    "wait_share",
    "bytes_read",
    "bytes_written",
    "read_amplification",
    "major_faults",
    "peak_bytes",
    "swap_bytes",
    "roofline_tok_s",
    "roofline_share",
    "efficiency",
)


def as_dict(lines: Sequence[Line]) -> list[Row]:
    """What `--json` prints of the arms: [median, least, most] of each figure, None if unknown."""
    found = []
    for line in lines:
        figures = {key: line.spread(key) for key in _FIGURES}
        found.append(
            {
                "arm": line.arm,
                "limit_bytes": line.limit_bytes,
                "failed": line.failed,
                "rounds": len(line.rows),
                "n_gen": line.median("n_gen"),
                "n_slots": line.median("n_slots"),
                "ratio_to_stock": line.ratio,
                "ratio_to_limit_before": line.step_ratio,
                **{k: [s.median, s.least, s.most] if s else None for k, s in figures.items()},
            }
        )
    return found

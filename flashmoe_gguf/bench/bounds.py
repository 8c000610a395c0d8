"""How near a run came to what the machine allows: the roofline and the pipeline's efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashmoe_gguf.bench.arm import STOCK
from flashmoe_gguf.bench.belady import belady_miss_bytes
from flashmoe_gguf.trace import Trace

Row = dict[str, Any]


def add_bounds(
    rows: Sequence[Row],
    bandwidth: float | None,
    trace: Trace | None,
    expert_bytes: Mapping[int, int],
) -> None:
    """Adds to each row of one round, None where a term is not known:

    - in_ram_seconds: per token of stock llama.cpp with everything in memory, in this round.
    - belady_miss_bytes: per token, with this row's slots on this routing (see `belady`).
    - roofline_tok_s: 1 / max(in_ram_seconds, belady_miss_bytes / bandwidth); that of a stock row is
      the one of the first streamed row under the same limit.
    - roofline_share: of it, what the row reached.
    - efficiency: max(in_ram_seconds, own missed bytes / bandwidth) / seconds per token.

    `expert_bytes` by layer; `bandwidth` in bytes per second.
    """
    good = [row for row in rows if "failed" not in row]
    in_ram = [r for r in good if r["kind"] == STOCK and r["limit_bytes"] is None]
    compute = 1.0 / in_ram[0]["decode_tok_s"] if in_ram else None
    for row in rows:
        row["in_ram_seconds"] = compute
        row["belady_miss_bytes"] = _belady(row, trace, expert_bytes)
        row["roofline_tok_s"] = _roofline(compute, row["belady_miss_bytes"], bandwidth)
        row["efficiency"] = _efficiency(row, compute, bandwidth)
    for row in rows:
        if row["roofline_tok_s"] is None:
            row["roofline_tok_s"] = next(
                (
                    r["roofline_tok_s"]
                    for r in rows
                    if r["limit_bytes"] == row["limit_bytes"] and r["roofline_tok_s"] is not None
                ),
                None,
            )
        speed, roof = row.get("decode_tok_s"), row["roofline_tok_s"]
        row["roofline_share"] = speed / roof if speed is not None and roof else None


def _belady(row: Row, trace: Trace | None, expert_bytes: Mapping[int, int]) -> float | None:
    slots = row.get("group_slots")
    if trace is None or not slots or len(slots) != len(expert_bytes):
        return None  # two blocks of experts in a layer
    by_layer = dict(zip(expert_bytes, slots, strict=True))
    first = int(row["n_prompt"]) + int(row["n_warmup"])
    return belady_miss_bytes(trace, by_layer, expert_bytes, first, int(row["n_gen"]))


def _roofline(
    compute: float | None, miss_bytes: float | None, bandwidth: float | None
) -> float | None:
    if compute is None or miss_bytes is None or not bandwidth:
        return None
    return 1.0 / max(compute, miss_bytes / bandwidth)


def _efficiency(row: Row, compute: float | None, bandwidth: float | None) -> float | None:
    missed = row.get("missed_bytes")
    if compute is None or missed is None or not bandwidth:
        return None
    least = max(compute, missed / row["n_gen"] / bandwidth)
    return float(least * row["decode_tok_s"])

"""The cache's counters as rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.screen import Rows

if TYPE_CHECKING:
    from flashmoe_gguf.regret import Regret
    from flashmoe_gguf.stats import Stats


def stats_rows(stats: Stats, *, budgeted: bool) -> Rows:
    """What `/stats` shows: since the model was loaded. `budgeted`: as for `plan_rows`."""
    waits = f"{stats.waits} times, {stats.wait_seconds:.2f} s"
    rows = [
        ("tokens", f"{stats.tokens} computed"),
        (
            "hits",
            f"{_share(stats.decode_hits, stats.decode_lookups)} in decode, "
            f"{_share(stats.hits, stats.lookups)} in all",
        ),
        (
            "read",
            f"{format_size(stats.bytes_read)} in {stats.reads} requests, "
            f"{format_size(stats.missed_bytes)} of it experts",
        ),
        ("waited", f"compute threads slept for experts {waits}"),
        (
            "cache",
            f"{stats.inserted} experts came, {stats.evicted} left, "
            f"{stats.bypassed} were used without being kept",
        ),
        ("policy", stats.policy + (f": {stats.policy_reason}" if stats.policy_reason else "")),
        *_python_policy(stats),
        (
            "memory",
            f"experts {format_size(stats.resident_bytes)} of {format_size(stats.slot_bytes)}, "
            f"dense {format_size(stats.dense_bytes)}, ring {format_size(stats.ring_bytes)}"
            + (f", budget {format_size(stats.budget_bytes)}" if budgeted else ""),
        ),
        ("I/O", stats.io_mode),
    ]
    if stats.guesses:
        rows.append(("guessed", f"{stats.guesses} experts ahead, {stats.guesses_used} were used"))
    if stats.given_back_bytes:
        rows.append(("given back", f"{format_size(stats.given_back_bytes)}: memory is short"))
    if stats.regret is not None:
        rows.append(("regret", regret_text(stats.regret)))
    if stats.failed_loads:
        rows.append(("failed", f"{stats.failed_loads} reads"))
    return rows


def regret_text(regret: Regret) -> str:
    """The gauge in one line."""
    closed = regret.gap_closed
    return (
        f"last {regret.tokens} tokens {regret.actual:.1%} hits; "
        f"lru {regret.lru:.1%}, dlfu {regret.dlfu:.1%}, the best possible {regret.belady:.1%}"
        + (f" ({closed:.0%} of the way)" if closed is not None else "")
    )


def _python_policy(stats: Stats) -> Rows:
    """What a policy written in Python costs, and why it failed; nothing for others."""
    rows = []
    if stats.policy_seconds:
        rows.append(("", f"its Python code took {stats.policy_ms_per_token:.2f} ms per token"))
    if stats.policy_failure:
        rows.append(("", f"it failed, {stats.policy_failure}"))
    return rows


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

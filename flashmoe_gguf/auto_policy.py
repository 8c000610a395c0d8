"""`policy="auto"`: the policy that did best on this model's own last tokens.

The routing of the last decoded tokens is kept in the user's cache directory when a model is closed,
and replayed with the slots of the new plan when it is loaded again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import simulate
from flashmoe_gguf.cache_dir import cache_dir
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.trace import Trace, read_trace, write_trace

DEFAULT = "learned"
# In order of preference; the first is taken unless another was better by more than this.
CANDIDATES = ("learned", "dlfu", "lru")
MARGIN = 0.002
# It keeps a missing expert out of the cache where the others are worth more, and so it is replayed.
BYPASSES = "learned"
# Fewer tokens than this say nothing.
LEAST_TOKENS = 256


@dataclass(frozen=True)
class Choice:
    """What `auto` picked, and why, in one line."""

    policy: str
    reason: str


def recent_file(fingerprint: str) -> Path:
    """Where the last routing of a model is kept."""
    return cache_dir() / "routing" / f"{fingerprint}.npz"


def keep_recent(
    fingerprint: str,
    experts: npt.NDArray[np.uint16],
    n_expert: npt.NDArray[np.int32],
    layers: npt.NDArray[np.int32],
) -> None:
    """Keeps routing [n_tokens, n_groups, k] for the next time. A cache that cannot be written is
    left as it is.
    """
    if len(experts) < LEAST_TOKENS:
        return
    path = recent_file(fingerprint)
    with contextlib.suppress(OSError, TraceError):
        trace = Trace(
            experts, np.array([0, len(experts)]), n_expert, layers, fingerprint=fingerprint
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(path, trace)


def choose_by_replay(
    fingerprint: str, n_expert: npt.NDArray[np.int32], n_slots: npt.NDArray[np.int32]
) -> Choice:
    """Replays the model's last routing with these slots [n_groups]; learned where there is none."""
    path = recent_file(fingerprint)
    try:
        trace = read_trace(path)
    except TraceError:
        return Choice(DEFAULT, "no routing of this model is known yet")
    if not np.array_equal(trace.n_expert, n_expert) or trace.n_tokens < LEAST_TOKENS:
        return Choice(DEFAULT, "no routing of this model is known yet")
    rates = {}
    for policy in CANDIDATES:
        counts = simulate(
            policy,
            trace.experts,
            trace.seq[:-1],
            n_expert,
            n_slots,
            bypass=policy == BYPASSES,
            count_from=trace.n_tokens // 4,
        )
        rates[policy] = counts.hits.sum() / max(counts.lookups.sum(), 1)
    best = DEFAULT
    for policy in CANDIDATES[1:]:
        if rates[policy] > rates[best] + MARGIN:
            best = policy
    others = ", ".join(f"{p} {rates[p]:.1%}" for p in CANDIDATES if p != best)
    return Choice(
        best, f"{rates[best]:.1%} hits on the last {trace.n_tokens:,} tokens, against {others}"
    )

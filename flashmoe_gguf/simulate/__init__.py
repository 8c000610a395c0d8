"""Policies on recorded routing, without the model: hit rates, evictions, what had to come back."""

from __future__ import annotations

from flashmoe_gguf.simulate.replay import (
    Replay,
    Size,
    expert_bytes_of,
    half,
    parse_sizes,
    policies_to_run,
    reference,
    replay,
    replay_all,
)

__all__ = [
    "Replay",
    "Size",
    "expert_bytes_of",
    "half",
    "parse_sizes",
    "policies_to_run",
    "reference",
    "replay",
    "replay_all",
]

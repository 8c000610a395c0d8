"""`n_ubatch="auto"`: more prompt tokens at once where reading experts is what takes time.

A prefill reads the experts that have no slot once per ubatch, nearly all of them. With twice the
tokens in a ubatch a prompt reads half as much. Larger ubatches take memory from the cache, so they
are chosen only where reading dominates. The results are those of llama.cpp with the same ubatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

DEFAULT_UBATCH = 512
MOST_UBATCH = 2048
# A drive that gives 1.6 GB/s and cores that compute 200 tokens/s in a prefill are even at this.
BYTES_PER_TOKEN = 8 << 20
# Compute buffers may take this share of the budget.
BUFFER_SHARE = 1 / 8


def ubatch_at_most(kwargs: Mapping[str, Any]) -> int:
    """Tokens of a ubatch by llama_cpp.Llama's arguments; of "auto" the most that it can be."""
    n_ubatch = kwargs.get("n_ubatch", DEFAULT_UBATCH)
    n_ubatch = MOST_UBATCH if n_ubatch == "auto" else min(n_ubatch, kwargs.get("n_batch", 512))
    return min(n_ubatch, kwargs.get("n_ctx", 512) or 512)


def ubatch_that_pays(
    missing_bytes: int, n_ctx: int, ram_bytes: int, buffer_bytes: Callable[[int], int]
) -> int:
    """Tokens per ubatch: 512, or up to 2048 while each would still read more than 8 MiB.

    missing_bytes: of experts that the budget cannot hold. buffer_bytes: compute buffers by ubatch.
    """
    ubatch = DEFAULT_UBATCH
    while (
        ubatch < MOST_UBATCH
        and ubatch < n_ctx
        and missing_bytes > ubatch * BYTES_PER_TOKEN
        and buffer_bytes(2 * ubatch) <= ram_bytes * BUFFER_SHARE
    ):
        ubatch *= 2
    return min(ubatch, n_ctx)

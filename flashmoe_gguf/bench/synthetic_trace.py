"""An expert-routing trace out of nothing, for when no recorded one is at hand.

It has the two properties a cache lives from: consecutive tokens share experts,
and some experts are more popular than others. It is no substitute for a real
trace when policies are ranked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import OptionError


def synthetic_trace(
    n_tokens: int,
    n_layer: int,
    n_expert: int,
    top_k: int,
    *,
    overlap: float = 0.4,
    skew: float = 0.6,
    seed: int = 0,
) -> npt.NDArray[np.uint16]:
    """Return `experts` [n_tokens, n_layer, top_k], distinct in each row, in random rank order.

    overlap: expected share of a token's experts that the token before it used too, kept as
        long as there are enough other experts to choose from (n_expert >= 2 * top_k).
    skew: the expert of popularity rank r is drawn with weight r ** -skew (0: all alike);
        each layer has its own order of popularity.

    Raises OptionError for impossible sizes or an overlap outside 0..1.
    """
    if min(n_tokens, n_layer, top_k) < 1 or n_expert < top_k:
        raise OptionError(
            f"no trace of {n_tokens} tokens, {n_layer} layers, top-{top_k} of {n_expert} experts",
            "every size must be at least 1 and top_k at most n_expert",
        )
    if not 0.0 <= overlap <= 1.0:
        raise OptionError(f"overlap {overlap} is not a share", "give a number from 0 to 1")
    rng = np.random.default_rng(seed)
    weight = np.arange(1, n_expert + 1, dtype=np.float64) ** -skew
    log_weight = rng.permuted(np.tile(np.log(weight), (n_layer, 1)), axis=1)

    layers = np.arange(n_layer)[:, None]
    experts = np.empty((n_tokens, n_layer, top_k), np.uint16)
    before: npt.NDArray[np.uint16] | None = None
    for token in range(n_tokens):
        # Gumbel noise: the k largest are a draw without replacement by weight.
        score = log_weight + rng.gumbel(size=(n_layer, n_expert))
        if before is not None:
            # Kept ones come first, dropped ones only if nothing else is left.
            kept = rng.random((n_layer, top_k)) < overlap
            score[layers, before] += np.where(kept, 1e6, -1e6)
        chosen = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
        before = rng.permuted(chosen, axis=1).astype(np.uint16)
        experts[token] = before
    return experts

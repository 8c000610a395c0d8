"""Embeddings and routers by which the tokens of a replay model choose the wished experts.

Each expert has a direction in the routing part of the residual stream; its router
logit is the stream's component along it. While there are enough dimensions the
directions are orthogonal and every wish comes true. With more experts than
dimensions they are nearly orthogonal: random rows of a tight frame (its columns
are orthonormal), and a token's embedding is searched for that puts the wished
experts at their levels and all others below a limit. That is a convex problem; for
random directions and 1 expert of 16 wished it has a solution up to about five
experts per dimension (Gardner 1988, "The space of interactions in neural network
models", the capacity for sparse patterns). Where there is none, the experts that
the model really chooses are recorded, and the search goes on until they are apart
from the rest by more than the rounding of any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import OptionError

Experts = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.float32]

ROUTER_GAIN = 2.0
# Router logits of the wished experts, by rank, before the gain; those of others stay below
# the limit. Lower limits leave no solution for 48 x 128 experts at 2048 dimensions.
_FIRST_LEVEL, _LAST_LEVEL = 1.0, 0.6
_LIMIT = 0.5
# The gap below the chosen experts that is asked for, that is tried for where the wishes cannot
# be had, and without which a model is refused: logits that are closer might change places with
# the order in which a kernel sums. Float32 rounding of such a sum is about 1e-6.
_ENOUGH_GAP, _SETTLED_GAP, MIN_GAP = 0.03, 0.002, 0.0001
# Experts per dimension beyond which next to nothing is left of the wishes.
MAX_CROWDING = 8
_MAX_ITERATIONS = 120
_SETTLE_ROUNDS = 5
# Layers are solved in groups of about this many dimensions: fewer cost less, but make the
# groups that happen to be hard harder.
_GROUP_WIDTH = 448
_TOKENS_AT_ONCE = 512


@dataclass(frozen=True)
class Routing:
    """How the tokens of a replay model route.

    - embedding [n_tokens, routing width] float16: the routing part of the embeddings.
    - directions [n_layer, n_expert, routing width] float32, or None: one dimension for each
      expert, in order.
    - experts [n_tokens, n_layer, k] uint16: what each token really chooses, by falling logit.
    - wished_share: share of the wished experts among them.
    - gap: the smallest distance of a chosen expert's logit from that of one not chosen, before
      the gain.
    """

    embedding: npt.NDArray[np.float16]
    directions: Floats | None
    experts: npt.NDArray[np.uint16]
    wished_share: float
    gap: float

    def router(self, layer: int, n_expert: int) -> Floats:
        """The router's rows [n_expert, routing width] of a layer."""
        if self.directions is not None:
            rows: Floats = self.directions[layer] * np.float32(ROUTER_GAIN)
            return rows
        rows = np.zeros((n_expert, self.embedding.shape[1]), np.float32)
        experts = np.arange(n_expert)
        rows[experts, layer * n_expert + experts] = ROUTER_GAIN
        return rows


def orthogonal_routing(wished: Experts, n_expert: int) -> Routing:
    """Routing with a dimension for each expert of each layer: all wishes come true."""
    n_tokens, n_layer, top_k = wished.shape
    rows = np.zeros((n_tokens, n_layer * n_expert), np.float16)
    columns = _columns(wished, n_expert)
    np.put_along_axis(rows, columns, np.tile(_levels(top_k), n_layer)[None], axis=1)
    return Routing(rows, None, wished.astype(np.uint16), 1.0, _LAST_LEVEL)


def crowded_routing(wished: Experts, n_expert: int, width: int, seed: int) -> Routing:
    """Routing of more experts than its `width` dimensions; see the module's head.

    Raises OptionError where the choice of experts would depend on rounding.
    """
    n_tokens, n_layer, top_k = wished.shape
    groups = _groups(n_layer, width)
    embedding = np.zeros((n_tokens, width), np.float16)
    directions = np.zeros((n_layer, n_expert, width), np.float32)
    chosen = np.empty((n_tokens, n_layer, top_k), np.uint16)
    gap = np.inf
    for number, (layers, part) in enumerate(groups):
        rng = np.random.Generator(np.random.SFC64([seed, 4, number]))
        rows = (layers.stop - layers.start) * n_expert
        n_dims = part.stop - part.start
        frame = np.linalg.qr(rng.standard_normal((rows, n_dims)))[0].astype(np.float32)
        for first in range(0, n_tokens, _TOKENS_AT_ONCE):
            tokens = slice(first, first + _TOKENS_AT_ONCE)
            solved, obtained, gaps = _settled(wished[tokens, layers], frame, n_expert)
            embedding[tokens, part], chosen[tokens, layers] = solved, obtained
            gap = min(gap, float(gaps.min()))
        directions[layers, :, part] = frame.reshape(-1, n_expert, n_dims)
    mine = np.zeros((n_tokens, n_layer, n_expert), bool)
    np.put_along_axis(mine, wished.astype(np.int64), True, axis=2)
    share = np.take_along_axis(mine, chosen.astype(np.int64), axis=2).mean()
    if gap < MIN_GAP:
        raise OptionError(
            f"the routing of {n_layer} layers of {n_expert} experts in {width} dimensions is not "
            f"clear of rounding (share of the trace obtained: {share:.0%})",
            "use a wider model or fewer layers",
        )
    return Routing(embedding, directions, chosen, float(share), gap)


def _groups(n_layer: int, width: int) -> list[tuple[slice, slice]]:
    """Which layers share which dimensions: each group has less of them than experts."""
    count = min(n_layer, max(1, width // _GROUP_WIDTH))
    layers = [n_layer * i // count for i in range(count + 1)]
    groups, first_dim = [], 0
    for first, end in pairwise(layers):
        n_dims = width * (end - first) // n_layer
        groups.append((slice(first, end), slice(first_dim, first_dim + n_dims)))
        first_dim += n_dims
    return groups


def _settled(
    wished: Experts, frame: Floats, n_expert: int
) -> tuple[npt.NDArray[np.float16], Experts, Floats]:
    """Embeddings, the experts they choose and the gaps below these, all clear of rounding.

    Wishes that cannot be had together give way to what came out, which is then pulled apart.
    """
    target = wished
    start: Floats | None = None
    for _ in range(_SETTLE_ROUNDS):
        start = _solve(target, frame, n_expert, start)
        rounded = start.astype(np.float16)
        logits = rounded.astype(np.float32) @ frame.T
        obtained, gaps = _top(logits.reshape(*wished.shape[:2], n_expert), wished.shape[2])
        if gaps.min() >= _SETTLED_GAP:
            break
        same = (np.sort(obtained, axis=2) == np.sort(target, axis=2)).all(axis=2)
        target = np.where(same[:, :, None], target, obtained)
    return rounded, obtained, gaps


def _solve(wished: Experts, frame: Floats, n_expert: int, start: Floats | None) -> Floats:
    """Embeddings [tokens, dimensions] of least squared violation, by accelerated projection.

    Each step moves the logits into what is allowed and projects them back onto what an
    embedding can give (the frame is tight, so that its transpose is its inverse); Nesterov's
    momentum with restarts. A token is done when all its wishes hold by _ENOUGH_GAP.
    """
    n_tokens, n_layer, top_k = wished.shape
    columns = _columns(wished, n_expert)
    levels = np.tile(_levels(top_k).astype(np.float32), n_layer)[None]
    result = np.zeros((n_tokens, frame.shape[1]), np.float32) if start is None else start.copy()
    active = np.arange(n_tokens)
    here, ahead, speed = result.copy(), result.copy(), 1.0
    for iteration in range(_MAX_ITERATIONS):
        logits = ahead @ frame.T
        picked = np.take_along_axis(logits, columns[active], axis=1)
        np.put_along_axis(logits, columns[active], -np.inf, axis=1)
        if iteration % 8 == 7:
            by_rank = picked.reshape(-1, n_layer, top_k)
            others = logits.reshape(-1, n_layer, n_expert).max(axis=2)
            apart = (by_rank.min(axis=2) - others).min(axis=1) >= _ENOUGH_GAP
            in_order = (np.diff(by_rank, axis=2) < 0).all(axis=(1, 2))
            done = apart & in_order
            result[active[done]] = ahead[done]
            left = ~done
            if not left.any():
                return result
            active, here, ahead = active[left], here[left], ahead[left]
            logits, picked = logits[left], picked[left]
        # From here on `logits` holds how far each is from what is allowed.
        logits -= _LIMIT
        np.maximum(logits, 0, out=logits)
        np.put_along_axis(logits, columns[active], picked - levels, axis=1)
        there = ahead - logits @ frame
        if float(np.vdot(ahead - there, there - here)) > 0:
            speed = 1.0
        faster = (1 + (1 + 4 * speed * speed) ** 0.5) / 2
        ahead = there + np.float32((speed - 1) / faster) * (there - here)
        here, speed = there, faster
    result[active] = here
    return result


def _top(logits: Floats, top_k: int) -> tuple[Experts, Floats]:
    """The top-k experts [tokens, layers, k] in order, and the gap [tokens, layers] below them."""
    if top_k == logits.shape[2]:
        return np.argsort(-logits, axis=2), np.full(logits.shape[:2], np.inf, np.float32)
    first = np.argpartition(-logits, top_k, axis=2)[:, :, : top_k + 1]
    values = np.take_along_axis(logits, first, axis=2)
    order = np.argsort(-values, axis=2)
    values = np.take_along_axis(values, order, axis=2)
    experts = np.take_along_axis(first, order, axis=2)[:, :, :top_k]
    return experts, values[:, :, top_k - 1] - values[:, :, top_k]


def _columns(wished: Experts, n_expert: int) -> npt.NDArray[np.int64]:
    """The direction [tokens, layers * k] of each wished expert."""
    first = np.arange(wished.shape[1])[:, None] * n_expert
    return (first + wished.astype(np.int64)).reshape(len(wished), -1)


def _levels(top_k: int) -> npt.NDArray[np.float16]:
    return np.linspace(_FIRST_LEVEL, _LAST_LEVEL, top_k).astype(np.float16)

"""Turns one dense feed-forward block into shared neurons and routed experts.

Pure functions on arrays: which neurons are always on, how the rest are grouped, the linear router
that guesses which groups matter for a token, and the down projection refitted to make up for the
groups that are left out. Axis letters: n tokens, d model width, f neurons, e experts, w neurons
per expert.

The idea of splitting a trained dense FFN by co-activation is MoEfication (Zhang et al.,
arXiv 2110.01786); always-on shared neurons and the least-squares refit are what make it usable
without training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmoe_gguf.demo.source import Floats

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Sizes:
    """How a block is cut: `n_shared` neurons always on, the rest in `n_experts`, `top_k` used."""

    n_shared: int
    n_experts: int
    top_k: int


@dataclass(frozen=True)
class Split:
    """One split block. `shared` and `experts` index the dense block's neurons."""

    shared: Index  # [n_shared], ascending
    experts: Index  # [e, w]
    router: Floats  # [e, d]; small, so that softmax gives every expert nearly 1 / e
    down_shared: Floats  # [d, n_shared]
    down_experts: Floats  # [e, d, w]

    @property
    def order(self) -> Index:
        """Neurons in the order of the split block: shared ones, then expert by expert."""
        return np.concatenate([self.shared, self.experts.ravel()])


@dataclass(frozen=True)
class Measured:
    """One block seen on calibration tokens."""

    inputs: Floats  # [n, d], after the norm
    hidden: Floats  # [n, f], outputs of the dense block's neurons
    target: Floats  # [n, d], what the split block should add to the residual stream
    weight: Floats  # [n], how much an error at this token counts


# Ridge strengths, relative to the mean diagonal of the Gram matrix. Tuned on held-out text: the
# router is flat from 0.002 to 0.2; 1.5 beat 0.5 for the refit, with 10k calibration tokens.
_ROUTER_RIDGE = 0.01
_DOWN_RIDGE = 1.5
_CLUSTER_ROUNDS = 12
_CLUSTER_STRIDE = 2  # clustering needs fewer tokens than the fits do
# Largest router logit on calibration tokens: softmax then strays 1 % from uniform at the most.
_LOGIT_SCALE = 0.01


def split_block(measured: Measured, down: Floats, sizes: Sizes) -> Split:
    """Splits a block whose dense down projection is `down` [d, f]."""
    n_neurons = measured.hidden.shape[1]
    if (n_neurons - sizes.n_shared) % sizes.n_experts:
        raise ValueError(f"{n_neurons} neurons do not divide into {sizes}")
    size = np.abs(measured.hidden)
    size *= np.sqrt((down * down).sum(0))
    size *= measured.weight[:, None]
    shared, routed = most_active(size.mean(0), sizes.n_shared)
    sample = RidgeSolver(measured.inputs[::_CLUSTER_STRIDE], _ROUTER_RIDGE)
    similarity = predictable_similarity(size[::_CLUSTER_STRIDE, routed], sample)
    labels = balanced_clusters(similarity, sizes.n_experts)
    experts = routed[np.argsort(labels, kind="stable")].reshape(sizes.n_experts, -1)
    norms = output_norms(measured.hidden, down, experts)
    router = fit_router(norms, RidgeSolver(measured.inputs, _ROUTER_RIDGE))
    mask = top_k_mask(measured.inputs @ router.T, sizes.top_k)
    order = np.concatenate([shared, experts.ravel()])
    refitted = refit_down(
        measured, masked_features(measured.hidden, shared, experts, mask), down[:, order]
    )
    n_shared = sizes.n_shared
    return Split(
        shared=shared,
        experts=experts,
        router=router,
        down_shared=refitted[:, :n_shared],
        down_experts=np.ascontiguousarray(
            refitted[:, n_shared:].reshape(len(down), sizes.n_experts, -1).transpose(1, 0, 2)
        ),
    )


def split_output(inputs: Floats, hidden: Floats, split: Split, top_k: int) -> Floats:
    """What the split block adds to the residual stream, [n, d], from the dense block's neurons."""
    mask = top_k_mask(inputs @ split.router.T, top_k)
    features = masked_features(hidden, split.shared, split.experts, mask)
    routed = split.down_experts.transpose(1, 0, 2).reshape(len(split.down_shared), -1)
    return np.asarray(features @ np.concatenate([split.down_shared, routed], axis=1).T, np.float32)


class RidgeSolver:
    """Least squares from `inputs` [n, d], the Gram matrix made once for several targets."""

    def __init__(self, inputs: Floats, ridge: float) -> None:
        self.inputs = inputs
        self.gram = inputs.T @ inputs
        _add_ridge(self.gram, ridge)

    def solve(self, targets: Floats) -> Floats:
        """Coefficients [d, m] of targets [n, m]."""
        return np.asarray(np.linalg.solve(self.gram, self.inputs.T @ targets), np.float32)


def most_active(activity: Floats, n_shared: int) -> tuple[Index, Index]:
    """The `n_shared` largest of `activity` [f] and the others, both ascending."""
    order = np.argsort(-activity, kind="stable")
    return np.sort(order[:n_shared]), np.sort(order[n_shared:])


def predictable_similarity(size: Floats, solver: RidgeSolver) -> Floats:
    """How alike neurons' output powers are, as far as a linear router can see, [f, f].

    `size` [n, f] is each neuron's output norm. Correlates the *linear predictions* of its square:
    what the router cannot predict should not shape the experts.
    """
    power = size * size
    power -= power.mean(0)
    predicted = solver.inputs @ solver.solve(power)
    predicted -= predicted.mean(0)
    covariance = predicted.T @ predicted
    scale = 1.0 / np.sqrt(np.maximum(np.diag(covariance), np.float32(1e-20)))
    return np.asarray(covariance * scale * scale[:, None], np.float32)


def balanced_clusters(similarity: Floats, n_clusters: int) -> Index:
    """Labels [n] of equally large clusters of alike items; `similarity` [n, n] is a Gram matrix.

    Spherical k-means with capacities, started from items far from one another; keeps the best
    of a fixed number of rounds. Raises ValueError when n is not a multiple of `n_clusters`.
    """
    n = len(similarity)
    if n % n_clusters:
        raise ValueError(f"{n} items do not divide into {n_clusters} equal clusters")
    scores = similarity[:, _distant_items(similarity, n_clusters)]
    best, best_value = np.zeros(n, np.int64), -np.inf
    for _ in range(_CLUSTER_ROUNDS):
        labels = _assign(scores, n // n_clusters)
        members = np.zeros((n, n_clusters), np.float32)
        members[np.arange(n), labels] = 1
        to_cluster = similarity @ members
        within = (members * to_cluster).sum(0)
        value = float(within.sum())
        if value > best_value:
            best, best_value = labels, value
        scores = to_cluster / np.sqrt(np.maximum(within, np.float32(1e-9)))
    return best


def _distant_items(similarity: Floats, n_items: int) -> list[int]:
    chosen = [int(np.argmax(similarity.sum(1)))]
    nearest = similarity[chosen[0]].copy()
    while len(chosen) < n_items:
        nearest[chosen] = np.inf
        chosen.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, similarity[chosen[-1]])
    return chosen


def _assign(scores: Floats, capacity: int) -> Index:
    """Each item to its best cluster that has room; the better fitting items are served first."""
    scores = scores.copy()
    n, n_clusters = scores.shape
    labels = np.full(n, -1, np.int64)
    room = np.full(n_clusters, capacity)
    waiting = np.arange(n)
    while len(waiting):
        wanted = scores[waiting].argmax(1)
        for cluster in np.unique(wanted):
            asking = waiting[wanted == cluster]
            asking = asking[np.argsort(-scores[asking, cluster], kind="stable")]
            taken = asking[: room[cluster]]
            labels[taken] = cluster
            room[cluster] -= len(taken)
            if not room[cluster]:
                scores[:, cluster] = -np.inf
        waiting = waiting[labels[waiting] < 0]
    return labels


def output_norms(hidden: Floats, down: Floats, experts: Index) -> Floats:
    """Norm of each expert's output per token, [n, e]."""
    norms = np.empty((len(hidden), len(experts)), np.float32)
    for expert, neurons in enumerate(experts):
        part, columns = hidden[:, neurons], down[:, neurons]
        squares = ((part @ (columns.T @ columns)) * part).sum(1)
        norms[:, expert] = np.sqrt(np.maximum(squares, 0))
    return norms


def fit_router(norms: Floats, solver: RidgeSolver) -> Floats:
    """Linear router [e, d] towards the square root of each expert's share of the output norm.

    The common part of the rows is taken out (softmax ignores it) and the rest scaled down, so
    that the weights softmax gives are nearly equal and only the order of experts matters.
    """
    share = norms / np.maximum(norms.sum(1, keepdims=True), np.float32(1e-20))
    router = solver.solve(np.sqrt(share)).T
    router -= router.mean(0)
    largest = np.abs(solver.inputs @ router.T).max()
    return np.asarray(router * (_LOGIT_SCALE / max(float(largest), 1e-20)), np.float32)


def top_k_mask(logits: Floats, top_k: int) -> Floats:
    """1 where an expert is among the token's `top_k` largest logits, else 0; [n, e]."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    mask = np.zeros(logits.shape, np.float32)
    np.put_along_axis(mask, chosen, 1, axis=1)
    return mask


def masked_features(hidden: Floats, shared: Index, experts: Index, mask: Floats) -> Floats:
    """Neuron outputs in split order, zero where the expert is not chosen, [n, f]."""
    features = hidden[:, np.concatenate([shared, experts.ravel()])]
    routed = features[:, len(shared) :].reshape(len(hidden), *experts.shape)
    routed *= mask[:, :, None]
    features[:, len(shared) :] = routed.reshape(len(hidden), -1)
    return features


def refit_down(measured: Measured, features: Floats, down: Floats) -> Floats:
    """The down projection [d, f] near `down` that best maps `features` [n, f] to the target.

    Weighted ridge regression towards `down`, not towards zero: without evidence nothing changes.
    """
    weighted = features * measured.weight[:, None]
    gram = weighted.T @ weighted
    missing = weighted.T @ (measured.target * measured.weight[:, None]) - gram @ down.T
    _add_ridge(gram, _DOWN_RIDGE)
    return np.asarray(down + np.linalg.solve(gram, missing).T, np.float32)


def _add_ridge(gram: Floats, ridge: float) -> None:
    gram.flat[:: len(gram) + 1] += ridge * float(np.diag(gram).mean()) + 1e-12

"""From traces to what a policy has learned: the split by sequence, the rounds, the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import simulate
from flashmoe_gguf.errors import OptionError, TraceError
from flashmoe_gguf.policy.flashmoe import MAX_AGE
from flashmoe_gguf.quotas import slots_for_share
from flashmoe_gguf.trace import Trace
from flashmoe_gguf.train.states import Cells, cells, distances, inputs, merge, residents, uses

Floats = npt.NDArray[np.float32]
Progress = Callable[[str, float], None]  # what is going on, and how much of the whole is done

_HELD_OUT = 0.2  # of the sequences


@dataclass(frozen=True)
class Split:
    """A trace in two by sequence: `training` to learn from, `held_out` to stop and to judge by."""

    training: Trace
    held_out: Trace


@dataclass(frozen=True)
class Learned:
    """What came out. weights [n]: what the C policy takes; networks: see `file.py`.

    `epochs` and `loss` (mean squared error of the log of the distance, on held-out sequences) have
    one entry per round; both are empty for `learned`, which has no rounds.
    """

    weights: Floats
    networks: Mapping[str, Floats]
    epochs: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()


def join(traces: Sequence[Trace]) -> Trace:
    """Traces of one model as one. Raises TraceError when they are of different models."""
    first = traces[0]
    for other in traces[1:]:
        alike = np.array_equal(first.n_expert, other.n_expert)
        if not alike or not np.array_equal(first.layers, other.layers):
            raise TraceError(
                "the traces have other layers or numbers of experts",
                "give traces of one model; --n-expert where files do not say it",
            )
        prints = {first.fingerprint, other.fingerprint} - {""}
        if len(prints) > 1:
            raise TraceError("the traces are of different models", "give traces of one model")
    k = max(trace.k for trace in traces)
    wide = [
        np.pad(t.experts, ((0, 0), (0, 0), (0, k - t.k)), constant_values=0xFFFF) for t in traces
    ]
    starts = np.cumsum([0, *(t.n_tokens for t in traces)])
    phases = [t.phase for t in traces]
    return Trace(
        np.concatenate(wide),
        np.concatenate([[0], *(t.seq[1:] + s for t, s in zip(traces, starts, strict=False))]),
        first.n_expert,
        first.layers,
        None,
        next((t.fingerprint for t in traces if t.fingerprint), ""),
        None
        if any(p is None for p in phases)
        else np.concatenate([p for p in phases if p is not None]),
    )


def split(trace: Trace, seed: int) -> Split:
    """A fifth of the sequences, drawn by lot, is held out; of a single one, its last fifth.

    Raises TraceError when there is too little.
    """
    if trace.n_tokens < 10:
        raise TraceError(f"{trace.n_tokens} tokens are too few to train on", "record some more")
    begins = np.flatnonzero(np.diff(trace.seq) > 0)
    if len(begins) == 1:
        cut = int(trace.n_tokens * (1 - _HELD_OUT))
        trace = Trace(
            trace.experts,
            np.array([0, cut, trace.n_tokens]),
            trace.n_expert,
            trace.layers,
            None,
            trace.fingerprint,
            trace.phase,
        )
        return Split(trace.select([0]), trace.select([1]))
    order = np.random.default_rng(seed).permutation(begins)
    n = max(1, round(len(order) * _HELD_OUT))
    return Split(trace.select(np.sort(order[n:])), trace.select(np.sort(order[:n])))


def train_flashmoe(
    parts: Split,
    sizes: Sequence[float],
    *,
    seed: int = 0,
    max_epochs: int = 30,
    dagger: int = 0,
    progress: Progress | None = None,
) -> Learned:
    """Trains the paper's networks to tell how far away the next use of each expert is.

    The first round learns from all experts that a token does not use, with caches of `sizes`
    (shares of each layer's experts) run by Belady. Each of `dagger` further rounds adds the states
    that the networks so far lead to, of the experts that could have left. Raises OptionError
    without torch.
    """
    try:
        from flashmoe_gguf.train import network
    except ImportError:
        raise OptionError(
            "training needs torch, which is not installed", "pip install 'flashmoe-gguf[train]'"
        ) from None
    report = progress or (lambda what, done: None)
    n_rounds = 1 + dagger
    both = (parts.training, parts.held_out)
    seen: tuple[list[Cells], list[Cells]] = ([], [])
    fitted: network.Fit | None = None
    weights: Floats | None = None
    epochs, losses = list[int](), list[float]()
    for r in range(n_rounds):
        label = f"round {r + 1} of {n_rounds}, " if dagger else ""
        report(f"{label}reading states", r / n_rounds)
        for trace, kept in zip(both, seen, strict=True):
            new = _states(trace, sizes, weights)
            kept[:] = [merge(list(pair)) for pair in zip(kept, new, strict=True)] if kept else new

        def on_epoch(epoch: int, most: int, loss: float, r: int = r, label: str = label) -> None:
            done = (r + 0.1 + 0.9 * epoch / most) / n_rounds
            report(f"{label}epoch {epoch} of at most {most}, held-out loss {loss:.4f}", done)

        fitted = network.fit(
            seen[0], seen[1], seed=seed + r, max_epochs=max_epochs, progress=on_epoch
        )
        weights = network.table(fitted.networks).ravel()
        epochs.append(fitted.epochs)
        losses.append(min(fitted.losses))
    assert fitted is not None and weights is not None
    return Learned(weights, fitted.networks.arrays(), tuple(epochs), tuple(losses))


def _states(trace: Trace, sizes: Sequence[float], weights: Floats | None) -> list[Cells]:
    """Each layer's cells, over caches of all sizes. weights None: Belady's caches, all experts."""
    answering = np.ones(trace.n_tokens, np.bool_) if trace.phase is None else trace.phase != 0
    if not answering.any():
        answering[:] = True
    victims = []
    for size in sizes:
        counts = simulate(
            "belady" if weights is None else "flashmoe",
            trace.experts,
            trace.seq[:-1],
            trace.n_expert,
            slots_for_share(trace.n_expert, size),
            weights=weights,
            victims=True,
        )
        assert counts.victims is not None
        victims.append(counts.victims)
    found: list[Cells] = []
    for layer in range(trace.n_layers):
        used = uses(trace, layer)
        away = np.log(np.minimum(distances(used), MAX_AGE)).astype(np.float32)
        parts = []
        for left in victims:
            held = residents(used, left[:, layer])
            candidates = ~used & answering[:, None]
            if weights is not None:
                candidates &= held
            parts.append(cells(inputs(trace, used, held), candidates, away))
        found.append(merge(parts))
    return found


def train_learned(
    trace: Trace, sizes: Sequence[float], *, passes: int = 1, progress: Progress | None = None
) -> Learned:
    """What the online policy has learned after it has seen the trace, `passes` times.

    With slots for the first of `sizes`: how far it looks ahead depends on them, but little.
    """
    weights: Floats | None = None
    for i in range(passes):
        counts = simulate(
            "learned",
            trace.experts,
            trace.seq[:-1],
            trace.n_expert,
            slots_for_share(trace.n_expert, sizes[0]),
            weights=weights,
            learned=True,
            progress=None
            if progress is None
            else lambda done, i=i: progress(  # type: ignore[misc]
                f"token {done} of {trace.n_tokens}", (i + done / max(trace.n_tokens, 1)) / passes
            ),
        )
        weights = counts.weights
    if weights is None:
        raise TraceError("the policy has learned nothing")
    return Learned(weights, {})

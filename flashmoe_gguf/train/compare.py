"""Every policy on sequences that nothing was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import policy_names, simulate
from flashmoe_gguf.policy import TRAINED
from flashmoe_gguf.quotas import slots_for_share
from flashmoe_gguf.trace import Trace

BEST = "belady"


@dataclass(frozen=True)
class Result:
    """One policy at one cache size, a share of each layer's experts. All from 0 to 1.

    `gap` is how far the policy gets from LRU's hit rate (0) to Belady's (1); `refetched` is the
    share of victims that were needed again within 5 tokens.
    """

    policy: str
    size: float
    hit_rate: float
    gap: float
    refetched: float


def compare(
    trace: Trace,
    sizes: Sequence[float],
    weights: Mapping[str, npt.NDArray[np.float32]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """All policies on a trace's answers, cold at the start, size by size.

    `weights`: what policies have learned, by name; a policy with weights comes last, after the
    same policy without (`learned`), unless that decides nothing then.
    `progress` gets replays done and in all. Raises OptionError for weights that do not fit.
    """
    trace = trace.answers()
    plain = [name for name in policy_names() if name not in TRAINED]
    jobs: list[tuple[str, str, npt.NDArray[np.float32] | None]] = [(n, n, None) for n in plain]
    jobs += [
        (f"{name}, trained" if name in plain else name, name, weights[name]) for name in weights
    ]
    jobs.append((BEST, BEST, None))
    results: list[Result] = []
    for i, size in enumerate(sizes):
        rates: dict[str, tuple[float, float]] = {}
        for j, (label, policy, learned) in enumerate(jobs):
            counts = simulate(
                policy,
                trace.experts,
                trace.seq[:-1],
                trace.n_expert,
                slots_for_share(trace.n_expert, size),
                weights=learned,
            )
            lookups, evicted = max(counts.lookups.sum(), 1), max(counts.evicted.sum(), 1)
            rates[label] = (counts.hits.sum() / lookups, counts.refetched.sum() / evicted)
            if progress is not None:
                progress(i * len(jobs) + j + 1, len(sizes) * len(jobs))
        low, high = rates["lru"][0], rates[BEST][0]
        for label, (rate, refetched) in rates.items():
            gap = (rate - low) / (high - low) if high > low else 0.0
            results.append(Result(label, size, float(rate), float(gap), float(refetched)))
    return results

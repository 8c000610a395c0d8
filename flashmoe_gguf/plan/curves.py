"""How often a cache hits, by how much of a layer's experts it holds: a miss curve per trace.

Three published routing traces were replayed through decayed LFU, with a quarter and half of the
experts cached; the default policy hits a little more. Each gives a curve through its two points,
miss(x) = (1 - x) exp(-b x^c) for the share x of the experts that is cached: 1 where nothing is, 0
where all are. 1 - x is what random routing would miss; b and c are what real routing gains on it.

A model whose trace is among them takes its own curve. Another takes those of the traces with its
share of experts used per token (k / E), weighted by how near that is; how far the curves lie apart
is how uncertain the figure is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class HitRate:
    """An expected share of hits, 0 to 1, and the range over the reference traces."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Reference:
    """A trace: hit rates with a quarter and half of the experts cached, and its router."""

    name: str
    architecture: str
    n_expert: int
    top_k: int
    at_quarter: float
    at_half: float

    @property
    def used_share(self) -> float:
        return self.top_k / self.n_expert

    def hit_rate(self, share: float) -> float:
        """The curve through the two points; `share` cached, 0 to 1."""
        if share >= 1:
            return 1.0
        quarter, half = (
            -math.log((1 - hit) / (1 - x))
            for hit, x in ((self.at_quarter, 0.25), (self.at_half, 0.5))
        )
        c = math.log2(half / quarter)
        b = half / 0.5**c
        return 1 - (1 - share) * math.exp(-b * share**c)


REFERENCES = (
    Reference("gpt-oss-20b, 215,000 tokens", "gpt-oss", 32, 4, 0.693, 0.916),
    Reference("OLMoE-1B-7B, 299 tokens", "olmoe", 64, 8, 0.620, 0.821),
    Reference("Kimi-Linear-48B, 300 tokens", "kimi-linear", 256, 8, 0.739, 0.869),
)


def expected_hit_rate(n_slots: float, n_expert: int, top_k: int, architecture: str = "") -> HitRate:
    """What decoding hits with `n_slots` of `n_expert` experts cached per layer.

    A layer with fewer slots than a token uses hits `n_slots` of `top_k` experts at the most.
    """
    share = min(n_slots / n_expert, 1.0)
    most = min(n_slots / top_k, 1.0)
    rates = [min(reference.hit_rate(share), most) for reference in REFERENCES]
    own = [
        rate
        for rate, reference in zip(rates, REFERENCES, strict=True)
        if (reference.architecture, reference.n_expert) == (architecture, n_expert)
    ]
    if own:
        return HitRate(own[0], min(rates), max(rates))
    weights = [1 / (0.1 + abs(math.log2(top_k / n_expert / r.used_share))) for r in REFERENCES]
    misses = [max(1 - rate, 1e-9) for rate in rates]
    mean = sum(w * math.log(m) for w, m in zip(weights, misses, strict=True)) / sum(weights)
    return HitRate(max(1 - math.exp(mean), 0.0) if share < 1 else 1.0, min(rates), max(rates))

"""Expert-routing traces out of nothing, with the statistics of real models' traces.

A token is a point in a latent space: its type's vector (types recur with a Zipf
frequency and tend to bring the same next type), some of the previous token's, a topic
that drifts, and what the sequence is about. Every expert of every layer scores the
point linearly; its popularity and noise are added, and the best are chosen. So tokens
share experts with their neighbours, some experts are popular, and what a token has
used in some layers tells what it will use in the next: the three things that caches,
learned policies and lookahead live from.

The parameters were fitted to recorded traces; docs/SYNTHETIC.md compares them. It is
still no substitute for a real trace when policies are ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import OptionError

_LATENT_WIDTH = 48
_N_TYPES = 2000
_SEQUENCE_TOKENS = 320
# Tokens scored at a time: bounds memory.
_CHUNK_SCORES = 4 << 20


@dataclass(frozen=True)
class Statistics:
    """What decides the statistics of a generated trace; the noise of a score has deviation 1.

    - popularity: mean of an expert's exponentially distributed advantage.
    - signal: standard deviation of the part of a score that the token's point decides.
    - decay: dimension i of the latent space counts as much as i ** -decay.
    - neighbour, topic, sequence: weights in the point of the previous token's type, of the
      drifting topic and of the sequence's own vector; the token's own type has weight 1.
    - topic_tokens: tokens after which 1 / e of a topic is left.
    - zipf: type r is drawn with a probability proportional to r ** -zipf.
    - follow: probability that a token is of the type that its predecessor's type prefers.
    """

    popularity: float
    signal: float
    decay: float
    neighbour: float
    topic: float
    topic_tokens: float
    sequence: float
    zipf: float
    follow: float


# Fitted to the traces of these models; see docs/SYNTHETIC.md.
STATISTICS: dict[str, Statistics] = {
    "gpt-oss-20b": Statistics(1.4, 10.0, 1.15, 0.40, 0.50, 8.0, 0.82, 0.98, 0.25),
    "olmoe": Statistics(0.9, 7.2, 1.20, 0.90, 0.80, 9.0, 0.22, 0.64, 0.22),
    "qwen3-30b": Statistics(1.9, 4.5, 0.89, 0.57, 0.27, 3.2, 0.48, 1.12, 0.26),
    "kimi-linear": Statistics(0.65, 4.9, 1.04, 0.60, 1.15, 9.0, 0.20, 0.74, 0.25),
}

# The largest layer for which each is taken.
_BY_EXPERTS = ((48, "gpt-oss-20b"), (96, "olmoe"), (192, "qwen3-30b"), (1 << 16, "kimi-linear"))


def statistics_for(n_expert: int) -> Statistics:
    """The statistics fitted to a model with about so many experts in a layer."""
    return next(STATISTICS[name] for most, name in _BY_EXPERTS if n_expert <= most)


def synthetic_trace(
    n_tokens: int,
    n_layer: int,
    n_expert: int,
    top_k: int,
    *,
    statistics: Statistics | None = None,
    seed: int = 0,
) -> npt.NDArray[np.uint16]:
    """Return `experts` [n_tokens, n_layer, top_k], distinct in each row, best first.

    statistics: None takes `statistics_for(n_expert)`. The same arguments give the same trace.

    Raises OptionError for impossible sizes.
    """
    if min(n_tokens, n_layer, top_k) < 1 or n_expert < top_k:
        raise OptionError(
            f"no trace of {n_tokens} tokens, {n_layer} layers, top-{top_k} of {n_expert} experts",
            "every size must be at least 1 and top_k at most n_expert",
        )
    s = statistics or statistics_for(n_expert)
    rng = np.random.Generator(np.random.PCG64(seed))
    points = _points(n_tokens, s, rng)
    reads = np.float32(s.signal) * rng.standard_normal(
        (_LATENT_WIDTH, n_layer * n_expert), np.float32
    )
    popularity = rng.standard_exponential(n_layer * n_expert, np.float32)
    popularity *= np.float32(s.popularity)
    experts = np.empty((n_tokens, n_layer, top_k), np.uint16)
    chunk = max(1, _CHUNK_SCORES // (n_layer * n_expert))
    for first in range(0, n_tokens, chunk):
        tokens = points[first : first + chunk]
        scores = tokens @ reads + popularity
        scores += rng.standard_normal(scores.shape, np.float32)
        scores = scores.reshape(len(tokens), n_layer, n_expert)
        best = np.argpartition(-scores, top_k - 1, axis=2)[:, :, :top_k]
        order = np.argsort(-np.take_along_axis(scores, best, axis=2), axis=2)
        experts[first : first + chunk] = np.take_along_axis(best, order, axis=2)
    return experts


def _points(n_tokens: int, s: Statistics, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """The tokens in latent space [n_tokens, _LATENT_WIDTH], of length about 1."""
    types = _types(n_tokens, s, rng)
    vectors = rng.standard_normal((_N_TYPES, _LATENT_WIDTH), np.float32)
    points = vectors[types]
    points[1:] += np.float32(s.neighbour) * vectors[types[:-1]]
    kept = float(np.exp(-1.0 / s.topic_tokens))
    renewed = (1.0 - kept * kept) ** 0.5
    about = topic = np.zeros(_LATENT_WIDTH)
    for token in range(n_tokens):
        if token % _SEQUENCE_TOKENS == 0:
            about, topic = rng.standard_normal((2, _LATENT_WIDTH))
        else:
            topic = kept * topic + renewed * rng.standard_normal(_LATENT_WIDTH)
        points[token] += s.topic * topic + s.sequence * about
    spectrum = np.arange(1, _LATENT_WIDTH + 1) ** -s.decay
    length = (1 + s.neighbour**2 + s.topic**2 + s.sequence**2) ** 0.5
    points *= (spectrum / np.linalg.norm(spectrum) / length).astype(np.float32)
    return points


def _types(n_tokens: int, s: Statistics, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """The type of each token."""
    weight = np.arange(1, _N_TYPES + 1) ** -s.zipf
    below = np.cumsum(weight / weight.sum())

    def draw(count: int) -> npt.NDArray[np.int64]:
        return np.minimum(np.searchsorted(below, rng.random(count)), _N_TYPES - 1)

    types, preferred = draw(n_tokens), draw(_N_TYPES)
    for token in np.flatnonzero(rng.random(n_tokens) < s.follow):
        if token:
            types[token] = preferred[types[token - 1]]
    return types

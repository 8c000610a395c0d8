"""A miss curve from the user's own recorded routing instead of the reference traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashmoe_gguf.auto_policy import BYPASSES, DEFAULT
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.plan.forecast import Curve
from flashmoe_gguf.plan.sizes import Subject
from flashmoe_gguf.simulate import Size, replay
from flashmoe_gguf.trace import read_trace

_STEPS = 12  # sizes of cache between nothing and everything; in between, straight lines


def trace_curve(path: Path, subject: Subject) -> Curve:
    """Hit rate by share of the experts cached, of the routing in `path` under the default policy.

    From a cold cache, as the first use of a model is; of answers alone where the trace tells them
    from prompts. Raises TraceError when the trace cannot be read, or is not of a model like
    `subject`.
    """
    trace = read_trace(path, subject.n_expert)
    if trace.has_answers:
        trace = trace.answers()
    if trace.n_layers != len(subject.layers) or trace.k > subject.top_k:
        raise TraceError(
            f"{path}: {trace.n_layers} layers with {trace.k} experts per token, and "
            f"{subject.name} has {len(subject.layers)} with {subject.top_k}",
            "record one with this model: flashmoe trace",
        )
    n_expert = subject.n_expert
    numbers = sorted(
        {subject.top_k, *(n_expert * i // _STEPS for i in range(1, _STEPS))} - {0, n_expert}
    )
    rates = [
        replay(trace, DEFAULT, Size(str(n), number=n), bypass=DEFAULT == BYPASSES).hit_rate
        for n in numbers
    ]
    shares = np.array([0, *numbers, n_expert]) / n_expert
    hits = np.maximum.accumulate([0.0, *rates, 1.0])  # a policy may do worse with more; plans not

    def curve(share: float) -> float:
        return float(np.interp(share, shares, hits))

    return curve

"""learned: what a token has just used says what will be used next (native/policy_learned.c).

Every sum is taken in float32 in the order in which the C code takes it, and logarithm and
exponential are the polynomials of native/approx.h, so that both name the same victims however close
the scores are. Tokens come one by one here: no prefill batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.policy.base import MayLeave, Policy, lowest

Floats = npt.NDArray[np.float32]

f32 = np.float32
HORIZON = 4
MANY_CONTEXTS, FEW_CONTEXTS, FEW_EXPERTS = 9, 5, 64
LANES = 8
DECAYS = (f32(0.8), f32(0.95), f32(0.995))
OLDEST = f32(512)
START_WEIGHT = (0.3, 0.5, 0.3, 0.0, -0.1, 0.3)
OWN_RATE, CONTEXT_RATE, SET_RATE, BIAS_RATE, WEIGHT_RATE = map(
    f32, (0.01, 0.003, 0.1, 0.001, 0.004)
)
NEW_ROW = f32(5)
MOST_LEARNED = f32(1e6)
MAX_SETS, MAX_SET_NUMBERS = 4096, 65536

_LOG = [0.013874484, -0.06559031, 0.14829414, -0.2345452, 0.33097526, -0.499859, 0.99999857]
_EXP = [0.0018937538, 0.008949591, 0.055860337, 0.24014182, 0.69315451, 0.99999988]


def _polynomial(coefficients: Sequence[float], u: Floats) -> Floats:
    p = np.full_like(u, coefficients[0])
    for c in coefficients[1:]:
        p = p * u + f32(c)
    return p


def log(x: Floats) -> Floats:
    """ln x as native/approx.h has it."""
    bits = x.view(np.int32)
    exponent = ((bits >> 23) - 127).astype(np.float32)
    u = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32) - f32(1)
    result: Floats = exponent * f32(0.6931472) + u * _polynomial(_LOG, u)
    return result


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x) as native/approx.h has it."""
    power = f32(127) - np.clip(x, f32(-30), f32(30)) * f32(1.442695)
    whole = power.astype(np.int32)
    u = power - whole.astype(np.float32)
    scale = (whole << 23).view(np.float32)
    result: Floats = f32(1) / (f32(1) + scale * _polynomial(_EXP, u))
    return result


def set_hash(experts: Sequence[int]) -> int:
    """The same for a set of experts in whatever order."""
    total = 0
    for e in experts:
        x = (e + 1) * 0x9E3779B1 & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x85EBCA77 & 0xFFFFFFFF
        total += x ^ x >> 13
    total &= 0xFFFFFFFF
    total = (total ^ total >> 16) * 0xC2B2AE3D & 0xFFFFFFFF
    return total ^ total >> 15


def _dot(a: Floats, b: Floats) -> np.float32:
    """In LANES sums, which are added in order."""
    lanes = np.add.accumulate((a * b).reshape(-1, LANES), axis=0)[-1]
    total: np.float32 = np.add.accumulate(lanes)[-1]
    return total


def _discounts(n_slots: int, n_used: int) -> list[np.float32]:
    """What a first use d + 1 tokens later is worth; the last is for later than HORIZON."""
    by = f32(0)
    if n_slots > 0:
        by = f32(1) - f32(0.4) * f32(n_used) / f32(n_slots)
    by = min(max(by, f32(0.8)), f32(0.95))
    worth = [f32(1)]
    for _ in range(HORIZON):
        worth.append(f32(worth[-1] * by))
    return worth


@dataclass
class _Step:
    features: Floats  # [6, stride]
    rows: list[int]
    used: list[int]


@dataclass
class _Layer:
    """One layer's statistics and model; arrays over experts are padded to a multiple of LANES."""

    n_expert: int
    n_slots: int
    n_context: int
    stride: int = field(init=False)
    n_tokens: int = 0  # in this request
    n_used: int = 1
    current: list[int] = field(default_factory=list)
    visits: deque[tuple[int, list[int]]] = field(default_factory=lambda: deque(maxlen=16))
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=HORIZON + 1))

    def __post_init__(self) -> None:
        self.stride = -(-self.n_expert // LANES) * LANES
        self.n_sets = MAX_SETS
        while self.n_sets > 1 and self.n_sets * self.stride > MAX_SET_NUMBERS:
            self.n_sets //= 2
        n_rows = self.n_context + 2 * self.n_sets
        self.ema = np.zeros((len(DECAYS), self.stride), np.float32)
        self.age = np.full(self.stride, OLDEST, np.float32)
        self.count = np.zeros(self.stride, np.float32)
        self.bias = np.zeros(self.stride, np.float32)
        self.bias[: self.n_expert] = -0.5
        self.weight = np.array(START_WEIGHT, np.float32)
        self.rows = np.zeros((n_rows, self.stride), np.float32)
        self.rows[range(self.n_expert), range(self.n_expert)] = 0.75
        self.learned = np.zeros(n_rows, np.float32)
        self.scores = np.zeros(self.stride, np.float32)

    def used_at(self, token: int) -> list[int]:
        return next((used for t, used in self.visits if t == token), [])

    def has(self, token: int) -> bool:
        return any(t == token for t, _ in self.visits)

    def set_row(self, used: list[int]) -> int:
        return set_hash(used) & (self.n_sets - 1)

    def add(self, used: list[int]) -> None:
        for ema, decay in zip(self.ema, DECAYS, strict=True):
            ema[:] = ema * decay + f32(1e-20)
            ema[used] += f32(1) - decay
        self.age = np.minimum(self.age + f32(1), OLDEST)
        self.age[used] = 0
        self.count[used] += f32(1)
        self.n_tokens += 1
        self.n_used = max(self.n_used, len(used))

    def features(self) -> Floats:
        made = np.empty((6, self.stride), np.float32)
        made[:3] = log(self.ema + f32(0.001)) + f32(3)
        made[3] = f32(1) / np.maximum(self.age, f32(1))
        made[4] = log(f32(1) + self.age) - f32(2.5)
        prior = f32(0.5) * f32(self.n_expert) / f32(self.n_used)
        scale = f32(3) / (f32(self.n_tokens) + f32(1) + prior)
        made[5] = scale * (self.count + f32(0.5))
        return made

    def score(self, step: _Step) -> Floats:
        z: Floats = self.bias.copy()
        for weight, feature in zip(self.weight, step.features, strict=True):
            z += weight * feature
        for row in step.rows:
            z += self.rows[row]
        return z

    def learn(self) -> None:
        step = self.steps[0]
        worth = _discounts(self.n_slots, self.n_used)
        target = worth[HORIZON] * sigmoid(self.scores)
        for d in range(HORIZON, 0, -1):
            target[self.steps[d].used] = worth[d - 1]
        error = sigmoid(self.score(step)) - target
        error[self.n_expert :] = 0
        rate = WEIGHT_RATE / f32(self.n_expert)
        for f, feature in enumerate(step.features):
            self.weight[f] -= rate * _dot(error, feature)
        self.bias -= BIAS_RATE * error
        for row in step.rows:
            base = CONTEXT_RATE if row < self.n_context else SET_RATE
            base = OWN_RATE if row < self.n_expert else base
            rate = base * (f32(1) + NEW_ROW / np.sqrt(f32(1) + self.learned[row]))
            if self.learned[row] < MOST_LEARNED:
                self.learned[row] += f32(1)
            self.rows[row] -= rate * error


class Learned(Policy):
    """A token is counted when the first layer that it passes has seen it."""

    def __init__(self, n_expert: Sequence[int], n_slots: Sequence[int]) -> None:
        super().__init__(n_expert, n_slots)
        n = len(self.n_expert)
        # per layer: (layer, tokens back, first row) of each context
        self._contexts: list[list[tuple[int, int, int]]] = []
        self._layers: list[_Layer] = []
        for layer in range(n):
            contexts, n_rows = [], 0
            few = self.n_expert[layer] <= FEW_EXPERTS
            for j in range(MANY_CONTEXTS if few else FEW_CONTEXTS):
                contexts.append(((layer - j) % n, -((layer - j) // n), n_rows))
                n_rows += self.n_expert[(layer - j) % n]
            self._contexts.append(contexts)
            self._layers.append(_Layer(self.n_expert[layer], self.n_slots[layer], n_rows))
        self._token = -1
        self._last_layer = n
        self._begins = [False] * n

    def on_hit(self, layer: int, expert: int) -> None:
        self._layers[layer].current.append(expert)

    on_miss = on_hit

    def begin_sequence(self) -> None:
        self._begins = [True] * len(self._layers)

    def end_token(self, layer: int) -> None:
        if layer <= self._last_layer:
            self._token += 1
        self._last_layer = layer
        state = self._layers[layer]
        used, state.current = state.current, []
        state.visits.append((self._token, used))
        if self._begins[layer]:
            self._begins[layer] = False
            state.count[:] = 0
            state.n_tokens = 0
        state.add(used)
        rows = [
            first + e
            for source, back, first in self._contexts[layer]
            for e in self._layers[source].used_at(self._token - back)
        ]
        of_first = state.n_context + state.n_sets
        if layer > 0 and self._layers[0].has(self._token):
            rows.append(of_first + state.set_row(self._layers[0].used_at(self._token)))
        rows.append(state.n_context + state.set_row(used))
        state.steps.append(_Step(state.features(), rows, used))
        state.scores = state.score(state.steps[-1])
        if len(state.steps) > HORIZON:
            state.learn()

    def victim(self, layer: int, may_leave: MayLeave) -> int:
        state = self._layers[layer]
        return lowest(state.scores[: state.n_expert], may_leave)

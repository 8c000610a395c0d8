"""The paper's network, one per layer, trained on all layers at once, and the table it becomes.

Three linear layers, hidden 128, SiLU between them, two inputs, one output: 17,025 numbers, 66.5 KiB
a layer at float32. Its output is the logarithm of the tokens until the next use; the candidate with
the largest leaves. The paper says 113 KB; that is what the same three layers take (113.1 KiB) when
they see 32 slots at once, two inputs each, and score all of them, which ties a network to one cache
size. Here one expert is scored at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flashmoe_gguf.policy.flashmoe import MAX_AGE, N_SHARES
from flashmoe_gguf.train.states import Cells, Floats

HIDDEN = 128

_STEPS_AN_EPOCH = 10
_RATE = 1e-2
_PATIENCE = 8  # epochs without progress on the held-out sequences

Progress = Callable[[int, int, float], None]  # epochs done, at most, loss on held-out sequences


class Networks(nn.Module):  # type: ignore[misc,unused-ignore]
    """One network per layer; `forward` takes [n_layers, n, 2] and gives [n_layers, n]."""

    def __init__(self, n_layers: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = ((2, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for n_in, n_out in sizes:
            bound = 1 / math.sqrt(n_in)  # as nn.Linear
            for made, shape in (
                (self.weights, (n_layers, n_in, n_out)),
                (self.biases, (n_layers, 1, n_out)),
            ):
                values = torch.rand(shape, generator=generator) * 2 * bound - bound
                made.append(nn.Parameter(values))

    def begin_at(self, mean: Tensor, deviation: Tensor, answer: Tensor) -> None:
        """Scales the first layer to the inputs' spread, and the last to the answers' mean."""
        with torch.no_grad():
            self.weights[0] /= deviation.transpose(1, 2)
            self.biases[0] -= mean @ self.weights[0]
            self.biases[-1] += answer.reshape(-1, 1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if i == 0 else nn.functional.silu(x), weight)
        return x.squeeze(2)

    def arrays(self) -> dict[str, Floats]:
        """w1, b1, w2, b2, w3, b3, each with the layer first."""
        named: dict[str, Floats] = {}
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            named[f"w{i}"] = weight.detach().numpy().copy()
            named[f"b{i}"] = bias.detach().numpy().copy()
        return named


@dataclass(frozen=True)
class Fit:
    """A trained network per layer, the epochs it took, and the losses on held-out sequences."""

    networks: Networks
    epochs: int
    losses: tuple[float, ...]


class _Batch:
    """Cells of all layers in one tensor, short layers padded with weight 0."""

    def __init__(self, layers: Sequence[Cells]) -> None:
        size = max((len(c.weights) for c in layers), default=0)
        inputs = np.zeros((len(layers), size, 2), np.float32)
        answers, weights = np.zeros((2, len(layers), size), np.float32)
        for i, c in enumerate(layers):
            n = len(c.weights)
            inputs[i, :n], answers[i, :n], weights[i, :n] = c.inputs, c.answers, c.weights
        self.inputs, self.answers = torch.from_numpy(inputs), torch.from_numpy(answers)
        total = weights.sum(axis=1, keepdims=True)
        self.weights = torch.from_numpy(weights / np.maximum(total, 1))

    def spread(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of the inputs in each layer. [n_layers, 1, 2] each"""
        weights = self.weights.unsqueeze(2)
        mean = (weights * self.inputs).sum(dim=1, keepdim=True)
        variance = (weights * (self.inputs - mean) ** 2).sum(dim=1, keepdim=True)
        return mean, variance.sqrt().clamp_min(1e-3)

    def loss(self, networks: Networks) -> Tensor:
        """Mean squared error of each layer's states, summed over layers."""
        squares: Tensor = (networks(self.inputs) - self.answers) ** 2
        return (self.weights * squares).sum()


def fit(
    training: Sequence[Cells],
    held_out: Sequence[Cells],
    *,
    seed: int,
    max_epochs: int,
    progress: Progress | None = None,
) -> Fit:
    """Trains a network for each layer's cells; keeps what is best on the held-out ones.

    All states of all cells are in every step, so an epoch is a fixed number of steps of Adam.
    Same seed, threads and machine: same result.
    """
    generator = torch.Generator().manual_seed(seed)
    networks = Networks(len(training), generator)
    steps, checks = _Batch(training), _Batch(held_out)
    networks.begin_at(*steps.spread(), (steps.weights * steps.answers).sum(dim=1))
    optimizer = torch.optim.Adam(networks.parameters(), lr=_RATE)
    n_steps = max_epochs * _STEPS_AN_EPOCH

    def rate(step: int) -> float:  # up during a tenth of the steps, then down along a cosine
        return min(1.0, 10 * (step + 1) / n_steps) * (1 + math.cos(math.pi * step / n_steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    best, best_state, losses = math.inf, networks.state_dict(), list[float]()
    since = 0
    for epoch in range(max_epochs):
        for _ in range(_STEPS_AN_EPOCH):
            optimizer.zero_grad()
            steps.loss(networks).backward()  # type: ignore[no-untyped-call,unused-ignore]
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            losses.append(float(checks.loss(networks)) / max(len(training), 1))
        if losses[-1] < best * (1 - 1e-5):
            best, since = losses[-1], 0
            best_state = {k: v.clone() for k, v in networks.state_dict().items()}
        else:
            since += 1
        if progress is not None:
            progress(epoch + 1, max_epochs, losses[-1])
        if since >= _PATIENCE:
            break
    networks.load_state_dict(best_state)
    return Fit(networks, len(losses), tuple(losses))


def table(networks: Networks) -> Floats:
    """What native/policy_flashmoe.c reads: the output at every age and N_SHARES count shares.

    [n_layers, MAX_AGE, N_SHARES]; between shares it is interpolated.
    """
    recency = 1 / torch.arange(1, MAX_AGE + 1, dtype=torch.float32)
    shares = torch.linspace(0, 1, N_SHARES)
    grid = torch.cartesian_prod(recency, shares).unsqueeze(0)
    n_layers = networks.weights[0].shape[0]
    with torch.no_grad():
        rows = networks(grid.expand(n_layers, -1, -1))
    values: Floats = rows.reshape(n_layers, MAX_AGE, N_SHARES).numpy()
    return values

"""The tensors of a replay model: weights by which greedy decoding walks through a trace.

How (a qwen3moe model, its residual stream divided into three parts):

- routing, n_layer * n_expert dimensions, or as many as the others leave: a direction
  for each expert. A token's embedding makes the router of each layer choose its
  experts (synthetic_routing.py); routers read nothing else.
- identity, 128 dimensions: a random code for each token. Row i + 1 of the output
  head is token i's code, so the arg-max is the next token.
- work, all others: random. Attention and experts read everything but write only
  here (their output rows for the other parts are zero), and the output head reads
  it too, so that every expert used moves every logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from flashmoe_gguf.bench.q4k import BLOCK_BYTES, BLOCK_WEIGHTS, random_q4_k
from flashmoe_gguf.bench.synthetic_routing import (
    MAX_CROWDING,
    Routing,
    crowded_routing,
    orthogonal_routing,
)
from flashmoe_gguf.errors import OptionError

IDENTITY_WIDTH = 128
_MIN_WORK_WIDTH = 64
# What experts and attention add per layer, relative to the stream: small, so that its
# size stays about the same down the layers, but well above float rounding.
_WRITE_GAIN = 0.25
_HEAD_NOISE = 0.1

# One ideograph per trace token; the second range is used when the first is full.
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x20000, 0x2A6DF))
MAX_TOKENS = sum(last - first + 1 for first, last in _IDEOGRAPHS)


def replay_text(first: int, count: int) -> str:
    """The text that tokenizes to trace tokens first, first + 1, ... (one character each)."""
    start, end = _IDEOGRAPHS[0]
    basic = end - start + 1
    tokens = range(first, first + count)
    return "".join(chr(start + i if i < basic else _IDEOGRAPHS[1][0] + i - basic) for i in tokens)


@dataclass(frozen=True)
class ReplayTensor:
    """One tensor to be written: `row_shape` is slowest first, its last entry in bytes.

    `parts` makes its data, in pieces of a few megabytes.
    """

    name: str
    qtype: GGMLQuantizationType
    row_shape: tuple[int, ...]
    parts: Callable[[], Iterator[npt.NDArray[Any]]]

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.row_shape))


@dataclass(frozen=True)
class ReplayModel:
    """The arguments of a replay model and what follows from them.

    `head_width` 0 divides the width among the heads.
    """

    experts: npt.NDArray[np.integer[Any]]
    n_expert: int
    width: int
    expert_width: int
    n_head: int
    n_head_kv: int
    seed: int = 0
    head_width: int = 0

    @property
    def n_tokens(self) -> int:
        return int(self.experts.shape[0])

    @property
    def n_layer(self) -> int:
        return int(self.experts.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def n_vocab(self) -> int:
        return self.n_tokens + 3 + 256

    @property
    def head(self) -> int:
        """Width of an attention head."""
        return self.head_width or self.width // self.n_head

    @property
    def routing_width(self) -> int:
        available = self.width - IDENTITY_WIDTH - _MIN_WORK_WIDTH
        return min(self.n_layer * self.n_expert, available)

    @property
    def read_only_width(self) -> int:
        """The leading dimensions of the stream that nothing writes to."""
        return self.routing_width + IDENTITY_WIDTH

    def check(self) -> None:
        """Raise OptionError if these arguments make no replay model."""
        e = self.experts
        if e.ndim != 3 or e.size == 0 or not np.issubdtype(e.dtype, np.integer):
            raise OptionError(
                f"a trace is whole numbers [tokens, layers, k], not {e.dtype} {list(e.shape)}",
                "pass the `experts` array of a trace file",
            )
        if int(e.min()) < 0 or int(e.max()) >= self.n_expert:
            raise OptionError(
                f"the trace names expert {int(e.max())} of only {self.n_expert}",
                "give the number of experts of the traced model; drop padded rows",
            )
        in_order = np.sort(e, axis=2)
        if (in_order[:, :, 1:] == in_order[:, :, :-1]).any():
            raise OptionError("the trace repeats an expert within one token and layer")
        if self.n_tokens > MAX_TOKENS:
            raise OptionError(
                f"{self.n_tokens} trace tokens are more than the {MAX_TOKENS} supported",
                "cut the trace",
            )
        if self.width % BLOCK_WEIGHTS or self.expert_width % BLOCK_WEIGHTS:
            raise OptionError(
                f"widths {self.width} and {self.expert_width} are not multiples of 256",
                "Q4_K rows are whole blocks of 256 weights",
            )
        if min(self.n_head, self.n_head_kv) < 1 or self.n_head % self.n_head_kv:
            raise OptionError(
                f"{self.n_head} heads do not share {self.n_head_kv} key-value heads evenly"
            )
        if not self.head_width and self.width % self.n_head:
            raise OptionError(f"{self.n_head} heads do not divide width {self.width}")
        if self.n_head * self.head % BLOCK_WEIGHTS or self.head % 2:
            raise OptionError(
                f"{self.n_head} heads of width {self.head} do not make whole blocks of 256 weights"
            )
        needed = self.n_layer * self.n_expert / MAX_CROWDING
        if self.routing_width < needed:
            needed += IDENTITY_WIDTH + _MIN_WORK_WIDTH
            raise OptionError(
                f"{self.n_layer} layers of {self.n_expert} experts need width {needed:.0f}, "
                f"not {self.width}",
                "replay fewer layers of the trace or use a wider model",
            )

    @cached_property
    def routing(self) -> Routing:
        """How its tokens route; OptionError where that would depend on rounding."""
        if self.routing_width == self.n_layer * self.n_expert:
            return orthogonal_routing(self.experts, self.n_expert)
        return crowded_routing(self.experts, self.n_expert, self.routing_width, self.seed)

    def _bits(self, *key: int) -> np.random.BitGenerator:
        return np.random.SFC64([self.seed, *key])

    def _codes(self) -> npt.NDArray[np.float32]:
        """Identity codes [n_tokens + 1, 128] of -1 and 1; the last belongs to no token."""
        rng = np.random.Generator(self._bits(0))
        signs = rng.integers(0, 2, (self.n_tokens + 1, IDENTITY_WIDTH))
        return (2 * signs - 1).astype(np.float32)

    def _embedding(self) -> Iterator[npt.NDArray[np.float16]]:
        rng = np.random.Generator(self._bits(1))
        rows = np.zeros((self.n_tokens, self.width), np.float16)
        rows[:, : self.routing_width] = self.routing.embedding
        rows[:, self.routing_width : self.read_only_width] = self._codes()[:-1]
        work = rng.standard_normal((self.n_tokens, self.width - self.read_only_width), np.float32)
        rows[:, self.read_only_width :] = work
        # Tokens beyond the trace (end, start, unknown, bytes) stand in for earlier ones.
        yield rows[np.arange(self.n_vocab) % self.n_tokens]

    def _output(self) -> Iterator[npt.NDArray[np.uint8]]:
        rng = np.random.Generator(self._bits(2))
        rows = np.zeros((self.n_vocab, self.width), np.float32)
        codes = self._codes()
        rows[0, self.routing_width : self.read_only_width] = codes[-1]
        rows[1 : self.n_tokens + 1, self.routing_width : self.read_only_width] = codes[:-1]
        work = rng.standard_normal((self.n_vocab, self.width - self.read_only_width), np.float32)
        rows[:, self.read_only_width :] = _HEAD_NOISE * work
        yield quantize(rows, GGMLQuantizationType.Q8_0)

    def _router(self, layer: int) -> Iterator[npt.NDArray[np.float32]]:
        rows = np.zeros((self.n_expert, self.width), np.float32)
        rows[:, : self.routing_width] = self.routing.router(layer, self.n_expert)
        yield rows

    def _matrices(
        self, key: tuple[int, ...], rows: int, width: int, gain: float, zero_rows: int, n: int
    ) -> Iterator[npt.NDArray[np.uint8]]:
        """`n` random Q4_K matrices [rows, bytes of a row], one by one."""
        std = gain / width**0.5
        for i in range(n):
            yield random_q4_k(rows, width, std, self._bits(*key, i), zero_rows=zero_rows)

    def tensors(self) -> Iterator[ReplayTensor]:
        """All tensors in file order; their data is made when asked for."""
        types = GGMLQuantizationType
        width, head = self.width, self.head

        def norm(name: str, n: int) -> ReplayTensor:
            def ones() -> Iterator[npt.NDArray[np.float32]]:
                yield np.ones(n, np.float32)

            return ReplayTensor(f"{name}.weight", types.F32, (n * 4,), ones)

        def q4_k(
            name: str, rows: int, cols: int, key: int, *, writes: bool = False, n: int = 0
        ) -> ReplayTensor:
            row_bytes = cols // BLOCK_WEIGHTS * BLOCK_BYTES
            gain, zero_rows = (_WRITE_GAIN, self.read_only_width) if writes else (1.0, 0)
            parts = partial(self._matrices, (3, layer, key), rows, cols, gain, zero_rows, n or 1)
            shape = (n, rows, row_bytes) if n else (rows, row_bytes)
            return ReplayTensor(f"blk.{layer}.{name}.weight", types.Q4_K, shape, parts)

        output_bytes = width // 32 * 34
        yield ReplayTensor(
            "token_embd.weight", types.F16, (self.n_vocab, 2 * width), self._embedding
        )
        yield norm("output_norm", width)
        yield ReplayTensor("output.weight", types.Q8_0, (self.n_vocab, output_bytes), self._output)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield norm(f"{block}.attn_norm", width)
            yield q4_k("attn_q", self.n_head * head, width, 0)
            yield q4_k("attn_k", self.n_head_kv * head, width, 1)
            yield q4_k("attn_v", self.n_head_kv * head, width, 2)
            yield q4_k("attn_output", width, self.n_head * head, 3, writes=True)
            yield norm(f"{block}.attn_q_norm", head)
            yield norm(f"{block}.attn_k_norm", head)
            yield norm(f"{block}.ffn_norm", width)
            yield ReplayTensor(
                f"{block}.ffn_gate_inp.weight",
                types.F32,
                (self.n_expert, 4 * width),
                partial(self._router, layer),
            )
            yield q4_k("ffn_up_exps", self.expert_width, width, 4, n=self.n_expert)
            yield q4_k("ffn_gate_exps", self.expert_width, width, 5, n=self.n_expert)
            yield q4_k("ffn_down_exps", width, self.expert_width, 6, writes=True, n=self.n_expert)

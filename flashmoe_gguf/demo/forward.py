"""The dense model's layers in numpy float32, over many short sequences at once.

Follows llama.cpp's llama graph: RMS norm, adjacent-pair ("NORM") rotary embedding, grouped-query
attention, SiLU-gated feed-forward. All sequences lie one after another in one array of tokens and
share the prefix that comes first, so its keys and values are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashmoe_gguf.demo.calibrate import Text
from flashmoe_gguf.demo.source import DenseModel, Floats, Shape

_ROWS = 512


@dataclass(frozen=True)
class Packed:
    """A Text as arrays. `spans` are [begin, end) of each sequence; the prefix is [0, n_prefix)."""

    tokens: NDArray[np.int64]  # [n]
    n_prefix: int
    spans: tuple[tuple[int, int], ...]
    cosines: Floats  # [n, head_dim / 2]
    sines: Floats


def pack(text: Text, shape: Shape) -> Packed:
    """Lays out a text and the rotary angles of its positions."""
    tokens = list(text.prefix)
    positions = list(range(len(tokens)))
    spans = []
    for sequence in text.sequences:
        spans.append((len(tokens), len(tokens) + len(sequence)))
        tokens += sequence
        positions += range(len(text.prefix), len(text.prefix) + len(sequence))
    frequencies = shape.rope_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = np.asarray(positions)[:, None] * frequencies
    return Packed(
        tokens=np.asarray(tokens, np.int64),
        n_prefix=len(text.prefix),
        spans=tuple(spans),
        cosines=np.cos(angles).astype(np.float32),
        sines=np.sin(angles).astype(np.float32),
    )


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / rms(x) * weight over the last axis."""
    scale = 1.0 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
    return np.asarray(x * scale * weight, np.float32)


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention; matrices are [out, in]."""

    norm: Floats
    query: Floats
    key: Floats
    value: Floats
    output: Floats

    @classmethod
    def load(cls, model: DenseModel, layer: int) -> AttentionWeights:
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
        return cls(*(model.weights(f"blk.{layer}.{name}.weight") for name in names))


@dataclass(frozen=True)
class FfnWeights:
    """One layer's feed-forward: gate and up [n_ff, d], down [d, n_ff]."""

    norm: Floats
    gate: Floats
    up: Floats
    down: Floats

    @classmethod
    def load(cls, model: DenseModel, layer: int) -> FfnWeights:
        names = ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        return cls(*(model.weights(f"blk.{layer}.{name}.weight") for name in names))


def attention(x: Floats, weights: AttentionWeights, packed: Packed, shape: Shape) -> Floats:
    """What the attention block adds to the residual stream `x`, [n, d] -> [n, d]."""
    n, dim, n_kv = len(x), shape.head_dim, shape.n_kv_heads
    normed = rms_norm(x, weights.norm, shape.norm_eps)
    query = _rotate((normed @ weights.query.T).reshape(n, shape.n_heads, dim), packed)
    key = _rotate((normed @ weights.key.T).reshape(n, n_kv, dim), packed).transpose(1, 0, 2)
    value = (normed @ weights.value.T).reshape(n, n_kv, dim).transpose(1, 0, 2)
    query *= np.float32(dim**-0.5)
    mixed = np.empty((n, shape.n_embd), np.float32)
    n_prefix = packed.n_prefix
    mixed[:n_prefix] = _attend(query[:n_prefix], key[:, :n_prefix], value[:, :n_prefix])
    for begin, end in packed.spans:
        keys = np.concatenate([key[:, :n_prefix], key[:, begin:end]], axis=1)
        values = np.concatenate([value[:, :n_prefix], value[:, begin:end]], axis=1)
        mixed[begin:end] = _attend(query[begin:end], keys, values)
    return np.asarray(mixed @ weights.output.T, np.float32)


def activations(x: Floats, weights: FfnWeights, eps: float) -> tuple[Floats, Floats]:
    """The feed-forward's input after its norm [n, d] and its neurons' outputs [n, n_ff]."""
    normed = rms_norm(x, weights.norm, eps)
    return normed, gated(normed, weights.gate, weights.up)


def gated(normed: Floats, gate: Floats, up: Floats) -> Floats:
    """silu(gate x) * (up x), [n, n_ff]."""
    out = np.empty((len(normed), len(gate)), np.float32)
    for begin in range(0, len(normed), _ROWS):  # in parts that stay in the processor's cache
        rows = normed[begin : begin + _ROWS]
        part = np.matmul(rows, gate.T, out=out[begin : begin + _ROWS])
        with np.errstate(over="ignore"):  # exp(-x) may be inf: then x / inf = -0 is right
            denominator = np.exp(-part)
        denominator += 1
        part /= denominator
        part *= rows @ up.T
    return out


def _rotate(x: Floats, packed: Packed) -> Floats:
    """Rotary embedding of adjacent pairs; x [n, heads, head_dim]."""
    cosines, sines = packed.cosines[:, None, :], packed.sines[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * cosines - odd * sines
    out[..., 1::2] = even * sines + odd * cosines
    return out


def _attend(query: Floats, keys: Floats, values: Floats) -> Floats:
    """Causal attention of the last tokens of a sequence.

    query [n, heads, head_dim], already scaled; keys and values [kv_heads, n_context, head_dim],
    of which the last n are the queries' own. Returns [n, heads * head_dim].
    """
    n, n_heads, dim = query.shape
    n_kv, n_context, _ = keys.shape
    group = n_heads // n_kv
    stacked = query.reshape(n, n_kv, group, dim).transpose(1, 2, 0, 3)
    scores = stacked.reshape(n_kv, group * n, dim) @ keys.transpose(0, 2, 1)
    scores = scores.reshape(n_kv, group, n, n_context)
    future = np.arange(n_context) > np.arange(n)[:, None] + (n_context - n)
    scores[:, :, future] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    out = scores.reshape(n_kv, group * n, n_context) @ values
    out = out.reshape(n_kv, group, n, dim).transpose(2, 0, 1, 3)
    return np.asarray(out.reshape(n, n_heads * dim), np.float32)

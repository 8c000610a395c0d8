"""Splits the whole dense model, block by block.

Two residual streams run side by side over the calibration text: the dense model's, and the one of
the model made so far. Each block is fitted to bring the second back to the first, so errors of
earlier blocks are corrected where they can be, and do not pile up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np

from flashmoe_gguf.demo.calibrate import Text
from flashmoe_gguf.demo.forward import (
    AttentionWeights,
    FfnWeights,
    activations,
    attention,
    pack,
)
from flashmoe_gguf.demo.source import DenseModel, Floats
from flashmoe_gguf.demo.split import Measured, Sizes, Split, split_block, split_output

DOWN_TYPE = gguf.GGMLQuantizationType.Q8_0


@dataclass(frozen=True)
class Recipe:
    """What is built. A change here makes another model: raise model.BUILDER_VERSION."""

    n_dense_layers: int  # leading blocks left as they are
    sizes: Sizes
    n_answer: int  # calibration tokens per prompt, at most


def split_model(
    model: DenseModel, text: Text, recipe: Recipe, progress: Callable[[int, float], None]
) -> dict[int, Split]:
    """A Split for each block from `recipe.n_dense_layers` on.

    `progress` gets the layer and the fraction of the whole done, several times a layer.
    """
    shape = model.shape
    packed = pack(text, shape)
    dense = model.rows("token_embd.weight", packed.tokens)
    ours = dense
    splits: dict[int, Split] = {}
    for layer in range(shape.n_layers):

        def report(part: float, layer: int = layer) -> None:
            progress(layer, (layer + part) / shape.n_layers)

        report(0.0)
        attn = AttentionWeights.load(model, layer)
        ffn = FfnWeights.load(model, layer)
        dense = dense + attention(dense, attn, packed, shape)
        report(0.15)
        _, hidden = activations(dense, ffn, shape.norm_eps)
        dense += hidden @ ffn.down.T
        if layer < recipe.n_dense_layers:
            ours = dense
            continue
        report(0.3)
        ours = ours + attention(ours, attn, packed, shape)
        report(0.4)
        inputs, hidden = activations(ours, ffn, shape.norm_eps)
        measured = Measured(inputs, hidden, target=dense - ours, weight=_token_weights(dense))
        report(0.55)
        split = _quantized(split_block(measured, ffn.down, recipe.sizes))
        report(0.9)
        ours += split_output(inputs, hidden, split, recipe.sizes.top_k)
        splits[layer] = split
    return splits


def _token_weights(stream: Floats) -> Floats:
    """1 / rms per token: the next norm divides by it. Without, the few attention-sink tokens,
    whose stream is a hundred times larger, would decide the fit alone."""
    return np.asarray(1.0 / np.sqrt((stream * stream).mean(1)), np.float32)


def _quantized(split: Split) -> Split:
    """The split with its down projections as they will be read back from the file."""
    return Split(
        shared=split.shared,
        experts=split.experts,
        router=split.router,
        down_shared=_round_trip(split.down_shared),
        down_experts=_round_trip(split.down_experts),
    )


def _round_trip(weights: Floats) -> Floats:
    packed = gguf.quants.quantize(weights, DOWN_TYPE)
    return np.asarray(gguf.quants.dequantize(packed, DOWN_TYPE), np.float32)

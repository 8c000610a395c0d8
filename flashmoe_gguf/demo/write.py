"""Writes the split model as a GGUF of llama.cpp's `deepseek` architecture.

| what | from |
|---|---|
| tokenizer, chat template, general.* | the source, unchanged but for name and description |
| llama.* | the source, renamed deepseek.*, plus the expert keys below |
| embeddings, norms, attention, dense blocks | the source's bytes |
| gate and up of shared and routed experts | the source's quantized rows, in another order |
| down of shared and routed experts | refitted, Q8_0: its rows are 32 long, too short for K-quants |
| router | float32 |

`deepseek` rotates adjacent pairs as `llama` does, has no norms or biases that llama lacks, and
weighs the chosen experts with a softmax that is not renormalised. Router logits are tiny, so each
weight is nearly 1 / n_experts; expert_weights_scale brings it back to 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from flashmoe_gguf.demo.build import DOWN_TYPE, Recipe
from flashmoe_gguf.demo.source import DenseModel, Floats
from flashmoe_gguf.demo.split import Split

_ARCH = "deepseek"
_NAME = "SmolLM2-135M-Instruct split into experts (flashmoe-gguf demo)"
_DESCRIPTION = (
    "Made from SmolLM2-135M-Instruct by flashmoe-gguf, for demonstration and tests: "
    "its feed-forward blocks are cut into shared neurons and routed experts."
)
_REPLACED = {"general.architecture", "general.name", "general.size_label", "general.finetune"}


def write_model(
    path: Path,
    model: DenseModel,
    splits: dict[int, Split],
    recipe: Recipe,
    provenance: dict[str, str],
) -> None:
    """Writes the whole file at `path`; the caller makes it durable and gives it its name.

    `provenance` becomes string metadata `demo.*`.
    """
    writer = gguf.GGUFWriter(path, _ARCH)
    try:
        _add_metadata(writer, model, splits, recipe, provenance)
        for tensor in model.reader.tensors:
            layer, part = _place(tensor.name)
            if layer in splits and part in ("ffn_gate", "ffn_up"):
                _add_rows(writer, tensor, layer, part, splits[layer])
            elif layer in splits and part == "ffn_down":
                prefix, split = f"blk.{layer}.", splits[layer]
                _add_quantized(writer, f"{prefix}ffn_down_shexp.weight", split.down_shared)
                _add_quantized(writer, f"{prefix}ffn_down_exps.weight", split.down_experts)
                writer.add_tensor(f"{prefix}ffn_gate_inp.weight", split.router)
            else:
                _add_raw(writer, tensor.name, tensor.data, tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_metadata(
    writer: gguf.GGUFWriter,
    model: DenseModel,
    splits: dict[int, Split],
    recipe: Recipe,
    provenance: dict[str, str],
) -> None:
    writer.add_name(_NAME)
    writer.add_description(_DESCRIPTION)
    for name, field in model.reader.fields.items():
        if name.startswith("GGUF.") or name in _REPLACED:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        new_name = f"{_ARCH}.{name[6:]}" if name.startswith("llama.") else name
        writer.add_key_value(new_name, field.contents(), kind, element)
    experts_wide = {split.experts.shape[1] for split in splits.values()}
    (n_ff_expert,) = experts_wide
    sizes = recipe.sizes
    writer.add_leading_dense_block_count(recipe.n_dense_layers)
    writer.add_expert_count(sizes.n_experts)
    writer.add_expert_used_count(sizes.top_k)
    writer.add_expert_feed_forward_length(n_ff_expert)
    # llama.cpp takes the shared part as a number of experts of the routed size.
    writer.add_expert_shared_count(sizes.n_shared // n_ff_expert)
    writer.add_expert_weights_scale(float(sizes.n_experts))
    for key, value in provenance.items():
        writer.add_string(f"demo.{key}", value)


def _place(name: str) -> tuple[int, str]:
    """Layer and part of a tensor's name; layer -1 for those that belong to none."""
    words = name.split(".")
    return (int(words[1]), words[2]) if words[0] == "blk" else (-1, words[0])


def _add_rows(writer: gguf.GGUFWriter, tensor: Any, layer: int, part: str, split: Split) -> None:
    """Quantized rows of gate or up; each neuron is a row, so its bytes move unchanged."""
    rows = tensor.data
    kind = tensor.tensor_type
    _add_raw(writer, f"blk.{layer}.{part}_shexp.weight", rows[split.shared], kind)
    _add_raw(writer, f"blk.{layer}.{part}_exps.weight", rows[split.experts], kind)


def _add_quantized(writer: gguf.GGUFWriter, name: str, weights: Floats) -> None:
    _add_raw(writer, name, gguf.quants.quantize(weights, DOWN_TYPE), DOWN_TYPE)


def _add_raw(writer: gguf.GGUFWriter, name: str, data: Any, kind: Any) -> None:
    writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)

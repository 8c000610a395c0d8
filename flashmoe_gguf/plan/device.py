"""What layers on a device leave of a model's sizes for the system's memory."""

from __future__ import annotations

from dataclasses import replace

from flashmoe_gguf.budget import CONTEXT_BYTES, RunSizes, estimate_fixed
from flashmoe_gguf.devices import list_devices, need_device
from flashmoe_gguf.libs import load_llama_cpp
from flashmoe_gguf.models import known_models
from flashmoe_gguf.placement import (
    AUTO,
    ContextBytes,
    LayerBytes,
    Placement,
    choose,
    layer_bytes,
    usable_devices,
)
from flashmoe_gguf.plan.sizes import Subject
from flashmoe_gguf.store import read_geometry


def on_devices(
    model: str, subject: Subject, run: RunSizes, n_layers: int | str
) -> tuple[Subject, Placement]:
    """(the subject without what a device takes, the placement of `n_layers`).

    Of a model that is not here, dense weights are taken to be the same in every layer. Raises
    OptionError and BudgetError, and LibraryError without llama.cpp's libraries.
    """
    llama_cpp = load_llama_cpp()
    found = list_devices(llama_cpp) if n_layers == AUTO else need_device(llama_cpp)
    weights = layer_bytes(read_geometry(model)) if subject.files else _spread(model, subject)
    n_block = len(weights.layers)
    kv_bytes = 2 * subject.sizes.kv_values * run.n_ctx
    compute = estimate_fixed(subject.sizes, run).context - kv_bytes - CONTEXT_BYTES
    placement = choose(
        weights, ContextBytes(kv_bytes // n_block, compute), usable_devices(found), n_layers
    )
    sizes = replace(
        subject.sizes,
        dense_bytes=placement.host_dense,
        kv_values=placement.host_kv // (2 * run.n_ctx),
    )
    shared = any(share.device.shares_memory for share in placement.shares if share.n_layers)
    if placement.n_layers > 0 and not shared:  # logits are computed there, attention too if all are
        all_there = placement.n_layers == placement.n_all
        sizes = replace(sizes, n_vocab=0, n_head=0 if all_there else sizes.n_head)
    idle = max(subject.embedding_bytes, weights.tied if placement.n_layers > 0 else 0)
    return replace(subject, sizes=sizes, embedding_bytes=idle), placement


def _spread(model: str, subject: Subject) -> LayerBytes:
    n_layer = known_models()[model].shape.layers
    rest = max(subject.sizes.dense_bytes - 2 * subject.embedding_bytes, 0)
    return LayerBytes(
        host=subject.embedding_bytes,
        layers=(rest // n_layer,) * n_layer,
        output=subject.embedding_bytes,
    )

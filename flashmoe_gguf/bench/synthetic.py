"""Generated models of real shape that replay an expert-routing trace when they decode.

Greedy decoding of such a model, in any llama.cpp program, walks through the
trace: token i of the vocabulary stands for token i of the trace, routes to
exactly its experts in every layer, and is followed by token i + 1. So speed can
be measured on real routing and real sizes without real weights.

The routing part never changes from layer to layer: a predictor that applies the
next layer's router early is always right here. Never quote such gains from it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, TokenType

from flashmoe_gguf.bench.replay_weights import ReplayModel, replay_text
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.errors import FlashMoEError

__all__ = ["SHAPES", "Shape", "build_replay_model", "replay_text", "synthetic_trace"]

Experts = npt.NDArray[np.integer[Any]]

_FREE_SPACE_MARGIN = 64 << 20


@dataclass(frozen=True)
class Shape:
    """Dimensions of a replay model; widths in weights, `top_k` experts per token and layer."""

    n_layer: int
    n_expert: int
    top_k: int
    width: int
    expert_width: int
    n_head: int
    n_head_kv: int


SHAPES: dict[str, Shape] = {
    # gpt-oss-20b's routing over experts of 5.3 MB, 4.1 GB of them (the real ones: 13.2 MB).
    "gpt-oss-20b": Shape(24, 32, 4, 2048, 1536, 16, 4),
    "olmoe": Shape(16, 64, 8, 2048, 1024, 16, 16),
}


def build_replay_model(
    path: Path,
    experts: Experts,
    *,
    n_expert: int,
    width: int,
    expert_width: int,
    n_head: int,
    n_head_kv: int,
    n_ctx: int,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a model to `path` that replays `experts` [tokens, layers, k]; return `path`.

    The vocabulary is the trace tokens, then `</s>` (which follows the last of them), `<s>`,
    `<unk>` and the 256 bytes (each standing for some trace token, so that any text is a
    valid prompt). The same arguments give the same bytes. The file appears under its name
    only when complete; one tensor at a time is in memory. `progress(done_bytes,
    total_bytes)` is called after each tensor.

    Raises OptionError for sizes or a trace that cannot be replayed, FlashMoEError if the
    disk has not enough room.
    """
    model = ReplayModel(np.asarray(experts), n_expert, width, expert_width, n_head, n_head_kv, seed)
    model.check()
    tensors = list(model.tensors())
    total = sum(tensor.n_bytes for tensor in tensors)
    _check_space(path, total)
    unfinished = path.with_name(path.name + ".partial")
    writer = GGUFWriter(unfinished, "qwen3moe")
    try:
        _add_metadata(writer, model, n_ctx)
        for t in tensors:
            writer.add_tensor_info(t.name, t.row_shape, np.dtype(np.uint8), t.n_bytes, t.qtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for t in tensors:
            writer.write_tensor_data(t.make().view(np.uint8).reshape(t.row_shape))
            done += t.n_bytes
            if progress is not None:
                progress(done, total)
        writer.close()
        with unfinished.open("rb+") as written:
            os.fsync(written.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(Exception):
            writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    return path


def _add_metadata(writer: GGUFWriter, model: ReplayModel, n_ctx: int) -> None:
    n = model.n_tokens
    writer.add_name(f"replay of {n} tokens, {model.n_layer} x {model.n_expert} experts")
    writer.add_description(
        "Generated: greedy decoding replays an expert-routing trace. Its words mean nothing, and "
        "its routing is known from the first layer on, so lookahead always succeeds."
    )
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(model.width)
    writer.add_block_count(model.n_layer)
    writer.add_feed_forward_length(model.expert_width)
    writer.add_expert_feed_forward_length(model.expert_width)
    writer.add_expert_count(model.n_expert)
    writer.add_expert_used_count(model.top_k)
    writer.add_head_count(model.n_head)
    writer.add_head_count_kv(model.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(model.n_vocab)

    kinds = [TokenType.NORMAL] * n + [TokenType.CONTROL] * 2 + [TokenType.UNKNOWN]
    words = [*replay_text(0, n), "</s>", "<s>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    writer.add_tokenizer_model("llama")  # SentencePiece
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types(kinds + [TokenType.BYTE] * 256)
    writer.add_eos_token_id(n)
    writer.add_bos_token_id(n + 1)
    writer.add_unk_token_id(n + 2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _check_space(path: Path, n_bytes: int) -> None:
    needed = n_bytes + _FREE_SPACE_MARGIN
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise FlashMoEError(
            f"the model needs {needed / 1e9:.2f} GB in {path.parent}, which has {free / 1e9:.2f}",
            "free some space or choose another folder",
        )

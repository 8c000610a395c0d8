"""Models of real size that take no room: a true header, and a file of holes where weights were.

For what reads headers only. Reading the weights gives zeros, at the speed of memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from flashmoe_gguf.bench.replay_weights import ReplayModel
from flashmoe_gguf.bench.synthetic import SHAPES


def make_sparse(path: Path, shape_name: str = "gpt-oss-20b", n_tokens: int = 1500) -> Path:
    """The benchmark's replay model (docs/BENCHMARKS.md), by the name of its shape, as holes."""
    shape = SHAPES[shape_name]
    experts = np.zeros((n_tokens, shape.n_layer, shape.top_k), np.uint8)
    model = ReplayModel(
        experts, shape.n_expert, shape.width, shape.expert_width, shape.n_head, shape.n_head_kv, 0
    )
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_name("holes")
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.expert_width)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.top_k)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(model.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    end = 0
    for t in model.tensors():
        writer.add_tensor_info(t.name, t.row_shape, np.dtype(np.uint8), t.n_bytes, t.qtype)
        end += -(-t.n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = -(-file.seek(0, 2) // 32) * 32
        file.truncate(start + end)
    return path

"""The metadata that architectures share, by what it describes: for the rows of `arch_table`.

Keys are those of llama.cpp's `load_arch_hparams`, without the `{arch}.` in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .builder import Value

Keys = Mapping[str, Value]

WIDTH, N_HEAD, FF = 64, 2, 64
N_EXPERT, TOP_K = 8, 2

# Gating functions by number, llama_expert_gating_func_type in llama.cpp's src/llama-hparams.h.
SIGMOID, SQRT_SOFTPLUS = 2, 4


@dataclass(frozen=True)
class Arch:
    """One architecture as it is generated.

    `n_layer` includes leading dense layers. `kind` is "decoder", "diffusion" (attention is not
    causal, there is no KV cache) or "encoder" (gives embeddings).
    """

    name: str
    what: str
    keys: Keys = field(default_factory=dict)
    n_layer: int = 3
    kind: str = "decoder"


# What any decoder with experts has; a key that an architecture does not know is ignored.
BASE: Keys = {
    "context_length": 4096,
    "embedding_length": WIDTH,
    "feed_forward_length": FF,
    "attention.head_count": N_HEAD,
    "attention.head_count_kv": N_HEAD,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": N_EXPERT,
    "expert_used_count": TOP_K,
    "expert_feed_forward_length": FF,
}
# One dense layer, then experts chosen with a bias and normalised, beside a shared one.
SHARED: Keys = {
    "leading_dense_block_count": 1,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": FF,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "expert_gating_func": SIGMOID,
}
GROUPS: Keys = {"expert_group_count": 4, "expert_group_used_count": 2}
MLA: Keys = {
    **SHARED,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 96,
    "attention.value_length": 64,
    "attention.key_length_mla": 64,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 32,
}
# Sparse attention: a small indexer chooses the keys that a query looks at.
INDEXER: Keys = {
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 32,
}
HYPER: Keys = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.magnitude": 2.0,
    "hyper_connection.low_rank": 8,
}
MAMBA: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * WIDTH,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "attention.head_count_kv": [0, N_HEAD, 0],
}
DELTA_NET: Keys = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 32,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 2,
    "full_attention_interval": 2,
    "rope.dimension_count": 32,
    "rope.dimension_sections": [8, 4, 4, 0],
    "expert_shared_feed_forward_length": FF,
}
# Kimi delta attention in the layers without KV heads, MLA in the others.
KDA: Keys = {
    "attention.head_count_kv": [0, 1, 0],
    "ssm.conv_kernel": 4,
    "kda.head_dim": 32,
    "kda.gate_lower_bound": -5.0,
    "kda.safe_gate": True,
}


def window(n_layer: int = 3) -> dict[str, Value]:
    """A sliding window of 32 tokens in every other layer."""
    return {
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": [i % 2 for i in range(n_layer)],
        "rope.freq_base_swa": 10000.0,
    }

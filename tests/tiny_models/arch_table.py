"""Every MoE architecture of llama.cpp: what is special about it, and the metadata it wants.

`ROWS` are the architectures that are generated and run; `EXCEPTIONS` are those whose loader
mentions routed experts and that are not, with the reason. Together they must be the list that
is computed from llama.cpp's own source. A row's own keys replace the shared ones of `arch_keys`.

A new architecture is one row here: its tensors are llama.cpp's own list (`wanted.py`).
"""

from __future__ import annotations

from .arch_keys import (
    DELTA_NET,
    FF,
    GROUPS,
    HYPER,
    INDEXER,
    KDA,
    MAMBA,
    MLA,
    N_HEAD,
    SHARED,
    SQRT_SOFTPLUS,
    Arch,
    window,
)
from .builder import U64

ROWS: tuple[Arch, ...] = (
    # llama-like
    Arch("llama", "Mixtral: softmax over all experts", {"rope.dimension_count": 32}),
    Arch("mistral3", "Ministral with experts"),
    Arch("minicpm", "scaled residuals and embeddings"),
    Arch("arctic", "a dense MLP beside the experts in every layer"),
    Arch("dbrx", "layer norm without bias, clamped QKV", {"attention.clamp_kqv": 8.0}),
    Arch("olmoe", "norm over the whole of Q and K"),
    Arch("phimoe", "biases everywhere, layer norm"),
    Arch("qwen2moe", "a gated shared expert", {"expert_shared_feed_forward_length": FF}),
    Arch("qwen3moe", "norm on each head's Q and K"),
    Arch(
        "qwen3vlmoe",
        "interleaved multimodal rope; text only",
        {"rope.dimension_sections": [8, 4, 4, 0]},
    ),
    Arch("mellum", "three sliding-window layers to one full", window()),
    Arch("granite", "the dense architecture's optional experts", {"logit_scale": 2.0}),
    Arch(
        "granitemoe",
        "a shared expert; scaled logits, residuals and attention",
        {"logit_scale": 2.0, "residual_scale": 0.5, "expert_shared_feed_forward_length": FF},
    ),
    Arch(
        "granite_swa",
        "fused gate and up, attention sinks, per-layer sliding window",
        {**window(), "logit_scale": 1.0, "expert_shared_feed_forward_length": FF},
    ),
    Arch("hunyuan-moe", "norm after rope; a shared expert", SHARED),
    Arch("hy_v3", "experts chosen with a bias; a shared expert", SHARED),
    Arch("bailingmoe", "shared experts, softmax without a bias", SHARED),
    Arch("bailingmoe2", "group routing, a leading dense layer", {**SHARED, **GROUPS}),
    Arch("dots1", "sigmoid router with a bias, a leading dense layer", SHARED),
    Arch(
        "ernie4_5-moe", "experts in a stride of layers", {**SHARED, "interleave_moe_layer_step": 1}
    ),
    Arch("exaone-moe", "sliding window without rope in full layers", {**SHARED, **window()}),
    Arch("glm4moe", "partial rope, QKV biases", {**SHARED, "rope.dimension_count": 16}),
    Arch("minimax-m2", "norm over the whole of Q and K, sigmoid router with a bias", SHARED),
    Arch(
        "minimax-m3",
        "an indexer chooses blocks of keys",
        {
            **SHARED,
            **INDEXER,
            "attention.indexer.head_count": N_HEAD,
            "attention.indexer.block_size": 4,
            "attention.indexer.local_blocks": 1,
            "rope.dimension_count": 32,
        },
    ),
    Arch(
        "grovemoe",
        "two expert blocks per layer: chunk experts shared by groups of experts",
        {
            "expert_chunk_feed_forward_length": 32,
            "expert_group_scale": 0.5,
            "experts_per_group": 2,
        },
    ),
    Arch("llada-moe", "diffusion: attention is not causal", kind="diffusion"),
    Arch("rnd1", "diffusion: attention is not causal", kind="diffusion"),
    Arch("llama-embed", "Llama as an encoder", {"rope.dimension_count": 32}, kind="encoder"),
    Arch(
        "nomic-bert-moe",
        "an encoder: no gate part, experts in every other layer",
        {"moe_every_n_layers": 2, "attention.causal": False},
        n_layer=4,
        kind="encoder",
    ),
    Arch("smallthinker", "the router looks at the layer's input; ReLU", {**SHARED, **window()}),
    Arch(
        "step35",
        "per-head attention gate, clamped SwiGLU in some layers",
        {**SHARED, **window(), "swiglu_clamp_exp": [0.0, 4.0, 0.0]},
    ),
    Arch("mimo2", "attention sinks, sliding window", {**SHARED, **window()}),
    Arch("laguna", "softplus attention gate", {**SHARED, **window()}),
    Arch("afmoe", "gated attention, four norms a layer", {**SHARED, **window()}),
    Arch("maple", "clamped SwiGLU", {**SHARED, **window(), "swiglu_clamp_exp": 7.0}),
    Arch(
        "cohere2moe",
        "attention and experts in parallel",
        {**SHARED, **window(), "logit_scale": 1.0},
    ),
    Arch(
        "gpt-oss",
        "biases on the experts, weights by softmax over the chosen ones, attention sinks",
        {"attention.sliding_window": 32},
    ),
    Arch(
        "llama4",
        "weights applied before the experts, experts in every other layer",
        {**SHARED, "interleave_moe_layer_step": 2},
        n_layer=4,
    ),
    # gemma-like and other norms
    Arch("grok", "soft-capped logits, a dense MLP beside the experts", {"logit_scale": 1.0}),
    Arch(
        "gemma4",
        "fused gate and up with a scale per expert, beside a dense MLP; embeddings per layer",
        {
            "attention.sliding_window": 32,
            "attention.sliding_window_pattern": [True, False, True],
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.key_length_swa": 32,
            "attention.value_length_swa": 32,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 32,
            "rope.freq_base_swa": 10000.0,
        },
    ),
    # deepseek-like
    Arch("deepseek", "fine-grained experts, shared experts, a leading dense layer", SHARED),
    Arch("deepseek2", "MLA, group routing, selection bias", {**MLA, **GROUPS}),
    Arch("deepseek2-ocr", "deepseek2's experts with plain attention", SHARED),
    Arch("mistral4", "deepseek2 with attention temperature", MLA),
    Arch("deepseek32", "MLA with an indexer", {**MLA, **INDEXER}),
    Arch("glm-dsa", "MLA with an indexer", {**MLA, **INDEXER}),
    Arch(
        "dots3note",
        "MLA with an indexer in full layers, another MLA in sliding-window ones",
        {
            **MLA,
            **INDEXER,
            **window(),
            "attention.indexer.types": [1, 0, 1],
            "attention.kv_lora_rank_swa": 64,
            "attention.key_length_swa": 96,
            "attention.value_length_swa": 64,
            "attention.key_length_mla_swa": 64,
            "attention.value_length_mla_swa": 32,
        },
    ),
    Arch(
        "hy_v4",
        "MLA, hyper-connections, shared indexers, clamped SwiGLU",
        {
            **MLA,
            **INDEXER,
            **HYPER,
            "attention.indexer.types": [1, 0, 1],
            "swiglu_clamp_exp": 10.0,
        },
    ),
    Arch(
        "deepseek4",
        "the first layer's experts are looked up by token id; hyper-connections, compressed KV",
        {
            **SHARED,
            **INDEXER,
            **HYPER,
            "expert_gating_func": SQRT_SOFTPLUS,
            "attention.head_count_kv": 1,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.q_lora_rank": 32,
            "rope.dimension_count": 32,
            "attention.sliding_window": 32,
            "attention.output_group_count": 2,
            "attention.output_lora_rank": 32,
            "attention.compress_ratios": [0, 0, 4, 128],
            "attention.compress_rope_freq_base": 160000.0,
            "hash_layer_count": 1,
            "swiglu_clamp_exp": 10.0,
        },
        n_layer=4,
    ),
    # hybrids
    Arch("jamba", "Mamba between attention layers", MAMBA),
    Arch(
        "granitehybrid",
        "Mamba-2 between attention layers, a shared expert",
        {**MAMBA, "logit_scale": 1.0, "expert_shared_feed_forward_length": FF},
    ),
    Arch(
        "nemotron_h",
        "the dense architecture with experts: no gate part, layers of one kind each",
        {
            **SHARED,
            **MAMBA,
            "feed_forward_length": [0, 0, FF],
            "attention.layer_norm_epsilon": 1e-5,
        },
    ),
    Arch(
        "nemotron_h_moe",
        "no gate part, latent width, top-k and expert width by layer",
        {
            **SHARED,
            **MAMBA,
            "attention.head_count_kv": [0, N_HEAD, 0, 0],
            "feed_forward_length": [0, 0, FF, FF],
            "expert_feed_forward_length": [0, 0, FF, 96],
            "expert_used_count": [0, 0, 2, 3],
            "moe_latent_size": 32,
        },
        n_layer=4,
    ),
    Arch(
        "lfm2moe",
        "short convolutions between attention layers",
        {**SHARED, "attention.head_count_kv": [0, N_HEAD, 0], "shortconv.l_cache": 3},
    ),
    Arch(
        "minimax-01",
        "lightning attention between full layers",
        {"residual_scale": 3.5, "full_attention_interval": 2},
    ),
    Arch("qwen3next", "gated delta-net between full layers, a gated shared expert", DELTA_NET),
    Arch("qwen35moe", "gated delta-net, interleaved rope", DELTA_NET),
    Arch(
        "qwen4exp",
        "gated delta-net, sparse attention, hyper-connections, n-gram embeddings",
        {
            **DELTA_NET,
            **HYPER,
            **INDEXER,
            "attention.indexer.key_length": 32,
            "attention.compress_ratios": [4, 4, 4],
            "embedding_length_per_layer_input": 16,
            "ple.layers": [0],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 0,
            "ple.layer_multipliers": U64([1, 3, 5]),
            "ple.head_offsets": U64([0, 256, 512, 768]),
            "ple.head_vocab_sizes": U64([256, 256, 256, 256]),
        },
    ),
    Arch("kimi-linear", "Kimi delta attention between MLA layers", {**MLA, **KDA}),
    Arch(
        "kimi-k3",
        "Kimi delta attention, experts of a latent width behind a projection",
        {
            **MLA,
            **KDA,
            "expert_latent_length": 32,
            "attn_res.block_size": 12,
            "activation.situ_beta": 4.0,
            "activation.situ_linear_beta": 25.0,
        },
    ),
    Arch(
        "bailingmoe3",
        "Kimi delta attention, group routing, clamped SwiGLU",
        {
            **MLA,
            **KDA,
            **GROUPS,
            "rope.dimension_sections": [4, 6, 6, 0],
            "swiglu_clamp_exp": [0.0, 4.0, 4.0],
            "swiglu_clamp_shexp": [0.0, 5.0, 5.0],
        },
    ),
    Arch(
        "glm5-next",
        "Kimi delta attention, MLA with a pooled indexer, hyper-connections",
        {
            **MLA,
            **KDA,
            **INDEXER,
            **HYPER,
            "attention.key_length": 64,
            "rope.dimension_count": 0,
            "attention.indexer.kpool": 4,
            "attention.indexer.kpool_select_tail": True,
        },
    ),
)

_DENSE = "its loader is shared with {}, and never creates experts for this name"
EXCEPTIONS: dict[str, str] = {
    "ernie4_5": _DENSE.format("ernie4_5-moe"),
    "paddleocr": _DENSE.format("ernie4_5-moe"),
    "lfm2": "its loader takes every layer for a dense one, whatever the metadata says",
    "refact": "its loader creates experts that its graph never uses",
    "dflash": "a draft model: it computes from another model's hidden states",
}

"""One function per architecture: its metadata and tensors, nothing else.

Names and shapes follow llama.cpp's src/models/<arch>.cpp (`load_arch_hparams`,
`load_arch_tensors`). A new architecture is one function here and one row in
`__init__.py`.
"""

from __future__ import annotations

from gguf import GGMLQuantizationType as T

from .blocks import QType
from .builder import Builder

# Router logits with a spread of about 2 make different tokens choose different experts.
ROUTER_GAIN = 2.0


def trunk(m: Builder, *, dense: T = T.Q8_0) -> None:
    """Metadata and tensors that every decoder here has."""
    s = m.spec
    m.metadata["general.name"] = f"tiny {s.name}"
    m.metadata["tokenizer.ggml.model"] = "no_vocab"
    m.set(
        vocab_size=m.n_vocab,
        context_length=m.n_ctx_train,
        embedding_length=s.width,
        block_count=s.n_layer,
        feed_forward_length=s.expert_width,
        attention__head_count=s.n_head,
        attention__head_count_kv=s.n_head_kv,
        attention__layer_norm_rms_epsilon=1e-5,
        expert_count=s.n_expert,
        expert_used_count=s.top_k,
        expert_feed_forward_length=s.expert_width,
    )
    m.matrix("token_embd", (s.width, m.n_vocab), dense, gain=s.width**0.5)
    m.norm("output_norm", s.width)
    # F32, so that no rounding of its input hides a small change of the residual stream.
    m.matrix("output", (s.width, m.n_vocab), T.F32)


def attention(m: Builder, i: int, *, dense: T = T.Q8_0, qk_norm: bool = False) -> None:
    """Grouped-query attention with its input norm."""
    s, b = m.spec, f"blk.{i}"
    q, kv = s.n_head * s.head_width, s.n_head_kv * s.head_width
    m.norm(f"{b}.attn_norm", s.width)
    m.matrix(f"{b}.attn_q", (s.width, q), dense)
    m.matrix(f"{b}.attn_k", (s.width, kv), dense)
    m.matrix(f"{b}.attn_v", (s.width, kv), dense)
    m.matrix(f"{b}.attn_output", (q, s.width), dense)
    if qk_norm:
        m.norm(f"{b}.attn_q_norm", s.head_width)
        m.norm(f"{b}.attn_k_norm", s.head_width)


def router(m: Builder, i: int) -> None:
    m.matrix(f"blk.{i}.ffn_gate_inp", (m.spec.width, m.spec.n_expert), T.F32, ROUTER_GAIN)


def experts(
    m: Builder,
    i: int,
    *,
    up: QType = T.Q8_0,
    down: QType = T.Q8_0,
    parts: tuple[str, ...] = ("up", "gate", "down"),
    suffix: str = "exps",
    width: int = 0,
    n: int = 0,
) -> None:
    """The routed experts' matrices; `parts` in the order they lie in the file."""
    s = m.spec
    width, n = width or s.expert_width, n or s.n_expert
    shapes = {
        "up": (s.width, width, n),
        "gate": (s.width, width, n),
        "gate_up": (s.width, 2 * width, n),
        "down": (width, s.width, n),
    }
    for part in parts:
        qtype = down if part == "down" else up
        m.matrix(f"blk.{i}.ffn_{part}_{suffix}", shapes[part], qtype)


def mlp(m: Builder, i: int, width: int, suffix: str = "", *, gate: bool = True) -> None:
    """A dense or shared-expert MLP."""
    s, b = m.spec, f"blk.{i}"
    m.matrix(f"{b}.ffn_up{suffix}", (s.width, width))
    if gate:
        m.matrix(f"{b}.ffn_gate{suffix}", (s.width, width))
    m.matrix(f"{b}.ffn_down{suffix}", (width, s.width))


def qwen3moe(m: Builder) -> None:
    trunk(m)
    for i in range(m.spec.n_layer):
        attention(m, i, qk_norm=True)
        m.norm(f"blk.{i}.ffn_norm", m.spec.width)
        router(m, i)
        experts(m, i, up=T.Q8_0, down=T.Q5_1, parts=("down", "gate", "up"))


def qwen3moe_mixed(m: Builder) -> None:
    """K-quants mixed over the layers as in the Q4_K_M recipe."""
    trunk(m)
    for i in range(m.spec.n_layer):
        attention(m, i, qk_norm=True)
        m.norm(f"blk.{i}.ffn_norm", m.spec.width)
        router(m, i)
        experts(m, i, up=T.Q4_K, down=T.Q6_K if i % 2 else T.Q4_K)


def qwen3moe_of(m: Builder, qtype: QType) -> None:
    """All experts of one type."""
    trunk(m)
    for i in range(m.spec.n_layer):
        attention(m, i, qk_norm=True)
        m.norm(f"blk.{i}.ffn_norm", m.spec.width)
        router(m, i)
        experts(m, i, up=qtype, down=qtype)


def granite_swa(m: Builder) -> None:
    """Fused gate_up, shared experts, attention sinks, alternating sliding window."""
    s = m.spec
    trunk(m)
    m.set(
        logit_scale=1.0,
        attention__sliding_window=32,
        attention__sliding_window_pattern=[bool(i % 2) for i in range(s.n_layer)],
        expert_shared_feed_forward_length=s.expert_width,
    )
    for i in range(s.n_layer):
        attention(m, i)
        m.floats(f"blk.{i}.attn_sinks.weight", (s.n_head,))
        m.norm(f"blk.{i}.ffn_norm", s.width)
        router(m, i)
        experts(m, i, up=T.Q4_0, down=T.Q5_0, parts=("gate_up", "down"))
        m.matrix(f"blk.{i}.ffn_up_shexp", (s.width, 2 * s.expert_width))
        m.matrix(f"blk.{i}.ffn_down_shexp", (s.expert_width, s.width))


def granitemoe(m: Builder) -> None:
    s = m.spec
    trunk(m)
    m.set(logit_scale=1.0, expert_shared_feed_forward_length=s.expert_width)
    for i in range(s.n_layer):
        attention(m, i)
        m.norm(f"blk.{i}.ffn_norm", s.width)
        router(m, i)
        experts(m, i, up=T.IQ4_NL, down=T.Q4_1)
        mlp(m, i, s.expert_width, "_shexp")


def gpt_oss(m: Builder) -> None:
    """MXFP4 experts with biases, attention sinks, alternating sliding window."""
    s = m.spec
    trunk(m)
    m.set(attention__sliding_window=32)
    for i in range(s.n_layer):
        b = f"blk.{i}"
        attention(m, i)
        m.norm(f"{b}.post_attention_norm", s.width)
        m.floats(f"{b}.attn_q.bias", (s.n_head * s.head_width,))
        m.floats(f"{b}.attn_k.bias", (s.n_head_kv * s.head_width,))
        m.floats(f"{b}.attn_v.bias", (s.n_head_kv * s.head_width,))
        m.floats(f"{b}.attn_output.bias", (s.width,))
        m.floats(f"{b}.attn_sinks.weight", (s.n_head,))
        router(m, i)
        m.floats(f"{b}.ffn_gate_inp.bias", (s.n_expert,))
        experts(m, i, up=T.MXFP4, down=T.MXFP4, parts=("gate", "up", "down"))
        m.floats(f"{b}.ffn_gate_exps.bias", (s.expert_width, s.n_expert))
        m.floats(f"{b}.ffn_up_exps.bias", (s.expert_width, s.n_expert))
        m.floats(f"{b}.ffn_down_exps.bias", (s.width, s.n_expert))


def grovemoe(m: Builder) -> None:
    """Two expert blocks per layer: each pair of experts shares one small chunk expert."""
    s = m.spec
    group, chunk_width = 2, 32
    trunk(m)
    m.set(
        expert_chunk_feed_forward_length=chunk_width,
        expert_group_scale=0.5,
        experts_per_group=group,
    )
    for i in range(s.n_layer):
        attention(m, i, qk_norm=True)
        m.norm(f"blk.{i}.ffn_norm", s.width)
        router(m, i)
        experts(m, i, up=T.Q8_0, down=T.Q4_0)
        experts(m, i, suffix="chexps", width=chunk_width, n=s.n_expert // group)


def deepseek2(m: Builder) -> None:
    """Multi-head latent attention, a leading dense layer, shared experts, selection bias."""
    s = m.spec
    q_rank, kv_rank, rope, head_k, head_v, dense_width = 64, 64, 32, 64, 32, 192
    nope = head_k - rope
    trunk(m)
    m.set(
        feed_forward_length=dense_width,
        leading_dense_block_count=1,
        attention__head_count_kv=1,
        attention__q_lora_rank=q_rank,
        attention__kv_lora_rank=kv_rank,
        attention__key_length=kv_rank + rope,
        attention__value_length=kv_rank,
        attention__key_length_mla=head_k,
        attention__value_length_mla=head_v,
        rope__dimension_count=rope,
        expert_shared_count=1,
        expert_weights_scale=1.5,
        expert_weights_norm=True,
        expert_gating_func=2,  # sigmoid
    )
    for i in range(s.n_layer):
        b = f"blk.{i}"
        m.norm(f"{b}.attn_norm", s.width)
        m.matrix(f"{b}.attn_q_a", (s.width, q_rank))
        m.norm(f"{b}.attn_q_a_norm", q_rank)
        m.matrix(f"{b}.attn_q_b", (q_rank, s.n_head * head_k))
        m.matrix(f"{b}.attn_kv_a_mqa", (s.width, kv_rank + rope))
        m.norm(f"{b}.attn_kv_a_norm", kv_rank)
        m.matrix(f"{b}.attn_k_b", (nope, kv_rank, s.n_head))
        m.matrix(f"{b}.attn_v_b", (kv_rank, head_v, s.n_head))
        m.matrix(f"{b}.attn_output", (s.n_head * head_v, s.width))
        m.norm(f"{b}.ffn_norm", s.width)
        if i == 0:
            mlp(m, i, dense_width)
            continue
        router(m, i)
        m.floats(f"{b}.exp_probs_b.bias", (s.n_expert,))
        experts(m, i, up=T.Q5_0, down=T.Q8_0, parts=("down", "gate", "up"))
        mlp(m, i, s.expert_width, "_shexp")


def nemotron_h_moe(m: Builder) -> None:
    """Experts without a gate part (squared ReLU), between Mamba-2 and attention layers."""
    s = m.spec
    conv, inner, state, groups, heads = 4, 2 * s.width, 32, 2, 4
    channels = inner + 2 * groups * state
    layers = "MEAE" * (s.n_layer // 4) + "MEAE"[: s.n_layer % 4]
    trunk(m)
    m.set(
        feed_forward_length=[s.expert_width if kind == "E" else 0 for kind in layers],
        attention__head_count_kv=[s.n_head_kv if kind == "A" else 0 for kind in layers],
        attention__layer_norm_epsilon=1e-5,
        ssm__conv_kernel=conv,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=heads,
        ssm__group_count=groups,
        expert_shared_count=1,
        expert_shared_feed_forward_length=s.expert_width,
        expert_weights_scale=1.5,
        expert_weights_norm=True,
    )
    for i, kind in enumerate(layers):
        b = f"blk.{i}"
        if kind == "A":
            attention(m, i)
            continue
        m.norm(f"{b}.attn_norm", s.width)
        if kind == "M":
            m.matrix(f"{b}.ssm_in", (s.width, inner + channels + heads))
            m.matrix(f"{b}.ssm_conv1d", (conv, channels), T.F32)
            m.floats(f"{b}.ssm_conv1d.bias", (channels,))
            m.floats(f"{b}.ssm_dt.bias", (heads,))
            m.floats(f"{b}.ssm_a", (1, heads), mean=-1.0)  # negative: the state decays
            m.floats(f"{b}.ssm_d", (1, heads), mean=1.0)
            m.floats(f"{b}.ssm_norm.weight", (inner // groups, groups), mean=1.0)
            m.matrix(f"{b}.ssm_out", (inner, s.width))
        else:
            router(m, i)
            m.floats(f"{b}.exp_probs_b.bias", (s.n_expert,))
            experts(m, i, up=T.Q5_1, down=T.Q8_0, parts=("down", "up"))
            mlp(m, i, s.expert_width, "_shexp", gate=False)

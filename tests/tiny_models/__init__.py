"""Tiny random MoE GGUFs that stock llama.cpp loads and decodes by token id.

`make(path, kind)` writes one; `KINDS` names them; `spec(kind)` describes one.
`make_arch(path, arch)` writes one of any MoE architecture of llama.cpp; `ARCHS` names them;
`arch_row(arch)` describes one. It needs the stock libraries, which say what tensors they want.
`make_chat(path)` writes one that can be talked to. The others have no vocabulary
(`tokenizer.ggml.model` is "no_vocab" and `{arch}.vocab_size` gives the count), so tokens go
in and come out as numbers: asking llama.cpp for their text aborts the process. Bytes depend
only on the kind, its seed and the installed numpy.
"""

from __future__ import annotations

from pathlib import Path

from . import archs
from .blocks import scale_byte
from .builder import Builder, Spec
from .chat import make_chat
from .every_arch import ARCHS, arch_row, make_arch

__all__ = [
    "ARCHS",
    "KINDS",
    "Spec",
    "arch_row",
    "make",
    "make_arch",
    "make_chat",
    "scale_byte",
    "spec",
]

_SPECS = (
    Spec(
        "qwen3moe",
        "qwen3moe",
        "expert parts that are not whole pages, at offsets that are only 32-aligned",
        archs.qwen3moe,
        n_expert=10,
        top_k=3,
        width=96,
        expert_width=160,
        n_head=4,
        n_head_kv=2,
    ),
    Spec(
        "mixed",
        "qwen3moe",
        "Q4_K experts, with Q6_K down parts in every other layer",
        archs.qwen3moe_mixed,
        width=256,
        expert_width=256,
        n_head=4,
    ),
    Spec(
        "split",
        "qwen3moe",
        "the tensors of `mixed` in three shards, each layer's parts in different ones",
        archs.qwen3moe_mixed,
        width=256,
        expert_width=256,
        n_head=4,
        n_shard=3,
    ),
    Spec("fused", "granite_swa", "gate and up in one tensor", archs.granite_swa),
    Spec(
        "gptoss",
        "gpt-oss",
        "MXFP4 experts with biases, weights by softmax over the chosen ones",
        archs.gpt_oss,
        top_k=4,
    ),
    Spec(
        "nogate",
        "nemotron_h_moe",
        "experts without a gate part, in every other layer of a hybrid model",
        archs.nemotron_h_moe,
        n_layer=6,
    ),
    Spec("grovemoe", "grovemoe", "two expert blocks per layer", archs.grovemoe),
    Spec(
        "deepseek2lite-like",
        "deepseek2",
        "latent attention, a leading dense layer, shared experts, biased selection",
        archs.deepseek2,
        n_layer=4,
        top_k=3,
    ),
    Spec("granite", "granitemoe", "IQ4_NL experts beside a shared expert", archs.granitemoe),
)
_BY_NAME = {row.name: row for row in _SPECS}
KINDS: tuple[str, ...] = tuple(_BY_NAME)


def spec(kind: str) -> Spec:
    """The description of one kind; KeyError if there is none of that name."""
    return _BY_NAME[kind]


def make(path: Path, kind: str) -> Path:
    """Write the tiny model of `kind` and return the file llama.cpp is to open.

    That is `path`, or for a split kind the first of `{stem}-0000i-of-0000N.gguf` beside it.
    """
    builder = Builder(spec(kind))
    builder.spec.build(builder)
    return builder.write(path)

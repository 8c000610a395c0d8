"""Headers on which llama.cpp would end the process or crash: refused before it loads the file.

llama.cpp compares the shape of each tensor with the numbers of the header, and refuses a file in
which they differ. What an architecture then does with numbers that agree it asserts, divides by
or trusts. Here are the rules that hold for many architectures, and those whose breach
is no assertion (`assertions.py` turns those into errors) but a signal: a division by zero, a
tensor that is not there, a type without a kernel.

Only for models with routed experts; a number of the wrong type is left to llama.cpp, which says so.
Sources: the pinned llama.cpp's src/llama-model.cpp (load_hparams) and src/models/.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashmoe_gguf.errors import ModelFileError, UnsupportedModelError
from flashmoe_gguf.gguf import Header
from flashmoe_gguf.gguf.cursor import DAMAGED, shown
from flashmoe_gguf.packed import PREFIX
from flashmoe_gguf.store import Geometry

_KEY_LENGTH = "attention.key_length"
_WINDOW = "attention.sliding_window"
_INDEXERS = "attention.indexer.types"
_RATIOS = "attention.compress_ratios"

# Types that no matrix product of ggml-cpu takes: without vec_dot in ggml-cpu.c.
NO_KERNEL = frozenset({"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})
# Tables of numbers, which are looked up and not multiplied.
_TABLE = re.compile(r"(?:.*\.)?(?:ffn_gate_tid2eid\.weight|d2t)")
# What is added to and multiplied with activations one by one, in F32 alone (binary-ops.cpp).
_ELEMENTWISE = re.compile(r".*norm(?:_[a-z0-9]+)?\.(?:weight|bias)|.*\.bias")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Layers without KV heads are recurrent.
_RECURRENT = _names(
    """
    jamba granitehybrid nemotron_h nemotron_h_moe lfm2 lfm2moe kimi-linear kimi-k3 bailingmoe3
    glm5-next
    """
)
_TOP_K_BY_LAYER = frozenset({"nemotron_h", "nemotron_h_moe"})
# They assert that a head's keys are as wide as its values, and that all of a head is rotated.
SAME_WIDTHS = _names(
    """
    afmoe arctic bailingmoe2 cohere2moe dbrx deepseek dots1 ernie4_5-moe exaone-moe glm4moe
    granite granite_swa granitemoe grok grovemoe hunyuan-moe hy_v3 laguna llada-moe llama
    llama-embed llama4 maple mellum minicpm minimax-m2 minimax-m3 mistral3 nomic-bert-moe olmoe
    phimoe qwen2moe qwen3moe qwen3vlmoe rnd1 smallthinker
    """
)
ALL_ROTATED = _names(
    """
    arctic cohere2moe dbrx deepseek dots1 ernie4_5-moe exaone-moe granite granite_swa granitemoe
    grok grovemoe hunyuan-moe hy_v3 llada-moe llama4 mellum minicpm mistral3 olmoe qwen2moe
    qwen3moe qwen3vlmoe rnd1 smallthinker
    """
)
# Latent attention: part of each head is rotated, and the cache holds one row for all heads.
LATENT = _names("deepseek2 mistral4 deepseek32 glm-dsa dots3note hy_v4")
# Numbers that must not be 0, and are not checked.
_DIVISORS = {
    "afmoe": (_WINDOW,),
    "deepseek4": ("attention.output_group_count",),
    "qwen3next": ("full_attention_interval", "ssm.group_count"),
    "qwen35moe": ("full_attention_interval", "ssm.group_count"),
    "qwen4exp": ("full_attention_interval", "ssm.group_count"),
    "minimax-01": ("full_attention_interval",),
    "granitehybrid": ("ssm.group_count",),
    "nemotron_h": ("ssm.group_count",),
    "nemotron_h_moe": ("ssm.group_count",),
}
# Tensors that the loader takes for optional and the graph does not: a layer that has the first
# needs one of the others.
_ROUTED = (
    ("ffn_gate_inp.weight", ("ffn_up_exps.weight", "ffn_gate_up_exps.weight")),
    ("ffn_gate_inp.weight", ("ffn_down_exps.weight",)),
)
_CONV_BIAS = (("ssm_conv1d.weight", ("ssm_conv1d.bias",)),)
_NEEDS: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "granitehybrid": _CONV_BIAS,
    "nemotron_h": _CONV_BIAS,
    "nemotron_h_moe": _CONV_BIAS,
    "qwen3next": (
        ("ssm_conv1d.weight", ("attn_qkv.weight", "ssm_in.weight")),
        ("attn_qkv.weight", ("attn_gate.weight",)),
    ),
    "qwen35moe": (
        ("ssm_conv1d.weight", ("attn_qkv.weight",)),
        ("ssm_conv1d.weight", ("attn_gate.weight",)),
    ),
    "kimi-k3": (
        ("ffn_gate_shexp.weight", ("ffn_up_shexp.weight",)),
        ("ffn_gate_shexp.weight", ("ffn_down_shexp.weight",)),
    ),
    "glm-dsa": (
        ("indexer.k_norm.weight", ("indexer.proj.weight",)),
        ("indexer.proj.weight", ("indexer.attn_k.weight",)),
        ("indexer.attn_k.weight", ("indexer.attn_q_b.weight",)),
        ("indexer.attn_q_b.weight", ("indexer.proj.weight",)),
    ),
}


def check_loadable(geometry: Geometry) -> None:
    """Raises ModelFileError or UnsupportedModelError for what llama.cpp would not survive."""
    if not geometry.is_moe:
        return
    check_types(geometry)
    check_tensors(geometry)
    check_top_k(geometry.header, geometry.layer_top_k, {g.layer for g in geometry.groups})
    check_numbers(geometry.header, geometry.n_layer - geometry.n_nextn)
    check_heads(geometry.header, geometry.n_layer)


def check_types(geometry: Geometry) -> None:
    """Every tensor has a type that ggml's CPU backend computes with."""
    for name, type_name, shape in _weights(geometry):
        if type_name in NO_KERNEL and not _TABLE.fullmatch(name):
            raise _no_kernel(geometry.header, name, type_name, "quantized or of floating point")
        is_vector = all(n == 1 for n in shape[1:])
        if is_vector and type_name != "F32" and _ELEMENTWISE.fullmatch(name):
            raise _no_kernel(geometry.header, name, type_name, "F32")


def _weights(geometry: Geometry) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of every tensor, for a packed file as its source had them."""
    for group in geometry.groups:
        yield from ((part.tensor, part.type_name, part.shape) for part in group.parts)
    for tensor in geometry.header.tensors:
        if not tensor.name.startswith(PREFIX):
            yield tensor.name, tensor.type_name, tensor.shape


def _no_kernel(header: Header, name: str, type_name: str, wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{shown(header.path)}: {shown(name)} is {type_name}, which llama.cpp cannot compute with",
        f"it has to be {wanted}: convert or quantize the original model again",
    )


def check_tensors(geometry: Geometry) -> None:
    """A layer with a router has experts, and every layer what its architecture _NEEDS."""
    header = geometry.header
    names = {name for name, _, _ in _weights(geometry)}
    for layer in range(geometry.n_layer - geometry.n_nextn):
        for one, others in (*_ROUTED, *_NEEDS.get(header.architecture, ())):
            needed = [f"blk.{layer}.{other}" for other in others]
            if f"blk.{layer}.{one}" in names and not any(name in names for name in needed):
                raise _missing(header, needed[0])


def _missing(header: Header, name: str) -> ModelFileError:
    return ModelFileError(f"{shown(header.path)}: tensor {name} is missing", DAMAGED)


def check_top_k(header: Header, layer_top_k: Sequence[int], moe_layers: Collection[int]) -> None:
    """Each layer with experts uses some, and no more than the first layer's number.

    The graphs of all but two architectures are built with that number, and sum up the layer's own.
    """
    first = layer_top_k[0]
    for layer in sorted(moe_layers):
        if not layer_top_k[layer]:
            raise _error(header, "expert_used_count", f"is 0 for layer {layer}, which has experts")
        if header.architecture not in _TOP_K_BY_LAYER and layer_top_k[layer] > first:
            raise _error(
                header,
                "expert_used_count",
                f"is {layer_top_k[layer]} for layer {layer} and {first} for layer 0",
            )


def check_numbers(header: Header, n_layer: int) -> None:
    """Nothing is divided by 0, and no layer of dots3note lacks the indexer that its graph uses.

    `n_layer` without those that predict further tokens.
    """
    for key in _DIVISORS.get(header.architecture, ()):
        if header.get(key) == 0:
            raise _error(header, key, "is 0")
    if header.architecture == "afmoe" and header.get(_WINDOW) is None:
        raise _error(header, _WINDOW, "is missing")
    if header.architecture == "deepseek4":
        _check_ratios(header, n_layer)
    if header.architecture == "dots3note":
        windows, full = header.get(f"{_WINDOW}_pattern"), header.get(_INDEXERS)
        if not isinstance(windows, tuple) or not isinstance(full, tuple):
            return  # as llama.cpp says itself
        for layer in range(n_layer):
            if layer >= len(windows) or not (windows[layer] or any(full[layer : layer + 1])):
                raise _error(header, _INDEXERS, f"has no indexer for layer {layer}")


def _check_ratios(header: Header, n_layer: int) -> None:
    """Some layer of deepseek4 compresses by 4, as its indexer's cache has those layers alone, and
    one by 128 where keys are as wide as the indexer's: an empty cache divides by 0 (the rotation
    in llama-kv-cache.cpp, which is forced for the indexer's width).
    """
    ratios = header.get(_RATIOS)
    if not isinstance(ratios, tuple):
        return  # as llama.cpp says itself
    wanted = [4]
    if header.get(_KEY_LENGTH) == header.get("attention.indexer.key_length"):
        wanted.append(128)
    for ratio in wanted:
        if ratio not in ratios[:n_layer]:
            raise _error(header, _RATIOS, f"has no layer with {ratio}")


@dataclass(frozen=True)
class _Heads:
    """Attention as llama_model::load_hparams reads it: heads by layer, widths of one head."""

    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key: int
    value: int
    rotated: int


def _read_heads(header: Header, n_layer: int) -> _Heads | None:
    """None where a number is missing or no number: llama.cpp refuses that itself."""
    n_head = _by_layer(header, "attention.head_count", n_layer)
    if n_head is None or not n_head[0]:
        raise _error(header, "attention.head_count", "is missing or 0")
    n_head_kv = _by_layer(header, "attention.head_count_kv", n_layer, n_head)
    width = header.get("embedding_length")
    if n_head_kv is None or type(width) is not int:
        return None
    key = _number(header, "attention.key_length", width // n_head[0])
    value = _number(header, "attention.value_length", width // n_head[0])
    rotated = _number(header, "rope.dimension_count", key)
    if key is None or value is None or rotated is None:
        return None
    return _Heads(n_head, n_head_kv, key, value, rotated)


def _number(header: Header, key: str, default: int | None) -> int | None:
    value = header.get(key)
    if value is None:
        return default
    return value if type(value) is int else None


def _by_layer(
    header: Header, key: str, n_layer: int, default: tuple[int, ...] | None = None
) -> tuple[int, ...] | None:
    value = header.get(key)
    if value is None:
        return default
    if type(value) is int:
        return (value,) * n_layer
    if not isinstance(value, tuple) or len(value) != n_layer:
        return None
    counts = tuple(v for v in value if type(v) is int)
    return counts if len(counts) == n_layer else None


def check_heads(header: Header, n_layer: int) -> None:
    """Heads divide, and are as wide as the architecture's graph and its KV cache take them."""
    heads = _read_heads(header, n_layer)
    if heads is None:
        return
    architecture = header.architecture
    n_head, n_head_kv = heads.n_head[0], heads.n_head_kv[0]  # other layers: asserted where used
    if n_head_kv == 0 and architecture not in _RECURRENT:
        raise _error(header, "attention.head_count_kv", "is 0")
    if n_head_kv and n_head % n_head_kv:
        what = f"is {n_head_kv}, which does not divide {n_head} heads"
        raise _error(header, "attention.head_count_kv", what)
    if architecture in LATENT:
        _check_latent(header, heads)
        return
    if architecture in SAME_WIDTHS and heads.key != heads.value:
        what = f"is {heads.key}, not {heads.value} as attention.value_length"
        raise _error(header, "attention.key_length", what)
    if architecture in ALL_ROTATED and heads.rotated != heads.key:
        what = f"is {heads.rotated}, not {heads.key} as the width of a head"
        raise _error(header, "rope.dimension_count", what)


def _check_latent(header: Header, heads: _Heads) -> None:
    """Multi-head latent attention: a part of each head is not rotated, and the cache's row is
    the latent vector and what is rotated, once for all heads."""
    per_head = _number(header, "attention.key_length_mla", 0)
    rank = _number(header, "attention.kv_lora_rank", 0)
    if per_head is None or rank is None:
        return
    width, key = (per_head, "attention.key_length_mla") if per_head else (heads.key, _KEY_LENGTH)
    if width <= heads.rotated:
        raise _error(header, key, f"is {width}, of which {heads.rotated} are rotated")
    row = heads.key * heads.n_head_kv[0]
    if per_head and row != rank + heads.rotated:
        raise _error(
            header,
            _KEY_LENGTH,
            f"makes rows of {row} in the KV cache, not {rank} + {heads.rotated}",
        )


def _error(header: Header, key: str, what: str) -> ModelFileError:
    return ModelFileError(f"{shown(header.path)}: {header.architecture}.{key} {what}", DAMAGED)

"""Sizes of a model, from the header of its file or, when there is none yet, from models.toml."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flashmoe_gguf.budget import (
    ALIGNMENT,
    GroupCost,
    ModelSizes,
    region_bytes,
    ring_buffers,
)
from flashmoe_gguf.gguf import ArraySummary, Header
from flashmoe_gguf.models import KnownModel, dense_bytes, part_bytes
from flashmoe_gguf.store import Geometry, Part, read_geometry

# What the token embeddings of these mixes are quantized to, bytes per 256 values.
_EMBEDDING_256 = {"Q4_K_M": 144, "MXFP4": 272}


@dataclass(frozen=True)
class LayerCost:
    """What decoding one token asks of one group of experts: `top_k` of `n_expert`."""

    expert_bytes: int
    n_expert: int
    top_k: int


@dataclass(frozen=True)
class Subject:
    """A model to plan for. `layers` go with `sizes.groups`, `embedding_bytes` are the dense
    weights of which a token reads one row, `part_bytes` the largest part of an expert. `files` is
    empty for a model that is not downloaded, whose sizes are estimates. `n_ctx` is the context
    that it was made for, if that is known.
    """

    name: str
    architecture: str
    file_bytes: int
    sizes: ModelSizes
    layers: tuple[LayerCost, ...]
    embedding_bytes: int
    part_bytes: int
    n_ctx: int | None
    files: tuple[Path, ...]

    @property
    def top_k(self) -> int:
        return max((layer.top_k for layer in self.layers), default=0)

    @property
    def n_expert(self) -> int:
        return max((layer.n_expert for layer in self.layers), default=0)

    @property
    def token_bytes(self) -> int:
        """Expert bytes that one token uses."""
        return sum(layer.top_k * layer.expert_bytes for layer in self.layers)


def read_subject(path: str | os.PathLike[str]) -> Subject:
    """The sizes in a file's header; raises ModelFileError."""
    geometry = read_geometry(path)
    header, groups = geometry.header, geometry.decode_groups
    embeddings = [t for t in header.tensors if t.name == "token_embd.weight"]
    tied = all(t.name != "output.weight" for t in header.tensors)
    n_ctx = header.get("context_length")
    return Subject(
        name=header.path.name,
        architecture=geometry.architecture,
        file_bytes=sum(file.size_bytes for file in geometry.files),
        sizes=ModelSizes(
            dense_bytes=geometry.dense_bytes,
            groups=tuple(
                GroupCost(sum(_region(part) for part in group.parts), group.n_expert)
                for group in groups
            ),
            ring_bytes=_ring_bytes(
                [(part.expert_bytes, _region(part)) for g in geometry.groups for part in g.parts]
            ),
            kv_values=_kv_values(geometry),
            n_head=_n_head(header),
            n_vocab=_n_vocab(header),
            n_hidden=_n_hidden(
                _whole(header, "embedding_length"),
                max(
                    (geometry.layer_top_k[g.layer] * g.parts[0].shape[1] for g in groups), default=0
                ),
            ),
        ),
        layers=tuple(
            LayerCost(g.expert_bytes, g.n_expert, min(geometry.layer_top_k[g.layer], g.n_expert))
            for g in groups
        ),
        embedding_bytes=0 if tied else sum(t.nbytes for t in embeddings),
        n_ctx=n_ctx if isinstance(n_ctx, int) and n_ctx > 0 else None,
        part_bytes=geometry.max_part_bytes,
        files=tuple(file.path for file in geometry.files),
    )


def known_subject(model: KnownModel) -> Subject:
    """The sizes of a model of models.toml, as well as its table tells them."""
    shape = model.shape
    parts = part_bytes(model)
    decoded = parts[: shape.layers - (shape.dense_layers or 0)]
    embedding = shape.vocabulary * shape.width * _EMBEDDING_256[model.hub.quant] // 256
    return Subject(
        name=model.name,
        architecture=shape.architecture,
        file_bytes=model.hub.likely_bytes or 0,
        sizes=ModelSizes(
            dense_bytes=dense_bytes(model),
            groups=tuple(
                GroupCost(sum(region_bytes(p) for p in layer), shape.experts) for layer in decoded
            ),
            ring_bytes=_ring_bytes([(p, region_bytes(p)) for layer in parts for p in layer]),
            kv_values=shape.kv_width * shape.layers,
            n_head=shape.heads,
            n_vocab=shape.vocabulary,
            n_hidden=_n_hidden(shape.width, shape.top_k * shape.expert_width),
        ),
        layers=tuple(LayerCost(sum(p), shape.experts, shape.top_k) for p in decoded),
        embedding_bytes=embedding,
        n_ctx=shape.context,
        part_bytes=max(max(p) for p in parts),
        files=(),
    )


def _region(part: Part) -> int:
    aligned = part.stride % ALIGNMENT == 0 and all(p.offset % ALIGNMENT == 0 for p in part.places)
    return region_bytes(part.expert_bytes, aligned)


def _ring_bytes(parts: list[tuple[int, int]]) -> int:
    """From (bytes, bytes in memory) of every part; 0 for a model without experts."""
    if not parts:
        return 0
    return ring_buffers(max(size for size, _ in parts)) * max(region for _, region in parts)


def _n_hidden(width: int, expert_widths: int) -> int:
    """The residual stream, its norm, attention's input and output; experts' up and gate."""
    return 4 * width + 2 * expert_widths


def _kv_values(geometry: Geometry) -> int:
    """Values of K and V per token over all layers, see src/llama-kv-cache.cpp.

    Layers with a recurrent state instead have no K and V; where the header says so with zero
    heads they count for nothing, elsewhere they are counted and the estimate is too high.
    """
    header = geometry.header
    n_embd, n_head = _whole(header, "embedding_length"), _n_head(header)
    n_layer = geometry.n_layer - geometry.n_nextn
    given = header.get("attention.head_count_kv")
    if isinstance(given, tuple):
        heads = sum(v for v in given[:n_layer] if isinstance(v, int))
    else:
        heads = n_layer * (given if isinstance(given, int) else n_head)
    key = _whole(header, "attention.key_length") or n_embd // n_head
    if _whole(header, "attention.key_length_mla"):
        return n_layer * key  # V is a view of K
    return heads * (key + (_whole(header, "attention.value_length") or n_embd // n_head))


def _n_head(header: Header) -> int:
    heads = header.get("attention.head_count")
    if isinstance(heads, tuple):
        return max((v for v in heads if isinstance(v, int)), default=1) or 1
    return heads if isinstance(heads, int) and heads > 0 else 1


def _n_vocab(header: Header) -> int:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArraySummary):
        return tokens.length
    return len(tokens) if isinstance(tokens, tuple) else _whole(header, "vocab_size")


def _whole(header: Header, key: str) -> int:
    value = header.get(key)
    return value if isinstance(value, int) and value > 0 else 0

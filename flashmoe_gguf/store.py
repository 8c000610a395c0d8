"""Where each routed expert's bytes lie: pure geometry over a GGUF header.

It says which tensors are routed-expert weights, how they group into the blocks that one
routing decision uses, and at which file offset each expert starts. It opens no file but
through the header reader, and reads no tensor data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.fingerprint import header_fingerprint
from flashmoe_gguf.gguf import Header, Shard, TensorInfo, read_header
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.packed import PREFIX, Located, PackedInfo, Place, place_of, read_packed
from flashmoe_gguf.stripes import refuse_stripe

# In the order in which the graph uses them, so the order in which they are read.
ROLES = ("up", "gate_up", "gate", "down")
FAMILIES = ("exps", "chexps")

# llama.cpp's own limits, src/llama-hparams.h; beyond them it aborts the process.
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
# llama-model.cpp, LLAMA_ROPE_SCALING_TYPES; llama-hparams.h, llama_expert_gating_func_type.
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_N_GATING_FUNCS = 5

# llama.cpp's names, src/llama-arch.cpp: LLM_TENSOR_FFN_{UP,GATE,DOWN,GATE_UP}_{EXPS,CHEXPS}.
# Biases and scales of the same experts end in .bias and .scale, and stay resident.
_EXPERT_NAME = re.compile(
    r"blk\.(?P<layer>0|[1-9][0-9]{0,5})\.ffn_(?P<role>up|gate_up|gate|down)_(?P<family>exps|chexps)\.weight"
)


@dataclass(frozen=True)
class Part:
    """One weight matrix of every expert of a group.

    Expert e is `expert_bytes` long and lies at `place(e)`, whose file is an index into
    `Geometry.files`. `shape` is [row length, rows, experts].
    """

    role: str
    tensor: str
    ggml_type: int
    type_name: str
    shape: tuple[int, ...]
    places: tuple[Place, ...]
    expert_bytes: int
    stride: int

    def place(self, expert: int) -> Place:
        """Where one expert begins."""
        return place_of(self.places, self.stride, expert)

    @property
    def shard(self) -> int:
        """The file of expert 0: of all, unless the file is striped."""
        return self.places[0].file

    @property
    def offset(self) -> int:
        """Of expert 0; the others follow, `stride` apart, unless the file is striped."""
        return self.places[0].offset


@dataclass(frozen=True)
class Group:
    """The experts one router chooses among: one per MoE layer, two in grovemoe.

    `parts` are in the order of use, see ROLES; not every model has every role.
    """

    layer: int
    family: str
    n_expert: int
    parts: tuple[Part, ...]

    @property
    def expert_bytes(self) -> int:
        """All parts of one expert."""
        return sum(part.expert_bytes for part in self.parts)


@dataclass(frozen=True)
class Geometry:
    """A model's experts. `n_layer` counts all blocks in the file, the last `n_nextn` of which
    predict further tokens (MTP) and take no part in plain decoding. `top_k` is the largest of
    `layer_top_k`, which has one entry per block. A model without experts has no groups. A packed
    file has the geometry of its source, at its own offsets, and `packed`.
    """

    header: Header
    architecture: str
    n_layer: int
    n_nextn: int
    n_expert: int
    top_k: int
    layer_top_k: tuple[int, ...]
    groups: tuple[Group, ...]
    dense_bytes: int
    expert_bytes: int
    packed: PackedInfo | None = None

    @property
    def files(self) -> tuple[Shard, ...]:
        """All files of the model: its shards, then its stripes."""
        return (*self.header.shards, *(self.packed.stripes if self.packed else ()))

    @cached_property
    def fingerprint(self) -> str:
        """What the model is known by, in hex; a packed file has that of its source.

        Raises ModelFileError when a header cannot be read any more.
        """
        return header_fingerprint(self.header) if self.packed is None else self.packed.fingerprint

    @property
    def is_moe(self) -> bool:
        return bool(self.groups)

    @property
    def decode_groups(self) -> tuple[Group, ...]:
        """The groups that plain decoding uses: all but those of MTP blocks."""
        return tuple(g for g in self.groups if g.layer < self.n_layer - self.n_nextn)

    @property
    def max_part_bytes(self) -> int:
        """The largest part of any expert; 0 where there is none."""
        return max((p.expert_bytes for g in self.groups for p in g.parts), default=0)

    @property
    def bytes_per_token(self) -> int:
        """Expert bytes that decoding one token reads when nothing is cached."""
        return sum(
            min(self.layer_top_k[g.layer], g.n_expert) * g.expert_bytes for g in self.decode_groups
        )


def read_geometry(path: str | os.PathLike[str]) -> Geometry:
    """Read a model's header and work out its experts; raises ModelFileError."""
    header = read_header(path)
    refuse_stripe(header)
    architecture = header.architecture
    n_layer = _count(header, "block_count", range(1, _MAX_LAYERS + 1))
    n_nextn = _count(header, "nextn_predict_layers", range(n_layer + 1), default=0)
    _check_choices(header)
    packed = read_packed(header)
    plain = [t for t in header.tensors if packed is None or not t.name.startswith(PREFIX)]
    located = packed.parts if packed else tuple(_in_place(t) for t in plain if _match(t))
    experts = [(m, t) for t in located if (m := _match(t.tensor))]
    if len(experts) != len(located):
        raise _error(header, "it packs a tensor that is no routed expert weight")
    n_expert, layer_top_k = 0, (0,) * n_layer
    if experts:
        n_expert = _count(header, "expert_count", range(1, _MAX_EXPERTS + 1))
        layer_top_k = _layer_top_k(header, n_layer, n_expert)
        _check_expert_groups(header, n_expert)
    else:
        _check_no_experts(header, n_layer)
    groups = _groups(header, experts, n_layer)
    expert_bytes = sum(t.tensor.nbytes for _, t in experts)
    dense_bytes = sum(t.nbytes for t in plain) - (0 if packed else expert_bytes)
    return Geometry(
        header=header,
        architecture=architecture,
        n_layer=n_layer,
        n_nextn=n_nextn,
        n_expert=n_expert,
        top_k=max(layer_top_k),
        layer_top_k=layer_top_k,
        groups=groups,
        dense_bytes=dense_bytes,
        expert_bytes=expert_bytes,
        packed=packed,
    )


def _error(header: Header, what: str) -> ModelFileError:
    hint = "the file is damaged, or made by a faulty tool"
    return ModelFileError(f"{shown(header.path)}: {what}", hint)


def _in_place(tensor: TensorInfo) -> Located:
    """An expert tensor of a stock file: one expert after the other."""
    place = Place(tensor.shard, tensor.offset)
    return Located(tensor, tensor.nbytes // tensor.shape[2], (place,))


def _match(tensor: TensorInfo) -> re.Match[str] | None:
    """Match a routed-expert weight.

    Three-dimensional as ggml counts, which ignores trailing ones: a lone expert is dense.
    """
    if len(tensor.shape) != 3 or tensor.shape[2] == 1:
        return None
    return _EXPERT_NAME.fullmatch(tensor.name)


def _count(header: Header, key: str, allowed: range, default: int | None = None) -> int:
    """A scalar count of the model's architecture; an absent one without default is an error."""
    value = header.get(key)
    if value is None and default is not None:
        return default
    name = f"{header.architecture}.{key}"
    if value is None:
        raise _error(header, f"{name} is missing")
    if type(value) is not int or value not in allowed:
        raise _error(header, f"{name} is not a count from {allowed[0]} to {allowed[-1]}")
    return value


def _layer_top_k(header: Header, n_layer: int, n_expert: int) -> tuple[int, ...]:
    """Experts per token for each layer; the file has one number for all, or one each."""
    key = "expert_used_count"
    value = header.get(key)
    if not isinstance(value, tuple):
        return (_count(header, key, range(1, n_expert + 1)),) * n_layer
    counts = tuple(v for v in value if type(v) is int and 0 <= v <= n_expert)
    if len(counts) != len(value) or len(counts) != n_layer or not any(counts):
        raise _error(
            header,
            f"{header.architecture}.{key} is not a count from 0 to {n_expert} "
            f"for each of {n_layer} layers",
        )
    return counts


def _check_choices(header: Header) -> None:
    """Values of every architecture that make llama.cpp abort instead of refusing the file."""
    scaling = header.get("rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        name = f"{header.architecture}.rope.scaling.type"
        raise _error(header, f"{name} is none of {', '.join(_ROPE_SCALINGS)}")
    _count(header, "expert_gating_func", range(_N_GATING_FUNCS), default=0)


def _check_no_experts(header: Header, n_layer: int) -> None:
    """What llama.cpp asserts of models without expert tensors too (the same place)."""
    n_expert = _count(header, "expert_count", range(_MAX_EXPERTS + 1), default=0)
    if n_expert:
        _layer_top_k(header, n_layer, n_expert)
        _check_expert_groups(header, n_expert)
        return
    used = header.get("expert_used_count")
    if any(used) if isinstance(used, tuple) else used:
        raise _error(header, "the model uses experts and has none")
    _count(header, "expert_group_count", range(1), default=0)


def _check_expert_groups(header: Header, n_expert: int) -> None:
    """What llama.cpp asserts of group-limited routing (llama-model.cpp, load_hparams)."""
    n_group = _count(header, "expert_group_count", range(n_expert), default=0)
    if n_group > 1:
        if n_expert % n_group:
            raise _error(header, f"{n_expert} experts do not divide into {n_group} groups")
        _count(header, "expert_group_used_count", range(1, n_group))


def _groups(
    header: Header, experts: Iterable[tuple[re.Match[str], Located]], n_layer: int
) -> tuple[Group, ...]:
    found: dict[tuple[int, str], dict[str, Part]] = {}
    for match, located in experts:
        tensor = located.tensor
        layer = int(match["layer"])
        if layer >= n_layer:
            raise _error(header, f"{tensor.name} is beyond the model's {n_layer} layers")
        part = Part(
            role=match["role"],
            tensor=tensor.name,
            ggml_type=tensor.ggml_type,
            type_name=tensor.type_name,
            shape=tensor.shape,
            places=located.places,
            expert_bytes=tensor.nbytes // tensor.shape[2],
            stride=located.stride,
        )
        found.setdefault((layer, match["family"]), {})[part.role] = part
    groups = []
    for (layer, family), parts in sorted(found.items(), key=_graph_order):
        ordered = tuple(parts[role] for role in ROLES if role in parts)
        n_expert = ordered[0].shape[2]
        for part in ordered:
            if part.shape[2] != n_expert:
                raise _error(
                    header,
                    f"{part.tensor} has {part.shape[2]} experts, {ordered[0].tensor} {n_expert}",
                )
        groups.append(Group(layer, family, n_expert, ordered))
    return tuple(groups)


def _graph_order(item: tuple[tuple[int, str], object]) -> tuple[int, int]:
    (layer, family), _ = item
    return layer, FAMILIES.index(family)

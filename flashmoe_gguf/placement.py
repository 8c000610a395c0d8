"""Which layers a device holds, and what that leaves for the system's memory.

Counted as llama.cpp does (src/llama-model.cpp, load_tensors): of N layers the first is the output,
the others are the model's last blocks. Token embeddings stay on the processor's side, and so do
routed experts with their biases and scales. The KV cache of a block lies where the block does.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flashmoe_gguf.budget import compute_bytes_about, format_size, kv_bytes_at_least
from flashmoe_gguf.devices import EXPERT_PATTERN, Device, list_devices, need_device
from flashmoe_gguf.errors import BudgetError, OptionError
from flashmoe_gguf.packed import PREFIX
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.ubatch import ubatch_at_most

AUTO = "auto"

# What `auto` leaves free on a device, beside what it counts: the driver's own, cuBLAS, graphs.
RESERVE_BYTES = 512 << 20
RESERVE_SHARE = 0.05

_SPLIT_NONE, _SPLIT_TENSOR = 0, 3  # llama.h, enum llama_split_mode
# src/llama-arch.cpp: tensors of LLM_TENSOR_LAYER_INPUT
_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd)[._]")
_BLOCK = re.compile(r"blk\.([0-9]+)\.")
_EXPERT = re.compile(EXPERT_PATTERN)


@dataclass(frozen=True)
class LayerBytes:
    """Weights by where they may be: `host` never on a device, `layers` one entry per block,
    `output` with the first layer that is placed; `tied` of these are copies that the host keeps.
    """

    host: int
    layers: tuple[int, ...]
    output: int
    tied: int = 0

    @property
    def n_all(self) -> int:
        """Layers that can be placed: the blocks and the output."""
        return len(self.layers) + 1


@dataclass(frozen=True)
class ContextBytes:
    """What a context takes: `kv` of a block, and buffers for computing on a device, about."""

    kv: int
    compute: int


@dataclass(frozen=True)
class Share:
    """What one device holds: weights, and KV cache with compute buffers, in bytes."""

    device: Device
    n_layers: int
    dense: int
    kv: int
    compute: int

    @property
    def least(self) -> int:
        return self.dense + self.kv

    @property
    def total(self) -> int:
        return self.dense + self.kv + self.compute


@dataclass(frozen=True)
class Placement:
    """`n_layers` of `n_all` are on devices; the rest of the weights and the KV cache is not."""

    n_layers: int
    n_all: int
    shares: tuple[Share, ...]
    host_dense: int
    host_kv: int


def parse_gpu_layers(value: int | str) -> int | str:
    """A number of layers, -1 for all, or "auto"; raises OptionError for anything else."""
    text = str(value).strip().lower()
    if text == AUTO:
        return AUTO
    if not re.fullmatch(r"-1|[0-9]{1,9}", text):
        raise OptionError(
            f"'{value}' is not a number of layers for the device",
            "0 for none, -1 for all, auto for as many as fit",
        )
    return int(text)


def layer_bytes(geometry: Geometry, *, with_experts: bool = False) -> LayerBytes:
    """From a header; `with_experts`: for stock llama.cpp, whose devices take experts too."""
    tensors = [t for t in geometry.header.tensors if not t.name.startswith(PREFIX)]
    layers, host, output = [0] * geometry.n_layer, 0, 0
    embedding = sum(t.nbytes for t in tensors if t.name == "token_embd.weight")
    tied = embedding if all(t.name != "output.weight" for t in tensors) else 0
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if _EXPERT.search(tensor.name) and not with_experts:
            host += tensor.nbytes
        elif block is not None and int(block[1]) < len(layers):
            layers[int(block[1])] += tensor.nbytes
        elif _INPUT.match(tensor.name):
            host += tensor.nbytes
        else:
            output += tensor.nbytes
    if not with_experts and geometry.packed is None:
        host -= geometry.expert_bytes  # those are streamed
    return LayerBytes(host, tuple(layers), output + tied, tied)


def place(
    weights: LayerBytes,
    context: ContextBytes,
    devices: Sequence[Device],
    n_layers: int,
    *,
    tensor_split: Sequence[float] | None = None,
    offload_kqv: bool = True,
) -> Placement:
    """Where `n_layers` go; -1: all. Devices share them by `tensor_split`, or by free memory."""
    n_all = weights.n_all
    n_placed = (n_all if n_layers < 0 else min(n_layers, n_all)) if devices else 0
    split = list(tensor_split or ())[: len(devices)]
    split += [0.0] * (len(devices) - len(split))
    if not any(split):
        split = [float(device.free_bytes or 1) for device in devices]
    ends = [end / sum(split) for end in accumulate(split)]
    dense, kv, counts = ([0] * len(devices) for _ in range(3))
    first = n_all - n_placed
    host_dense = weights.host + sum(weights.layers[:first])
    if n_placed == 0:
        host_dense += weights.output - weights.tied
    host_kv = context.kv * (min(first, n_all - 1) if offload_kqv else n_all - 1)
    for layer in range(first, n_all):
        on = min(bisect_right(ends, (layer - first) / n_placed), len(devices) - 1)
        counts[on] += 1
        if layer == n_all - 1:
            dense[on] += weights.output
        else:
            dense[on] += weights.layers[layer]
            kv[on] += context.kv if offload_kqv else 0
    shares = tuple(
        Share(device, n, d, k, context.compute if n else 0)
        for device, n, d, k in zip(devices, counts, dense, kv, strict=True)
    )
    for share in shares:
        if share.device.shares_memory:
            host_dense += share.dense
            host_kv += share.kv
    return Placement(n_placed, n_all, shares, host_dense, host_kv)


def choose(
    weights: LayerBytes,
    context: ContextBytes,
    devices: Sequence[Device],
    n_layers: int | str,
    *,
    tensor_split: Sequence[float] | None = None,
    offload_kqv: bool = True,
) -> Placement:
    """As `place`; "auto": as many layers as fit, with room to spare, into every device.

    Raises BudgetError where a given number cannot fit, OptionError where a device does not say
    how much memory it has and `auto` would have to know.
    """

    def placed(n: int) -> Placement:
        return place(
            weights, context, devices, n, tensor_split=tensor_split, offload_kqv=offload_kqv
        )

    if not isinstance(n_layers, str):
        placement = placed(n_layers)
        for share in placement.shares:
            device = share.device
            if device.total_bytes and share.least > device.free_bytes:
                fits = next((n for n in range(placement.n_layers, -1, -1) if _fits(placed(n))), 0)
                raise BudgetError(
                    f"{placement.n_layers} layers do not fit into {device.name} "
                    f"({device.description}): they take at least {format_size(share.least)} of "
                    f"it, and {format_size(device.free_bytes)} are free",
                    f"about {fits} fit: give fewer layers (--ngl, n_gpu_layers), auto, or a "
                    "smaller context",
                )
        return placement
    for device in devices:
        if device.total_bytes == 0:
            raise OptionError(
                f"{device.name} ({device.description}) does not say how much memory it has",
                "give a number of layers instead of auto",
            )
    return next(p for n in range(weights.n_all, -1, -1) if _fits(p := placed(n)) or n == 0)


def _fits(placement: Placement) -> bool:
    return all(
        share.n_layers == 0
        or share.total + RESERVE_BYTES + RESERVE_SHARE * share.device.total_bytes
        <= share.device.free_bytes
        for share in placement.shares
    )


def usable_devices(
    devices: Sequence[Device],
    split_mode: int | None = None,
    main_gpu: int = 0,
    tensor_split: Sequence[float] | None = None,
) -> list[Device]:
    """The devices that llama.cpp takes with these arguments; raises OptionError."""
    if not devices:
        return []
    if split_mode == _SPLIT_TENSOR:
        raise OptionError(
            "tensor parallelism (split_mode tensor) is not supported with streamed experts",
            "leave out split_mode: layers are spread over the devices",
        )
    if (
        tensor_split is not None
        and len(tensor_split) > len(devices)
        and any(tensor_split[len(devices) :])
    ):
        raise OptionError(
            f"tensor_split has {len(tensor_split)} shares for {len(devices)} devices: "
            f"{', '.join(device.name for device in devices)}",
            "give one share for each of them",
        )
    if split_mode != _SPLIT_NONE:
        return list(devices)
    if not 0 <= main_gpu < len(devices):
        raise OptionError(
            f"main_gpu is {main_gpu}, and there are {len(devices)} devices: "
            f"{', '.join(device.name for device in devices)}",
            "they count from 0",
        )
    return [devices[main_gpu]]


def place_model(
    llama_cpp: Any, geometry: Geometry, kwargs: Mapping[str, Any], *, with_experts: bool
) -> Placement | None:
    """Where the layers go that llama_cpp.Llama's arguments ask for; None: on no device.

    Raises OptionError and BudgetError.
    """
    asked = parse_gpu_layers(kwargs.get("n_gpu_layers", 0))
    if asked == 0 or kwargs.get("vocab_only"):
        return None
    devices = list_devices(llama_cpp) if asked == AUTO else need_device(llama_cpp)
    split = kwargs.get("tensor_split")
    devices = usable_devices(devices, kwargs.get("split_mode"), kwargs.get("main_gpu", 0), split)
    quantized = kwargs.get("type_k") is not None or kwargs.get("type_v") is not None
    header, n_ctx = geometry.header, kwargs.get("n_ctx", 512)
    kv = 0 if quantized and asked != AUTO else kv_bytes_at_least(header, n_ctx)
    # an automatic ubatch is decided when this is known
    compute = compute_bytes_about(header, n_ctx, ubatch_at_most(kwargs))
    if kwargs.get("op_offload"):  # room for the experts of one matmul
        parts = (part for group in geometry.groups for part in group.parts)
        compute += max((part.expert_bytes * part.shape[2] for part in parts), default=0)
    return choose(
        layer_bytes(geometry, with_experts=with_experts),
        ContextBytes(kv // geometry.n_layer, compute),
        devices,
        asked,
        tensor_split=split,
        offload_kqv=kwargs.get("offload_kqv", True),
    )

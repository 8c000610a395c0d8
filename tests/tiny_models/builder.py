"""Collects the metadata and random tensors of one tiny model and writes the GGUF.

Shapes are given the way llama.cpp prints them: fastest dimension first. Each
tensor's bytes depend only on the seed and its name, so two models that differ
in one tensor, or only in how they are split into files, share all the rest.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from .blocks import BLOCK_SIZES, QType, random_blocks

T = GGMLQuantizationType


class U64(list[int]):
    """An array that the file stores as 64-bit unsigned integers."""


Value = bool | int | float | str | list[int] | list[bool] | list[float]


@dataclass(frozen=True)
class Spec:
    """One kind of tiny model: what it is for and its dimensions."""

    name: str
    arch: str
    what: str
    build: Callable[[Builder], None]
    n_layer: int = 3
    n_expert: int = 8
    top_k: int = 2
    width: int = 128
    expert_width: int = 96
    n_head: int = 2
    n_head_kv: int = 1
    n_shard: int = 1
    seed: int = 1

    @property
    def head_width(self) -> int:
        return self.width // self.n_head


@dataclass(frozen=True)
class Tensor:
    """A tensor as the writer wants it: slowest dimension first, rows in bytes if quantised."""

    name: str
    qtype: QType
    data: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | npt.NDArray[np.int32]


class Builder:
    """What an architecture's function fills: `set` for metadata, the rest for tensors."""

    n_vocab = 256
    n_ctx_train = 4096

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.metadata: dict[str, Value] = {}
        self.tensors: list[Tensor] = []

    def set(self, **values: Value) -> None:
        """Set `{arch}.key` entries; `__` in a name stands for the dot."""
        for key, value in values.items():
            self.metadata[f"{self.spec.arch}.{key.replace('__', '.')}"] = value

    def rng(self, name: str) -> np.random.Generator:
        """The generator for one tensor's values."""
        return np.random.default_rng([self.spec.seed, zlib.crc32(name.encode())])

    def matrix(
        self, name: str, shape: tuple[int, ...], qtype: QType = T.Q8_0, gain: float = 1.0
    ) -> None:
        """Add random `{name}.weight`; outputs are about `gain` times as large as inputs."""
        std = gain / np.sqrt(shape[0])
        rows = tuple(reversed(shape[1:]))
        name += ".weight"
        if qtype == T.F32:
            values = self.rng(name).normal(0, std, (*rows, shape[0])).astype(np.float32)
            self.tensors.append(Tensor(name, T.F32, values))
            return
        block, block_bytes = BLOCK_SIZES[qtype]
        if shape[0] % block:
            raise ValueError(f"{name}: a row of {shape[0]} is not whole blocks of {qtype.name}")
        n_blocks = int(np.prod(shape)) // block
        data = random_blocks(qtype, n_blocks, float(std), self.rng(name))
        row_bytes = shape[0] // block * block_bytes
        self.tensors.append(Tensor(name, qtype, data.reshape(*rows, row_bytes)))

    def floats(
        self, name: str, shape: tuple[int, ...], mean: float = 0.0, std: float = 0.1
    ) -> None:
        """Add a random F32 tensor under its full name (norms, biases, sinks)."""
        values = self.rng(name).normal(mean, std, tuple(reversed(shape))).astype(np.float32)
        self.tensors.append(Tensor(name, T.F32, values))

    def norm(self, name: str, n: int) -> None:
        """Add a norm's `{name}.weight` [n], near 1."""
        self.floats(f"{name}.weight", (n,), mean=1.0)

    def write(self, path: Path) -> Path:
        """Write the file, or the shards beside it; return what llama.cpp is to open."""
        n_shard = self.spec.n_shard
        if n_shard == 1:
            _write(path, self.spec.arch, self.metadata, self.tensors)
            return path
        shards: list[list[Tensor]] = [[] for _ in range(n_shard)]
        n_expert_tensors = 0
        for tensor in self.tensors:
            # The parts of one layer's experts go to different files; the rest into the first.
            is_expert = "exps.weight" in tensor.name
            shards[n_expert_tensors % n_shard if is_expert else 0].append(tensor)
            n_expert_tensors += is_expert
        names = [
            path.with_name(f"{path.stem}-{i + 1:05}-of-{n_shard:05}.gguf") for i in range(n_shard)
        ]
        for i, name in enumerate(names):
            split = {
                "split.no": i,
                "split.count": n_shard,
                "split.tensors.count": len(self.tensors),
            }
            arch, metadata = (self.spec.arch, self.metadata) if i == 0 else (None, {})
            _write(name, arch, metadata, shards[i], split)
        return names[0]


def _write(
    path: Path,
    arch: str | None,
    metadata: dict[str, Value],
    tensors: list[Tensor],
    split: dict[str, int] | None = None,
) -> None:
    writer = GGUFWriter(path, arch or "")
    if arch is None:  # as llama-gguf-split does: later shards carry only the split keys
        writer.kv_data[0].clear()
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, U64):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType.UINT64)
        else:
            writer.add_array(key, value)
    for key, number in (split or {}).items():
        if key.endswith("tensors.count"):
            writer.add_int32(key, number)
        else:
            writer.add_uint16(key, number)
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.qtype)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""A small GGUF writer for tests: exact bytes, right or wrong as the test wants them.

gguf-py's GGUFWriter drops empty strings and arrays, cannot write most damaged files, and
checks shapes against data; this writes whatever it is told. Values carry their type:
`u32(3)`, `string("x")`, `array("u32", [1, 2])`. Not a product module.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KINDS = {
    "u8": (0, "B"),
    "i8": (1, "b"),
    "u16": (2, "H"),
    "i16": (3, "h"),
    "u32": (4, "I"),
    "i32": (5, "i"),
    "f32": (6, "f"),
    "bool": (7, "?"),
    "str": (8, ""),
    "array": (9, ""),
    "u64": (10, "Q"),
    "i64": (11, "q"),
    "f64": (12, "d"),
}

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, I8 = 0, 1, 2, 8, 12, 14, 24
# ggml type -> elements per block, bytes per block
BLOCKS = {
    F32: (1, 4),
    F16: (1, 2),
    Q4_0: (32, 18),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q6_K: (256, 210),
    I8: (1, 1),
}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def scalar(kind: str, value: float) -> bytes:
    """A metadata value: its type and its bytes."""
    number, code = KINDS[kind]
    return struct.pack(f"<I{code}", number, value)


def u16(value: int) -> bytes:
    return scalar("u16", value)


def u32(value: int) -> bytes:
    return scalar("u32", value)


def i32(value: int) -> bytes:
    return scalar("i32", value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", KINDS["str"][0]) + text(value)


def array(kind: str, values: Sequence[float] | Sequence[str] | Sequence[bytes]) -> bytes:
    number, code = KINDS[kind]
    head = struct.pack("<IIQ", KINDS["array"][0], number, len(values))
    if kind == "str":
        return head + b"".join(text(v) for v in values)  # type: ignore[arg-type]
    return head + struct.pack(f"<{len(values)}{code}", *values)


@dataclass(frozen=True)
class Tensor:
    """`shape` in ggml order. Data is `fill` repeated; `offset` overrides the right one."""

    name: str | bytes
    shape: tuple[int, ...]
    ggml_type: int = F32
    offset: int | None = None
    fill: bytes = b"\xa5"

    @property
    def nbytes(self) -> int:
        elements, size = BLOCKS.get(self.ggml_type, (1, 1))
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True)
class Gguf:
    """One file. `keys` is a mapping, or pairs where a test wants a key twice."""

    keys: Mapping[str, bytes] | Iterable[tuple[str | bytes, bytes]] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    version: int = 3
    alignment: int = 32
    magic: bytes = b"GGUF"
    n_keys: int | None = None
    n_tensors: int | None = None

    def header(self) -> bytes:
        """Everything before the padding that precedes the data."""
        pairs = list(self.keys.items() if isinstance(self.keys, Mapping) else self.keys)
        if self.alignment != 32:
            pairs.append(("general.alignment", u32(self.alignment)))
        parts = [
            self.magic,
            struct.pack(
                "<IQQ",
                self.version,
                len(self.tensors) if self.n_tensors is None else self.n_tensors,
                len(pairs) if self.n_keys is None else self.n_keys,
            ),
        ]
        parts += [text(key) + value for key, value in pairs]
        offset = 0
        for t in self.tensors:
            dims = len(t.shape)
            at = offset if t.offset is None else t.offset
            parts.append(text(t.name))
            parts.append(struct.pack(f"<I{dims}QIQ", dims, *t.shape, t.ggml_type, at))
            offset += self._padded(t.nbytes)
        return b"".join(parts)

    def data(self) -> bytes:
        return b"".join(
            (t.fill * t.nbytes)[: t.nbytes].ljust(self._padded(t.nbytes), b"\0")
            for t in self.tensors
        )

    def to_bytes(self) -> bytes:
        header = self.header()
        return header.ljust(self._padded(len(header)), b"\0") + self.data()

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def _padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment


def moe_keys(
    architecture: str = "olmoe", *, layers: int = 2, experts: int = 4, top_k: int = 2
) -> dict[str, bytes]:
    """The least that read_geometry needs."""
    return {
        "general.architecture": string(architecture),
        f"{architecture}.block_count": u32(layers),
        f"{architecture}.expert_count": u32(experts),
        f"{architecture}.expert_used_count": u32(top_k),
    }


def expert_tensors(
    layer: int, *, experts: int = 4, width: int = 64, inner: int = 32, ggml_type: int = Q8_0
) -> list[Tensor]:
    """gate, up and down of one layer, in the order llama.cpp's converter writes them."""
    return [
        Tensor(f"blk.{layer}.ffn_gate_exps.weight", (width, inner, experts), ggml_type),
        Tensor(f"blk.{layer}.ffn_up_exps.weight", (width, inner, experts), ggml_type),
        Tensor(f"blk.{layer}.ffn_down_exps.weight", (inner, width, experts), ggml_type),
    ]


def write_shards(
    folder: Path,
    keys: Mapping[str, bytes],
    parts: Sequence[Sequence[Tensor]],
    *,
    stem: str = "model",
    alignment: int = 32,
) -> list[Path]:
    """Write NAME-00001-of-0000N.gguf and so on, as llama-gguf-split names and keys them."""
    total = sum(map(len, parts))
    paths = []
    for i, tensors in enumerate(parts):
        split = {
            "split.no": u16(i),
            "split.count": u16(len(parts)),
            "split.tensors.count": i32(total),
        }
        its_keys = {**keys, **split} if i == 0 else split
        path = folder / f"{stem}-{i + 1:05}-of-{len(parts):05}.gguf"
        paths.append(Gguf(its_keys, tensors, alignment=alignment).write(path))
    return paths

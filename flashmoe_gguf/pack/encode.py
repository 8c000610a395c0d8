"""The few pieces of a GGUF header that a packed file adds, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

_U32, _STRING, _ARRAY, _U64 = 4, 8, 9, 10


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def start(n_tensors: int, n_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys)


def u32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", _U32, value)


def string(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", _STRING) + text(value)


def u32s(key: str, values: Sequence[int]) -> bytes:
    return _array(key, _U32, len(values), struct.pack(f"<{len(values)}I", *values))


def u64s(key: str, values: Sequence[int]) -> bytes:
    return _array(key, _U64, len(values), struct.pack(f"<{len(values)}Q", *values))


def strings(key: str, values: Sequence[str]) -> bytes:
    return _array(key, _STRING, len(values), b"".join(map(text, values)))


def tensor(name: str, shape: Sequence[int], ggml_type: int, offset: int) -> bytes:
    """A row of the tensor table; `offset` from the start of the data."""
    dims = len(shape)
    return text(name) + struct.pack(f"<I{dims}QIQ", dims, *shape, ggml_type, offset)


def _array(key: str, kind: int, count: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<IIQ", _ARRAY, kind, count) + data

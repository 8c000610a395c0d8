"""A GGUF header taken apart into fields that can be changed one by one, and put together again.

It reads good files only, and writes whatever it is given.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from flashmoe_gguf.gguf import GGML_TYPES

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# What repaired files may grow to.
_MAX_DATA_BYTES = 2 << 20


@dataclass
class Key:
    """`value` is what follows the type; for an array its type and count too."""

    name: bytes
    kind: int
    value: bytes


@dataclass
class Row:
    """One row of the tensor table; `offset` from the start of the data."""

    name: bytes
    shape: list[int]
    ggml_type: int
    offset: int


@dataclass
class Head:
    """The counts in the file are those of the lists unless they are set."""

    version: int
    keys: list[Key]
    rows: list[Row]
    n_keys: int | None = None
    n_rows: int | None = None

    def copy(self) -> Head:
        """Another that can be changed; several times as fast as copy.deepcopy."""
        keys = [Key(key.name, key.kind, key.value) for key in self.keys]
        rows = [Row(row.name, list(row.shape), row.ggml_type, row.offset) for row in self.rows]
        return Head(self.version, keys, rows, self.n_keys, self.n_rows)

    def to_bytes(self) -> bytes:
        parts = [
            b"GGUF",
            struct.pack(
                "<IQQ",
                self.version,
                len(self.rows) if self.n_rows is None else self.n_rows,
                len(self.keys) if self.n_keys is None else self.n_keys,
            ),
        ]
        for key in self.keys:
            parts += [text(key.name), struct.pack("<I", key.kind), key.value]
        for row in self.rows:
            parts.append(text(row.name))
            dims = len(row.shape)
            parts.append(struct.pack(f"<I{dims}QIQ", dims, *row.shape, row.ggml_type, row.offset))
        return b"".join(parts)

    @property
    def alignment(self) -> int:
        """What the file says, 32 where that is no power of two below 64 KiB."""
        for key in self.keys:
            if key.name == b"general.alignment" and key.kind == 4:
                value = int.from_bytes(key.value, "little")
                if value.bit_count() == 1 and value <= 1 << 16:
                    return value
        return 32

    def repair(self) -> int | None:
        """Give every tensor the offset that a reader wants; returns the bytes of all data.

        None, with offsets as they were, where a type is unknown or they are too many.
        """
        at, offsets = 0, []
        for row in self.rows:
            if row.ggml_type not in GGML_TYPES:
                return None
            _, elements, nbytes = GGML_TYPES[row.ggml_type]
            offsets.append(at)
            at += padded(math.prod(row.shape) // elements * nbytes, self.alignment)
            if at > _MAX_DATA_BYTES:
                return None
        for row, offset in zip(self.rows, offsets, strict=True):
            row.offset = offset
        return at


def padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def parse(data: bytes) -> tuple[Head, int]:
    """The header of a good file, and where its data starts."""
    at = 4

    def take(layout: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + layout, data, at)
        at += struct.calcsize("<" + layout)
        return int(value)

    def take_bytes(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        return data[at - nbytes : at]

    version, n_rows, n_keys = take("I"), take("Q"), take("Q")
    keys, rows = [], []
    for _ in range(n_keys):
        name, kind = take_bytes(take("Q")), take("I")
        start = at
        element, count = (take("I"), take("Q")) if kind == ARRAY else (kind, 1)
        if element == STRING:
            for _ in range(count):
                take_bytes(take("Q"))
        else:
            take_bytes(count * SIZES[element])
        keys.append(Key(name, kind, data[start:at]))
    for _ in range(n_rows):
        name = take_bytes(take("Q"))
        shape = [take("Q") for _ in range(take("I"))]
        rows.append(Row(name, shape, take("I"), take("Q")))
    head = Head(version, keys, rows)
    return head, min(padded(at, head.alignment), len(data))

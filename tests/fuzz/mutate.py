"""One damaged model for every number: fields, bytes, or both are changed.

Half of the files whose fields were changed have the offsets of their tensors put right again and
data as long as they claim, so that the damage goes further than the first check.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import xxhash

from flashmoe_gguf.gguf import GGML_TYPES
from fuzz.gguf_head import ARRAY, SIZES, STRING, Head, Key, Row, padded, parse, text
from fuzz.seeds import Seed

U32 = (0, 1, 2, 3, 7, 31, 255, 256, 512, 513, 1024, 1025, 4096, 65536, (1 << 31) - 1, 1 << 31)
U32S = (*U32, (1 << 32) - 1)
U64S = (
    *U32S,
    1 << 32,
    (1 << 62) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 32,
    (1 << 64) - 1,
)
_FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
_STORED = b"flashmoe.header.0"


@dataclass(frozen=True)
class Damaged:
    """A model to be written; the first file is the one to open."""

    seed: Seed
    files: tuple[tuple[str, bytes], ...]


def damaged(seeds: Sequence[Seed], run: int, index: int) -> Damaged:
    """Number `index` of run `run`: always the same, and never a seed as it is."""
    rng = random.Random(f"{run}:{index}")
    while True:
        seed = rng.choice(seeds)
        files = _damage(rng, seed, seeds)
        if files != seed.files:
            return Damaged(seed, files)


def _damage(rng: random.Random, seed: Seed, seeds: Sequence[Seed]) -> tuple[tuple[str, bytes], ...]:
    number = 0 if rng.random() < 0.7 else rng.randrange(len(seed.files))
    name, data = seed.files[number]
    if seed.packed and number == 0 and rng.random() < 0.2:
        new = _change_stored_header(rng, data)
    else:
        new = _change_file(rng, data, rng.choice(seeds))
    files = list(seed.files)
    files[number] = (name, new)
    return tuple(files)


@cache
def _parsed(data: bytes) -> tuple[Head, int]:
    return parse(data)


def _change_file(rng: random.Random, data: bytes, other: Seed) -> bytes:
    old, start = _parsed(data)
    tail = data[start:]
    fields = rng.random() < 0.75
    if fields:
        head = old.copy()
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(_FIELD_CHANGES)(rng, head, _parsed(other.files[0][1])[0])
        nbytes = head.repair() if rng.random() < 0.7 else None
        raw = head.to_bytes()
        if nbytes is not None:
            tail = tail[:nbytes].ljust(nbytes, b"\1")
        raw = raw.ljust(padded(len(raw), head.alignment), b"\0")
    else:
        raw = data[:start]
    if not fields or rng.random() < 0.15:
        raw = change_bytes(rng, raw, other.files[0][1][:4096])
    whole = raw + tail
    if rng.random() < 0.03:
        whole = whole[: rng.randrange(len(whole) + 1)]
    return whole


def _change_stored_header(rng: random.Random, data: bytes) -> bytes:
    """The copy of its source's header that a packed file carries; at times with a right sum."""
    old, start = _parsed(data)
    head = old.copy()
    row = next(r for r in head.rows if r.name == _STORED)
    at, length = start + row.offset, row.shape[0]
    stored = data[at : at + length]
    if rng.random() < 0.5:
        inner, inner_start = parse(stored)
        rng.choice(_FIELD_CHANGES)(rng, inner, inner)
        inner.repair()
        new = inner.to_bytes()
        new = new.ljust(padded(len(new), inner.alignment), b"\0")[:inner_start].ljust(length, b"\0")
    else:
        new = change_bytes(rng, stored, stored)[:length].ljust(length, b"\0")
    whole = bytearray(data)
    whole[at : at + length] = new
    if rng.random() < 0.8:
        sizes = next(k for k in head.keys if k.name == b"flashmoe.source.sizes")
        mark = next(k for k in head.keys if k.name == b"flashmoe.source.fingerprint")
        if int.from_bytes(sizes.value[4:12], "little") == 1:
            mark.value = text(xxhash.xxh3_128_hexdigest(sizes.value[12:20] + new).encode())
        raw = head.to_bytes()
        whole[: len(raw)] = raw
    return bytes(whole)


def change_bytes(rng: random.Random, raw: bytes, other: bytes) -> bytes:
    """Some of: flips, insertions, deletions, repeats, numbers at limits, another file's bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        n = rng.choice((1, 1, 2, 4, 8, 32))
        what = rng.randrange(8)
        if what == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at:at] = rng.randbytes(n)
        elif what == 2:
            del data[at : at + n]
        elif what == 3:
            data[at:at] = data[at : at + n]
        elif what == 4:
            data[at : at + 4] = struct.pack("<I", rng.choice(U32S))
        elif what == 5:
            data[at : at + 8] = struct.pack("<Q", rng.choice(U64S))
        elif what == 6:
            place = rng.randrange(len(other) + 1)
            data[at : at + 64] = other[place : place + 64]
        else:
            data[at : at + n] = rng.randbytes(n)
    return bytes(data)


def _number(rng: random.Random, size: int) -> bytes:
    if size == 8:
        return struct.pack("<Q", rng.choice(U64S))
    if size == 4 and rng.random() < 0.1:
        return struct.pack("<f", rng.choice(_FLOATS))
    return struct.pack("<I", rng.choice(U32S) if size == 4 else rng.choice(U32))[:size]


def _value(rng: random.Random, key: Key) -> None:
    """A number or a string of the same type becomes another."""
    if key.kind == STRING:
        value = bytearray(key.value[8:])
        what = rng.randrange(4)
        if what == 0:
            value.clear()
        elif what == 1:
            value = bytearray(rng.choice((b"llama", b"bert", b"gpt2", b"\xff\0", b"a" * 5000)))
        elif value:
            value[rng.randrange(len(value))] = rng.randrange(256)
        key.value = text(bytes(value))
        if what == 3:
            key.value = struct.pack("<Q", rng.choice(U64S)) + bytes(value)
        return
    if key.kind != ARRAY:
        key.value = _number(rng, len(key.value))
        return
    kind, count = struct.unpack_from("<IQ", key.value)
    body = bytearray(key.value[12:])
    what = rng.randrange(4)
    if what == 0:
        count = rng.choice(U64S)
    elif what == 1:
        kind = rng.randrange(14)
    elif kind in SIZES and count:
        size = SIZES[kind]
        if what == 2:
            at = rng.randrange(count) * size
            body[at : at + size] = _number(rng, size)
        else:
            count = rng.choice((0, 1, count - 1, count + 1, 600, 5000))
            body = bytearray((bytes(body) * count)[: count * size])
    elif body:
        body[rng.randrange(len(body))] = rng.randrange(256)
    key.value = struct.pack("<IQ", kind, count) + body


def _change_value(rng: random.Random, head: Head, other: Head) -> None:
    if head.keys:
        _value(rng, rng.choice(head.keys))


def _change_kind(rng: random.Random, head: Head, other: Head) -> None:
    """Another type, with or without a value that fits it."""
    if not head.keys:
        return
    key = rng.choice(head.keys)
    key.kind = rng.choice((*SIZES, STRING, ARRAY, 13, (1 << 32) - 1))
    if rng.random() < 0.8 and key.kind in SIZES:
        key.value = _number(rng, SIZES[key.kind])
    elif key.kind == ARRAY:
        kind = rng.choice((0, 4, 5, 6, 7, 10))
        count = rng.choice((0, 1, 2, 3, 512, 513))
        values = b"".join(_number(rng, SIZES[kind]) for _ in range(count))
        key.value = struct.pack("<IQ", kind, count) + values


def _change_keys(rng: random.Random, head: Head, other: Head) -> None:
    """One more, one fewer, another's, another name, another place."""
    what = rng.randrange(5)
    if what == 0 and other.keys:
        head.keys.insert(rng.randrange(len(head.keys) + 1), copy.copy(rng.choice(other.keys)))
    elif what == 1 and head.keys:
        del head.keys[rng.randrange(len(head.keys))]
    elif what == 2 and head.keys:
        key = rng.choice(head.keys)
        key.name = rng.choice((b"", b"x" * 70000, b"\xff", b"flashmoe.version", key.name + b"\0"))
    elif what == 3:
        rng.shuffle(head.keys)
    else:
        head.keys.append(_some_key(rng, head))


def _some_key(rng: random.Random, head: Head) -> Key:
    """One that readers know, which this file may lack."""
    arch = next((k.value[8:] for k in head.keys if k.name == b"general.architecture"), b"x")
    name, kind = rng.choice(_KNOWN)
    value = text(b"x") if kind == STRING else _number(rng, SIZES[kind])
    return Key(name.replace(b"{}", arch), kind, value)


_KNOWN = (
    (b"general.alignment", 4),
    (b"split.count", 2),
    (b"split.no", 2),
    (b"split.tensors.count", 5),
    (b"flashmoe.version", 4),
    (b"flashmoe.stripe.index", 4),
    (b"{}.expert_group_count", 4),
    (b"{}.expert_group_used_count", 4),
    (b"{}.nextn_predict_layers", 4),
    (b"{}.leading_dense_block_count", 4),
    (b"{}.expert_shared_count", 4),
    (b"{}.attention.key_length", 4),
    (b"{}.attention.value_length", 4),
    (b"{}.attention.sliding_window", 4),
    (b"{}.rope.dimension_count", 4),
    (b"{}.rope.scaling.type", STRING),
    (b"{}.rope.scaling.factor", 6),
    (b"{}.expert_gating_func", 4),
    (b"{}.vocab_size", 4),
    (b"{}.pooling_type", 4),
    (b"tokenizer.ggml.model", STRING),
    (b"tokenizer.ggml.eos_token_id", 4),
)


def _change_shape(rng: random.Random, head: Head, other: Head) -> None:
    if not head.rows:
        return
    row = rng.choice(head.rows)
    what = rng.randrange(4)
    if what == 0 and row.shape:
        row.shape[rng.randrange(len(row.shape))] = rng.choice(U64S)
    elif what == 1:
        row.shape.append(rng.choice((0, 1, 2)))
    elif what == 2 and row.shape:
        row.shape.pop()
    else:
        rng.shuffle(row.shape)


def _change_type(rng: random.Random, head: Head, other: Head) -> None:
    if head.rows:
        kinds = (*GGML_TYPES, *GGML_TYPES, *U32S)
        rng.choice(head.rows).ggml_type = rng.choice(kinds)


def _change_offset(rng: random.Random, head: Head, other: Head) -> None:
    if head.rows:
        rng.choice(head.rows).offset = rng.choice(U64S)


def _change_name(rng: random.Random, head: Head, other: Head) -> None:
    if not head.rows:
        return
    row = rng.choice(head.rows)
    names = (
        b"",
        b"x" * 63,
        b"x" * 64,
        b"blk.\xff",
        rng.choice(head.rows).name,
        b"blk.999999.ffn_up_exps.weight",
        b"blk.0.ffn_up_chexps.weight",
        b"blk.1.ffn_gate_up_exps.weight",
        row.name.replace(b"blk.0", b"blk.1"),
        row.name.replace(b"_exps", b"_chexps"),
    )
    row.name = rng.choice(names)


def _change_rows(rng: random.Random, head: Head, other: Head) -> None:
    what = rng.randrange(4)
    if what == 0 and head.rows:
        del head.rows[rng.randrange(len(head.rows))]
    elif what == 1 and other.rows:
        new = copy.deepcopy(rng.choice(other.rows))
        head.rows.insert(rng.randrange(len(head.rows) + 1), new)
    elif what == 2:
        rng.shuffle(head.rows)
    else:
        shape = [rng.choice((1, 32, 64)), rng.choice((1, 4))]
        head.rows.append(Row(b"more", shape, rng.choice(tuple(GGML_TYPES)), 0))


def _change_counts(rng: random.Random, head: Head, other: Head) -> None:
    what = rng.randrange(3)
    if what == 0:
        head.n_keys = rng.choice((*U64S, len(head.keys) - 1, len(head.keys) + 1)) % (1 << 64)
    elif what == 1:
        head.n_rows = rng.choice((*U64S, len(head.rows) - 1, len(head.rows) + 1)) % (1 << 64)
    else:
        head.version = rng.choice((*U32S, 1, 2, 3, 3 << 24))


_FIELD_CHANGES: tuple[Callable[[random.Random, Head, Head], None], ...] = (
    _change_value,
    _change_value,
    _change_value,
    _change_value,
    _change_kind,
    _change_keys,
    _change_shape,
    _change_shape,
    _change_type,
    _change_offset,
    _change_name,
    _change_rows,
    _change_counts,
)

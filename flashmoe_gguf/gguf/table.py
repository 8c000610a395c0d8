"""Reading the header of one GGUF file: its start, its metadata, its table of tensors."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf.cursor import Cursor, open_file, shown
from flashmoe_gguf.gguf.header import GGML_TYPES, ArraySummary, Scalar, Shard, TensorInfo, Value

# Arrays above this length are vocabularies; nothing here needs their elements.
MAX_ARRAY = 4096

# No model comes near the first two; the others are the format's and ggml's own.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_KEY_BYTES = 65535
_MAX_NAME_BYTES = 63  # GGML_MAX_NAME less the terminator
_MAX_DIMS = 4
_MAX_TENSOR_BYTES = (1 << 63) - 1

_U16, _U32, _STRING, _ARRAY = 2, 4, 8, 9
# GGUF value type -> name, struct code
_SCALARS = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "?"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}


@dataclass(frozen=True)
class FileTable:
    """The header of one file. `key_spans`: where each key, with its value, starts and ends."""

    shard: Shard
    metadata: Mapping[str, Value]
    key_spans: Mapping[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]


def read_file(path: Path, number: int) -> tuple[Shard, dict[str, Value], list[TensorInfo]]:
    file, size = open_file(path)
    with file:
        table = parse_table(path, file, size, number)
    return table.shard, dict(table.metadata), list(table.tensors)


def parse_table(path: Path, file: io.FileIO | io.BytesIO, size: int, number: int = 0) -> FileTable:
    """Read the header at the start of `file`, which stands for `size` bytes called `path`.

    `file` may hold the header alone. Raises ModelFileError.
    """
    cursor = Cursor(path, file, size)
    version = _read_start(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of keys")
    # The smallest key takes 14 bytes, the smallest tensor 24.
    for count, least, most, what in (
        (n_keys, 14, _MAX_KEYS, "keys"),
        (n_tensors, 24, _MAX_TENSORS, "tensors"),
    ):
        if count > most or count * least > cursor.left:
            raise cursor.error(f"the header claims {count:,} {what}, which it cannot hold")
    metadata: dict[str, Value] = {}
    key_spans: dict[str, tuple[int, int]] = {}
    for i in range(n_keys):
        start = cursor.offset
        key = cursor.text(f"the name of key {i}", _MAX_KEY_BYTES)
        if not key:
            raise cursor.error(f"key {i} has an empty name")
        if key in metadata:
            raise cursor.error(f"key {shown(key)} is there twice")
        metadata[key] = _read_value(cursor, key)
        key_spans[key] = start, cursor.offset
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment.bit_count() != 1:
        raise cursor.error(f"general.alignment is {shown(alignment)}, not a power of two")
    tensors = _read_tensors(cursor, n_tensors, number, alignment)
    data_offset = _padded(cursor.offset, alignment)
    if tensors:
        end = tensors[-1].offset + tensors[-1].nbytes
        if end > size:
            raise ModelFileError(
                f"{shown(path)}: cut short: {end - size:,} of {end:,} bytes are missing",
                "the download or copy was interrupted: finish it or start again",
            )
    shard = Shard(path, size, version, alignment, data_offset)
    return FileTable(shard, metadata, key_spans, tuple(tensors))


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _read_start(cursor: Cursor) -> int:
    """Check magic and version; returns the version."""
    head = cursor.peek(min(64, cursor.left), "the magic")
    if head[:4] != b"GGUF":
        raise cursor.error("not a GGUF file", _looks_like(head))
    cursor.skip(4, "the magic")
    version = cursor.u32("the version")
    if version in (2, 3):
        return version
    if version == 1:
        hint = "convert the original model again, or find a newer GGUF of it"
        raise cursor.error("GGUF version 1 is no longer supported", hint)
    if version and version & 0xFFFF == 0:
        hint = "gguf-py's gguf_convert_endian.py turns it into little endian"
        raise cursor.error("this GGUF is big endian", hint)
    hint = "the file is damaged, or newer than this program"
    raise cursor.error(f"GGUF version {version:,} is unknown; 2 and 3 are supported", hint)


def _looks_like(head: bytes) -> str:
    """A hint for a file that starts with `head` and is not GGUF."""
    convert = "convert it with llama.cpp's convert_hf_to_gguf.py, or find a GGUF of the model"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the model itself: run `git lfs pull`"
    if head.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        return "it is a web page saved in place of the model: download the file itself"
    if head[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file from before GGUF: find a GGUF of the model"
    if head[8:9] == b"{":
        return f"it looks like safetensors: {convert}"
    if head[:4] == b"PK\x03\x04":
        return f"it looks like a PyTorch checkpoint: {convert}"
    if not any(head):
        return "it starts with zeros, as an unfinished download does: download it again"
    return "give a .gguf file"


def _read_value(cursor: Cursor, key: str) -> Value:
    what = f"the value of {shown(key)}"
    kind = cursor.u32(what)
    if key == "general.alignment" and kind != _U32:
        raise cursor.error("general.alignment is not a u32")
    if key in ("split.no", "split.count") and kind != _U16:  # llama.cpp aborts on another type
        raise cursor.error(f"{key} is missing or not a count (u16)")
    if kind == _STRING:
        return _read_strings(cursor, 1, what)[0]
    if kind in _SCALARS:
        (value,) = _read_numbers(cursor, kind, 1, what)
        return value
    if kind != _ARRAY:
        raise cursor.error(f"{what} has the unknown type {kind}")
    kind, count = cursor.u32(what), cursor.u64(what)
    if kind == _STRING:
        cursor.require(8 * count, what)
        if count <= MAX_ARRAY:
            return _read_strings(cursor, count, what)
        cursor.skip_strings(count, what)
        return ArraySummary("str", count)
    if kind in _SCALARS:
        name, code = _SCALARS[kind]
        if count <= MAX_ARRAY:
            return _read_numbers(cursor, kind, count, what)
        cursor.skip(count * struct.calcsize(code), what)
        return ArraySummary(name, count)
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays")
    raise cursor.error(f"{what} is an array of the unknown type {kind}")


def _read_numbers(cursor: Cursor, kind: int, count: int, what: str) -> tuple[Scalar, ...]:
    layout = struct.Struct(f"<{count}{_SCALARS[kind][1]}")
    cursor.keep(40 * count, what)
    return layout.unpack(cursor.take(layout.size, what))


def _read_strings(cursor: Cursor, count: int, what: str) -> tuple[str, ...]:
    strings = []
    for _ in range(count):
        length = cursor.u64(what)
        cursor.require(length, what)
        cursor.keep(64 + length, what)
        # Lenient, unlike names: one bad byte in a chat template must not hide the model.
        strings.append(cursor.take(length, what).decode(errors="replace"))
    return tuple(strings)


def _read_tensors(cursor: Cursor, count: int, shard: int, alignment: int) -> list[TensorInfo]:
    """The tensor table. Offsets come out absolute, which needs the table's end: two passes."""
    table: list[tuple[str, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    expected = 0
    for i in range(count):
        name = cursor.text(f"the name of tensor {i}", _MAX_NAME_BYTES)
        if name in names:
            raise cursor.error(f"tensor {shown(name)} is there twice")
        names.add(name)
        what = f"tensor {shown(name)}"
        n_dims = cursor.u32(what)
        if n_dims > _MAX_DIMS:
            raise cursor.error(f"{what} has {n_dims:,} dimensions, more than {_MAX_DIMS}")
        shape = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, what))
        if 0 in shape:
            raise cursor.error(f"{what} has a dimension of zero length")
        ggml_type = cursor.u32(what)
        nbytes = _tensor_bytes(cursor, what, shape, ggml_type)
        offset = cursor.u64(what)
        if offset != expected:
            raise cursor.error(f"{what} lies at offset {offset:,} of the data, not at {expected:,}")
        expected += _padded(nbytes, alignment)
        table.append((name, shape, ggml_type, nbytes))
    position = _padded(cursor.offset, alignment)
    tensors = []
    for name, shape, ggml_type, nbytes in table:
        type_name = GGML_TYPES[ggml_type][0]
        tensors.append(TensorInfo(name, shape, ggml_type, type_name, position, nbytes, shard))
        position += _padded(nbytes, alignment)
    return tensors


def _tensor_bytes(cursor: Cursor, what: str, shape: tuple[int, ...], ggml_type: int) -> int:
    if ggml_type not in GGML_TYPES:
        raise cursor.error(
            f"{what} has the unknown ggml type {ggml_type}",
            "the file is damaged, or made for a newer or another llama.cpp",
        )
    type_name, block_elements, block_bytes = GGML_TYPES[ggml_type]
    row = shape[0] if shape else 1
    if row % block_elements:
        raise cursor.error(
            f"{what} has rows of {row:,} elements, {type_name} needs a multiple of {block_elements}"
        )
    nbytes = math.prod(shape) // block_elements * block_bytes
    if nbytes > _MAX_TENSOR_BYTES:
        raise cursor.error(f"{what} has an impossible shape: {' x '.join(map(str, shape))}")
    return nbytes

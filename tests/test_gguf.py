"""The GGUF header reader: what it reads, and that no file makes it do anything but answer."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

import gguf_files as gf
from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import GGML_TYPES, ArraySummary, read_header
from flashmoe_gguf.gguf import cursor as cursor_module
from gguf_files import F16, F32, Q4_K, Q8_0, Gguf, Tensor, array, i32, scalar, string, u16, u32

KEYS = {"general.architecture": string("olmoe"), "olmoe.block_count": u32(16)}
TENSORS = [
    Tensor("token_embd.weight", (64, 10), F16),
    Tensor("blk.0.ffn_up_exps.weight", (64, 32, 4), Q8_0),
    Tensor("output_norm.weight", (64,), F32),
]
SMALL = Gguf(KEYS, TENSORS)


def error_of(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_reads_keys_and_tensors(tmp_path: Path) -> None:
    path = SMALL.write(tmp_path / "m.gguf")
    header = read_header(path)
    assert header.architecture == "olmoe"
    assert header.get("block_count") == 16
    assert header.get("expert_count") is None
    (shard,) = header.shards
    assert (shard.path, shard.size_bytes) == (path, path.stat().st_size)
    assert (shard.version, shard.alignment) == (3, 32)
    assert shard.data_offset == -(-len(SMALL.header()) // 32) * 32
    assert [(t.name, t.shape, t.type_name, t.nbytes, t.shard) for t in header.tensors] == [
        ("token_embd.weight", (64, 10), "F16", 1280, 0),
        ("blk.0.ffn_up_exps.weight", (64, 32, 4), "Q8_0", 64 * 32 * 4 // 32 * 34, 0),
        ("output_norm.weight", (64,), "F32", 256, 0),
    ]
    data = path.read_bytes()
    assert all(data[t.offset : t.offset + t.nbytes] == b"\xa5" * t.nbytes for t in header.tensors)


def test_accepts_a_string_path_and_version_2(tmp_path: Path) -> None:
    path = Gguf(KEYS, TENSORS, version=2).write(tmp_path / "m.gguf")
    assert read_header(str(path)).shards[0].version == 2


def test_every_value_type(tmp_path: Path) -> None:
    scalars = {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "bool": True,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e300,
    }
    keys = {kind: scalar(kind, value) for kind, value in scalars.items()}
    keys |= {f"many {kind}": array(kind, [value] * 3) for kind, value in scalars.items()}
    keys |= {"text": string("héllo"), "texts": array("str", ["a", "", "b"])}
    keys |= {"empty": string(""), "none": array("u32", []), "no texts": array("str", [])}
    metadata = read_header(Gguf(keys).write(tmp_path / "m.gguf")).metadata
    expected: dict[str, object] = dict(scalars)
    expected |= {f"many {kind}": (value,) * 3 for kind, value in scalars.items()}
    expected |= {"text": "héllo", "texts": ("a", "", "b"), "empty": "", "none": (), "no texts": ()}
    assert metadata == expected
    assert metadata["bool"] is True
    assert list(metadata) == list(keys)


def test_long_arrays_are_summarised(tmp_path: Path) -> None:
    # Long enough for several chunks of the reader, with one string longer than a chunk.
    texts = ["t" * (i % 300) for i in range(20_000)]
    texts[7] = "x" * 3_000_000
    keys = {
        "tokens": array("str", texts),
        "scores": array("f32", [0.0] * 4097),
        "kept": array("u8", [1] * 4096),
        "after": u32(7),
    }
    metadata = read_header(Gguf(keys).write(tmp_path / "m.gguf")).metadata
    assert metadata["tokens"] == ArraySummary("str", 20_000)
    assert metadata["scores"] == ArraySummary("f32", 4097)
    assert metadata["kept"] == (1,) * 4096
    assert metadata["after"] == 7


def test_text_that_is_not_utf8_is_kept_readable(tmp_path: Path) -> None:
    path = Gguf({"chat": string(b"a\xffb")}).write(tmp_path / "m.gguf")
    assert read_header(path).metadata["chat"] == "a\ufffdb"


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    path = Gguf(KEYS, TENSORS, alignment=alignment).write(tmp_path / "m.gguf")
    header = read_header(path)
    assert header.shards[0].alignment == alignment
    assert all(t.offset % alignment == 0 for t in header.tensors)
    data = path.read_bytes()
    assert all(data[t.offset : t.offset + t.nbytes] == b"\xa5" * t.nbytes for t in header.tensors)


def test_a_tensor_without_dimensions_has_one_element(tmp_path: Path) -> None:
    (tensor,) = read_header(Gguf({}, [Tensor("scale", ())]).write(tmp_path / "m.gguf")).tensors
    assert (tensor.shape, tensor.nbytes) == ((), 4)


def test_the_last_tensor_needs_no_padding_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = Gguf({}, [Tensor("t", (1,))]).to_bytes()
    path.write_bytes(data[: len(data) - 28])
    assert read_header(path).tensors[0].nbytes == 4


def test_type_table_agrees_with_the_pinned_llama_cpp() -> None:
    # ggml-common.h: a half-precision delta and 2 bits each; 4 scale bytes and 4 bits each.
    assert GGML_TYPES[42] == ("Q2_0", 64, 2 + 64 // 4)
    assert GGML_TYPES[41] == ("Q1_0", 128, 2 + 128 // 8)
    assert GGML_TYPES[40] == ("NVFP4", 64, 4 + 64 // 2)
    assert GGML_TYPES[12] == ("Q4_K", 256, 144)
    assert GGML_TYPES[39] == ("MXFP4", 32, 17)


def test_a_file_without_architecture_says_so_when_asked(tmp_path: Path) -> None:
    header = read_header(Gguf({"a": u32(1)}).write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="names no architecture"):
        header.get("block_count")


# --- files that are wrong ----------------------------------------------------------------------


def nested_array() -> bytes:
    return struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 4, 0)


def dims(count: int) -> bytes:
    """A header with one tensor that claims `count` dimensions and has four."""
    head = Gguf({}, [], n_tensors=1).header()
    return head + gf.text("t") + struct.pack("<I4QIQ", count, 1, 1, 1, 1, 0, 0) + bytes(64)


WRONG: dict[str, tuple[bytes, str]] = {
    "text": (b"hello, this is no model at all", "not a GGUF file"),
    "two bytes": (b"GG", "not a GGUF file"),
    "magic only": (b"GGUF", "ends inside its header"),
    "version 0": (Gguf(KEYS, version=0).to_bytes(), "version 0 is unknown"),
    "version 1": (Gguf(KEYS, version=1).to_bytes(), "version 1 is no longer supported"),
    "version 4": (Gguf(KEYS, version=4).to_bytes(), "version 4 is unknown; 2 and 3"),
    "big endian": (Gguf(KEYS, version=3 << 24).to_bytes(), "big endian"),
    "too many keys": (Gguf(KEYS, n_keys=2**64 - 1).to_bytes(), "claims .* keys"),
    "too many tensors": (Gguf(KEYS, n_tensors=2**63).to_bytes(), "claims .* tensors"),
    "more keys than there are": (Gguf(KEYS, n_keys=3).to_bytes(), "."),
    "key without name": (Gguf({"": u32(1)}).to_bytes(), "key 0 has an empty name"),
    "key twice": (Gguf([("a", u32(1)), ("a", u32(1))]).to_bytes(), "key a is there twice"),
    "key not UTF-8": (Gguf([(b"\xff", u32(1))]).to_bytes(), "key 0 is not UTF-8"),
    "key with NUL": (Gguf({"a\0b": u32(1)}).to_bytes(), "key 0 has a NUL"),
    "key of 64 KiB": (Gguf({"k" * 65536: u32(1)}).to_bytes(), "65,536 bytes long"),
    "unknown value type": (Gguf({"a": struct.pack("<IQ", 13, 0)}).to_bytes(), "unknown type 13"),
    "unknown element type": (
        Gguf({"a": struct.pack("<IIQ", 9, 99, 1)}).to_bytes(),
        "array of the unknown type 99",
    ),
    "array of arrays": (Gguf({"a": nested_array()}).to_bytes(), "array of arrays"),
    "string beyond the end": (
        Gguf({"a": struct.pack("<IQ", 8, 2**63)}).to_bytes(),
        "ends inside its header: the value of a",
    ),
    "array beyond the end": (Gguf({"a": struct.pack("<IIQ", 9, 4, 4000)}).to_bytes(), "ends insi"),
    "long array beyond the end": (
        Gguf({"a": struct.pack("<IIQ", 9, 12, 2**64 - 1)}).to_bytes(),
        "ends inside its header",
    ),
    "strings beyond the end": (
        Gguf({"a": struct.pack("<IIQ", 9, 8, 2**64 - 1)}).to_bytes(),
        "ends inside its header",
    ),
    "long string array with a wild length": (
        Gguf({"a": array("str", ["x"] * 5000)}).to_bytes()[:-100] + b"\xff" * 100,
        "ends inside its header",
    ),
    "alignment not a power of two": (
        Gguf({"general.alignment": u32(48)}).to_bytes(),
        "alignment is 48, not a power of two",
    ),
    "alignment zero": (Gguf({"general.alignment": u32(0)}).to_bytes(), "alignment is 0"),
    "alignment text": (
        Gguf({"general.alignment": string("32")}).to_bytes(),
        "alignment is not a u32",
    ),
    "alignment i32": (Gguf({"general.alignment": i32(32)}).to_bytes(), "alignment is not a u32"),
    "tensor twice": (Gguf({}, [Tensor("t", (1,))] * 2).to_bytes(), "tensor t is there twice"),
    "tensor name of 64 bytes": (Gguf({}, [Tensor("n" * 64, (1,))]).to_bytes(), "64 bytes long"),
    "tensor name not UTF-8": (Gguf({}, [Tensor(b"\xc0", (1,))]).to_bytes(), "0 is not UTF-8"),
    "five dimensions": (dims(5), "5 dimensions, more than 4"),
    "a billion dimensions": (dims(2**30), "1,073,741,824 dimensions"),
    "zero dimension": (Gguf({}, [Tensor("t", (4, 0))]).to_bytes(), "zero length"),
    "shape overflow": (
        Gguf({}, [Tensor("t", (2**62, 2**62), fill=b"")], n_tensors=1).header() + bytes(64),
        "impossible shape",
    ),
    "unknown ggml type": (Gguf({}, [Tensor("t", (4,), 99)]).to_bytes(), "unknown ggml type 99"),
    "removed ggml type": (Gguf({}, [Tensor("t", (4,), 31)]).to_bytes(), "unknown ggml type 31"),
    "row not whole blocks": (
        Gguf({}, [Tensor("t", (128, 2), Q4_K)]).to_bytes() + bytes(999),
        "rows of 128 elements, Q4_K needs a multiple of 256",
    ),
    "offset off": (
        Gguf({}, [Tensor("a", (9,)), Tensor("b", (1,), offset=96)]).to_bytes(),
        "tensor b lies at offset 96 of the data, not at 64",
    ),
    "offset beyond the end": (
        Gguf({}, [Tensor("a", (1,), offset=2**63)]).to_bytes(),
        "tensor a lies at offset",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_file(tmp_path: Path, what: str) -> None:
    data, message = WRONG[what]
    path = tmp_path / "wrong.gguf"
    path.write_bytes(data)
    error = error_of(path)
    assert error.message.startswith(f"{path}: ")
    assert re.search(message, error.message), error.message


def test_truncated_data_says_how_much_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = SMALL.to_bytes()
    path.write_bytes(data[:-1000])
    error = error_of(path)
    assert f"1,000 of {len(data):,} bytes are missing" in error.message
    assert "download" in error.hint


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"PK\x03\x04archive/data.pkl", "PyTorch"),
        (struct.pack("<Q", 40) + b'{"__metadata__":{}}', "safetensors"),
        (b"tjgg" + bytes(40), "before GGUF"),
        (bytes(100), "unfinished download"),
        (b"\x7fELF and so on", "give a .gguf file"),
    ],
)
def test_what_is_not_gguf_is_recognised(tmp_path: Path, data: bytes, hint: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert hint in error_of(path).hint


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert "the file is empty" in error_of(path).message


def test_folder_names_the_models_in_it(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "m.gguf")
    error = error_of(tmp_path)
    assert "this is a folder" in error.message
    assert error.hint == "that folder has m.gguf"


def test_missing_file_names_the_most_similar(tmp_path: Path) -> None:
    for name in ("olmoe-q4_k_m.gguf", "olmoe-q8_0.gguf", "zebra.gguf", "notes.txt"):
        (tmp_path / name).touch()
    error = error_of(tmp_path / "olmoe-q4km.gguf")
    assert "no such file" in error.message
    assert error.hint.startswith("that folder has olmoe-q4_k_m.gguf")
    assert "notes.txt" not in error.hint


def test_missing_file_in_a_folder_without_models(tmp_path: Path) -> None:
    assert "has no .gguf files" in error_of(tmp_path / "m.gguf").hint


def test_missing_folder(tmp_path: Path) -> None:
    assert "there is no folder" in error_of(tmp_path / "nowhere" / "m.gguf").hint


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert "not a regular file" in error_of(tmp_path / "m.gguf").message


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SMALL.write(tmp_path / "m.gguf")

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    # Not chmod: root reads anything.
    monkeypatch.setattr(cursor_module.os, "open", refuse)
    assert "permission denied" in error_of(path).message


def test_path_below_a_file(tmp_path: Path) -> None:
    assert "cannot open" in error_of(SMALL.write(tmp_path / "m.gguf") / "n.gguf").message


def test_path_with_a_nul() -> None:
    assert "not a valid path" in error_of(Path("a\0b.gguf")).message


def test_names_that_would_spoil_a_terminal_are_escaped(tmp_path: Path) -> None:
    path = Gguf({}, [Tensor("a\x1b[2J\n", (1,))] * 2).write(tmp_path / "m.gguf")
    assert r"tensor 'a\x1b[2J\n' is there twice" in error_of(path).message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("_MAX_HEADER_BYTES", 4000, "header is longer"), ("_MAX_KEPT_BYTES", 4000, "more metadata")],
)
def test_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int, message: str
) -> None:
    path = Gguf({"a": string("x" * 9000)}).write(tmp_path / "m.gguf")
    assert read_header(path).metadata["a"] == "x" * 9000
    monkeypatch.setattr(cursor_module, name, value)
    assert message in error_of(path).message


def test_read_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BadDisk(cursor_module.io.FileIO):
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    path = SMALL.write(tmp_path / "m.gguf")
    monkeypatch.setattr(cursor_module.io, "FileIO", BadDisk)
    assert "cannot read at offset 0: Input/output error" in error_of(path).message


def test_file_that_shrinks_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shrinking(cursor_module.io.FileIO):
        def read(self, size: int = -1) -> bytes:
            return super().read(min(size, 10)) if self.tell() < 50 else b""

    path = SMALL.write(tmp_path / "m.gguf")
    monkeypatch.setattr(cursor_module.io, "FileIO", Shrinking)
    assert "became shorter" in error_of(path).message


# --- shards ------------------------------------------------------------------------------------


def write_three(folder: Path) -> list[Path]:
    return gf.write_shards(folder, KEYS, [[], TENSORS[:1], TENSORS[1:]])


def test_three_shards(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    header = read_header(paths[0])
    assert header.path == paths[0]
    assert [s.path for s in header.shards] == paths
    assert header.metadata["split.count"] == 3
    assert [(t.name, t.shard) for t in header.tensors] == [
        ("token_embd.weight", 1),
        ("blk.0.ffn_up_exps.weight", 2),
        ("output_norm.weight", 2),
    ]
    for t in header.tensors:
        data = header.shards[t.shard].path.read_bytes()
        assert data[t.offset : t.offset + t.nbytes] == b"\xa5" * t.nbytes


def test_one_shard_of_one_may_have_any_name(tmp_path: Path) -> None:
    (path,) = gf.write_shards(tmp_path, KEYS, [TENSORS])
    assert len(read_header(path.rename(tmp_path / "any.gguf")).tensors) == 3


def test_another_shard_names_the_first(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    error = error_of(paths[1])
    assert "this is part 2 of 3" in error.message
    assert error.hint == f"give {paths[0]}"


def test_another_shard_with_a_name_of_its_own(tmp_path: Path) -> None:
    error = error_of(write_three(tmp_path)[1].rename(tmp_path / "any.gguf"))
    assert "-00001-of-00003.gguf" in error.hint


def test_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    paths[2].unlink()
    error = error_of(paths[0])
    assert error.message == f"{paths[2]}: this part of the model is missing"
    assert "3 parts" in error.hint


def test_renamed_first_shard(tmp_path: Path) -> None:
    error = error_of(write_three(tmp_path)[0].rename(tmp_path / "any.gguf"))
    assert "part 1 of 3, but its name does not say so" in error.message


def test_damaged_shard_is_named(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-40])
    assert error_of(paths[0]).message.startswith(f"{paths[1]}: cut short: 40 of ")


def test_swapped_shards(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    data = [p.read_bytes() for p in paths]
    paths[1].write_bytes(data[2])
    assert "says it is part 3 of 3, its name says part 2 of 3" in error_of(paths[0]).message


def test_shard_without_its_number(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    Gguf({}, TENSORS[:1]).write(paths[1])
    assert "split.no is missing" in error_of(paths[0]).message


def test_shard_of_another_split(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    Gguf({"split.no": u16(1), "split.count": u16(4)}, TENSORS[:1]).write(paths[1])
    assert "part 2 of 4" in error_of(paths[0]).message


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = gf.write_shards(tmp_path, KEYS, [TENSORS, TENSORS[:1]])
    assert "token_embd.weight is in two parts" in error_of(paths[0]).message


def test_tensor_count_of_the_split_must_agree(tmp_path: Path) -> None:
    paths = write_three(tmp_path)
    Gguf({"split.no": u16(2), "split.count": u16(3)}, TENSORS[1:2]).write(paths[2])
    assert "the parts hold 2 tensors, not 3" in error_of(paths[0]).message


@pytest.mark.parametrize("count", [string("3"), scalar("i32", -1), scalar("bool", 1)])
def test_split_count_that_is_no_count(tmp_path: Path, count: bytes) -> None:
    path = Gguf({"split.count": count}).write(tmp_path / "m.gguf")
    assert "split.count is missing or not a count" in error_of(path).message

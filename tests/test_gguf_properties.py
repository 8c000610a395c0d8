"""Properties of the GGUF header reader: any damage is answered, and gguf-py agrees with it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf import Header, read_header
from gguf_files import F16, F32, Q8_0, Gguf, Tensor, array, scalar, string, u16, u32

KEYS = {"general.architecture": string("olmoe"), "olmoe.block_count": u32(16)}
TENSORS = [
    Tensor("token_embd.weight", (64, 10), F16),
    Tensor("blk.0.ffn_up_exps.weight", (64, 32, 4), Q8_0),
    Tensor("output_norm.weight", (64,), F32),
]
# No deadline: how long a disk takes is not this test's business. The folder is shared on purpose.
PROPERTY = settings(
    max_examples=100,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

RICH = Gguf(
    {
        **KEYS,
        "general.alignment": u32(32),
        "list": array("str", ["a", "bc", ""]),
        "numbers": array("i64", [-1, 2]),
        "split.no": u16(0),
        "split.count": u16(1),
        "flag": scalar("bool", 0),
    },
    TENSORS,
)
RICH_BYTES = RICH.to_bytes()
RICH_HEADER = len(RICH.header())


def answer(path: Path, data: bytes) -> Header | ModelFileError:
    """Whatever the reader makes of `data`; any other exception fails the test."""
    path.unlink(missing_ok=True)  # rewriting in place makes some file systems wait for the disk
    path.write_bytes(data)
    try:
        return read_header(path)
    except ModelFileError as error:
        assert str(path) in error.message and "\n" not in error.message
        return error


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    end = RICH_HEADER + 40
    for length in [*range(end), *range(end, len(RICH_BYTES), 97), len(RICH_BYTES) - 1]:
        got = answer(tmp_path / "m.gguf", RICH_BYTES[:length])
        assert isinstance(got, ModelFileError), length


def test_every_flipped_header_byte_is_answered_in_little_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        for position in range(RICH_HEADER):
            for flip in (0x01, 0x08, 0x80, 0xFF):
                data = bytearray(RICH_BYTES)
                data[position] ^= flip
                answer(tmp_path / "m.gguf", bytes(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@PROPERTY
@given(
    edits=st.lists(
        st.tuples(st.integers(0, RICH_HEADER - 1), st.binary(min_size=1, max_size=9)), max_size=4
    ),
    cut=st.integers(0, len(RICH_BYTES)),
)
@example(edits=[(4, b"\0\0\0\3")], cut=0)
def test_any_damage_is_answered(tmp_path: Path, edits: list[tuple[int, bytes]], cut: int) -> None:
    data = bytearray(RICH_BYTES)
    for position, patch in edits:
        data[position : position + len(patch)] = patch
    got = answer(tmp_path / "m.gguf", bytes(data[: len(data) - cut]))
    if isinstance(got, Header):
        size = got.shards[0].size_bytes
        assert all(t.offset > 0 and t.offset + t.nbytes <= size for t in got.tensors)


NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)
WRITER_VALUES = {
    "uint8": st.integers(0, 255),
    "int8": st.integers(-128, 127),
    "uint16": st.integers(0, 2**16 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(min_size=1, max_size=50),
    "array": st.one_of(
        st.lists(st.text(max_size=9), min_size=1, max_size=9),
        st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
        st.lists(st.booleans(), min_size=1, max_size=9),
    ),
}
WRITER_KEY = st.sampled_from(sorted(WRITER_VALUES)).flatmap(
    lambda kind: st.tuples(st.just(kind), WRITER_VALUES[kind])
)


@PROPERTY
@given(
    keys=st.dictionaries(NAMES, WRITER_KEY, max_size=8),
    shapes=st.dictionaries(
        NAMES, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), max_size=5
    ),
    dtype=st.sampled_from(["float16", "float32", "int8", "int32", "float64"]),
)
def test_agrees_with_gguf_py(
    tmp_path: Path,
    keys: dict[str, tuple[str, object]],
    shapes: dict[str, tuple[int, ...]],
    dtype: str,
) -> None:
    from gguf import GGUFReader, GGUFWriter

    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "olmoe")
    for name, (kind, value) in keys.items():
        getattr(writer, f"add_{kind}")(f"test.{name}", value)
    for number, (name, shape) in enumerate(shapes.items()):
        writer.add_tensor(name, np.full(shape, number, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    header = read_header(path)
    assert header.architecture == "olmoe"
    for name, (_, value) in keys.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert header.metadata[f"test.{name}"] == expected

    theirs = GGUFReader(path)
    assert header.shards[0].data_offset == theirs.data_offset or not shapes
    assert [(t.name, t.shape, t.ggml_type, t.offset, t.nbytes) for t in header.tensors] == [
        (t.name, tuple(map(int, t.shape)), t.tensor_type, t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ]


def test_reads_what_gguf_py_splits(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "olmoe", split_max_tensors=1)
    for name in "abc":
        writer.add_tensor(name, np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(tmp_path / "m-00001-of-00003.gguf")
    assert [(t.name, t.shape, t.shard) for t in header.tensors] == [
        ("a", (3, 2), 0),
        ("b", (3, 2), 1),
        ("c", (3, 2), 2),
    ]

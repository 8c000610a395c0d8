"""Packing: the format, what others make of it, and every way it can be refused."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import xxhash

import gguf_files
import tiny_models
from flashmoe_gguf.errors import FlashMoEError, ModelFileError, PackError
from flashmoe_gguf.pack import open_packed, pack_model, unpack_model, verify_model
from flashmoe_gguf.pack.files import free_bytes
from flashmoe_gguf.pack.layout import plan_layout
from flashmoe_gguf.pack.source import read_source
from flashmoe_gguf.pack.steps import in_place_peak, plan_steps
from flashmoe_gguf.store import ROLES, read_geometry
from gguf_files import F32, Gguf, Tensor, expert_tensors, moe_keys, string, u32
from tiny_models import child

SPACE_FOR_NOTHING = os.statvfs_result((4096, 4096, 100, 1, 1, 10, 10, 10, 0, 255))


@pytest.fixture
def source(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A copy of a tiny model in a folder of its own."""
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "model.gguf"
    path.write_bytes(tiny_model("qwen3moe").read_bytes())
    return path


@pytest.mark.parametrize("mark", [b"../" * 10 + b"up", b"A" * 32, b"a" * 31 + b"\0"])
def test_a_fingerprint_that_is_none(mark: bytes, source: Path, tmp_path: Path) -> None:
    """Files of the cache are named after it, so a damaged one is refused before that."""
    out = tmp_path / "packed.gguf"
    pack_model(source, out)
    packed = read_geometry(out).packed
    assert packed is not None
    out.write_bytes(out.read_bytes().replace(packed.fingerprint.encode(), mark))
    with pytest.raises(ModelFileError, match="missing or no fingerprint"):
        read_geometry(out)


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_every_kind_comes_back(
    kind: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    path, out = tiny_model(kind), tmp_path / "packed.gguf"
    report = pack_model(path, out)
    assert report.packed_bytes == out.stat().st_size
    assert report.blocks == sum(g.n_expert for g in read_geometry(path).groups)
    assert verify_model(out, n_threads=2).ok
    (tmp_path / "back").mkdir()
    files = unpack_model(out, tmp_path / "back").files
    originals = [shard.path for shard in read_geometry(path).header.shards]
    assert [f.name for f in files] == [f.name for f in originals]
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in originals]


@pytest.mark.parametrize("kind", ["split", "grovemoe", "nogate", "fused"])
def test_gguf_py_opens_it_and_finds_what_the_format_says(
    kind: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    path, out = tiny_model(kind), tmp_path / "packed.gguf"
    pack_model(path, out)
    reader = gguf.GGUFReader(out)
    geometry = read_geometry(path)
    tensors = {t.name: t for t in reader.tensors}

    def column(name: str) -> list[object]:
        contents = reader.fields[f"flashmoe.{name}"].contents()
        assert isinstance(contents, list)
        return contents

    assert reader.alignment == 4096
    assert reader.fields["flashmoe.version"].contents() == 1
    assert column("source.files") == [s.path.name for s in geometry.header.shards]
    assert column("source.sizes") == [s.path.stat().st_size for s in geometry.header.shards]
    assert not [key for key in reader.fields if key.startswith("split.")]
    parts = [(g, p) for g in geometry.groups for p in g.parts]
    assert column("parts.tensor") == [p.tensor for _, p in parts]
    assert column("parts.layer") == [g.layer for g, _ in parts]
    assert column("parts.family") == [g.family for g, _ in parts]
    assert column("parts.source_offset") == [p.offset for _, p in parts]
    assert column("parts.shard") == [p.shard for _, p in parts]
    sums = tensors["flashmoe.sums"].data.view(np.uint64).tolist()
    for (group, part), block_offset in zip(parts, column("parts.block_offset"), strict=True):
        data = geometry.header.shards[part.shard].path.read_bytes()
        blocks = tensors[f"flashmoe.blk.{group.layer}.{group.family}"].data.view(np.uint8)
        assert len(blocks) == group.n_expert
        assert isinstance(block_offset, int) and block_offset % 4096 == 0
        for expert in range(group.n_expert):
            start = part.offset + expert * part.expert_bytes
            wanted = data[start : start + part.expert_bytes]
            found = blocks[expert, block_offset : block_offset + part.expert_bytes].tobytes()
            assert found == wanted
            assert sums.pop(0) == xxhash.xxh3_64_intdigest(wanted)
    assert sums == []
    held = {p.tensor for _, p in parts}
    dense = [t for t in geometry.header.tensors if t.name not in held]
    assert tensors["flashmoe.dense_sums"].data.view(np.uint64).tolist() == [
        xxhash.xxh3_64_intdigest(
            geometry.header.shards[t.shard].path.read_bytes()[t.offset : t.offset + t.nbytes]
        )
        for t in dense
    ]
    digest = xxhash.xxh3_128()
    for i, shard in enumerate(geometry.header.shards):
        header = shard.path.read_bytes()[: shard.data_offset]
        assert tensors[f"flashmoe.header.{i}"].data.tobytes() == header
        digest.update(struct.pack("<Q", shard.size_bytes) + header)
    assert reader.fields["flashmoe.source.fingerprint"].contents() == digest.hexdigest()
    assert not [name for name in tensors if name.startswith("flashmoe.gaps")]


def test_parts_are_in_the_order_of_use(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    pack_model(tiny_model("qwen3moe"), tmp_path / "p.gguf")
    for group in open_packed(tmp_path / "p.gguf").layout.groups:
        roles = [p.tensor.name.split("ffn_")[1].split("_exps")[0] for p in group.parts]
        assert roles == sorted(roles, key=ROLES.index)
        assert [p.block_offset for p in group.parts] == sorted(p.block_offset for p in group.parts)


def test_stock_llama_cpp_refuses_it_in_its_own_words(source: Path, tmp_path: Path) -> None:
    libraries = child.stock_libraries()
    if libraries is None:
        pytest.skip("the stock llama.cpp libraries are not there")
    pack_model(source, tmp_path / "packed.gguf")
    with pytest.raises(RuntimeError, match="does not load") as caught:
        child.decode(libraries, [(tmp_path / "packed.gguf", [1, 2], 2)])
    assert "ended with 1:" in str(caught.value)  # an exit, not a signal
    assert "ffn_gate_exps.weight' not found" in str(caught.value)


def test_a_shard_that_ends_before_its_data(tmp_path: Path) -> None:
    paths = gguf_files.write_shards(tmp_path, moe_keys(layers=1), [[], expert_tensors(0)])
    short = Gguf(
        {
            **moe_keys(layers=1),
            "split.no": gguf_files.u16(0),
            "split.count": gguf_files.u16(2),
            "split.tensors.count": gguf_files.i32(3),
            "odd": string("x"),
        }
    ).header()
    paths[0].write_bytes(short)
    original = [path.read_bytes() for path in paths]
    pack_model(paths[0], tmp_path / "packed.gguf")
    unpack_model(tmp_path / "packed.gguf", tmp_path, force=True)
    assert [path.read_bytes() for path in paths] == original


def test_memory_stays_at_a_few_blocks(tmp_path: Path) -> None:
    tensors = expert_tensors(0, experts=32, width=1024, inner=256)
    path = Gguf(moe_keys(layers=1, experts=32), tensors).write(tmp_path / "m.gguf")
    block = sum(t.nbytes for t in tensors) // 32
    (tmp_path / "back").mkdir()
    tracemalloc.start()
    try:
        pack_model(path, tmp_path / "p.gguf")
        unpack_model(tmp_path / "p.gguf", tmp_path / "back")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * block + (2 << 20) < path.stat().st_size


def test_packing_again_says_it_is_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed.gguf"
    assert not pack_model(source, out).already_there
    before = out.stat()
    assert pack_model(source, out).already_there
    after = out.stat()  # of which only the time of the last reading may be another
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    with pytest.raises(PackError, match="there already, so nothing is packed in place"):
        pack_model(source, out, in_place=True)
    assert source.exists()


def refused(message: str, hint: str, act: Callable[[], object]) -> None:
    with pytest.raises(FlashMoEError) as caught:
        act()
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_packed_file_is_not_packed_again(source: Path, tmp_path: Path) -> None:
    pack_model(source, tmp_path / "p.gguf")
    refused(
        "p.gguf: this file is packed already",
        "unpack",
        lambda: pack_model(tmp_path / "p.gguf", tmp_path / "q.gguf"),
    )


def test_source_and_target_are_the_same(source: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    before = source.read_bytes()
    for out in (source, link):
        refused(
            "source and target are the same file",
            "another name",
            lambda out=out: pack_model(source, out, force=True),  # type: ignore[misc]
        )
    pack_model(source, tmp_path / "p.gguf")
    (tmp_path / "p.gguf").rename(source)
    refused(
        "source and target are the same file", "-o", lambda: unpack_model(source, source.parent)
    )
    pack_before = source.read_bytes()
    assert pack_before != before


def test_a_target_that_is_something_else(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "letter.gguf"
    out.write_text("Dear Anna")
    refused("a file of this name is there already", "--force", lambda: pack_model(source, out))
    assert out.read_text() == "Dear Anna"
    pack_model(source, out, force=True)
    assert verify_model(out).ok
    refused("this is a folder", "name", lambda: pack_model(source, tmp_path))
    refused("there is no folder", "make it", lambda: pack_model(source, tmp_path / "no" / "p.gguf"))


def test_a_target_packed_from_something_else(
    source: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    out = tmp_path / "p.gguf"
    pack_model(source, out)
    refused("from another model", "--force", lambda: pack_model(tiny_model("mixed"), out))
    source.write_bytes(tiny_model("mixed").read_bytes())
    refused("has changed since this file was packed", "--force", lambda: pack_model(source, out))


def test_not_a_moe(tmp_path: Path) -> None:
    keys = {"general.architecture": string("llama"), "llama.block_count": u32(1)}
    path = Gguf(keys, [Tensor("output.weight", (32, 4), F32)]).write(tmp_path / "dense.gguf")
    refused("no experts", "runs as it is", lambda: pack_model(path, tmp_path / "p.gguf"))


def test_our_names_are_taken(tmp_path: Path) -> None:
    tensors = [*expert_tensors(0), Tensor("flashmoe.sums", (4,), F32)]
    path = Gguf(moe_keys(layers=1), tensors).write(tmp_path / "odd.gguf")
    refused("flashmoe.sums", "original", lambda: pack_model(path, tmp_path / "p.gguf"))


def test_a_newer_format(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    pack_model(source, out)
    key = b"flashmoe.version" + struct.pack("<I", 4)
    data = out.read_bytes()
    assert data.count(key + struct.pack("<I", 1)) == 1
    newer = data.replace(key + struct.pack("<I", 1), key + struct.pack("<I", 2))
    out.write_bytes(newer)
    for act in (verify_model, lambda p: unpack_model(p, tmp_path)):
        refused("packed by a newer version", "update", lambda act=act: act(out))  # type: ignore[misc]


def test_a_stock_file_is_not_verified(source: Path, tmp_path: Path) -> None:
    refused("not a packed file", "flashmoe pack", lambda: verify_model(source))
    refused("not a packed file", "flashmoe pack", lambda: unpack_model(source, tmp_path))


@pytest.mark.parametrize("name", ["../up.gguf", "/abs.gguf", "a/b.gguf", "..", "", "a\\b.gguf"])
def test_source_names_that_leave_the_folder(name: str, source: Path, tmp_path: Path) -> None:
    named = source.with_name("n" * max(len(name), 6))
    source.rename(named)
    pack_model(named, tmp_path / "p.gguf")
    data = (tmp_path / "p.gguf").read_bytes()
    old = struct.pack("<Q", len(named.name)) + named.name.encode()
    new = struct.pack("<Q", len(name)) + name.encode()
    assert data.count(old) == 1
    # A header of another length: as long as padding allows, only the table's end moves.
    at = data.index(old)
    base = open_packed(tmp_path / "p.gguf").layout.header
    head = base.rstrip(b"\0")
    changed = (head[:at] + new + head[at + len(old) :]).ljust(len(base), b"\0")
    (tmp_path / "p.gguf").write_bytes(changed + data[len(base) :])
    (tmp_path / "back").mkdir()
    with pytest.raises(ModelFileError, match="not the name of a source file"):
        unpack_model(tmp_path / "p.gguf", tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_model(source, tmp_path / "p.gguf")
    files = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(os, "statvfs", lambda _path: SPACE_FOR_NOTHING)
    assert free_bytes(tmp_path) == 4096
    message = "are needed on this disk and 4 KiB are free"
    refused(message, "free", lambda: pack_model(source, tmp_path / "q.gguf"))
    refused(message, "free", lambda: pack_model(source, tmp_path / "q.gguf", in_place=True))
    refused(message, "free", lambda: unpack_model(tmp_path / "p.gguf", tmp_path))
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "no space left on the disk"), (errno.EIO, "cannot be written")],
)
def test_a_disk_that_fails_while_writing(
    number: int, message: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.pwrite, 0

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 1_000_000:
            raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    out = tmp_path / "p.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        refused(message, "", lambda: pack_model(source, out))
    assert not out.exists()
    assert pack_model(source, out).resumed_bytes > 0
    (tmp_path / "back").mkdir()
    written = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        refused(message, "", lambda: unpack_model(out, tmp_path / "back"))
    assert list((tmp_path / "back").iterdir()) == []


def test_a_read_only_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, mode)

    pack_model(source, tmp_path / "q.gguf")
    (tmp_path / "back").mkdir()
    monkeypatch.setattr(os, "open", read_only)
    message = "cannot be written: Read-only file system"
    refused(message, "another place", lambda: pack_model(source, tmp_path / "p.gguf"))
    refused(message, "", lambda: pack_model(source, tmp_path / "p.gguf", in_place=True))
    refused(message, "", lambda: unpack_model(tmp_path / "q.gguf", tmp_path / "back"))


def test_a_source_that_changes_while_it_is_packed(source: Path, tmp_path: Path) -> None:
    def touch(done: int, total: int) -> None:
        if done == total:
            os.utime(source, ns=(1, 1))

    refused(
        "the model was changed while it was packed",
        "again",
        lambda: pack_model(source, tmp_path / "p.gguf", progress=touch),
    )
    assert not (tmp_path / "p.gguf").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_two_at_once(in_place: bool, source: Path, tmp_path: Path) -> None:
    def second(done: int, _total: int) -> None:
        if done:
            pack_model(source, tmp_path / "p.gguf", in_place=in_place)

    refused(
        "another process is writing this file",
        "wait",
        lambda: pack_model(source, tmp_path / "p.gguf", progress=second),
    )
    assert not pack_model(source, tmp_path / "p.gguf").already_there


def test_in_place_leaves_files_with_other_names_alone(source: Path, tmp_path: Path) -> None:
    link, hard = source.with_name("link.gguf"), source.with_name("hard.gguf")
    link.symlink_to(source)
    before = source.read_bytes()
    out = tmp_path / "p.gguf"
    refused("other names", "without --in-place", lambda: pack_model(link, out, in_place=True))
    os.link(source, hard)
    refused("other names", "without --in-place", lambda: pack_model(source, out, in_place=True))
    assert source.read_bytes() == before


def test_in_place_takes_little_more_than_a_layer(tiny_model: Callable[[str], Path]) -> None:
    source = read_source(tiny_model("mixed"))
    layout = plan_layout(source)
    sizes = [shard.size_bytes for shard in source.shards]
    peak = in_place_peak(plan_steps(layout), sizes, 1)
    layers = [g.block_bytes * g.n_expert for g in layout.groups]
    assert max(layers) <= peak < 2 * max(layers) < sum(sizes)


def test_a_damaged_expert_is_not_unpacked(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    pack_model(source, out)
    group = open_packed(out).layout.groups[1]
    data = bytearray(out.read_bytes())
    data[group.offset + 3 * group.block_bytes + group.parts[2].block_offset] ^= 1
    out.write_bytes(data)
    (tmp_path / "back").mkdir()
    name = group.parts[2].tensor.name
    refused(
        f"damaged at layer {group.layer} expert 3 ({name})",
        "verify",
        lambda: unpack_model(out, tmp_path / "back"),
    )
    assert list((tmp_path / "back").iterdir()) == []


def test_a_file_from_before_dense_sums_is_not_called_damaged(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    pack_model(source, out)
    out.write_bytes(out.read_bytes().replace(b"flashmoe.dense_sums", b"flashmoe.other_sums"))
    refused("packed before dense tensors", "the version", lambda: verify_model(out))


def test_a_damaged_dense_tensor_is_not_unpacked(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.gguf"
    pack_model(source, out)
    dense = open_packed(out).layout.dense[1]
    data = bytearray(out.read_bytes())
    data[dense.offset + dense.tensor.nbytes - 1] ^= 1
    out.write_bytes(data)
    (tmp_path / "back").mkdir()
    where = f"tensor {dense.tensor.name}"
    refused(f"damaged at {where}", "verify", lambda: unpack_model(out, tmp_path / "back"))
    assert list((tmp_path / "back").iterdir()) == []
    report = verify_model(out)
    assert (report.damaged_tensors, report.damaged_blocks) == (1, 0)
    assert [str(damage) for damage in report.damages] == [where]


def test_steps_cover_everything_once(tiny_model: Callable[[str], Path]) -> None:
    for kind in ("split", "grovemoe"):
        layout = plan_layout(read_source(tiny_model(kind)))
        steps = plan_steps(layout)
        assert sorted(s.group.offset for s in steps if s.group) == [g.offset for g in layout.groups]
        dense = sorted(d.offset for s in steps for d in s.dense)
        assert dense == [d.offset for d in layout.dense]
        assert len({s.name for s in steps}) == len(steps)

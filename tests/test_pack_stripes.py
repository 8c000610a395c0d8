"""Packed files whose experts are spread over several folders: there, back, found, resumed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

import tiny_models
from cli_tools import assert_error, flashmoe
from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.plan_text import plan_rows
from flashmoe_gguf.errors import FlashMoEError, ModelFileError, PackError
from flashmoe_gguf.pack import open_packed, pack_model, unpack_model, verify_model
from flashmoe_gguf.store import read_geometry
from kill_points import pack_in_child

KILLS = 16


def folders(root: Path, count: int) -> list[Path]:
    paths = [root / f"drive{i}" for i in range(count)]
    for path in paths:
        path.mkdir(parents=True)
    return paths


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def refused(message: str, hint: str, act: Callable[[], object]) -> FlashMoEError:
    with pytest.raises(FlashMoEError) as caught:
        act()
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


def stripe(out: Path, folder: Path, index: int, count: int) -> Path:
    return folder / f"{out.name}.stripe-{index + 1}-of-{count}.gguf"


@pytest.fixture
def packed(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A file with two stripes, in folders of their own."""
    out = tmp_path / "packed.gguf"
    pack_model(tiny_model("qwen3moe"), out, stripes=folders(tmp_path, 2))
    return out


@pytest.mark.parametrize("kind", tiny_models.KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_kind_comes_back(
    kind: str, count: int, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    path, out = tiny_model(kind), tmp_path / "packed.gguf"
    report = pack_model(path, out, stripes=folders(tmp_path, count))
    assert report.stripes == tuple(
        stripe(out, tmp_path / f"drive{i}", i, count) for i in range(count)
    )
    files = [out, *report.stripes]
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(files)
    assert report.packed_bytes == sum(p.stat().st_size for p in files)
    assert verify_model(out, n_threads=2).ok
    (tmp_path / "back").mkdir()
    restored = unpack_model(out, tmp_path / "back").files
    originals = [shard.path for shard in read_geometry(path).header.shards]
    assert [f.read_bytes() for f in restored] == [f.read_bytes() for f in originals]
    before = contents(tmp_path)
    assert pack_model(path, out, stripes=[tmp_path / f"drive{i}" for i in range(count)]) == replace(
        report, already_there=True
    )
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("kind", "count"), [("split", 2), ("grovemoe", 3), ("mixed", 3)])
def test_blocks_lie_where_the_format_says(
    kind: str, count: int, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    source, out, whole = tiny_model(kind), tmp_path / "packed.gguf", tmp_path / "whole.gguf"
    report = pack_model(source, out, stripes=folders(tmp_path, count))
    pack_model(source, whole)
    main, single = gguf.GGUFReader(out), gguf.GGUFReader(whole)
    blocks = {t.name: t for t in single.tensors if t.name.startswith("flashmoe.blk.")}
    assert [t.name for t in main.tensors] == [
        t.name for t in single.tensors if t.name not in blocks
    ]
    assert main.fields["flashmoe.stripes"].contents() == [str(path) for path in report.stripes]
    for i, path in enumerate(report.stripes):
        reader = gguf.GGUFReader(path)
        assert reader.alignment == 4096
        keys = ("version", "stripe.index", "stripe.count")
        assert [reader.fields[f"flashmoe.{k}"].contents() for k in keys] == [1, i, count]
        key = "flashmoe.source.fingerprint"
        assert reader.fields[key].contents() == main.fields[key].contents()
        assert [t.name for t in reader.tensors] == list(blocks)
        for tensor in reader.tensors:
            wanted = blocks[tensor.name].data[i::count]
            assert np.array_equal(np.atleast_2d(tensor.data), wanted)
    geometry, layout = read_geometry(out), open_packed(out).layout
    for group, planned in zip(geometry.groups, layout.groups, strict=True):
        for part, planned_part in zip(group.parts, planned.parts, strict=True):
            for expert in range(group.n_expert):
                place, block = part.place(expert), planned.block(expert)
                assert place.file == block.file == 1 + expert % count
                assert place.offset == block.offset + planned_part.block_offset


def test_packing_is_deterministic(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    drives = folders(tmp_path, 2)
    made = []
    for _ in range(2):
        pack_model(tiny_model("mixed"), tmp_path / "p.gguf", stripes=drives, force=True)
        made.append(contents(tmp_path))
    assert made[0] == made[1]


def test_moved_together_they_are_found(packed: Path, tmp_path: Path) -> None:
    files = open_packed(packed).files
    new = tmp_path / "new"
    new.mkdir()
    for path in files:
        shutil.move(path, new / path.name)
    moved = new / packed.name
    assert verify_model(moved).ok
    assert open_packed(moved).files == tuple(new / path.name for path in files)
    assert [f.path for f in read_geometry(moved).files] == [new / path.name for path in files]
    moved.rename(new / "renamed.gguf")
    assert verify_model(new / "renamed.gguf").ok


def every_reader(packed: Path, tmp_path: Path) -> Sequence[Callable[[], object]]:
    return (
        lambda: verify_model(packed),
        lambda: unpack_model(packed, tmp_path),
        lambda: read_geometry(packed),
    )


def test_a_missing_stripe_is_named(packed: Path, tmp_path: Path) -> None:
    second = open_packed(packed).files[2]
    second.unlink()
    for act in every_reader(packed, tmp_path):
        error = refused("stripe 2 of 2 of packed.gguf is missing", "drive", act)
        assert isinstance(error, ModelFileError)
        assert error.message.startswith(f"{second}: ")


def test_a_foreign_stripe_is_named(
    packed: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    _, first, second = open_packed(packed).files
    mine = second.read_bytes()
    other = tmp_path / "other"
    pack_model(tiny_model("mixed"), other.with_suffix(".gguf"), stripes=folders(other, 2))
    theirs = open_packed(other.with_suffix(".gguf")).files[2].read_bytes()
    pack_model(tiny_model("qwen3moe"), tmp_path / "three.gguf", stripes=folders(tmp_path / "3", 3))
    of_three = open_packed(tmp_path / "three.gguf").files[2].read_bytes()
    for data, what in [
        (theirs, "this is not stripe 2 of 2 of packed.gguf but another model's"),
        (first.read_bytes(), "this is not stripe 2 of 2 of packed.gguf"),
        (of_three, "this is not stripe 2 of 2 of packed.gguf"),
        (tiny_model("qwen3moe").read_bytes(), "this is not stripe 2 of 2 of packed.gguf"),
        (packed.read_bytes(), "this is not stripe 2 of 2 of packed.gguf"),
        (b"Dear Anna", "not a GGUF"),
        (mine[:-1], ""),
        (mine[:100], ""),
        (mine[:5000], ""),
        (b"", ""),
    ]:
        second.write_bytes(data)
        for act in every_reader(packed, tmp_path):
            error = refused(what, "", act)
            assert error.message.startswith(f"{second}: ")
    second.write_bytes(mine + b"\0")
    assert refused("bytes, not", "", lambda: verify_model(packed)).message.startswith(str(second))


def test_a_stripe_is_no_model(packed: Path, tmp_path: Path) -> None:
    first = open_packed(packed).files[1]
    for act in every_reader(first, tmp_path):
        refused("this is a stripe of a packed file", "give packed.gguf", act)
    refused("packed already", "", lambda: pack_model(first, tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("old", "new"),
    [(b".stripe-2-of-2.gguf", b".stripe-1-of-2.gguf"), (b"flashmoe.stripes", b"flashmoe.stripeZ")],
)
def test_a_damaged_list_of_stripes(old: bytes, new: bytes, packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    assert data.count(old) == 1
    packed.write_bytes(data.replace(old, new))
    for act in every_reader(packed, tmp_path):
        refused("packed.gguf: ", "damaged", act)


def test_any_flipped_byte_of_a_stripes_header_is_named(packed: Path) -> None:
    file = open_packed(packed)
    for path, planned in zip(file.stripes, file.layout.stripes, strict=True):
        data = bytearray(path.read_bytes())
        for at in range(0, len(planned.header), 11):
            data[at] ^= 0x41
            path.write_bytes(data)
            error = refused("", "", lambda: verify_model(packed))
            assert error.message.startswith(f"{path}: "), at
            data[at] ^= 0x41
        path.write_bytes(data)
    assert verify_model(packed).ok


def test_damage_in_a_stripe_is_found(packed: Path, tmp_path: Path) -> None:
    file = open_packed(packed)
    group = file.layout.groups[1]
    place = group.block(3)
    path = file.files[place.file]
    assert path == file.files[2]
    data = bytearray(path.read_bytes())
    data[place.offset + group.parts[1].block_offset] ^= 1
    path.write_bytes(data)
    report = verify_model(packed)
    name = group.parts[1].tensor.name
    assert [str(d) for d in report.damages] == [f"layer {group.layer} expert 3 ({name})"]
    (tmp_path / "back").mkdir()
    error = refused("damaged at", "verify", lambda: unpack_model(packed, tmp_path / "back"))
    assert error.message.startswith(f"{path}: ")


def test_what_is_refused(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source, out = tiny_model("split"), tmp_path / "p.gguf"
    drives = folders(tmp_path, 2)
    refused(
        "in place cannot spread",
        "--in-place",
        lambda: pack_model(source, out, in_place=True, stripes=drives),
    )
    refused(
        "drive9: there is no such folder",
        "make it",
        lambda: pack_model(source, out, stripes=[*drives, tmp_path / "drive9"]),
    )
    refused(
        "17 stripes are too many",
        "at most 16",
        lambda: pack_model(source, out, stripes=[tmp_path] * 17),
    )
    refused(
        "9 stripes are too many for 8 experts",
        "fewer",
        lambda: pack_model(source, out, stripes=[tmp_path] * 9),
    )
    letter = stripe(out, drives[1], 1, 2)
    letter.write_text("Dear Anna")
    refused(
        "a file of this name is there already",
        "--force",
        lambda: pack_model(source, out, stripes=drives),
    )
    assert contents(tmp_path) == {"drive1/" + letter.name: b"Dear Anna"}
    pack_model(source, out, stripes=drives, force=True)
    assert verify_model(out).ok
    refused("packed in another way", "--force", lambda: pack_model(source, out))
    refused(
        "packed in another way", "--force", lambda: pack_model(source, out, stripes=drives[::-1])
    )


def test_the_source_is_not_written_over(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source = stripe(tmp_path / "p.gguf", tmp_path, 0, 1)
    shutil.copy(tiny_model("qwen3moe"), source)
    refused(
        "source and target are the same file",
        "-o",
        lambda: pack_model(source, tmp_path / "p.gguf", stripes=[tmp_path], force=True),
    )


def test_too_little_space_on_one_drive(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = folders(tmp_path, 2)
    real, full = os.stat, os.statvfs_result((4096, 4096, 100, 1, 1, 10, 10, 10, 0, 255))

    def stat(path: object, **options: object) -> os.stat_result:
        """The second folder is a disk of its own."""
        found = real(path, **options)  # type: ignore[arg-type,call-overload]
        if str(path) == str(drives[1]):
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))
        return found  # type: ignore[no-any-return]

    enough = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == drives[1] else enough)
    error = refused(
        "are needed on this disk and 4 KiB are free",
        "free",
        lambda: pack_model(tiny_model("qwen3moe"), tmp_path / "p.gguf", stripes=drives),
    )
    assert error.message.startswith(f"{drives[1]}: ")
    assert contents(tmp_path) == {}


def test_killed_anywhere_it_goes_on(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source, work = tiny_model("split"), tmp_path / "work"
    drives, out = folders(work, 2), work / "out.gguf"
    total = pack_in_child(source, out, in_place=False, stripes=drives)
    assert total is not None
    expected = contents(work)
    assert len(expected) == 3
    resumed = []
    # evenly over all, and each of the last, where the files get their names
    points = {1 + round(i * (total - 1) / (KILLS - 1)) for i in range(KILLS)}
    for kill_at in sorted(points | set(range(total - 10, total + 1))):
        shutil.rmtree(work)
        folders(work, 2)
        killed = pack_in_child(source, out, in_place=False, stripes=drives, kill_at=kill_at)
        assert killed is None
        for name, data in contents(work).items():
            assert ".partial" in name or data == expected[name], "a half-written file"
        if out.exists():
            assert verify_model(out).ok
        resumed.append(pack_model(source, out, stripes=drives).resumed_bytes)
        assert contents(work) == expected
    assert max(resumed) > min(resumed) == 0
    assert verify_model(out).ok


def test_a_stripe_lost_between_the_runs_is_made_again(
    tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    source, work = tiny_model("split"), tmp_path / "work"
    drives, out = folders(work, 2), work / "out.gguf"
    total = pack_in_child(source, out, in_place=False, stripes=drives)
    assert total is not None
    expected = contents(work)
    for kill_at in range(total - 10, total):
        shutil.rmtree(work)
        folders(work, 2)
        assert pack_in_child(source, out, in_place=False, stripes=drives, kill_at=kill_at) is None
        if out.exists():
            continue
        lost = next(iter(sorted(drives[1].iterdir())))
        lost.unlink()
        assert pack_model(source, out, stripes=drives).resumed_bytes == 0
        assert contents(work) == expected


def test_another_process_writes_a_stripe(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Two packed files of one name, in two folders, that want the same stripes."""
    drives = folders(tmp_path, 2)
    source, outs = tiny_model("mixed"), [drives[i] / "p.gguf" for i in range(2)]

    def second(done: int, _total: int) -> None:
        if done:
            pack_model(source, outs[1], stripes=[tmp_path])

    with pytest.raises(PackError, match="another process is writing this file"):
        pack_model(source, outs[0], stripes=[tmp_path], progress=second)


def test_command_line(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    drives, out = folders(tmp_path, 2), tmp_path / "p.gguf"
    source = tiny_model("split")
    options = ("--stripe", drives[0], "--stripe", drives[1])
    stripes = [str(stripe(out, drives[i], i, 2)) for i in range(2)]
    result = flashmoe("pack", source, "-o", out, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert [row[1] for row in rows if row[0] == "stripe"] == stripes
    data = json.loads(flashmoe("pack", source, "-o", out, *options, "--json").stdout)
    assert (data["already_there"], data["stripes"]) == (True, stripes)
    assert json.loads(flashmoe("verify", out, "--json").stdout)["ok"]
    geometry, size = read_geometry(out), sum(os.path.getsize(p) for p in [out, *stripes])
    [(_, what), *_] = plan_rows(
        geometry, streamed=True, plan=None, budgeted=False, stats=None, settings=""
    )
    assert format_size(size) in what
    result = flashmoe("inspect", out)
    rows = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line]
    assert [row[1] for row in rows if row[0] == "stripe"] == stripes
    data = json.loads(flashmoe("inspect", out, "--json").stdout)
    assert [s["path"] for s in data["packed"]["stripes"]] == stripes
    assert {part["offset"] for group in data["groups"] for part in group["parts"]} == {None}
    result = flashmoe("pack", source, "-o", out, *options, "--in-place")
    assert_error(result, "packing in place cannot spread experts over stripes", "--in-place")

"""Packing that is killed at any point goes on, and loses nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flashmoe_gguf.errors import PackError
from flashmoe_gguf.pack import open_packed, pack_model
from flashmoe_gguf.pack.layout import PackedGroup, PackedPart, Source
from flashmoe_gguf.pack.source import read_source
from kill_points import pack_in_child

IN_PLACE_KILLS = 20
KILLS = 8


class Case:
    """A split model, its packed file, and a folder to pack a copy of it in."""

    def __init__(self, original: Path, work: Path) -> None:
        self.work = work
        self.source: Source = read_source(original)
        self.originals = {s.path.name: s.path.read_bytes() for s in self.source.shards}
        self.expected = work / "expected.gguf"
        pack_model(original, self.expected)
        self.first = original.name

    def fresh(self) -> tuple[Path, Path]:
        """Source and target in a new copy."""
        folder = self.work / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, data in self.originals.items():
            (folder / name).write_bytes(data)
        return folder / self.first, folder / "out.gguf"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Case:
    return Case(tiny_model("split"), tmp_path_factory.mktemp("kill"))


def points(total: int, wanted: int) -> Sequence[int]:
    """Evenly over 1..total, both ends included."""
    return sorted({1 + round(i * (total - 1) / (wanted - 1)) for i in range(wanted)})


def journaled(out: Path) -> list[str]:
    journal = out.with_name(out.name + ".partial.journal")
    if not journal.exists():
        return []
    lines = journal.read_bytes().split(b"\n")[:-1]
    return [json.loads(line)["done"] for line in lines[1:]]


def test_killed_anywhere_it_goes_on_after_the_last_finished_layer(case: Case) -> None:
    source, out = case.fresh()
    total = pack_in_child(source, out, in_place=False)
    assert total is not None
    expected = case.expected.read_bytes()
    assert out.read_bytes() == expected
    resumed = []
    for kill_at in points(total, KILLS):
        source, out = case.fresh()
        assert pack_in_child(source, out, in_place=False, kill_at=kill_at) is None
        if out.exists():
            assert out.read_bytes() == expected, "a half-written file under the final name"
        steps = journaled(out)
        seen: list[int] = []
        report = pack_model(source, out, progress=lambda done, _all, seen=seen: seen.append(done))  # type: ignore[misc]
        assert out.read_bytes() == expected
        assert [p.name for p in out.parent.glob("*.partial*")] == []
        if not report.already_there:
            assert seen[0] == report.resumed_bytes
            assert (report.resumed_bytes > 0) == (len(steps) > 1)
        resumed.append(report.resumed_bytes)
        assert {n: (out.parent / n).read_bytes() for n in case.originals} == case.originals
    assert sorted(set(resumed))[-1] > sorted(set(resumed))[0] == 0


def test_in_place_every_layer_is_always_whole_somewhere(case: Case) -> None:
    source, out = case.fresh()
    total = pack_in_child(source, out, in_place=True)
    assert total is not None
    expected = case.expected.read_bytes()
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert out.read_bytes() == expected
    cut = False
    for kill_at in points(total, IN_PLACE_KILLS):
        source, out = case.fresh()
        assert pack_in_child(source, out, in_place=True, kill_at=kill_at) is None
        assert_recoverable(case, out)
        left = {n: p.stat().st_size for n in case.originals if (p := out.parent / n).exists()}
        cut = cut or left != {n: len(data) for n, data in case.originals.items()}
        pack_model(source, out, in_place=True)
        assert [p.name for p in out.parent.iterdir()] == [out.name]
        assert out.read_bytes() == expected
    assert cut


def test_in_place_killed_again_and_again(case: Case) -> None:
    source, out = case.fresh()
    for kill_at in range(9, 400, 7):
        if pack_in_child(source, out, in_place=True, kill_at=kill_at) is not None:
            break
        assert_recoverable(case, out)
    assert out.read_bytes() == case.expected.read_bytes()
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def assert_recoverable(case: Case, out: Path) -> None:
    """Each part of each expert is in the original's place or in its packed place."""
    packed = open_packed(case.expected)
    partial = out.with_name(out.name + ".partial")
    made = next((p.read_bytes() for p in (out, partial) if p.exists()), b"")
    left = [p.read_bytes() if (p := out.parent / n).exists() else b"" for n in case.originals]
    whole = list(case.originals.values())

    def is_whole(group: PackedGroup, part: PackedPart, expert: int) -> bool:
        nbytes, shard = part.expert_bytes, part.tensor.shard
        at = part.tensor.offset + expert * nbytes
        there = group.offset + expert * group.block_bytes + part.block_offset
        data = whole[shard][at : at + nbytes]
        return data in (left[shard][at : at + nbytes], made[there : there + nbytes])

    for group in packed.layout.groups:
        for part in group.parts:
            for expert in range(group.n_expert):
                assert is_whole(group, part, expert), (group.layer, part.tensor.name, expert)
    for dense in packed.layout.dense:
        t = dense.tensor
        data = whole[t.shard][t.offset : t.offset + t.nbytes]
        packed_data = made[dense.offset : dense.offset + t.nbytes]
        assert data in (left[t.shard][t.offset : t.offset + t.nbytes], packed_data), t.name


def begun_in_place(case: Case) -> tuple[Path, Path]:
    source, out = case.fresh()
    total = pack_in_child(source, out, in_place=True)
    assert total is not None
    source, out = case.fresh()
    assert pack_in_child(source, out, in_place=True, kill_at=total // 2) is None
    return source, out


def test_what_was_begun_in_place_is_not_restarted_otherwise(case: Case) -> None:
    source, out = begun_in_place(case)
    before = {p.name: p.read_bytes() for p in out.parent.iterdir()}
    with pytest.raises(PackError, match="packing in place was begun") as caught:
        pack_model(source, out)
    assert "--in-place" in caught.value.hint
    assert {p.name: p.read_bytes() for p in out.parent.iterdir()} == before


def test_in_place_refuses_another_file_under_the_old_name(case: Case) -> None:
    source, out = begun_in_place(case)
    source.write_bytes(b"\0" * 100)
    with pytest.raises(PackError, match="not the file whose packing in place was begun"):
        pack_model(source, out, in_place=True)
    assert source.read_bytes() == b"\0" * 100


def test_a_partial_file_of_another_model_is_begun_anew(
    case: Case, tiny_model: Callable[[str], Path]
) -> None:
    source, out = case.fresh()
    total = pack_in_child(source, out, in_place=False)
    assert total is not None
    out.unlink()
    assert pack_in_child(source, out, in_place=False, kill_at=total - 3) is None
    other = tiny_model("mixed")
    report = pack_model(other, out)
    assert report.resumed_bytes == 0
    fresh = case.work / "other.gguf"
    pack_model(other, fresh, force=True)
    assert out.read_bytes() == fresh.read_bytes()


def test_a_source_that_changed_meanwhile_is_begun_anew(case: Case) -> None:
    source, out = case.fresh()
    total = pack_in_child(source, out, in_place=False)
    assert total is not None
    out.unlink()
    assert pack_in_child(source, out, in_place=False, kill_at=total - 3) is None
    data = bytearray(source.read_bytes())
    data[-40] ^= 1  # the header, and so the fingerprint, stays
    source.write_bytes(data)
    assert pack_model(source, out).resumed_bytes == 0
    fresh = case.work / "changed.gguf"
    pack_model(source, fresh, force=True)
    assert out.read_bytes() == fresh.read_bytes()

"""The file that a drive is measured with: one that is there, or one that leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashmoe_gguf import disk_sample
from flashmoe_gguf.disk import read_bandwidth
from flashmoe_gguf.disk_sample import sample_file
from flashmoe_gguf.errors import DiskError

MIB = 1 << 20


def test_a_file_is_made_and_gone(tmp_path: Path) -> None:
    with sample_file(tmp_path, largest=2 * MIB) as sample:
        assert sample.made and sample.size_bytes == 2 * MIB
        assert os.listdir(tmp_path) == []  # not even while it is there
        assert sample.path.stat().st_size == 2 * MIB
        assert len(set(sample.path.read_bytes()[:4096])) > 200  # no zeros
        assert read_bandwidth(sample.path, seconds=0.01, direct=False) > 0
    assert not sample.path.exists()


def test_a_model_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_sample, "_LEAST_BYTES", 4096)
    for name, size in (("a.gguf", 8192), ("b.gguf", 12288), ("c.gguf", 100), ("d.bin", 99999)):
        (tmp_path / name).write_bytes(os.urandom(size))
    with (tmp_path / "holes.gguf").open("wb") as file:
        file.truncate(MIB)  # reading it would measure memory
    with sample_file(tmp_path) as sample:
        assert (sample.path.name, sample.size_bytes, sample.made) == ("b.gguf", 12288, False)
    assert sample.path.exists()


@pytest.mark.parametrize(
    ("free", "size"), [(10 << 30, 256 * MIB), (512 * MIB, 256 * MIB), (511 * MIB, 64 * MIB)]
)
def test_it_takes_what_room_allows(
    free: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert disk_sample._room(tmp_path, disk_sample.SAMPLE_BYTES) == size


def test_a_full_drive_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300 * MIB))
    with pytest.raises(DiskError, match="no room for a file of 64 MiB"), sample_file(tmp_path):
        pass


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(DiskError, match="cannot look into it: No such"),
        sample_file(tmp_path / "x"),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory"), sample_file(tmp_path / "file"):
        pass
    proc = Path("/proc/self/fdinfo")  # root may write nearly everywhere else
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 30))
    with pytest.raises(DiskError, match="cannot write a file"), sample_file(proc):
        pass


def test_a_drive_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(DiskError, match=r"cannot write 1048576 bytes .*No space left"),
        sample_file(tmp_path, largest=MIB),
    ):
        pass

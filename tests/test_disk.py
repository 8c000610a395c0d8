"""Measured bandwidth: what is read, past which cache, and what is refused."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashmoe_gguf import disk
from flashmoe_gguf.disk import ALIGNMENT, Bandwidth, measure_grid, read_bandwidth
from flashmoe_gguf.errors import DiskError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * ALIGNMENT + 100))
    return path


class Reads:
    """Stands in for os.preadv: the offsets asked for and an error or a length to answer with."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, answer: OSError | int | None = None
    ) -> None:
        self.offsets: list[int] = []
        self._answer = answer
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        self.offsets.append(offset)
        if isinstance(self._answer, OSError):
            raise self._answer
        return len(buffers[0]) if self._answer is None else self._answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock takes a millisecond, whatever the machine is busy with."""
    ticks = itertools.count()
    monkeypatch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))


@pytest.mark.parametrize("depth", [1, 3])
def test_buffered_reads_give_a_figure(file: Path, depth: int) -> None:
    assert (
        read_bandwidth(file, request_bytes=ALIGNMENT, depth=depth, seconds=0.02, direct=False) > 0
    )


def test_direct_reads_work_or_are_refused_by_name(file: Path) -> None:
    why = disk.direct_io_problem(file)
    if not why:
        assert read_bandwidth(file, request_bytes=ALIGNMENT, seconds=0.02) > 0
    else:
        with pytest.raises(DiskError, match="no direct I/O"):
            read_bandwidth(file, request_bytes=ALIGNMENT, seconds=0.02)


def test_every_block_is_read_once_before_any_is_read_again(
    file: Path, monkeypatch: pytest.MonkeyPatch, clock: None
) -> None:
    reads = Reads(monkeypatch)
    speed = read_bandwidth(file, request_bytes=2 * ALIGNMENT, depth=1, seconds=0.2, direct=False)
    rounds = [reads.offsets[i : i + 32] for i in range(0, len(reads.offsets), 32)]
    assert len(rounds) > 2
    assert speed == pytest.approx(2 * ALIGNMENT * 1000, rel=0.1)  # a read a millisecond
    for blocks in rounds[:-1]:
        assert sorted(blocks) == [2 * ALIGNMENT * i for i in range(32)]
    assert rounds[0] != rounds[1]


def test_the_cache_is_emptied_before_every_buffered_round(
    file: Path, monkeypatch: pytest.MonkeyPatch, clock: None
) -> None:
    reads, advice = Reads(monkeypatch), []
    real = os.posix_fadvise
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, *rest: advice.append((rest, len(reads.offsets))) or real(fd, *rest),
    )
    read_bandwidth(file, request_bytes=ALIGNMENT, depth=1, seconds=0.2, direct=False)
    drops = [at for rest, at in advice if rest == (0, 0, os.POSIX_FADV_DONTNEED)]
    assert drops == list(range(0, len(reads.offsets), 64))
    assert any(rest[2] == os.POSIX_FADV_RANDOM for rest, _ in advice)


def test_buffered_pages_really_leave_the_cache(file: Path) -> None:
    """RWF_NOWAIT answers only from the page cache."""
    if not hasattr(os, "RWF_NOWAIT"):
        pytest.skip("preadv2 is missing")
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.pread(fd, ALIGNMENT, 0)
        try:
            assert os.preadv(fd, [bytearray(ALIGNMENT)], 0, os.RWF_NOWAIT) == ALIGNMENT
        except OSError:
            pytest.skip("a file system without RWF_NOWAIT")
        disk._drop_pages(fd)
        try:
            left = os.preadv(fd, [bytearray(ALIGNMENT)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            left = 0
    finally:
        os.close(fd)
    if left and _is_tmpfs(file):
        pytest.skip("tmpfs: its pages are the file")
    assert left == 0


def _is_tmpfs(path: Path) -> bool:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    inside = [m for m in mounts if path.is_relative_to(m[1])]
    return max(inside, key=lambda m: len(m[1]))[2] in ("tmpfs", "ramfs")


@pytest.mark.parametrize(
    ("number", "direct", "message"),
    [
        (errno.EINVAL, True, "no direct I/O"),
        (errno.EIO, True, "cannot read: Input/output error"),
        (errno.EINVAL, False, "cannot read: Invalid argument"),
    ],
)
def test_an_error_while_reading_is_typed(
    file: Path, monkeypatch: pytest.MonkeyPatch, number: int, direct: bool, message: str
) -> None:
    if direct and disk.direct_io_problem(file):
        pytest.skip("no direct I/O in the folder of the tests")
    Reads(monkeypatch, OSError(number, os.strerror(number)))
    with pytest.raises(DiskError, match=message):
        read_bandwidth(file, request_bytes=ALIGNMENT, seconds=0.02, direct=direct)


def test_a_short_read_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Reads(monkeypatch, 512)
    with pytest.raises(DiskError, match="became shorter"):
        read_bandwidth(file, request_bytes=ALIGNMENT, seconds=0.02, direct=False)


def test_opening_for_direct_reads_may_be_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(DiskError, match="no direct I/O"):
        read_bandwidth(file, request_bytes=ALIGNMENT)
    assert "refuses" in disk.direct_io_problem(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_bytes": 0}, "reads of 0"),
        ({"request_bytes": 1000}, "reads of 1000"),
        ({"depth": 0}, "0 threads"),
        ({"seconds": 0.0}, "0.0 seconds"),
        ({"seconds": float("nan")}, "nan seconds"),
        ({"request_bytes": 1 << 20}, "shorter than one read"),
    ],
)
def test_what_makes_no_sense_is_refused(file: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DiskError, match=message):
        read_bandwidth(file, **{"request_bytes": ALIGNMENT, "direct": False, **changes})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for measure in (
        lambda path: read_bandwidth(path, direct=False),
        lambda path: measure_grid(path, [ALIGNMENT], [1], 0.01),
    ):
        with pytest.raises(DiskError, match="cannot read: No such file"):
            measure(tmp_path / "none")


def test_a_grid_has_every_size_that_fits_at_every_depth(file: Path) -> None:
    sizes = [ALIGNMENT, 4 * ALIGNMENT, 1 << 20]
    rows = measure_grid(file, iter(sizes), iter([1, 2]), 0.01, direct=False)
    assert [(r.request_bytes, r.depth) for r in rows] == [
        (ALIGNMENT, 1),
        (ALIGNMENT, 2),
        (4 * ALIGNMENT, 1),
        (4 * ALIGNMENT, 2),
    ]
    assert all(isinstance(r, Bandwidth) and r.bytes_per_second > 0 for r in rows)
    with pytest.raises(DiskError, match="every size"):
        measure_grid(file, [1 << 20], [1], 0.01, direct=False)

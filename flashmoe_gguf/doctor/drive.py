"""The folder's file system and drive, and what they give."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.disk import Bandwidth, direct_io_problem, measure_grid
from flashmoe_gguf.disk_sample import sample_file
from flashmoe_gguf.doctor.finding import Finding, System
from flashmoe_gguf.errors import DiskError

REQUEST_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
USED = (1 << 20, 4)  # the expert cache's own request size and number of readers

# Of direct reads. Below the first, decoding is slower than reading along; a good NVMe drive gives
# more than the second.
_SLOW = 200e6
_MODEST = 1e9

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "virtiofs", "afs")
_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Mount:
    """A line of mountinfo: where, which kind, from what, and the device's numbers."""

    point: str
    kind: str
    source: str
    device: str


def check_drive(folder: Path, system: System, seconds: float) -> list[Finding]:
    """File system, drive, direct I/O and bandwidth of `folder`, `seconds` for each measurement."""
    found = [check_file_system(folder, system)]
    found.append(check_drive_type(folder, system))
    try:
        with sample_file(folder) as sample:
            where = "a temporary file" if sample.made else sample.path.name
            problem = direct_io_problem(sample.path)
            rows = measure_grid(sample.path, REQUEST_SIZES, DEPTHS, seconds, direct=not problem)
    except DiskError as error:
        return [*found, Finding("bandwidth", "hurts", error.message, error.hint)]
    return [*found, judge_direct_io(problem), judge_bandwidth(rows, where, not problem)]


def mount_of(folder: Path, system: System) -> Mount | None:
    """The mount that `folder` lies on; the last one of the longest matching path counts."""
    best: Mount | None = None
    resolved = str(folder.resolve())
    for line in system.read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, more = left.split(), right.split()
        if len(fields) < 5 or len(more) < 2:
            continue
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
        inside = resolved == point or resolved.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(point, more[0], more[1], fields[2])
    return best


def check_file_system(folder: Path, system: System) -> Finding:
    mount = mount_of(folder, system)
    if mount is None:
        return Finding("file system", "note", "unknown", "this system does not tell")
    data = asdict(mount)
    value = f"{mount.kind} on {mount.point}"
    if mount.kind in _MEMORY:
        return Finding(
            "file system",
            "hurts",
            f"{value}: this is memory",
            "a model here takes the memory that is to be saved; put it on a drive",
            data,
        )
    if mount.kind in _NETWORK or mount.kind.startswith("fuse."):
        return Finding(
            "file system",
            "note",
            f"{value}: another program or machine answers",
            "every missing expert waits for it; a local drive is faster",
            data,
        )
    return Finding("file system", "good", value, "", data)


def check_drive_type(folder: Path, system: System) -> Finding:
    """From the block device's own words; partitions and mapped devices lead to their drives."""
    mount = mount_of(folder, system)
    drive = _drive(mount, system) if mount else None
    if drive is None:
        advice = "the figures below say what it gives"
        return Finding("drive", "note", "not a block device that is known", advice)
    rotates = system.read(str(drive / "queue/rotational")) == "1"
    model = system.read(str(drive / "device/model"))
    kind = (
        "spinning disk" if rotates else "NVMe" if drive.name.startswith("nvme") else "solid state"
    )
    if drive.name.startswith("vd") or "virtual" in model.lower():
        kind = "virtual disk"
    value = f"{drive.name}, {kind}" + (f", {model}" if model else "")
    data = {"name": drive.name, "kind": kind, "model": model or None}
    if kind == "spinning disk":
        return Finding(
            "drive", "hurts", value, "it seeks for every expert; put the model on an SSD", data
        )
    return Finding("drive", "good", value, "", data)


def _drive(mount: Mount, system: System) -> Path | None:
    """/sys folder of the whole drive behind a mount, inside `system`'s root."""
    device = mount.device
    if device.startswith("0:"):  # btrfs, overlay: the numbers mean nothing, the source may
        try:
            numbers = os.stat(mount.source).st_rdev
        except OSError:
            return None
        device = f"{os.major(numbers)}:{os.minor(numbers)}"
    link = system.path(f"/sys/dev/block/{device}")
    if not link.exists():
        return None
    folder = link.resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    while slaves := sorted((folder / "slaves").glob("*")):  # dm-crypt, LVM, RAID
        folder = slaves[0].resolve()
        if (folder / "partition").exists():
            folder = folder.parent
    return Path("/") / folder.relative_to(system.root.resolve())


def judge_direct_io(problem: str) -> Finding:
    if not problem:
        return Finding("direct I/O", "good", "works", "", {"works": True})
    return Finding(
        "direct I/O",
        "note",
        f"does not work: {problem}",
        "experts then pass the page cache, about half as fast; ext4 and xfs can do it",
        {"works": False, "problem": problem},
    )


def judge_bandwidth(rows: list[Bandwidth], where: str, direct: bool) -> Finding:
    """By what the cache's own way of reading gives; the best row is named where it is better."""
    best = max(rows, key=lambda row: row.bytes_per_second)
    used = [row for row in rows if (row.request_bytes, row.depth) == USED]
    speed = (used[0] if used else best).bytes_per_second
    how = "direct" if direct else "buffered"
    value = f"{speed / 1e9:.3g} GB/s in {how} reads of 1 MiB by 4 threads, from {where}"
    data = {"direct": direct, "from": where, "rows": [asdict(row) for row in rows]}
    if speed < _SLOW:
        advice = (
            "a token reads tens to hundreds of MB: expect seconds per token; use a faster drive"
        )
        return Finding("bandwidth", "hurts", value, advice, data)
    if speed < _MODEST:
        advice = "the drive will set the pace: give as much --ram as there is, or a faster drive"
        return Finding("bandwidth", "note", value, advice, data)
    advice = ""
    if best.bytes_per_second > 1.3 * speed:
        advice = (
            f"{best.bytes_per_second / 1e9:.3g} GB/s with {format_size(best.request_bytes)} "
            f"by {best.depth}: large experts come faster than that figure"
        )
    return Finding("bandwidth", "good", value, advice, data)

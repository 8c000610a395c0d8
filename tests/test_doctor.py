"""What the doctor finds on machines that are made up, and on this one."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli_tools import assert_error, flashmoe
from flashmoe_gguf import disk_sample
from flashmoe_gguf.devices import Device
from flashmoe_gguf.disk import Bandwidth
from flashmoe_gguf.doctor import Finding, System, drive, examine, machine, software
from flashmoe_gguf.errors import DiskError, LibraryError
from flashmoe_gguf.host import MemoryLimit

GIB = 1 << 30
NAMES = (
    "file system",
    "drive",
    "direct I/O",
    "bandwidth",
    "memory",
    "address space",
    "swap",
    "huge pages",
    "processor",
    "load",
    "versions",
    "libraries",
    "devices",
)


@pytest.fixture
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement on a file of 8 MiB."""
    monkeypatch.setattr(disk_sample, "_room", lambda folder, largest: 8 << 20)


def system(root: Path, files: Mapping[str, str]) -> System:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return System(root)


def mountinfo(kind: str, point: object, source: str = "/dev/sdx1", device: str = "8:1") -> str:
    escaped = str(point).replace(" ", "\\040")
    return (
        "20 1 8:9 / / rw - ext4 /dev/root rw\n"
        f"21 20 {device} / {escaped} rw shared:1 - {kind} {source} rw"
    )


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("ext4", "good", ""),
        ("xfs", "good", ""),
        ("tmpfs", "hurts", "this is memory"),
        ("nfs4", "note", "another program or machine"),
        ("fuse.sshfs", "note", "another program or machine"),
    ],
)
def test_file_systems(kind: str, state: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    made_up = system(tmp_path / "root", {"/proc/self/mountinfo": mountinfo(kind, folder)})
    found = drive.check_file_system(folder, made_up)
    assert (found.state, found.data["kind"], found.data["point"]) == (state, kind, str(folder))
    assert words in found.value
    assert bool(found.advice) == (state != "good")


def test_the_longest_mount_counts_and_names_are_not_prefixes(tmp_path: Path) -> None:
    (tmp_path / "models2").mkdir()
    made_up = system(
        tmp_path / "root", {"/proc/self/mountinfo": mountinfo("tmpfs", tmp_path / "models")}
    )
    found = drive.check_file_system(tmp_path / "models2", made_up)
    assert found.value == "ext4 on /"
    assert drive.check_file_system(tmp_path, System(tmp_path / "none")).state == "note"


def block(root: Path, name: str, *, rotates: bool, model: str = "", partition: bool = True) -> None:
    """A drive with a partition 8:1 in sysfs, as the kernel lays it out."""
    folder = root / "sys/devices/pci/block" / name
    (folder / "queue").mkdir(parents=True)
    (folder / "queue/rotational").write_text(f"{int(rotates)}\n")
    if model:
        (folder / "device").mkdir()
        (folder / "device/model").write_text(f"{model}  \n")
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    target = folder
    if partition:
        target = folder / f"{name}1"
        target.mkdir()
        (target / "partition").write_text("1\n")
    (root / "sys/dev/block/8:1").symlink_to(target)


@pytest.mark.parametrize(
    ("name", "rotates", "model", "state", "kind"),
    [
        ("nvme0n1", False, "Samsung SSD 990 PRO", "good", "NVMe"),
        ("sda", False, "", "good", "solid state"),
        ("sda", True, "ST4000", "hurts", "spinning disk"),
        ("vda", True, "", "good", "virtual disk"),  # what it claims means nothing
    ],
)
def test_drives(
    name: str, rotates: bool, model: str, state: str, kind: str, tmp_path: Path
) -> None:
    made_up = system(tmp_path, {"/proc/self/mountinfo": mountinfo("ext4", tmp_path)})
    block(tmp_path, name, rotates=rotates, model=model)
    found = drive.check_drive_type(tmp_path, made_up)
    assert (found.state, found.data["name"], found.data["kind"]) == (state, name, kind)
    assert found.value == f"{name}, {kind}" + (f", {model}" if model else "")
    assert bool(found.advice) == (state == "hurts")


def test_a_mapped_device_leads_to_its_drive(tmp_path: Path) -> None:
    made_up = system(tmp_path, {"/proc/self/mountinfo": mountinfo("ext4", tmp_path)})
    block(tmp_path, "sdb", rotates=True)
    mapped = tmp_path / "sys/devices/virtual/block/dm-0"
    (mapped / "slaves").mkdir(parents=True)
    (mapped / "slaves/sdb1").symlink_to(tmp_path / "sys/devices/pci/block/sdb/sdb1")
    link = tmp_path / "sys/dev/block/8:1"
    link.unlink()
    link.symlink_to(mapped)
    assert drive.check_drive_type(tmp_path, made_up).data["name"] == "sdb"


def test_a_drive_that_is_not_known(tmp_path: Path) -> None:
    text = mountinfo("overlay", tmp_path, "overlay", "0:77")
    made_up = system(tmp_path, {"/proc/self/mountinfo": text})
    assert drive.check_drive_type(tmp_path, made_up).state == "note"


@pytest.mark.parametrize(
    ("speed", "best", "state", "advice"),
    [
        (50e6, 60e6, "hurts", "seconds per token"),
        (600e6, 600e6, "note", "will set the pace"),
        (3e9, 3.1e9, "good", ""),
        (3e9, 6e9, "good", "6 GB/s with 4 MiB by 16"),
    ],
)
def test_bandwidths(speed: float, best: float, state: str, advice: str) -> None:
    rows = [Bandwidth(1 << 20, 4, speed), Bandwidth(4 << 20, 16, best)]
    found = drive.judge_bandwidth(rows, "m.gguf", True)
    assert found.state == state
    assert advice in found.advice and bool(advice) == bool(found.advice)
    assert f"{speed / 1e9:.3g} GB/s in direct reads of 1 MiB by 4 threads" in found.value
    assert found.data["rows"][1]["bytes_per_second"] == best


def test_direct_io_that_does_not_work_says_why() -> None:
    found = drive.judge_direct_io("the file system refuses to open files for it")
    assert found.state == "note" and "refuses" in found.value
    assert drive.judge_direct_io("").value == "works"


@pytest.mark.usefixtures("small_sample")
def test_without_direct_io_the_buffered_figures_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "direct_io_problem", lambda path: "no")
    found = {f.name: f for f in drive.check_drive(tmp_path, System(tmp_path), 0.01)}
    assert found["direct I/O"].state == "note"
    assert found["bandwidth"].data["direct"] is False
    assert "buffered reads" in found["bandwidth"].value


def test_a_folder_that_cannot_be_measured_hurts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    found = drive.check_drive(tmp_path, System(tmp_path), 0.01)[-1]
    assert (found.name, found.state) == ("bandwidth", "hurts")
    assert "no room" in found.value and "free some space" in found.advice


def limits(
    monkeypatch: pytest.MonkeyPatch, available: int, source: str, limit: int | None
) -> Finding:
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    monkeypatch.setattr(machine, "available_memory", lambda: MemoryLimit(available, source))
    monkeypatch.setattr(machine, "default_budget", lambda: MemoryLimit(available * 9 // 10, source))
    monkeypatch.setattr(machine, "cgroup_limit", lambda: limit)
    return machine.check_memory()


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits(monkeypatch, 40 * GIB, "available memory", None)
    assert found.state == "good"
    assert "40 GiB of 64 GiB can be had (available memory), no cgroup limit; --ram" in found.value
    found = limits(monkeypatch, 8 * GIB, "the cgroup's limit", 10 * GIB)
    assert found.state == "note" and "a cgroup limit of 10 GiB" in found.value
    assert found.data["cgroup_limit_bytes"] == 10 * GIB
    found = limits(monkeypatch, GIB // 2, "available memory", None)
    assert found.state == "hurts" and found.advice


def test_a_limited_address_space_hurts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * GIB, 8 * GIB))
    found = machine.check_address_space()
    assert found.state == "hurts" and "8 GiB" in found.value and "ulimit" in found.advice


def test_swap(tmp_path: Path) -> None:
    head = "Filename\tType\tSize\tUsed\tPriority"
    assert machine.check_swap(System(tmp_path)).value == "none"
    assert machine.check_swap(system(tmp_path, {"/proc/swaps": head})).value == "none"
    lines = f"{head}\n/dev/sda2 partition 4194304 1024 -2\n/swapfile file 4194304 0 -3"
    made_up = system(tmp_path, {"/proc/swaps": lines, "/proc/sys/vm/swappiness": "60"})
    found = machine.check_swap(made_up)
    assert (found.state, found.value) == ("good", "1 MiB of 8 GiB in use, swappiness 60")
    made_up = system(tmp_path, {"/proc/swaps": f"{head}\n/dev/sda2 partition 4194304 2097152 -2"})
    assert machine.check_swap(made_up).state == "note"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("always [madvise] never", "good"),
        ("[always] madvise never", "good"),
        ("always madvise [never]", "note"),
        ("", "note"),
    ],
)
def test_huge_pages(text: str, state: str, tmp_path: Path) -> None:
    made_up = system(tmp_path, {"/sys/kernel/mm/transparent_hugepage/enabled": text})
    assert machine.check_huge_pages(made_up).state == state


def test_processors(tmp_path: Path) -> None:
    def found(cpuinfo: str) -> Finding:
        return machine.check_processor(system(tmp_path, {"/proc/cpuinfo": cpuinfo}))

    good = found("processor : 0\nmodel name : Fast 9000\nflags : fpu avx2 fma f16c bmi2 avx512f")
    assert good.state == "good" and "Fast 9000" in good.value
    assert good.value.endswith("avx2 fma f16c bmi2 avx512f")
    old = found("processor : 0\nmodel name : Old 1\nflags : fpu sse2 avx")
    assert old.state == "hurts" and "without avx2 and fma and f16c" in old.advice
    arm = found("processor : 0\nFeatures : fp asimd asimddp i8mm")
    assert arm.state == "good" and arm.value.endswith("asimd asimddp i8mm")
    assert machine.check_processor(System(tmp_path / "none")).state == "good"  # nothing is known


def test_a_quota_of_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "model name : X\nflags : avx2 fma f16c",
        "/proc/self/cgroup": "5:cpu,cpuacct:/a\n0::/b/c",
        "/sys/fs/cgroup/cpu.max": "max 100000",
        "/sys/fs/cgroup/b/cpu.max": "250000 100000",
        "/sys/fs/cgroup/b/c/cpu.max": "max 100000",
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "400000",
        "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
    }
    made_up = system(tmp_path, files)
    assert machine.cpu_quota(made_up) == 2.5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    found = machine.check_processor(made_up)
    assert found.state == "note" and "--threads 2" in found.advice
    assert machine.cpu_quota(System(tmp_path / "none")) is None


@pytest.mark.parametrize(("load", "state"), [(0.5, "good"), (8.0, "note"), (15.0, "note")])
def test_load(load: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    found = machine.check_load()
    assert found.state == state
    if state == "note":
        assert found.value.startswith(f"{load / 4:.1f} programs")


def test_versions_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_built_from", lambda: "0.0.1")
    found = software.check_versions()
    assert found.state == "hurts" and "llama-cpp-python 0.0.1" in found.advice
    monkeypatch.undo()
    assert software.check_versions().state == "good"
    assert software._built_from() == software._version("llama-cpp-python")
    assert software._version("no-such-package") is None


def test_libraries_that_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_gguf import _native

    def broken() -> list[str]:
        raise LibraryError("it does not load", "reinstall")

    assert software.check_libraries().state == "good"
    monkeypatch.setattr(_native, "policy_names", broken)
    found = software.check_libraries()
    assert (found.state, found.value, found.advice) == ("hurts", "it does not load", "reinstall")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("CUDA0", "a GPU", "CUDA", 6 * GIB, 8 * GIB)

    def found(devices: list[Device], backends: list[str]) -> Finding:
        monkeypatch.setattr(software, "list_devices", lambda llama_cpp: devices)
        monkeypatch.setattr(software, "device_backends", lambda llama_cpp: backends)
        return software.check_devices()

    assert found([gpu], ["CUDA"]).value == "CUDA0 (a GPU, 6 GiB free)"
    json.dumps(found([gpu], ["CUDA"]).data)
    silent = found([], ["CUDA"])
    assert silent.state == "note" and "CUDA" in silent.value and "driver" in silent.advice
    assert found([], []) == Finding(
        "devices",
        "good",
        "none: llama.cpp was built for the processor only",
        "",
        {"backends": [], "devices": []},
    )

    def broken() -> object:
        raise LibraryError("it does not load", "reinstall")

    monkeypatch.setattr(software, "load_llama_cpp", broken)
    assert software.check_devices().value == "not known: the libraries do not load"


@pytest.mark.usefixtures("small_sample")
def test_this_machine(tmp_path: Path) -> None:
    found = examine(tmp_path, seconds=0.01)
    assert tuple(f.name for f in found) == NAMES
    rows = found[3].data["rows"]
    assert len(rows) == len(drive.REQUEST_SIZES) * len(drive.DEPTHS)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("small_sample")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import flashmoe_gguf.doctor

    def made_up(folder: Path, *, seconds: float) -> list[Finding]:
        assert (folder, seconds) == (tmp_path, 0.05)
        rows = [Bandwidth(1 << 20, depth, depth * 1e9) for depth in (1, 4)]
        return [
            drive.judge_bandwidth(rows, "m.gguf", True),
            drive.judge_direct_io("no such thing"),
            Finding("swap", states[0], "some", "less"),
        ]

    monkeypatch.setattr(flashmoe_gguf.doctor, "examine", made_up)
    states = ["good"]
    model = tmp_path / "m.gguf"
    model.touch()
    result = flashmoe("doctor", model, "--seconds", "0.05")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "ok     bandwidth   4 GB/s in direct reads of 1 MiB by 4 threads, from m.gguf\n"
        "                   GB/s   1 thread  4 threads\n"
        "                   1 MiB  1         4\n"
        "note   direct I/O  does not work: no such thing\n"
        "                   -> experts then pass the page cache, about half as fast; "
        "ext4 and xfs can do it\n"
        "ok     swap        some\n"
        "                   -> less\n"
    )
    states[0] = "hurts"
    result = flashmoe("doctor", tmp_path, "--seconds", "0.05")
    assert result.exit_code == 1
    assert "HURTS  swap        some\n" in result.stdout
    result = flashmoe("doctor", tmp_path, "--seconds", "0.05", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["hurts"] is True and data["folder"] == str(tmp_path)
    assert [f["name"] for f in data["findings"]] == ["bandwidth", "direct I/O", "swap"]


@pytest.mark.usefixtures("small_sample")
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    result = flashmoe("doctor", tmp_path, "--seconds", "0.01")
    assert result.exit_code == (1 if "HURTS" in result.stdout else 0), result.output
    for name in NAMES:
        assert name in result.stdout
    assert "16 threads" in result.stdout


def test_no_such_folder(tmp_path: Path) -> None:
    assert_error(flashmoe("doctor", tmp_path / "x"), "x: no such folder", "folder of your models")


def test_disk_errors_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **more: object) -> list[Bandwidth]:
        raise DiskError("Input/output error", "check the drive")

    monkeypatch.setattr(disk_sample, "_room", lambda folder, largest: 1 << 20)
    monkeypatch.setattr(drive, "measure_grid", broken)
    found = drive.check_drive(tmp_path, System(tmp_path), 0.01)[-1]
    assert (found.state, found.value) == ("hurts", "Input/output error")

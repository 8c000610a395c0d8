"""What this machine is made of, by name: processor, and the drive under a file."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def drive_of(path: Path) -> dict[str, Any]:
    """`file_system` and `disk` of a file: the device that is mounted where it lies."""
    mounts = [
        part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)
    ]
    best = max(mounts, key=lambda part: len(Path(part.mountpoint).parts), default=None)
    if best is None:
        return {"file_system": "", "disk": ""}
    return {"file_system": best.fstype, "disk": _disk_name(best.device)}


def _disk_name(device: str, block: Path = Path("/sys/class/block")) -> str:
    """A device with the model's name that its drive tells, where it does."""
    name = Path(os.path.realpath(device)).name
    for folder in (block / name, (block / name).resolve().parent):
        with suppress(OSError):
            return f"{device} ({(folder / 'device' / 'model').read_text().strip()})"
    return device

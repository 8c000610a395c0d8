"""What this machine offers: memory limits and what this process uses. Reads, never sets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes this process may use, and where the number comes from."""

    limit_bytes: int
    source: str


def default_threads() -> int:
    """Physical cores that this process may run on, as llama.cpp's own tools choose."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    logical = allowed or os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or logical, logical))


def process_memory() -> tuple[int, int]:
    """(resident bytes, committed private writable bytes) of this process.

    The second counts memory that was mapped and not yet touched; where the system does not tell
    (it is Linux's VmData), it is the resident size.
    """
    info = psutil.Process().memory_info()
    return info.rss, getattr(info, "data", info.rss)


def available_memory() -> MemoryLimit:
    """What this process may use: what the system has available, and each cgroup's limit less
    what others in the cgroup use, whichever is least. Its own memory counts as available.
    """
    own, _ = process_memory()
    limits = [MemoryLimit(psutil.virtual_memory().available + own, "available memory")]
    limits += [
        MemoryLimit(max(limit - max(used - own, 0), 0), "the cgroup's limit")
        for limit, used in _cgroups()
    ]
    return min(limits, key=lambda m: m.limit_bytes)


def cgroup_limit() -> int | None:
    """The least limit of this process's cgroup and those above it; None where there is none."""
    return min((limit for limit, _ in _cgroups()), default=None)


def default_budget() -> MemoryLimit:
    """What `ram` None and "auto" mean: what is available, less a tenth (256 MiB at least)."""
    limit = available_memory()
    headroom = max(limit.limit_bytes // 10, 256 << 20)
    return MemoryLimit(max(limit.limit_bytes - headroom, 0), limit.source)


def busy_with_others() -> float | None:
    """Runnable programs per processor over the last minute when that is above 1; None otherwise.

    Whatever is measured then comes out low, and whatever runs then runs slowly.
    """
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return load if load > 1 else None


def _cgroups(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """(limit, memory in use that cannot be reclaimed) of this process's cgroup and all above it.

    Versions 1 and 2; groups without a limit are left out. Version 2's memory.high counts as one:
    beyond it the kernel slows a process down until it is useless. Swap is never counted: experts
    that are swapped out are slower to get than experts that were never read.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, prefix, usage_name = root, "", "memory.current"
            limit_names: tuple[str, ...] = ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            base, prefix, usage_name = root / "memory", "total_", "memory.usage_in_bytes"
            limit_names = ("memory.limit_in_bytes",)
        else:
            continue
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts) + 1):
            group = base.joinpath(*parts[:depth])
            limits = [_read_number(group / name) for name in limit_names]
            given = [limit for limit in limits if limit is not None]
            if given:
                used = _read_number(group / usage_name) or 0
                found.append((min(given), max(used - _page_cache(group, prefix), 0)))
    return found


def _page_cache(group: Path, prefix: str) -> int:
    """File pages, which the kernel drops when the group needs the room."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    wanted = (f"{prefix}active_file", f"{prefix}inactive_file")
    rows = (line.split() for line in lines)
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in wanted)


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

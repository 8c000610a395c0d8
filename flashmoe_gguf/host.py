"""What this machine offers: memory limits and what this process uses. Reads, never sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes this process may use, and where the number comes from."""

    limit_bytes: int
    source: str


def process_memory() -> tuple[int, int]:
    """(resident bytes, committed private writable bytes) of this process.

    The second counts memory that was mapped and not yet touched; where the system does not tell
    (it is Linux's VmData), it is the resident size.
    """
    info = psutil.Process().memory_info()
    return info.rss, getattr(info, "data", info.rss)


def available_memory() -> MemoryLimit:
    """min(cgroup limit less what is used in it, available memory), for `ram=None`."""
    limits = [
        MemoryLimit(psutil.virtual_memory().available + process_memory()[0], "available memory")
    ]
    limits += [MemoryLimit(limit, "the cgroup's limit") for limit in _cgroup_limits()]
    return min(limits, key=lambda m: m.limit_bytes)


def default_budget() -> MemoryLimit:
    """What `ram=None` means: what is available, less a tenth (256 MiB at least) for others."""
    limit = available_memory()
    headroom = max(limit.limit_bytes // 10, 256 << 20)
    return MemoryLimit(max(limit.limit_bytes - headroom, 0), limit.source)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Limits of this process's cgroup and all above it, v1 and v2; unlimited ones are left out."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [p for p in path.split("/") if p]
        for depth in range(len(parts) + 1):
            value = _read_limit(base.joinpath(*parts[:depth], name))
            if value is not None:
                limits.append(value)
    return limits


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None

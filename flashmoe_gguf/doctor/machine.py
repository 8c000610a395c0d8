"""Memory, its limits, and the processor."""

from __future__ import annotations

import os
import platform
import resource

import psutil

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.doctor.finding import Finding, System
from flashmoe_gguf.host import available_memory, busy_with_others, cgroup_limit, default_budget

_LEAST_BUDGET = 512 << 20
_SWAP_IN_USE = 256 << 20

# What llama.cpp's CPU kernels are written for, the most important first (ggml/src/ggml-cpu).
_X86 = ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
_ARM = ("asimd", "asimddp", "i8mm", "sve")
_NEEDED = {"x86": ("avx2", "fma", "f16c"), "arm": ("asimd",)}


def check_machine(system: System) -> list[Finding]:
    """Everything but the drive and the software."""
    return [
        check_memory(),
        check_address_space(),
        check_swap(system),
        check_huge_pages(system),
        check_processor(system),
        check_load(),
    ]


def check_load() -> Finding:
    load = busy_with_others()
    if load is None:
        return Finding("load", "good", "the processors are free")
    return Finding(
        "load",
        "note",
        f"{load:.1f} programs for each processor",
        "what was measured here is low; a model that runs beside them is slow",
        {"per_processor": load},
    )


def check_memory() -> Finding:
    total, here, budget = psutil.virtual_memory().total, available_memory(), default_budget()
    limit = cgroup_limit()
    limit_words = f"a cgroup limit of {format_size(limit)}" if limit else "no cgroup limit"
    value = (
        f"{format_size(here.limit_bytes)} of {format_size(total)} can be had ({here.source}), "
        f"{limit_words}; --ram auto means {format_size(budget.limit_bytes)}"
    )
    data = {
        "total_bytes": total,
        "available_bytes": here.limit_bytes,
        "limited_by": here.source,
        "cgroup_limit_bytes": limit,
        "auto_budget_bytes": budget.limit_bytes,
    }
    if budget.limit_bytes < _LEAST_BUDGET:
        advice = "hardly a model fits: close other programs, or raise the container's limit"
        return Finding("memory", "hurts", value, advice, data)
    if here.source != "available memory" and here.limit_bytes < total // 2:
        advice = "a container or service limit decides, not the machine: raise it for more speed"
        return Finding("memory", "note", value, advice, data)
    return Finding("memory", "good", value, "", data)


def check_address_space() -> Finding:
    """Weights on disk take addresses, and no memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Finding("address space", "good", "not limited", "", {"limit_bytes": None})
    return Finding(
        "address space",
        "hurts",
        f"limited to {format_size(limit)}",
        "a streamed model reserves as many addresses as its file is long: ulimit -v unlimited",
        {"limit_bytes": limit},
    )


def check_swap(system: System) -> Finding:
    lines = [line.split() for line in system.read("/proc/swaps").splitlines()[1:]]
    total = sum(int(fields[2]) for fields in lines if len(fields) > 3) << 10
    used = sum(int(fields[3]) for fields in lines if len(fields) > 3) << 10
    swappiness = system.read("/proc/sys/vm/swappiness")
    data = {"total_bytes": total, "used_bytes": used, "swappiness": swappiness or None}
    if not total:
        return Finding("swap", "good", "none", "", data)
    value = f"{format_size(used)} of {format_size(total)} in use, swappiness {swappiness or '?'}"
    if used > _SWAP_IN_USE:
        advice = "memory is short already: an expert that is swapped out is slower than one on disk"
        return Finding("swap", "note", value, advice, data)
    return Finding("swap", "good", value, "no budget counts on it", data)


def check_huge_pages(system: System) -> Finding:
    text = system.read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text[text.find("[") + 1 : text.find("]")] if "[" in text else ""
    data = {"transparent": chosen or None}
    if chosen in ("always", "madvise"):
        return Finding("huge pages", "good", f"{chosen}: slots get them", "", data)
    return Finding(
        "huge pages",
        "note",
        chosen or "unknown",
        "slots get small pages, a little slower: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        data,
    )


def check_processor(system: System) -> Finding:
    text = system.read("/proc/cpuinfo")
    fields = dict(
        (key.strip(), value.strip())
        for key, _, value in (line.partition(":") for line in reversed(text.splitlines()))
    )
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    kind = "arm" if platform.machine().lower() in ("aarch64", "arm64") else "x86"
    if "asimd" in flags or "Features" in fields:
        kind = "arm"
    has = [flag for flag in (_ARM if kind == "arm" else _X86) if flag in flags]
    missing = [flag for flag in _NEEDED[kind] if flag not in flags]
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota(system)
    cores = f"{allowed} logical cores" + (f", a quota of {quota:.3g}" if quota else "")
    name = fields.get("model name", platform.machine())
    value = f"{name}, {cores}; {' '.join(has) or 'no vector units that are known'}"
    data = {"name": name, "cores": allowed, "quota": quota, "flags": has, "missing": missing}
    if missing and flags:
        advice = f"without {' and '.join(missing)} llama.cpp computes several times slower"
        return Finding("processor", "hurts", value, advice, data)
    if quota and allowed and quota < allowed:
        advice = f"threads beyond the quota are stopped and wait: --threads {max(1, int(quota))}"
        return Finding("processor", "note", value, advice, data)
    return Finding("processor", "good", value, "", data)


def cpu_quota(system: System) -> float | None:
    """Processors that this process's cgroup and those above it allow; None: no limit."""
    found = []
    for line in system.read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = "/sys/fs/cgroup" + ("/cpu" if controllers else "")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            group = "/".join([base, *parts[:depth]])
            if controllers:
                quota = system.read(f"{group}/cpu.cfs_quota_us")
                period = system.read(f"{group}/cpu.cfs_period_us")
            else:
                quota, _, period = system.read(f"{group}/cpu.max").partition(" ")
            if quota.isdigit() and period.isdigit() and int(period):
                found.append(int(quota) / int(period))
    return min(found, default=None)

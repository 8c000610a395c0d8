"""What a row says of where it was measured: versions, processor, drive, model."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from flashmoe_gguf import __version__
from flashmoe_gguf.disk import read_bandwidth
from flashmoe_gguf.errors import DiskError
from flashmoe_gguf.hardware import cpu_name, drive_of
from flashmoe_gguf.libs import library_dir
from flashmoe_gguf.store import Geometry

_REQUEST_BYTES = 1 << 20
_PAGE = 4096


def facts(geometry: Geometry) -> dict[str, Any]:
    """The keys of a row that are the same for all arms of a bench; reads no more than headers."""
    path = geometry.header.path.resolve()
    build = build_info()
    return {
        "version": __version__,
        "llama_cpp_version": metadata.version("llama-cpp-python"),
        "patch_hash": build.get("patches", {}).get("sha256", ""),
        "cmake_args": " ".join(build.get("cmake_args", [])),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        **drive_of(path),
        "model": path.name,
        "model_bytes": sum(file.size_bytes for file in geometry.files),
        "fingerprint": geometry.fingerprint,
        "architecture": geometry.architecture,
        "n_layer": geometry.n_layer,
        "n_expert": geometry.n_expert,
        "top_k": geometry.top_k,
    }


def build_info() -> dict[str, Any]:
    """What the build recorded of itself, `lib/build.json`."""
    path = library_dir("patched").parent / "build.json"
    info: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return info


def disk_bandwidth(path: Path, seconds: float = 1.0) -> float | None:
    """Bytes per second of reads as the cache does them: direct where possible, 1 MiB, 4 at once.

    None for a file that is too short to tell.
    """
    size = path.stat().st_size
    request = min(_REQUEST_BYTES, size // 8 // _PAGE * _PAGE)
    if request == 0:
        return None
    for direct in (True, False):
        with suppress(DiskError):
            return read_bandwidth(path, request_bytes=request, seconds=seconds, direct=direct)
    return None

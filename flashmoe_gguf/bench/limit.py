"""A real memory limit for a child process: a cgroup (v1) of its own, made and removed here.

Page cache is charged to the group that first touched a page, so caches are dropped before each run;
otherwise the limit means nothing for mmapped models.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashmoe_gguf.errors import FlashMoEError

_ROOT = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Limited:
    """How a child under a limit ended. `killed`: by signal, as the kernel does out of memory."""

    stdout: str
    stderr: str
    returncode: int
    peak_bytes: int

    @property
    def killed(self) -> bool:
        return self.returncode < 0


def run_limited(command: Sequence[str], limit_bytes: int | None) -> Limited:
    """Runs a command to its end under a memory limit (None: measured, not limited), cold caches.

    Raises FlashMoEError where cgroups cannot be made.
    """
    group = _ROOT / f"flashmoe-bench-{os.getpid()}"
    try:
        group.mkdir()
        if limit_bytes is not None:
            (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise FlashMoEError(
            f"cannot set a memory limit: {error}",
            "run as root on a system with the memory controller of cgroup v1",
        ) from error
    procs = group / "cgroup.procs"
    try:
        done = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command],
            capture_output=True,
            text=True,
            check=False,
        )
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        group.rmdir()
    return Limited(done.stdout, done.stderr, done.returncode, peak)

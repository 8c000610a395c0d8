"""A real memory limit for a child process: a cgroup of its own, made and removed here.

Three ways, found by `find_limiter`: the memory controller of cgroup v1, cgroup v2, both as root,
and `systemd-run --user --scope` on cgroup v2 without root. Swap is limited too where the kernel
counts it. Each way reads the limit back before the child starts: a limit that is not in force
would make every figure of a bench wrong.

Page cache is charged to the group that first touched a page, so caches are dropped before each run
(see `cold`); otherwise the limit means nothing for mapped files.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flashmoe_gguf.errors import FlashMoEError

CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROBE_BYTES = 64 << 20
_REMOVE_TRIES = 100  # a group is busy until the kernel has buried its last process

OnLine = Callable[[str], None]


def _ignore(_line: str) -> None:
    """For children whose stdout nobody wants."""


@dataclass(frozen=True)
class Ended:
    """How a child under a limit ended.

    `peak_bytes` of the group counts page cache and what else the kernel charges; it and
    `swap_bytes` (the most, where the kernel keeps it) are None where it does not tell.
    `oom_kills`: processes that it killed for want of memory. `timed_out`: it was ended from here.
    """

    returncode: int
    stderr: str
    peak_bytes: int | None
    swap_bytes: int | None
    oom_kills: int
    timed_out: bool

    @property
    def signal(self) -> int | None:
        """The number of the signal that ended it; a shell in between tells it as 128 and more."""
        if self.returncode < 0:
            return -self.returncode
        return self.returncode - 128 if 128 < self.returncode < 160 else None

    @property
    def killed(self) -> bool:
        """By SIGKILL, as the kernel does out of memory."""
        return self.signal == signal.SIGKILL

    @property
    def last_words(self) -> str:
        """The last line of stderr, which for a traceback says what went wrong."""
        return (self.stderr.strip().splitlines() or ["no message"])[-1]


class Limiter(Protocol):
    """A way to run a child under a memory limit. `name` goes into the rows."""

    name: str

    def run(
        self,
        command: Sequence[str],
        limit_bytes: int | None,
        stdin: str = "",
        on_line: OnLine = _ignore,
        timeout: float | None = None,
    ) -> Ended:
        """Runs a command to its end; None: measured, not limited. Its lines go to `on_line`;
        after `timeout` seconds it is ended.

        Raises FlashMoEError where the limit cannot be set.
        """
        ...


def find_limiter(root: Path = CGROUP_ROOT, is_root: bool | None = None) -> Limiter:
    """The way that works here, tried out on `true`. Raises FlashMoEError with what to do."""
    if is_root is None:
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    limiter: Limiter
    if is_root and (root / "memory" / "memory.limit_in_bytes").exists():
        limiter = V1(root / "memory")
    elif is_root and (root / "cgroup.controllers").exists():
        limiter = V2(root)
    elif not is_root and shutil.which("systemd-run"):
        limiter = SystemdScope(root)
    else:
        raise FlashMoEError(
            "no memory limit can be set here, and without one the figures mean nothing",
            "run it as root on Linux with the memory controller of cgroup v1 or v2, or as a user "
            "of a systemd session (systemd-run --user)",
        )
    tried = limiter.run(["true"], _PROBE_BYTES)
    if tried.returncode != 0:
        raise FlashMoEError(
            f"no memory limit can be set with {limiter.name}: {tried.last_words}",
            "run it as root, or log in to a systemd session whose user may limit memory (cgroup v2 "
            "with the memory controller delegated)",
        )
    return limiter


class _Root:
    """A group of its own for each run, below the root of a hierarchy that root may write to."""

    name: str

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(
        self,
        command: Sequence[str],
        limit_bytes: int | None,
        stdin: str = "",
        on_line: OnLine = _ignore,
        timeout: float | None = None,
    ) -> Ended:
        group = self._root / _group_name()
        try:
            self._prepare()
            group.mkdir(exist_ok=True)
            if limit_bytes is not None:
                self._limit(group, _whole_pages(limit_bytes))
        except OSError as error:
            _remove(group)
            raise _cannot(self.name, error) from error
        return _run_in(group, command, stdin, on_line, timeout, self._figures)

    def _prepare(self) -> None:
        """What the root needs before it can have groups."""

    def _limit(self, group: Path, limit: int) -> None:
        raise NotImplementedError

    @staticmethod
    def _figures(group: Path) -> tuple[int | None, int | None, int]:
        """(peak, peak of swap, processes killed for want of memory)"""
        raise NotImplementedError


class V1(_Root):
    """A group below the root of cgroup v1's memory controller."""

    name = "cgroup v1"

    def _limit(self, group: Path, limit: int) -> None:
        _write(group / "memory.limit_in_bytes", limit)
        if (group / "memory.memsw.limit_in_bytes").exists():
            _write(group / "memory.memsw.limit_in_bytes", limit)  # memory and swap
        if (group / "memory.swappiness").exists():
            _write(group / "memory.swappiness", 0)
        _check_in_force(group / "memory.limit_in_bytes", limit)

    @staticmethod
    def _figures(group: Path) -> tuple[int | None, int | None, int]:
        peak = _number(group / "memory.max_usage_in_bytes")
        both = _number(group / "memory.memsw.max_usage_in_bytes")
        # The two peaks need not be of one moment: their difference is the least there was.
        swap = max(both - peak, 0) if both is not None and peak is not None else None
        return peak, swap, _field(group / "memory.oom_control", "oom_kill")


class V2(_Root):
    """A group below the root of cgroup v2."""

    name = "cgroup v2"

    def _prepare(self) -> None:
        enabled = self._root / "cgroup.subtree_control"
        if "memory" not in enabled.read_text().split():
            enabled.write_text("+memory")

    def _limit(self, group: Path, limit: int) -> None:
        _write(group / "memory.max", limit)
        if (group / "memory.swap.max").exists():
            _write(group / "memory.swap.max", 0)
        _check_in_force(group / "memory.max", limit)

    @staticmethod
    def _figures(group: Path) -> tuple[int | None, int | None, int]:
        return (
            _number(group / "memory.peak"),
            _number(group / "memory.swap.peak"),
            _field(group / "memory.events", "oom_kill"),
        )


# Inside the scope: where the limit is not in force nothing runs; afterwards, before the scope is
# gone, what the kernel counted. Only the command is killed when memory runs out: it is the largest.
_IN_SCOPE = """
group="$1$(sed -n 's/^0:://p' /proc/self/cgroup)"; report="$2"; limit="$3"; shift 3
if [ -n "$limit" ] && [ "$(cat "$group/memory.max" 2>/dev/null)" != "$limit" ]; then
  echo "systemd-run set no limit: the memory controller is not delegated to this user" >&2
  exit 97
fi
"$@"; code=$?
{ for name in memory.peak memory.swap.peak; do echo "$name $(cat "$group/$name" 2>/dev/null)"; done
  cat "$group/memory.events" 2>/dev/null; } >"$report"
exit $code
"""


class SystemdScope:
    """A transient scope of the user's own service manager, on cgroup v2."""

    name = "systemd-run"

    def __init__(self, root: Path) -> None:
        self._root = root

    def run(
        self,
        command: Sequence[str],
        limit_bytes: int | None,
        stdin: str = "",
        on_line: OnLine = _ignore,
        timeout: float | None = None,
    ) -> Ended:
        limit = "" if limit_bytes is None else str(_whole_pages(limit_bytes))
        properties = ["-p", "MemoryAccounting=yes"]
        if limit:
            properties = ["-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]
        with tempfile.TemporaryDirectory(prefix="flashmoe-bench-") as folder:
            report = Path(folder) / "report"
            scope = ["systemd-run", "--user", "--scope", "--quiet", "--collect", *properties, "--"]
            inside = ["sh", "-c", _IN_SCOPE, "sh", str(self._root), str(report), limit]
            code, stderr, late = _run([*scope, *inside, *command], stdin, on_line, timeout)
            return Ended(
                code,
                stderr,
                _field(report, "memory.peak") or None,
                _field(report, "memory.swap.peak"),
                _field(report, "oom_kill"),
                late,
            )


class Unlimited:
    """No limit: the child is trusted to keep to its budget. Not for figures against other arms."""

    name = "no limit"

    def run(
        self,
        command: Sequence[str],
        limit_bytes: int | None,
        stdin: str = "",
        on_line: OnLine = _ignore,
        timeout: float | None = None,
    ) -> Ended:
        code, stderr, late = _run(command, stdin, on_line, timeout)
        return Ended(code, stderr, None, None, 0, late)


def _run_in(
    group: Path,
    command: Sequence[str],
    stdin: str,
    on_line: OnLine,
    timeout: float | None,
    figures: Callable[[Path], tuple[int | None, int | None, int]],
) -> Ended:
    """Runs a command that enters `group` before it starts, and removes the group."""
    enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    try:
        code, stderr, late = _run([*enter, *command], stdin, on_line, timeout)
        return Ended(code, stderr, *figures(group), late)
    finally:
        _remove(group)


def _run(
    command: Sequence[str], stdin: str, on_line: OnLine, timeout: float | None
) -> tuple[int, str, bool]:
    """Runs a command, its stdout line by line to `on_line`; (code, stderr, whether it timed out).

    Ctrl-C in the terminal reaches this process alone, which then ends the child's whole session.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(timeout or 0.0, end)
        try:
            if timeout is not None:
                timer.start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(stdin)
                child.stdin.close()
            except BrokenPipeError:  # it ended without reading; its code says why
                pass
            for line in child.stdout:
                on_line(line)
            code = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        finally:
            timer.cancel()
            if child.stdout is not None:
                child.stdout.close()
        errors.seek(0)
        return code, errors.read(), late.is_set()


def _group_name() -> str:
    return f"flashmoe-bench-{os.getpid()}"


def _cannot(name: str, error: OSError) -> FlashMoEError:
    return FlashMoEError(
        f"cannot set a memory limit with {name}: {error.strerror or error}",
        "run it as root, outside containers that keep cgroups to themselves",
    )


def _whole_pages(size: int) -> int:
    """The kernel counts in pages, and would round it down by itself."""
    page = os.sysconf("SC_PAGE_SIZE")
    return size // page * page


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))


def _check_in_force(path: Path, limit: int) -> None:
    if _number(path) != limit:
        raise OSError(errno.EINVAL, "the kernel did not take the limit")


def _remove(group: Path) -> None:
    for _ in range(_REMOVE_TRIES):
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
            time.sleep(0.05)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    """A number after its name in a file of such lines; 0 where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    rows = (line.split() for line in lines)
    return next((int(r[1]) for r in rows if len(r) == 2 and r[0] == name), 0)

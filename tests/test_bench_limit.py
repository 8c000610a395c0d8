"""Memory limits: a real cgroup v1 where one can be made; v2 and systemd-run with stand-ins for the
kernel's files and for the program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flashmoe_gguf.bench.cold import make_cold
from flashmoe_gguf.bench.limit import V1, V2, SystemdScope, find_limiter
from flashmoe_gguf.errors import FlashMoEError, OptionError

MIB = 1 << 20
PYTHON = [sys.executable, "-S", "-c"]
TAKE = (
    "import json; b = bytearray({} << 20); b[::4096] = b'x' * len(b[::4096]); print(json.dumps(1))"
)


@pytest.fixture(scope="module")
def v1() -> V1:
    """The real one."""
    if os.geteuid() != 0:
        pytest.skip("not root: no cgroup can be made")
    try:
        limiter = find_limiter()
    except FlashMoEError as error:
        pytest.skip(f"no memory cgroup: {error.message}")
    if not isinstance(limiter, V1):
        pytest.skip("the memory controller is not cgroup v1")
    return limiter


def test_a_real_limit_is_kept(v1: V1) -> None:
    lines: list[str] = []
    fits = v1.run([*PYTHON, TAKE.format(40)], 200 * MIB, on_line=lines.append)
    assert fits.returncode == 0 and not fits.killed and fits.oom_kills == 0
    assert json.loads(lines[0]) == 1
    assert fits.peak_bytes is not None and 40 * MIB < fits.peak_bytes <= 200 * MIB
    assert fits.swap_bytes in (0, None)


def test_a_child_that_needs_more_is_killed(v1: V1) -> None:
    too_big = v1.run([*PYTHON, TAKE.format(400)], 200 * MIB)
    assert too_big.killed and too_big.oom_kills > 0 and not too_big.timed_out


def test_no_limit_is_measured_all_the_same(v1: V1) -> None:
    free = v1.run([*PYTHON, TAKE.format(40)], None)
    assert free.returncode == 0 and free.peak_bytes is not None and free.peak_bytes > 40 * MIB


def test_nothing_is_left_behind(v1: V1) -> None:
    mine = Path("/sys/fs/cgroup/memory") / f"flashmoe-bench-{os.getpid()}"
    assert v1.run(["cat"], MIB * 64, stdin="in").returncode == 0
    assert not mine.exists()

    def fail(_line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        v1.run([*PYTHON, "print(1, flush=True); input()"], 64 * MIB, on_line=fail)
    assert not mine.exists()


def test_a_child_that_takes_too_long_is_ended(v1: V1) -> None:
    late = v1.run([*PYTHON, "import time; time.sleep(60)"], 64 * MIB, timeout=0.2)
    assert late.timed_out and late.killed and late.oom_kills == 0


def test_what_a_child_says_last(v1: V1) -> None:
    ended = v1.run([*PYTHON, "raise ValueError('no')"], 64 * MIB)
    assert ended.returncode == 1 and ended.last_words == "ValueError: no"
    assert v1.run(["true"], 64 * MIB).last_words == "no message"


@pytest.fixture
def v2_root(tmp_path: Path) -> Path:
    """A folder in the shape of a cgroup v2 root, with a group as the kernel fills it."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    group = tmp_path / f"flashmoe-bench-{os.getpid()}"
    group.mkdir()
    (group / "memory.swap.max").write_text("max")
    (group / "memory.peak").write_text("12345\n")
    (group / "memory.swap.peak").write_text("678\n")
    (group / "memory.events").write_text("low 0\nmax 7\noom 2\noom_kill 1\n")
    return tmp_path


def test_v2_writes_its_limits_and_reads_the_counts(v2_root: Path) -> None:
    limiter = find_limiter(v2_root, is_root=True)
    assert isinstance(limiter, V2)
    seen: list[str] = []
    ended = limiter.run([*PYTHON, "print(input())"], 100 * MIB + 1, "hello", seen.append)
    group = v2_root / f"flashmoe-bench-{os.getpid()}"
    assert seen == ["hello\n"]
    assert (group / "memory.max").read_text() == str(100 * MIB)  # whole pages
    assert (group / "memory.swap.max").read_text() == "0"
    assert (v2_root / "cgroup.subtree_control").read_text() == "+memory"
    assert int((group / "cgroup.procs").read_text()) > 0
    assert (ended.peak_bytes, ended.swap_bytes, ended.oom_kills) == (12345, 678, 1)


def test_v2_on_an_old_kernel_has_no_peak(v2_root: Path) -> None:
    group = v2_root / f"flashmoe-bench-{os.getpid()}"
    for name in ("memory.peak", "memory.swap.peak", "memory.swap.max"):
        (group / name).unlink()
    ended = V2(v2_root).run(["true"], 100 * MIB)
    assert (ended.peak_bytes, ended.swap_bytes) == (None, None)
    assert not (group / "memory.swap.max").exists()


def test_a_limit_that_is_not_taken_runs_nothing(v2_root: Path, tmp_path: Path) -> None:
    group = v2_root / f"flashmoe-bench-{os.getpid()}"
    (group / "memory.max").symlink_to("/dev/null")  # takes anything, keeps nothing
    ran = tmp_path / "ran"
    with pytest.raises(FlashMoEError, match="did not take the limit") as caught:
        V2(v2_root).run(["touch", str(ran)], 100 * MIB)
    assert caught.value.hint and not ran.exists()


def test_v1_through_a_stand_in(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    group = root / f"flashmoe-bench-{os.getpid()}"
    group.mkdir(parents=True)
    (root / "memory.limit_in_bytes").write_text("9223372036854771712")
    for name, text in (
        ("memory.memsw.limit_in_bytes", "9223372036854771712"),
        ("memory.swappiness", "60"),
        ("memory.max_usage_in_bytes", "100"),
        ("memory.memsw.max_usage_in_bytes", "130"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ):
        (group / name).write_text(text)
    limiter = find_limiter(tmp_path, is_root=True)
    assert isinstance(limiter, V1)
    ended = limiter.run(["true"], 50 * MIB)
    assert (ended.peak_bytes, ended.swap_bytes, ended.oom_kills) == (100, 30, 2)
    assert (group / "memory.limit_in_bytes").read_text() == str(50 * MIB)
    assert (group / "memory.memsw.limit_in_bytes").read_text() == str(50 * MIB)
    assert (group / "memory.swappiness").read_text() == "0"


# Speaks systemd-run's arguments: refuses what the real one would not know, notes its properties,
# sets the limit as the service manager would, and becomes the command.
_SYSTEMD_RUN = """#!{python} -S
import os, sys
root, arguments, properties, flags = {root!r}, sys.argv[1:], {{}}, set()
while arguments[0] != "--":
    argument = arguments.pop(0)
    if argument == "-p":
        key, _, value = arguments.pop(0).partition("=")
        properties[key] = value
    elif argument in ("--user", "--scope", "--quiet", "--collect"):
        flags.add(argument)
    else:
        sys.exit("systemd-run: unrecognized option " + argument)
if not {{"--user", "--scope"}} <= flags:
    sys.exit("systemd-run: not a user scope")
with open(root + "/properties", "a") as file:
    file.write(repr(sorted(properties.items())) + "\\n")
group = next(l for l in open("/proc/self/cgroup") if l.startswith("0::"))[3:].strip()
os.makedirs(root + group, exist_ok=True)
for name, text in (("max", properties.get("MemoryMax", "max")), ("peak", "4096"),
                   ("swap.peak", "0"), ("events", "oom 1\\noom_kill 0")):
    if not (name == "max" and {deaf!r}):
        open(root + group + "/memory." + name, "w").write(text + "\\n")
os.execvp(arguments[1], arguments[1:])
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool = False) -> Path:
    """Puts the program first on PATH; returns the folder that is its cgroup root."""
    if not any(
        line.startswith("0::") for line in Path("/proc/self/cgroup").read_text().split("\n")
    ):
        pytest.skip("the kernel has no cgroup v2 hierarchy at all")
    root, programs = folder / "cgroup", folder / "bin"
    root.mkdir()
    programs.mkdir()
    program = programs / "systemd-run"
    program.write_text(_SYSTEMD_RUN.format(python=sys.executable, root=str(root), deaf=deaf))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return root


def test_systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stand_in(tmp_path, monkeypatch)
    limiter = find_limiter(root, is_root=False)
    assert isinstance(limiter, SystemdScope)
    seen: list[str] = []
    ended = limiter.run([*PYTHON, "print(input())"], 100 * MIB + 5, "hello", seen.append)
    assert (ended.returncode, seen) == (0, ["hello\n"])
    assert (ended.peak_bytes, ended.swap_bytes, ended.oom_kills) == (4096, 0, 0)
    free = limiter.run(["true"], None)
    assert free.returncode == 0
    properties = (root / "properties").read_text().splitlines()
    assert properties[1] == f"[('MemoryMax', '{100 * MIB}'), ('MemorySwapMax', '0')]"
    assert properties[2] == "[('MemoryAccounting', 'yes')]"


def test_systemd_run_of_a_killed_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = SystemdScope(stand_in(tmp_path, monkeypatch))
    ended = limiter.run([*PYTHON, "import os; os.kill(os.getpid(), 9)"], 64 * MIB)
    assert ended.killed and ended.peak_bytes == 4096
    crashed = limiter.run([*PYTHON, "import os; os.abort()"], 64 * MIB)
    assert crashed.signal == 6 and not crashed.killed


def test_systemd_run_that_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = stand_in(tmp_path, monkeypatch, deaf=True)
    with pytest.raises(FlashMoEError, match="the memory controller is not delegated") as caught:
        find_limiter(root, is_root=False)
    assert "as root" in caught.value.hint


def test_no_way_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for is_root in (True, False):
        with pytest.raises(FlashMoEError, match="no memory limit can be set") as caught:
            find_limiter(tmp_path, is_root=is_root)
        assert "systemd-run --user" in caught.value.hint


def test_cold_by_dropping_all(tmp_path: Path) -> None:
    switch = tmp_path / "drop_caches"
    switch.write_text("0")
    assert make_cold([], "auto", switch) == "drop"
    assert switch.read_text() == "3"


def cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache (mincore)."""
    import ctypes
    import mmap

    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        pages = (ctypes.c_ubyte * (-(-len(view) // mmap.PAGESIZE)))()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert libc.mincore(address, len(view), ctypes.byref(pages)) == 0
        return sum(page & 1 for page in pages)


def test_cold_by_advice(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(4 * MIB))
    if cached_pages(path) == 0:
        pytest.skip("the file system of the temporary folder has no page cache")
    no_switch = tmp_path / "missing" / "drop_caches"
    assert make_cold([path], "auto", no_switch) == "advise"
    assert cached_pages(path) == 0 or _is_tmpfs(path)
    with pytest.raises(OptionError, match="cannot drop") as caught:
        make_cold([path], "drop", no_switch)
    assert "--cold advise" in caught.value.hint


def _is_tmpfs(path: Path) -> bool:
    from flashmoe_gguf.hardware import drive_of

    return drive_of(path)["file_system"] in ("tmpfs", "ramfs")

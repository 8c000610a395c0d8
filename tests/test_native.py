"""The C tests: `native/tests/test_*.c` over `native/*.c`, built with plain `cc`, with and without
sanitizers. hooks.c and checksum.c are left out: they need llama.cpp's archive, and the models'
tests exercise them.

Each TEST in C is one test here. A sanitizer is skipped only where a program of one line does not
build or run with it.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent / "native"
SOURCES = sorted(path for path in NATIVE.glob("*.c") if path.name not in ("hooks.c", "checksum.c"))
PROGRAMS = sorted((NATIVE / "tests").glob("test_*.c"))
SUPPORT = sorted(set((NATIVE / "tests").glob("*.c")) - set(PROGRAMS))

# -std and -pthread as CMake has them: C11 with extensions
FLAGS = ["-std=gnu11", "-pthread", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
MODES: dict[str, list[str]] = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
LINK_FLAGS = {
    "test_allocation": ["-Wl,--wrap=malloc", "-Wl,--wrap=calloc", "-Wl,--wrap=realloc"],
}
SKIPPED = 77  # check.h
HANG_SECONDS = 120  # a deadlock shall end the run, not stop it

Build = Callable[[str], "Mode"]


@dataclass(frozen=True)
class Mode:
    """Test programs built in one mode, and the command prefix that they need to run."""

    directory: Path
    prefix: tuple[str, ...]


def c_tests() -> list[tuple[str, str]]:
    """(program, test) of every TEST in native/tests."""
    return [
        (program.stem, name)
        for program in PROGRAMS
        for name in re.findall(r"^TEST\((\w+)\)", program.read_text("utf-8"), re.MULTILINE)
    ]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=HANG_SECONDS,
        check=False,
    )


def compile_c(arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return run([*shlex.split(os.environ.get("CC", "cc")), *FLAGS, *arguments])


def must_compile(arguments: Sequence[str | Path]) -> None:
    result = compile_c(arguments)
    assert result.returncode == 0, result.stderr


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "no message")


def runnable(mode: str, directory: Path) -> tuple[str, ...]:
    """The prefix with which programs of this mode run here; skips when there is none."""
    source = directory / "probe.c"
    source.write_text("int main(void) { return 0; }\n")
    probe = directory / "probe"
    built = compile_c([*MODES[mode], source, "-o", probe])
    if built.returncode != 0:
        pytest.skip(f"cc does not build with {MODES[mode][0]}: {first_line(built.stderr)}")
    # ThreadSanitizer does not know the address layout of every kernel
    prefixes: list[tuple[str, ...]] = [()]
    if shutil.which("setarch"):
        prefixes.append(("setarch", platform.machine(), "-R"))
    for prefix in prefixes:
        ran = run([*prefix, probe])
        if ran.returncode == 0:
            return prefix
    pytest.skip(f"programs built with {MODES[mode][0]} do not run: {first_line(ran.stderr)}")


def build_mode(mode: str, directory: Path) -> Mode:
    prefix = runnable(mode, directory) if MODES[mode] else ()

    def object_of(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        must_compile([*MODES[mode], "-I", NATIVE, "-c", source, "-o", target])
        return target

    def link(program: Path, objects: Sequence[Path]) -> None:
        if sys.platform == "darwin" and program.stem in LINK_FLAGS:
            return  # its linker has no --wrap
        flags: list[str | Path] = [*MODES[mode], "-I", NATIVE, *LINK_FLAGS.get(program.stem, [])]
        must_compile([*flags, program, *objects, "-o", directory / program.stem, "-lm"])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(object_of, [*SOURCES, *SUPPORT]))
        list(pool.map(functools.partial(link, objects=objects), PROGRAMS))
    return Mode(directory, prefix)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a mode when its first test asks for it."""
    compiler = shlex.split(os.environ.get("CC", "cc"))[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler: {compiler}")
    return functools.cache(lambda mode: build_mode(mode, tmp_path_factory.mktemp(f"native-{mode}")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("program", "name"), c_tests())
def test_c(mode: str, program: str, name: str, build: Build, tmp_path: Path) -> None:
    built = build(mode)
    if not (built.directory / program).exists():
        pytest.skip(f"the linker has no {LINK_FLAGS[program][0]}")
    result = run([*built.prefix, built.directory / program, tmp_path, name])
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stderr}"
    assert result.stdout.splitlines() == [f"ok {name}"]


@pytest.mark.parametrize("program", [path.stem for path in PROGRAMS])
def test_every_test_of_the_c_files_is_found(program: str, build: Build) -> None:
    """What a program has registered is what the pattern above sees in its source."""
    built = build("plain")
    if not (built.directory / program).exists():
        pytest.skip(f"the linker has no {LINK_FLAGS[program][0]}")
    listed = run([built.directory / program]).stdout.splitlines()
    assert listed
    assert [(program, name) for name in listed] == [
        test for test in c_tests() if test[0] == program
    ]

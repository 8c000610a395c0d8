"""The installed package holds what this checkout says, and both library sets are whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import archive
import flashmoe_gguf
import strict_patch

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
PACKAGE = Path(flashmoe_gguf.__file__).parent
LIB = PACKAGE / "lib"
CORE = {"libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads ELF files")


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((LIB / "build.json").read_text("utf-8"))
    return result


def test_the_installed_package_is_tested() -> None:
    assert ROOT not in PACKAGE.parents or ".venv" in PACKAGE.parts, "run `make test`"


def test_build_json_matches_pin_and_patches(build: dict[str, Any]) -> None:
    pin = archive.read_pin(ROOT / "native" / "pin.txt")
    assert build["archive"] == {"name": pin.name, "version": pin.version, "sha256": pin.sha256}
    assert build["patches"] == {
        "names": [patch.name for patch in PATCHES],
        "sha256": archive.patches_sha256(PATCHES),
    }


def test_the_bindings_are_pinned_to_the_same_version() -> None:
    pin = archive.read_pin(ROOT / "native" / "pin.txt")
    assert f'"{pin.name}=={pin.version}"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_patches_are_few_and_small() -> None:
    files = [file for p in PATCHES for file in strict_patch.parse(p.read_bytes(), p.name)]
    assert 1 <= len(PATCHES) <= 4
    assert sum(file.added for file in files) <= 300


def test_every_patch_is_explained() -> None:
    readme = (ROOT / "patches" / "README.md").read_text("utf-8")
    assert [patch.name for patch in PATCHES if patch.name not in readme] == []


def test_files_the_package_needs_are_installed() -> None:
    for name in ("flashmoe.h", "models.toml"):
        source = next(path for path in (ROOT / name, ROOT / "native" / name) if path.exists())
        assert (PACKAGE / name).read_bytes() == source.read_bytes()
    assert "MIT" in (LIB / "LICENSE.llama.cpp").read_text("utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("args", ["-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=86;90", "-DA='b c'"])
def test_make_takes_any_cmake_args(args: str, tmp_path: Path) -> None:
    command = ["make", "-f", str(ROOT / "Makefile"), "build/inputs.txt", f"CMAKE_ARGS={args}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert f" CMAKE_ARGS={args} " in (tmp_path / "build" / "inputs.txt").read_text("utf-8")


@dataclass(frozen=True)
class Library:
    """What the dynamic section of a shared library says."""

    soname: str
    needed: frozenset[str]
    rpath: tuple[str, ...]
    symbols: frozenset[str]


def read_library(path: Path) -> Library:
    elffile = pytest.importorskip("elftools.elf.elffile", reason="needs pyelftools")
    with path.open("rb") as file:
        elf = elffile.ELFFile(file)
        tags = list(elf.get_section_by_name(".dynamic").iter_tags())
        symbols = frozenset(
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
        )
    rpaths = [getattr(t, "rpath", getattr(t, "runpath", "")) for t in tags]
    return Library(
        soname=next(t.soname for t in tags if t.entry.d_tag == "DT_SONAME"),
        needed=frozenset(t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"),
        rpath=tuple(part for rpath in rpaths if rpath for part in rpath.split(":")),
        symbols=symbols,
    )


def libraries() -> Iterator[Path]:
    for name in ("stock", "patched"):
        yield from sorted((LIB / name).iterdir())


@linux
def test_both_sets_are_whole(build: dict[str, Any]) -> None:
    sets = {name: {path.name for path in (LIB / name).iterdir()} for name in ("stock", "patched")}
    assert sets["stock"] >= CORE
    assert sets["patched"] == sets["stock"] | {"libflashmoe.so"}
    assert build["libraries"] == {key: sorted(sets["stock"]) for key in sets}
    for path in libraries():
        library = read_library(path)
        assert library.soname == path.name
        # What it needs of llama.cpp lies beside it under exactly that name.
        ours = {n for n in library.needed if n.startswith(("libggml", "libllama", "libflashmoe"))}
        assert ours <= sets[path.parent.name]


@linux
def test_libraries_look_for_each_other_beside_themselves(build: dict[str, Any]) -> None:
    for path in libraries():
        rpath = read_library(path).rpath
        assert rpath[:1] == ("$ORIGIN",), path.name
        if not build["cmake_args"]:  # other backends add their toolkit's folder
            assert rpath == ("$ORIGIN",), path.name


@linux
def test_the_sets_differ_by_what_the_patches_declare() -> None:
    exported = {
        name: frozenset().union(*(read_library(LIB / name / n).symbols for n in CORE))
        for name in ("stock", "patched")
    }
    assert {"llama_decode", "ggml_mul_mat_id", "ggml_backend_cpu_init"} <= exported["stock"]
    added = [
        line[1:]
        for patch in PATCHES
        for line in patch.read_text("utf-8").splitlines()
        if re.match(r"\+ *(LLAMA_API|GGML_BACKEND_API|GGML_API) ", line)
    ]
    declared = {match.group(1) for line in added if (match := re.search(r"(\w+) *\(", line))}
    assert declared
    assert declared <= exported["patched"]
    assert not declared & exported["stock"]
    assert exported["stock"] <= exported["patched"]


@linux
def test_libflashmoe_exports_its_header() -> None:
    header = re.sub(r"/\*.*?\*/", "", (PACKAGE / "flashmoe.h").read_text("utf-8"), flags=re.S)
    declared = set(re.findall(r"\b(fm_\w+)\s*\([^;{]*\)\s*;", header))
    assert declared
    assert declared <= read_library(LIB / "patched" / "libflashmoe.so").symbols


@pytest.mark.parametrize("name", ["stock", "patched"])
def test_the_bindings_load_the_set(name: str) -> None:
    code = (
        "import llama_cpp, sys; llama_cpp.llama_backend_init();"
        "sys.stdout.write(llama_cpp.llama_print_system_info().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(LIB / name)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CPU" in done.stdout

"""The build of both library sets, with a fake CMake: what is redone, and what is not.

The fake "compiles" the tree by writing the text of src/a.c and the flags into each
library, so that a library's content says what it was built from.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import archive
import llama_libraries
from archive import Pin, SourceError
from progress import CommandError
from strict_patch import PatchError

NAMES = ("libggml-base.so", "libggml-cpu.so", "libggml.so", "libllama.so")

FAKE_CMAKE = """\
#!{python}
import pathlib, sys
arguments = sys.argv[1:]
root = pathlib.Path({root!r})
with (root / "calls").open("a") as calls:
    calls.write(arguments[0] + "\\n")
if arguments[0] == "-S":
    build = pathlib.Path(arguments[3])
    (build / "flags").write_text(" ".join(arguments))
    (build / "source").write_text(arguments[1])
else:
    build = pathlib.Path(arguments[1])
    if (root / "break").exists():
        print("[1/2] working")
        print("FAILED: a.o")
        print("a.c:1: error: no")
        sys.exit(1)
    text = (pathlib.Path((build / "source").read_text()) / "src/a.c").read_text()
    (build / "bin").mkdir(exist_ok=True)
    for name in {names!r}:
        (build / "bin" / name).write_text(text + (build / "flags").read_text())
"""


def change(line: int, old: str, new: str, path: str = "src/a.c") -> str:
    """A patch of one line."""
    return f"--- a/{path}\n+++ b/{path}\n@@ -{line} +{line} @@\n-{old}\n+{new}\n"


@dataclass
class Project:
    """A checkout with a pinned archive of three small files."""

    root: Path
    args: tuple[str, ...] = ()
    patches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.work = self.root / "work"
        self.work.mkdir()
        (self.root / "patches").mkdir()
        name = "llama-cpp-python"
        self.pin = Pin(name, "1.0", "")
        tree = {"CMakeLists.txt": "cm\n", "src/a.c": "a1\na2\n", "src/b.c": "b\n", "docs/d": "d"}
        with tarfile.open(self.work / self.pin.file_name, "w:gz") as file:
            for path, text in tree.items():
                member = tarfile.TarInfo(f"{self.pin.root}/{path}")
                member.size = len(text)
                file.addfile(member, io.BytesIO(text.encode()))
        digest = hashlib.sha256((self.work / self.pin.file_name).read_bytes()).hexdigest()
        self.pin = replace(self.pin, sha256=digest)
        self.pin_file = self.root / "pin.txt"
        self.pin_file.write_text(f"# why\n{name}==1.0 --hash=sha256:{digest}\n")
        self.cmake = self.root / "cmake"
        self.cmake.write_text(
            FAKE_CMAKE.format(python=sys.executable, root=str(self.root), names=NAMES)
        )
        self.cmake.chmod(0o755)

    def build(self) -> list[str]:
        """Build with the present patches and args; returns the calls of CMake it took."""
        for old in (self.root / "patches").iterdir():
            old.unlink()
        for name, text in self.patches.items():
            (self.root / "patches" / name).write_text(text)
        calls = self.root / "calls"
        calls.write_text("")
        inputs = llama_libraries.Inputs(
            work=self.work,
            pin_file=self.pin_file,
            patches=tuple(sorted((self.root / "patches").glob("*.patch"))),
            cmake=str(self.cmake),
            generator=("Ninja",),
            compilers=("cc", "c++"),
            compiler_ids=("GNU 1", "GNU 1"),
            build_type="Release",
            args=self.args,
        )
        llama_libraries.build(inputs)
        return calls.read_text().split()

    def library(self, name: str) -> str:
        """The text of a set's libllama."""
        return (self.work / name / "libllama.so").read_text()


ONE_SET = ["-S", "--build"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, patches={"0001.patch": change(1, "a1", "A1")})


def test_two_sets_from_one_tree(project: Project) -> None:
    assert project.build() == 2 * ONE_SET
    assert project.library("stock").startswith("a1\na2\n")
    assert project.library("patched").startswith("A1\na2\n")
    assert sorted(path.name for path in (project.work / "patched").iterdir()) == sorted(NAMES)
    assert not (project.work / "source" / "docs").exists()


def test_a_second_run_does_nothing(project: Project) -> None:
    project.build()
    (project.work / project.pin.file_name).unlink()  # not even the archive is needed
    assert project.build() == []


def test_new_patches_rebuild_the_patched_set_and_restore_what_they_left(project: Project) -> None:
    project.build()
    untouched = project.work / "source" / "src" / "b.c"
    before = untouched.stat().st_mtime_ns
    project.patches = {"0001.patch": change(2, "a2", "A2")}
    assert project.build() == ONE_SET
    assert project.library("stock").startswith("a1\na2\n")
    assert project.library("patched").startswith("a1\nA2\n")
    assert untouched.stat().st_mtime_ns == before

    new_file = "--- /dev/null\n+++ b/src/n.h\n@@ -0,0 +1 @@\n+n\n"
    project.patches = {"0001.patch": new_file}
    assert project.build() == ONE_SET
    assert (project.work / "source/src/n.h").read_text() == "n\n"
    project.patches = {}
    assert project.build() == ONE_SET
    assert not (project.work / "source/src/n.h").exists()
    assert project.library("patched") == project.library("stock")


def test_patches_apply_in_name_order(project: Project) -> None:
    project.patches = {"0002.patch": change(1, "A1", "AA"), "0001.patch": change(1, "a1", "A1")}
    project.build()
    assert project.library("patched").startswith("AA\n")


def test_new_flags_rebuild_both_sets_from_the_right_sources(project: Project) -> None:
    project.build()
    project.args = ("-DGGML_CUDA=ON", "-DBUILD_SHARED_LIBS=OFF")
    assert project.build() == 2 * ONE_SET
    assert project.library("stock").startswith("a1\n")
    flags = project.library("patched")
    assert "-DGGML_CUDA=ON" in flags
    # What the package's layout relies on comes last and wins.
    assert flags.index("-DBUILD_SHARED_LIBS=OFF") < flags.index("-DBUILD_SHARED_LIBS=ON")
    assert json.loads((project.work / "build.json").read_text())["cmake_args"] == list(project.args)


def test_a_changed_compiler_flag_variable_counts(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CFLAGS", raising=False)
    project.build()
    monkeypatch.setenv("CFLAGS", "-g")
    assert project.build() == 2 * ONE_SET


def test_a_failed_compile_is_shown_and_recovered(project: Project) -> None:
    project.build()
    (project.root / "break").touch()
    project.patches = {"0001.patch": change(2, "a2", "A2")}
    with pytest.raises(CommandError) as caught:
        project.build()
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["FAILED: a.o", "a.c:1: error: no"]
    assert "patched-compile.log" in lines[-1]

    project.args = ("-DX=1",)  # stock has to be built again: from pristine sources
    with pytest.raises(CommandError):
        project.build()
    (project.root / "break").unlink()
    assert project.build() == 2 * ONE_SET
    assert project.library("stock").startswith("a1\na2\n")
    assert project.library("patched").startswith("a1\nA2\n")


def test_a_run_killed_between_two_writes_is_completed(project: Project) -> None:
    project.patches["0002.patch"] = change(1, "b", "B", "src/b.c")
    project.build()
    source = project.work / "source" / "src"
    (source / "a.c").write_text("hal")  # a torn write; the record names the file
    (project.work / "patched.key").unlink()
    assert project.build() == ONE_SET
    assert (source / "a.c").read_text() == "A1\na2\n"
    assert (source / "b.c").read_text() == "B\n"


def test_a_killed_unpack_is_repeated(project: Project) -> None:
    part = project.work / "source.part"
    part.mkdir()
    (part / "stale").touch()
    project.build()
    assert not part.exists()
    assert not (project.work / "source" / "stale").exists()


def test_a_patch_that_does_not_apply_stops_before_compiling(project: Project) -> None:
    project.patches["0002.patch"] = change(2, "other", "A2")
    with pytest.raises(PatchError, match=r"0002\.patch: hunk 1 .* does not apply to src/a\.c"):
        project.build()
    assert (project.root / "calls").read_text() == ""


def test_backends_as_plugins_are_refused(project: Project) -> None:
    project.args = ("-DGGML_BACKEND_DL:BOOL=on",)
    with pytest.raises(llama_libraries.BuildError, match="GGML_BACKEND_DL:BOOL=on is not supp"):
        project.build()
    project.args = ("-DGGML_BACKEND_DL=OFF",)
    assert project.build() == 2 * ONE_SET


def test_a_missing_library_is_an_error(project: Project) -> None:
    text = project.cmake.read_text().replace("'libggml-cpu.so', ", "")
    project.cmake.write_text(text)
    with pytest.raises(llama_libraries.BuildError, match="made no libggml-cpu"):
        project.build()


def test_an_archive_with_another_hash_is_not_used(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.work / project.pin.file_name).write_bytes(b"damaged")

    def download(pin: Pin, pin_file: Path, folder: Path) -> None:
        (folder / pin.file_name).write_bytes(b"also wrong")

    monkeypatch.setattr(archive, "_pip_download", download)
    with pytest.raises(SourceError, match=r"sha256 is not the one in pin\.txt"):
        project.build()


@pytest.mark.parametrize("text", ["", "a==1\n", "a==1 --hash=sha256:12\n", "a==1\nb==2\n"])
def test_a_pin_without_a_hash_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pin.txt").write_text(text)
    with pytest.raises(SourceError, match="expected one line"):
        archive.read_pin(tmp_path / "pin.txt")


def test_patches_sha256_is_that_of_sha256sum(tmp_path: Path) -> None:
    lines = ""
    for name in ("b.patch", "a.patch"):
        (tmp_path / name).write_text(name)
        lines = f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" + lines
    expected = hashlib.sha256(lines.encode()).hexdigest()
    assert archive.patches_sha256(tmp_path.glob("*.patch")) == expected

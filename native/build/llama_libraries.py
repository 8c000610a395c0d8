"""Builds llama.cpp's shared libraries twice from one tree: as released, and patched.

Called by native/CMakeLists.txt. Everything happens in one work folder:

    ARCHIVE.tar.gz   the pinned source archive
    source/          llama.cpp, pristine or patched
    build/           its CMake build; the second library set rebuilds only what changed
    stock/ patched/  the finished library sets, each with the key it was built for
    build.json       what they were built from

A set whose key (archive, flags, compilers, patches) is unchanged is left alone, so a
second run takes no time; new patches rebuild the patched set only; new flags rebuild
all. Nothing is trusted from an interrupted run except what its key vouches for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import archive as archives
import progress
import strict_patch

# Bump when this script changes what a library set contains.
_RECIPE = 1

# Variables that CMake or a compiler reads without being told.
_ENVIRONMENT = (
    *("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"),
    *("CUDACXX", "CUDAFLAGS", "CUDAARCHS", "CUDAHOSTCXX", "HIPCXX", "HIPFLAGS"),
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"),
    *("ARCHFLAGS", "SDKROOT", "MACOSX_DEPLOYMENT_TARGET"),
)

_TOOLKIT_RPATH = Path(__file__).parent.parent / "cmake" / "toolkit_rpath.cmake"

# After the user's CMAKE_ARGS, so that they win: what the package's layout relies on.
# One file name per library (no .so.0 links): wheels cannot hold symbolic links.
_FORCED = (
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_PLATFORM_NO_VERSIONED_SONAME=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
    # Only adds folders outside the build, such as a backend's.
    "-DCMAKE_INSTALL_RPATH_USE_LINK_PATH=ON",
    f"-DCMAKE_PROJECT_INCLUDE={_TOOLKIT_RPATH}",
    "-DLLAMA_USE_SYSTEM_GGML=OFF",
    "-DLLAMA_OPENSSL=OFF",
    *(
        f"-DLLAMA_BUILD_{part}=OFF"
        for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "MTMD")
    ),
)
_REFUSED = {
    "GGML_BACKEND_DL": "the compute hook lives in the CPU backend, which must be linked",
    "GGML_STATIC": "the two library sets are shared libraries",
}
_SUFFIXES = (".so", ".dylib")


class BuildError(Exception):
    """The build cannot go on; the message says what to change."""


@dataclass(frozen=True)
class Inputs:
    """Where things are and what they are built with."""

    work: Path
    pin_file: Path
    patches: tuple[Path, ...]
    cmake: str
    generator: tuple[str, ...]
    compilers: tuple[str, ...]
    compiler_ids: tuple[str, ...]
    build_type: str
    args: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """All -D arguments of llama.cpp's configure, the user's between ours."""
        return [
            f"-DCMAKE_BUILD_TYPE={self.build_type}",
            *(
                f"-DCMAKE_{language}_COMPILER={path}"
                for language, path in zip(("C", "CXX"), self.compilers, strict=True)
            ),
            *self.args,
            *_FORCED,
        ]


def build(inputs: Inputs) -> None:
    """Make ``stock/``, ``patched/`` and ``build.json`` match the inputs, doing the least."""
    _refuse(inputs.args)
    pin = archives.read_pin(inputs.pin_file)
    patches_hash = archives.patches_sha256(inputs.patches)
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    flags_key = _key(
        *(_RECIPE, pin.sha256, inputs.flags, _TOOLKIT_RPATH.read_text("utf-8")),
        *(inputs.compiler_ids, inputs.generator[0], environment),
    )
    stock_key = _key(flags_key, "stock")
    patched_key = _key(flags_key, patches_hash)
    work = inputs.work
    work.mkdir(parents=True, exist_ok=True)

    stock_ready = _has_key(work / "stock", stock_key)
    patched_ready = _has_key(work / "patched", patched_key)
    if stock_ready and patched_ready:
        progress.say("llama.cpp libraries, stock and patched: up to date")
    else:
        _build_sets(inputs, pin, flags_key, "" if stock_ready else stock_key, patched_key)
    _write_build_json(inputs, pin, patches_hash)


def _build_sets(
    inputs: Inputs, pin: archives.Pin, flags_key: str, stock_key: str, patched_key: str
) -> None:
    """Build the patched set and, if ``stock_key`` is not empty, the stock set before it."""
    work, source = inputs.work, inputs.work / "source"
    progress.say(f"source archive {pin.file_name} ...")
    archive = archives.fetch(pin, inputs.pin_file, work)
    # Before anything is compiled: a patch that does not apply should cost seconds.
    patched = archives.patched_files(archive, pin, inputs.patches)

    record = work / "touched.json"
    if not _has_key(source, pin.sha256):
        progress.say("unpacking llama.cpp ...")
        shutil.rmtree(work / "build", ignore_errors=True)
        record.unlink(missing_ok=True)
        archives.unpack(archive, pin, source)
        _set_key(source, pin.sha256)

    build_folder = work / "build"
    if not _has_key(build_folder, flags_key):
        shutil.rmtree(build_folder, ignore_errors=True)
        build_folder.mkdir()
        _set_key(build_folder, flags_key)

    if stock_key:
        archives.set_files(archive, pin, source, record, {})
        _compile(inputs, "stock", stock_key)
    names = ", ".join(patch.name for patch in inputs.patches)
    progress.say(f"applying {names or 'no patches'}: {len(patched)} files")
    archives.set_files(archive, pin, source, record, patched)
    _compile(inputs, "patched", patched_key)


def _compile(inputs: Inputs, name: str, key: str) -> None:
    """Configure and build the tree as it stands; copy its libraries to ``work/name``."""
    work, build_folder, target = inputs.work, inputs.work / "build", inputs.work / name
    # Sources lie inside the user's checkout: its git commit is not llama.cpp's.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(work), "NINJA_STATUS": "[%f/%t] "}
    configure = [inputs.cmake, "-S", str(work / "source"), "-B", str(build_folder)]
    configure += ["-G", *inputs.generator, *inputs.flags]
    compile_ = [inputs.cmake, "--build", str(build_folder), "--target", "llama"]
    compile_ += ["--config", inputs.build_type]
    progress.run(f"{name} libraries: configure", configure, work / f"{name}-configure.log", env)
    progress.run(f"{name} libraries: compile", compile_, work / f"{name}-compile.log", env)

    libraries = sorted(
        path for path in (build_folder / "bin").iterdir() if path.suffix in _SUFFIXES
    )
    for stem in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
        if stem not in {path.stem for path in libraries}:
            raise BuildError(f"llama.cpp's build made no {stem}; see {work}/{name}-*.log")
    target.mkdir(exist_ok=True)
    _key_file(target).unlink(missing_ok=True)
    for path in target.iterdir():
        if path.name not in {library.name for library in libraries}:
            path.unlink()
    for library in libraries:
        shutil.copy2(library, target / library.name)  # keeps the time: nothing relinks for it
    _set_key(target, key)
    progress.say(f"{name} libraries: {', '.join(library.name for library in libraries)}")


def _write_build_json(inputs: Inputs, pin: archives.Pin, patches_hash: str) -> None:
    description = {
        "archive": {"name": pin.name, "version": pin.version, "sha256": pin.sha256},
        "patches": {
            "names": [patch.name for patch in inputs.patches],
            "sha256": patches_hash,
        },
        "cmake_args": list(inputs.args),
        "build_type": inputs.build_type,
        "compilers": dict(zip(("c", "cxx"), inputs.compiler_ids, strict=True)),
        "system": f"{platform.system()} {platform.machine()}",
        "libraries": {
            name: sorted(path.name for path in (inputs.work / name).iterdir())
            for name in ("stock", "patched")
        },
    }
    text = json.dumps(description, indent=1) + "\n"
    path = inputs.work / "build.json"
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def _refuse(args: tuple[str, ...]) -> None:
    for arg in args:
        name, _, value = arg.removeprefix("-D").partition("=")
        name = name.partition(":")[0]
        if name in _REFUSED and value.upper() not in ("", "0", "OFF", "NO", "FALSE"):
            raise BuildError(f"{arg} is not supported: {_REFUSED[name]}")


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _key_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".key")


def _has_key(folder: Path, key: str) -> bool:
    file = _key_file(folder)
    return folder.is_dir() and file.is_file() and file.read_text("utf-8") == key


def _set_key(folder: Path, key: str) -> None:
    _key_file(folder).write_text(key, "utf-8")


def main() -> int:
    """Read the arguments that CMake passes; one error text and status 1 on failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pin", type=Path, required=True)
    parser.add_argument("--patches", type=Path, required=True, help="folder of *.patch")
    parser.add_argument("--cmake", required=True)
    parser.add_argument("--generator", required=True)
    parser.add_argument("--make-program", default="")
    parser.add_argument("--compilers", nargs=2, required=True, metavar=("CC", "CXX"))
    parser.add_argument("--compiler-ids", nargs=2, required=True)
    parser.add_argument("--build-type", required=True)
    parser.add_argument("--args-file", type=Path, required=True, help="one CMake argument a line")
    options = parser.parse_args()
    generator = [options.generator]
    if options.make_program:
        generator.append(f"-DCMAKE_MAKE_PROGRAM={options.make_program}")
    inputs = Inputs(
        work=options.work,
        pin_file=options.pin,
        patches=tuple(sorted(options.patches.glob("*.patch"))),
        cmake=options.cmake,
        generator=tuple(generator),
        compilers=tuple(options.compilers),
        compiler_ids=tuple(options.compiler_ids),
        build_type=options.build_type,
        args=tuple(line for line in options.args_file.read_text("utf-8").splitlines() if line),
    )
    try:
        build(inputs)
    except (
        BuildError,
        archives.SourceError,
        progress.CommandError,
        strict_patch.PatchError,
    ) as error:
        print(f"{progress.MARK} error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

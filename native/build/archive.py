"""llama.cpp's sources: from the pinned archive to a tree in the state a build needs.

Owns: fetching the source archive of llama-cpp-python (by name, version and sha256,
with pip), unpacking the part that is built, and moving the tree between its pristine
and its patched state by rewriting only the files that differ. Leaves to others: what
a patch says (strict_patch) and what is built (llama_libraries).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import strict_patch

# Parts of llama.cpp that no library target reads (two thirds of its size), and a link to a
# git repository that is not there.
_NOT_UNPACKED = {".git", "benches", "docs", "media", "models"}
_PIN = re.compile(r"^([\w-]+)==([\w.]+) --hash=sha256:([0-9a-f]{64})$")


class SourceError(Exception):
    """The archive cannot be fetched, is not the pinned one, or its tree is not as expected."""


@dataclass(frozen=True)
class Pin:
    """Name, version and sha256 (hex) of the source archive."""

    name: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """The archive's file name."""
        return f"{self.name.replace('-', '_')}-{self.version}.tar.gz"

    @property
    def root(self) -> str:
        """llama.cpp's folder inside the archive."""
        return f"{self.file_name.removesuffix('.tar.gz')}/vendor/llama.cpp"


def read_pin(path: Path) -> Pin:
    """Read a one-requirement pip requirements file with a hash."""
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    pins = [line for line in lines if line and not line.startswith("#")]
    match = _PIN.match(pins[0]) if len(pins) == 1 else None
    if match is None:
        raise SourceError(f"{path}: expected one line: name==version --hash=sha256:...")
    return Pin(*match.groups())


def fetch(pin: Pin, pin_file: Path, folder: Path) -> Path:
    """The verified archive in ``folder``, downloaded with pip unless it is there already."""
    archive = folder / pin.file_name
    if not archive.exists() or _sha256(archive) != pin.sha256:
        archive.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _pip_download(pin, pin_file, Path(temporary))
            os.replace(Path(temporary) / pin.file_name, archive)
        if _sha256(archive) != pin.sha256:
            raise SourceError(f"{archive}: sha256 is not the one in {pin_file.name}")
    return archive


def _pip_download(pin: Pin, pin_file: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--no-deps", "--no-binary", ":all:", "--require-hashes"]
    # The bindings' own build backend is in this environment, so reading their metadata
    # needs no second isolated environment (20 s).
    command += ["--no-build-isolation", "--dest", str(folder), "-r", str(pin_file)]
    # An outer pip's tracker would take the archive for its own.
    env = {key: value for key, value in os.environ.items() if key != "PIP_BUILD_TRACKER"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not (folder / pin.file_name).exists():
        raise SourceError(
            f"{done.stdout}{done.stderr}\ncannot fetch {pin.file_name} with pip (see above); "
            "without a network, put the file in a folder and set PIP_FIND_LINKS to it"
        )


def unpack(archive: Path, pin: Pin, source: Path) -> None:
    """Unpack llama.cpp to ``source``: whole or, when interrupted, not at all."""
    temporary = source.with_name(source.name + ".part")
    for old in (temporary, source):
        if old.exists():
            shutil.rmtree(old)
    with tarfile.open(archive) as file:
        for member in file:
            path = _inside(member.name, pin)
            if path is None or path.parts[:1] in {(name,) for name in _NOT_UNPACKED}:
                continue
            member.name = str(path)
            if hasattr(tarfile, "data_filter"):
                file.extract(member, temporary, filter="data")
            elif member.isfile() or member.isdir():  # Python without extraction filters
                file.extract(member, temporary)
    if not (temporary / "CMakeLists.txt").exists():
        raise SourceError(f"{archive.name} has no {pin.root}/CMakeLists.txt")
    os.replace(temporary, source)


def patched_files(archive: Path, pin: Pin, patches: Iterable[Path]) -> dict[str, bytes]:
    """The text of every file that ``patches``, applied in name order, change or create.

    Raises PatchError naming patch, file and hunk.
    """
    parsed = {
        patch.name: strict_patch.parse(patch.read_bytes(), patch.name)
        for patch in sorted(patches, key=lambda patch: patch.name)
    }
    texts = _pristine(archive, pin, {file.path for files in parsed.values() for file in files})
    for name, files in parsed.items():
        for file in files:
            texts[file.path] = strict_patch.apply(texts[file.path], file, name)
    return {path: text for path, text in texts.items() if text is not None}


def set_files(
    archive: Path, pin: Pin, source: Path, record: Path, wanted: Mapping[str, bytes]
) -> None:
    """Bring ``source`` to "pristine, but these files have these texts".

    ``record`` lists every file that may differ from the archive. It is extended before
    the first write, so an interrupted call is completed by the next one. A file that
    already has the right text is not touched: the build sees no change in it.
    """
    touched = set(json.loads(record.read_text("utf-8"))) if record.exists() else set()
    touched |= wanted.keys()
    _write_record(record, touched)
    for path, pristine in _pristine(archive, pin, touched).items():
        target = source / path
        text = wanted.get(path, pristine)
        if text is None:
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
    _write_record(record, set(wanted))


def patches_sha256(patches: Iterable[Path]) -> str:
    """One hash for a patch set: ``cd patches && sha256sum *.patch | sha256sum``."""
    total = hashlib.sha256()
    for patch in sorted(patches, key=lambda patch: patch.name):
        total.update(f"{_sha256(patch)}  {patch.name}\n".encode())
    return total.hexdigest()


def _write_record(record: Path, paths: set[str]) -> None:
    temporary = record.with_name(record.name + ".part")
    temporary.write_text(json.dumps(sorted(paths)), "utf-8")
    os.replace(temporary, record)


def _pristine(archive: Path, pin: Pin, paths: set[str]) -> dict[str, bytes | None]:
    """The archive's text of each path; None where the archive has no such file."""
    texts: dict[str, bytes | None] = dict.fromkeys(paths)
    if paths:
        with tarfile.open(archive) as file:
            for member in file:
                path = _inside(member.name, pin)
                if path is not None and str(path) in texts:
                    data = file.extractfile(member)
                    texts[str(path)] = data.read() if data else None
    return texts


def _inside(name: str, pin: Pin) -> PurePosixPath | None:
    path = PurePosixPath(name)
    return path.relative_to(pin.root) if path.is_relative_to(pin.root) else None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()

"""Downloads of known models from the Hugging Face hub, through huggingface_hub.

huggingface_hub finds files, follows redirects, retries and authenticates (its own login and
HF_ENDPOINT count). It keeps no partial file when a download is stopped, so that part is here:
NAME.<start of its checksum>.part grows beside the final name, is continued by the next pull, and
takes the final name only when its SHA-256 is the one that the hub gives. Files beyond 50 GB are the
exception: the hub gives those through hf_xet alone, which starts them anew when stopped.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from flashmoe_gguf.errors import FlashMoEError, HubError
from flashmoe_gguf.models import Hub

_SPARE_BYTES = 64 << 20
_HASH_BYTES = 4 << 20
_XET_PARTS = Path(".cache/huggingface/download")  # of huggingface_hub, inside the folder
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub at a fixed revision (a commit), with its SHA-256 in hex."""

    repository: str
    revision: str
    path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def find_files(hub: Hub) -> list[RemoteFile]:
    """The files of a model, sorted, all at the commit that `hub.revision` or main is now.

    Raises HubError when the hub cannot be reached, has no such files, or lacks a shard.
    """
    library = _library()
    with _translated(hub.repository):
        info = library.HfApi().model_info(
            hub.repository, revision=hub.revision, files_metadata=True
        )
    found = [
        RemoteFile(hub.repository, info.sha, s.rfilename, s.lfs.size, s.lfs.sha256)
        for s in info.siblings or []
        if s.lfs is not None and fnmatch.fnmatchcase(s.rfilename, hub.pattern)
    ]
    if not found:
        raise HubError(
            f"{hub.repository} has no file {hub.pattern}",
            "the repository has changed since this version; look for the file with a browser",
        )
    found.sort(key=lambda file: file.path)
    _check_shards(found)
    return found


def _check_shards(files: list[RemoteFile]) -> None:
    numbers = [match for file in files if (match := _SHARD.search(file.name))]
    if not numbers:
        if len(files) > 1:
            raise HubError(
                f"{files[0].repository}: {len(files)} files match, and are no shards of one model",
                "the pattern in models.toml is too wide",
            )
        return
    wanted = range(1, int(numbers[0][2]) + 1)
    missing = set(wanted) - {int(match[1]) for match in numbers}
    if missing or len(files) != len(wanted):
        raise HubError(
            f"{files[0].repository}: shard {min(missing, default=0)} of {len(wanted)} is missing",
            "the repository is incomplete; try again later",
        )


def download(files: list[RemoteFile], folder: Path) -> list[Path]:
    """Downloads into `folder`, continuing what an earlier call has left; returns the final paths.

    A file that is there already is checked and kept. Every file's SHA-256 is compared before it
    gets its name; `bytes_here` tells how far it is. Raises HubError when there is not enough room,
    when the hub fails for good, and for a file that is not what the hub says: one that just came
    is deleted then, one that was there is not.
    """
    library = _library()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(files, folder)
        return [_download_one(library, file, folder) for file in files]
    except OSError as error:
        words = error.strerror or str(error)
        raise HubError(
            f"{folder}: {words}", "check the folder; pull goes on where it was"
        ) from error


def part_path(file: RemoteFile, folder: Path) -> Path:
    """Where a file grows. Its name holds the checksum: parts of another revision never mix in."""
    return folder / f"{file.name}.{file.sha256[:12]}.part"


def bytes_here(files: list[RemoteFile], folder: Path) -> int:
    """How much of the files is in `folder` already, whole or in part; for progress and room."""
    total = sum(_size(part) for part in (folder / _XET_PARTS).rglob("*.incomplete"))
    for file in files:
        sizes = [_size(folder / file.name), _size(part_path(file, folder))]
        total += min(max(sizes), file.size_bytes)
    return total


def _check_room(files: list[RemoteFile], folder: Path) -> None:
    needed = sum(file.size_bytes for file in files) - bytes_here(files, folder)
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE_BYTES > free:
        raise HubError(
            f"{folder}: {needed / 1e9:.1f} GB are still to come, and {free / 1e9:.1f} GB are free",
            "free some space, or choose another folder with -o",
        )


def _download_one(library: Any, file: RemoteFile, folder: Path) -> Path:
    final, part = folder / file.name, part_path(file, folder)
    if final.exists():
        if not _is(final, file):
            raise HubError(
                f"{final} is there, and is not the file that the hub has",
                "move it away, or choose another folder with -o",
            )
        return final
    if file.size_bytes > library.constants.MAX_HTTP_DOWNLOAD_SIZE:
        _fetch_by_xet(library, file, folder).replace(part)
    else:
        _fetch(library, file, part)
    if not _is(part, file):
        part.unlink()
        raise HubError(
            f"{file.name} came damaged: its SHA-256 is not the one that the hub gives",
            "it was deleted; pull again, over another network if this happens twice",
        )
    part.replace(final)
    return final


def _is(path: Path, file: RemoteFile) -> bool:
    return _size(path) == file.size_bytes and _sha256(path) == file.sha256


def _fetch(library: Any, file: RemoteFile, part: Path) -> None:
    with _locked(part) as stream:
        if _size(part) > file.size_bytes:
            stream.truncate(0)
        stream.seek(0, os.SEEK_END)
        with _translated(file.repository):
            library.file_download.http_get(
                library.hf_hub_url(file.repository, file.path, revision=file.revision),
                stream,
                resume_size=stream.tell(),
                headers=library.utils.build_hf_headers(),
                expected_size=file.size_bytes,
            )
        stream.flush()
        os.fsync(stream.fileno())


def _fetch_by_xet(library: Any, file: RemoteFile, folder: Path) -> Path:
    with _translated(file.repository):
        try:
            path = library.hf_hub_download(
                file.repository, file.path, revision=file.revision, local_dir=folder
            )
        except ValueError as error:
            raise HubError(
                f"{file.name} is too large for a plain download", "install it: pip install hf_xet"
            ) from error
    return Path(path)


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """The part, open at its end, and nobody else's meanwhile."""
    with part.open("a+b") as stream:
        try:
            import fcntl
        except ImportError:  # Windows: two pulls at once would damage the part, which is noticed
            yield stream
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(
                f"{part.name}: another pull is at it", "wait for it, or stop it first"
            ) from None
        yield stream


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _library() -> Any:
    """huggingface_hub, quiet: progress and errors are told in our words."""
    try:
        library = importlib.import_module("huggingface_hub")
    except ImportError:
        raise HubError(
            "huggingface_hub is not installed",
            "install it: pip install 'flashmoe-gguf[hub]'; or download the file with a browser",
        ) from None
    importlib.import_module("huggingface_hub.file_download")
    importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return library


@contextmanager
def _translated(repository: str) -> Iterator[None]:
    """Errors of the library and the network as HubError."""
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except FlashMoEError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"{repository} asks for a licence to be accepted first",
            "accept it on its page, then log in: hf auth login",
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise HubError(
            f"{repository} is not on the hub, or not at this revision",
            "the repository has changed since this version; look for the model with a browser",
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise HubError(
            f"the hub answered {status} for {repository}", "try again later; pull goes on"
        ) from error
    except (errors.HTTPError, OSError) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise HubError(
            f"the hub cannot be reached: {words}", "check the network; pull goes on where it was"
        ) from error

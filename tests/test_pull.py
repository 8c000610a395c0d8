"""`flashmoe pull` against a stand-in for the hub: whole, stopped, damaged and refused downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_tools import assert_error, command, flashmoe
from flashmoe_gguf import hub as hub_module
from flashmoe_gguf import models
from flashmoe_gguf.errors import HubError
from flashmoe_gguf.hub import bytes_here, download, find_files, part_path
from flashmoe_gguf.models import Hub, find_model
from hub_stand_in import COMMIT, HubStandIn

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

REPOSITORY = "someone/tiny-GGUF"
ONE = Hub(REPOSITORY, "tiny.gguf", "Q4_K_M", "https://example.org", size_bytes=1)
SHARDS = replace(ONE, pattern="Q4_K_M/tiny-*-of-00002.gguf")
DATA = bytes(range(256)) * 400
FILES = {
    "tiny.gguf": DATA,
    "Q4_K_M/tiny-00002-of-00002.gguf": DATA[:5000],
    "Q4_K_M/tiny-00001-of-00002.gguf": DATA[100:9000],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The stand-in, which huggingface_hub takes for the hub."""
    from huggingface_hub import constants, file_download

    with HubStandIn(REPOSITORY, dict(FILES)) as server:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        no_wait = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        monkeypatch.setattr(file_download, "time", no_wait)
        yield server


def test_a_file(hub: HubStandIn, tmp_path: Path) -> None:
    [file] = find_files(ONE)
    assert (file.name, file.size_bytes, file.revision) == ("tiny.gguf", len(DATA), COMMIT)
    assert download([file], tmp_path / "new" / "folder") == [tmp_path / "new/folder/tiny.gguf"]
    assert (tmp_path / "new/folder/tiny.gguf").read_bytes() == DATA
    assert os.listdir(tmp_path / "new/folder") == ["tiny.gguf"]
    assert hub.bytes_asked() == [None]


def test_shards_come_in_order_into_one_folder(hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(SHARDS)
    assert bytes_here(files, tmp_path) == 0
    first, second = download(files, tmp_path)
    assert (first.name, second.name) == ("tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf")
    assert first.read_bytes() == DATA[100:9000] and second.read_bytes() == DATA[:5000]
    assert first.parent == second.parent == tmp_path
    assert bytes_here(files, tmp_path) == 8900 + 5000


def test_what_is_there_is_checked_and_kept(hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(ONE)
    [path] = download(files, tmp_path)
    before = path.stat()
    download(files, tmp_path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert len(hub.bytes_asked()) == 1
    path.write_bytes(DATA[:-1] + b"x")  # the same length
    with pytest.raises(HubError, match=r"tiny\.gguf is there, and is not the file"):
        download(files, tmp_path)
    assert path.read_bytes().endswith(b"x")  # it may be somebody's


@pytest.mark.parametrize("n", [1, 50_000, len(DATA) - 1, len(DATA)])
def test_a_part_is_continued(n: int, hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(ONE)
    part_path(files[0], tmp_path).write_bytes(DATA[:n])
    assert bytes_here(files, tmp_path) == n
    [path] = download(files, tmp_path)
    assert path.read_bytes() == DATA
    assert os.listdir(tmp_path) == ["tiny.gguf"]
    assert hub.bytes_asked() == ([f"bytes={n}-"] if n < len(DATA) else [])


def test_a_server_without_ranges_starts_anew(hub: HubStandIn, tmp_path: Path) -> None:
    hub.ranges = False
    files = find_files(ONE)
    part_path(files[0], tmp_path).write_bytes(DATA[:1000])
    [path] = download(files, tmp_path)
    assert path.read_bytes() == DATA


def test_a_part_that_is_too_long_starts_anew(hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(ONE)
    part_path(files[0], tmp_path).write_bytes(DATA + b"more")
    [path] = download(files, tmp_path)
    assert path.read_bytes() == DATA and hub.bytes_asked() == [None]


def test_a_connection_that_is_cut_goes_on(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_at = 60_000
    [path] = download(find_files(ONE), tmp_path)
    assert path.read_bytes() == DATA
    assert hub.bytes_asked() == [None, "bytes=60000-"]


def test_a_connection_that_is_cut_again_and_again_keeps_its_part(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cut_at = 60_000  # less than the library writes at once, so that no try gets on
    with pytest.raises(HubError, match="the hub cannot be reached") as caught:
        download(find_files(ONE), tmp_path)
    assert "goes on where it was" in caught.value.hint
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]


def test_a_download_that_was_killed_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process of its own, killed in the middle of a body; the next asks for the rest only."""
    from huggingface_hub import constants

    chunk = constants.DOWNLOAD_CHUNK_SIZE  # what the library writes at once
    name = find_model("olmoe-1b-7b").hub
    data = os.urandom(1 << 20) * (chunk // (1 << 20) + 2)
    with HubStandIn(name.repository, {name.pattern: data}, stall_at=chunk + 1000) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        arguments = command("pull", "olmoe-1b-7b", "-o", tmp_path / "models")
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                assert hub.stalled.wait(60)
                [part] = _wait_for_part(tmp_path / "models", chunk)
            finally:
                child.kill()
        hub.stall_at = None
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    final = tmp_path / "models" / name.pattern
    assert done.stdout == f"{final}\n"
    assert "10 MiB of it here already" in done.stderr
    assert "SHA-256 as on the hub" in done.stderr
    assert final.read_bytes() == data
    assert hub.bytes_asked() == [None, f"bytes={chunk}-"]
    assert not part.exists()


def _wait_for_part(folder: Path, size: int) -> list[Path]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        parts = list(folder.glob("*.part"))
        if parts and parts[0].stat().st_size >= size:
            return parts
        time.sleep(0.01)
    raise AssertionError("no part appeared")


def test_a_damaged_file_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    hub.damage = lambda data: data[:777] + b"!" + data[778:]
    files = find_files(ONE)
    with pytest.raises(HubError, match=r"tiny\.gguf came damaged: its SHA-256"):
        download(files, tmp_path)
    assert os.listdir(tmp_path) == []
    hub.damage = None
    [path] = download(files, tmp_path)
    assert path.read_bytes() == DATA


def test_a_damaged_part_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(ONE)
    part_path(files[0], tmp_path).write_bytes(b"?" * 1000)
    with pytest.raises(HubError, match="came damaged"):
        download(files, tmp_path)
    assert os.listdir(tmp_path) == []


def test_room_is_looked_at_first(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare = hub_module._SPARE_BYTES
    files = find_files(ONE)
    free = [len(DATA) + spare - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    with pytest.raises(HubError, match=r"GB are still to come, and .* are free"):
        download(files, tmp_path)
    assert hub.bytes_asked() == []
    part_path(files[0], tmp_path).write_bytes(DATA[:1])  # what is here needs no room
    download(files, tmp_path)
    free[0] = 0
    download(files, tmp_path)  # nothing is to come


def test_two_pulls_at_once(hub: HubStandIn, tmp_path: Path) -> None:
    files = find_files(ONE)
    with (
        hub_module._locked(part_path(files[0], tmp_path)),
        pytest.raises(HubError, match="another pull is at it"),
    ):
        download(files, tmp_path)


def test_a_very_large_file_comes_through_the_library(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only hf_xet gets those, and only from the hub itself: the library's own call is replaced."""
    monkeypatch.setattr(huggingface_hub.constants, "MAX_HTTP_DOWNLOAD_SIZE", 1000)
    asked = []

    def fetch(repository: str, path: str, *, revision: str, local_dir: Path) -> str:
        asked.append((repository, path, revision))
        (local_dir / "sub").mkdir()
        (local_dir / "sub" / path).write_bytes(DATA)
        return str(local_dir / "sub" / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    [path] = download(find_files(ONE), tmp_path)
    assert path == tmp_path / "tiny.gguf" and path.read_bytes() == DATA
    assert asked == [(REPOSITORY, "tiny.gguf", COMMIT)]

    def refuse(*arguments: Any, **more: Any) -> str:
        raise ValueError("The file is too large to be downloaded using the regular method")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    path.unlink()
    with pytest.raises(HubError, match="too large for a plain download") as caught:
        download(find_files(ONE), tmp_path)
    assert "hf_xet" in caught.value.hint


@pytest.mark.parametrize(
    ("hub_entry", "message"),
    [
        (replace(ONE, pattern="huge.gguf"), r"has no file huge\.gguf"),
        (replace(ONE, pattern="*.gguf"), "shard 2 of 2 is missing|3 files match|is missing"),
        (replace(ONE, repository="someone/else"), "someone/else is not on the hub"),
        (replace(ONE, revision="f" * 40), "not on the hub, or not at this revision"),
    ],
)
def test_what_the_hub_does_not_have(hub_entry: Hub, message: str, hub: HubStandIn) -> None:
    with pytest.raises(HubError, match=message):
        find_files(hub_entry)


def test_a_missing_shard(hub: HubStandIn) -> None:
    del hub.files["Q4_K_M/tiny-00001-of-00002.gguf"]
    with pytest.raises(HubError, match="shard 1 of 2 is missing"):
        find_files(SHARDS)


def test_files_that_are_no_shards(hub: HubStandIn) -> None:
    hub.files["tinx.gguf"] = b"x"
    with pytest.raises(HubError, match="2 files match, and are no shards"):
        find_files(replace(ONE, pattern="tin?.gguf"))


def test_an_error_of_the_hub_s(hub: HubStandIn, tmp_path: Path) -> None:
    hub.status = 403
    with pytest.raises(HubError, match="the hub answered 403"):
        find_files(ONE)


def test_no_network(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nobody answers
    with pytest.raises(HubError, match="the hub cannot be reached"):
        find_files(ONE)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="huggingface_hub is not installed") as caught:
        find_files(ONE)
    assert "flashmoe-gguf[hub]" in caught.value.hint


def test_the_command(hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(find_model("olmoe-1b-7b"), name="tiny", title="Tiny", hub=SHARDS)
    monkeypatch.setattr(models, "find_model", lambda name: tiny)
    result = flashmoe("pull", "tiny", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path / 'tiny-00001-of-00002.gguf'}\n"
    assert result.stderr == (
        "Tiny: 2 files, 13.6 KiB, from someone/tiny-GGUF at 0123456789ab\n"
        "tiny-00001-of-00002.gguf: SHA-256 as on the hub, and so 1 more shard\n"
    )


def test_ctrl_c_says_what_is_there(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(files: list[hub_module.RemoteFile], folder: Path) -> list[Path]:
        part_path(files[0], folder).write_bytes(DATA[:2048])
        raise KeyboardInterrupt

    tiny = replace(find_model("olmoe-1b-7b"), name="tiny", title="Tiny", hub=ONE)
    monkeypatch.setattr(models, "find_model", lambda name: tiny)
    monkeypatch.setattr(hub_module, "download", stop)
    result = flashmoe("pull", "tiny", "-o", tmp_path)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("stopped with 2 KiB here; the same command goes on\n")


def test_an_unknown_name() -> None:
    assert_error(flashmoe("pull", "gpt-9"), "no known model is called 'gpt-9'", "known: olmoe")


def test_a_folder_that_cannot_be_made(hub: HubStandIn, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match="file/sub: Not a directory"):
        download(find_files(ONE), tmp_path / "file" / "sub")

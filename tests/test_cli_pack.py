"""`flashmoe pack`, `unpack`, `verify`: whole output, JSON, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_tools import assert_error, flashmoe
from flashmoe_gguf.cli.pack import target_path
from flashmoe_gguf.cli.progress import ByteCount, State, progress_text
from flashmoe_gguf.pack import open_packed


@pytest.fixture
def model(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    first = tiny_model("split")
    for path in first.parent.glob("*.gguf"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path / first.name


def test_there_and_back(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "split.packed.gguf"
    result = flashmoe("pack", model)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        f"packed  {packed}\n"
        "size    3.62 MiB, the model has 3.51 MiB\n"
        "blocks  24 experts in 3 groups\n"
    )
    again = flashmoe("pack", model)
    assert again.stdout == f"packed  {packed} is there already, from this very model\n"
    result = flashmoe("verify", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (f"{packed}: all 24 blocks and 30 dense tensors are right, 3.53 MiB\n")
    back = tmp_path / "back"
    back.mkdir()
    result = flashmoe("unpack", packed, "-o", back)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split()[-1] for line in result.stdout.splitlines()[:3]] == [
        str(back / f"split-0000{i}-of-00003.gguf") for i in (1, 2, 3)
    ]
    for path in back.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_json(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "p.gguf"
    result = flashmoe("pack", model, "-o", packed, "--json", "--in-place")
    data = json.loads(result.stdout)
    assert result.exit_code == 0
    assert data["out"] == str(packed)
    assert data["packed_bytes"] == packed.stat().st_size
    assert (data["groups"], data["blocks"], data["in_place"]) == (3, 24, True)
    assert [path.name for path in tmp_path.iterdir()] == ["p.gguf"]
    data = json.loads(flashmoe("verify", packed, "--json").stdout)
    assert (data["ok"], data["blocks"], data["damaged"]) == (True, 24, [])
    assert data["tensors"] == len(open_packed(packed).layout.dense) > 0
    data = json.loads(flashmoe("unpack", packed, "--json").stdout)
    assert data["files"] == sorted(str(path) for path in tmp_path.glob("split-*"))
    assert data["bytes"] == sum(path.stat().st_size for path in tmp_path.glob("split-*"))


def test_damage_is_named(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "p.gguf"
    flashmoe("pack", model, "-o", packed)
    layout = open_packed(packed).layout
    group, n_dense = layout.groups[2], len(layout.dense)
    data = bytearray(packed.read_bytes())
    data[group.offset + 5 * group.block_bytes] ^= 1
    packed.write_bytes(data)
    result = flashmoe("verify", packed, "-t", "1")
    where = "layer 2 expert 5 (blk.2.ffn_up_exps.weight)"
    words = f"1 of 24 blocks and 0 of {n_dense} dense tensors are damaged, first {where}"
    assert_error(result, words, "pack the model again")
    assert where in result.stderr.splitlines()
    result = flashmoe("verify", packed, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["damaged"] == [
        {"layer": 2, "family": "exps", "expert": 5, "tensor": "blk.2.ffn_up_exps.weight"}
    ]


def test_inspect_says_that_it_is_packed(model: Path, tmp_path: Path) -> None:
    stock = json.loads(flashmoe("inspect", model, "--json").stdout)
    packed = tmp_path / "p.gguf"
    flashmoe("pack", model, "-o", packed)
    result = flashmoe("inspect", packed)
    row = "packed          format 1, from split-00001-of-00003.gguf and 2 more"
    assert row in result.stdout.splitlines()
    data = json.loads(flashmoe("inspect", packed, "--json").stdout)
    assert stock["packed"] is None
    assert data["packed"]["version"] == 1
    assert len(data["packed"]["source_files"]) == 3
    same = ("layers", "experts", "top_k", "expert_bytes", "dense_bytes", "bytes_per_token")
    assert [data[key] for key in same] == [stock[key] for key in same]


def test_errors(model: Path, tmp_path: Path) -> None:
    assert_error(flashmoe("pack", tmp_path / "no.gguf"), "no.gguf: no such file", "")
    assert_error(flashmoe("verify", model), "not a packed file", "flashmoe pack")
    assert_error(flashmoe("unpack", model), "not a packed file", "flashmoe pack")
    flashmoe("pack", model)
    result = flashmoe("unpack", tmp_path / "split.packed.gguf")
    assert_error(result, "a file of this name is there already", "--force")
    result = flashmoe("unpack", tmp_path / "split.packed.gguf", "-o", tmp_path / "no")
    assert_error(result, "there is no such folder", "make it")
    assert flashmoe("unpack", tmp_path / "split.packed.gguf", "--force").exit_code == 0


def test_where_the_packed_file_goes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert target_path("a/m.gguf", None) == Path("a/m.packed.gguf")
    assert target_path("a/m-00001-of-00007.gguf", None) == Path("a/m.packed.gguf")
    assert target_path("a/m.gguf", "x") == Path("x")
    assert target_path("a/m.gguf", folder) == tmp_path / "m.packed.gguf"


def test_progress_counts_this_run_only() -> None:
    count = ByteCount()
    assert count.state() is None
    count(500 << 20, 1000 << 20)
    count(600 << 20, 1000 << 20)
    state = count.state()
    assert state == State(600 << 20, 1000 << 20, nbytes=True, before=500 << 20)
    assert progress_text(state, 10.0) == "60 %, 10 MiB/s, 40 s left"

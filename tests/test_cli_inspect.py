"""`flashmoe inspect`: whole output for known files, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gguf_files
from cli_tools import assert_error, flashmoe

MIXED = """\
model           tiny mixed
file            mixed.gguf, 3.51 MiB
shards          1 (not split)
architecture    qwen3moe
context         4096 tokens in training
layers          3, 3 with experts
experts         8 per layer, top-2
weights         experts 2.66 MiB, 75.9 %; dense 866 KiB, always in memory
read per token  681 KiB without a cache

layers  experts  bytes each  parts
0, 2    8        108 KiB     up Q4_K 256x256, gate Q4_K 256x256, down Q4_K 256x256
1       8        124 KiB     up Q4_K 256x256, gate Q4_K 256x256, down Q6_K 256x256
"""


def test_a_model_with_mixed_types(tiny_model: Callable[[str], Path]) -> None:
    result = flashmoe("inspect", tiny_model("mixed"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, MIXED, "")


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("split", ["shards          3"]),
        (
            "grovemoe",
            [
                "layers  experts           bytes each  parts",
                "0-2     8                 32.2 KiB    "
                "up Q8_0 128x96, gate Q8_0 128x96, down Q4_0 96x128",
                "0-2     4 (second block)  12.8 KiB    "
                "up Q8_0 128x32, gate Q8_0 128x32, down Q8_0 32x128",
            ],
        ),
        ("nogate", ["1, 3, 5  8        21.8 KiB    up Q5_1 128x96, down Q8_0 96x128"]),
        ("fused", ["layers          3, 3 with experts"]),
        ("deepseek2lite-like", ["layers          4, 3 with experts"]),
    ],
)
def test_other_shapes(kind: str, lines: list[str], tiny_model: Callable[[str], Path]) -> None:
    result = flashmoe("inspect", tiny_model(kind))
    assert result.exit_code == 0
    assert set(lines) <= set(result.stdout.splitlines())


def test_json_has_every_part(tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("split")
    result = flashmoe("inspect", path, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["path"] == str(path)
    assert [Path(shard["path"]).name for shard in data["shards"]] == [
        f"{path.name[: -len('00001-of-00003.gguf')]}0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]
    assert (data["layers"], data["experts"], data["top_k"]) == (3, 8, 2)
    total = sum(g["bytes_per_expert"] * g["experts"] for g in data["groups"])
    assert total == data["expert_bytes"]
    assert data["bytes_per_token"] == sum(2 * g["bytes_per_expert"] for g in data["groups"])
    assert data["expert_share"] == total / (total + data["dense_bytes"])
    assert {part["shard"] for g in data["groups"] for part in g["parts"]} == {0, 1, 2}


def test_a_dense_model_says_so(tmp_path: Path) -> None:
    keys = {
        "general.architecture": gguf_files.string("llama"),
        "llama.block_count": gguf_files.u32(2),
    }
    tensor = gguf_files.Tensor("output.weight", (32, 4), gguf_files.F32)
    path = gguf_files.Gguf(keys, [tensor]).write(tmp_path / "dense.gguf")
    result = flashmoe("inspect", path)
    assert result.exit_code == 0
    assert "experts       none: this model runs as it does in llama.cpp" in result.stdout


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("shopping list")
    assert_error(flashmoe("inspect", path), "notes.gguf: not a GGUF file", "give a .gguf file")


def test_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    result = flashmoe("inspect", tmp_path / "modle.gguf")
    assert_error(result, "modle.gguf: no such file", "that folder has model.gguf")


def test_truncated(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(tiny_model("gptoss").read_bytes()[:-5000])
    assert_error(flashmoe("inspect", path), "5,000 of 848,256 bytes are missing", "interrupted")


def test_a_missing_shard_is_named(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    first = tiny_model("split")
    for number in (1, 3):
        name = first.name.replace("00001", f"0000{number}", 1)
        (tmp_path / name).write_bytes(first.with_name(name).read_bytes())
    result = flashmoe("inspect", tmp_path / first.name)
    missing = first.name.replace("00001", "00002", 1)
    assert_error(result, f"{missing}: this part of the model is missing", "in one folder")


def test_a_hostile_name_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines.gguf"
    path.write_text("x")
    assert_error(flashmoe("inspect", path), "two\\nlines.gguf", "")

"""Which tensors are routed experts, how they group, and where each expert lies."""

from __future__ import annotations

from pathlib import Path

import pytest

import gguf_files as gf
from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.store import Geometry, Group, read_geometry
from gguf_files import F32, Q4_K, Q6_K, Q8_0, Gguf, Tensor, array, i32, moe_keys, u32

DENSE = [Tensor("token_embd.weight", (64, 8)), Tensor("output_norm.weight", (64,))]


def read(tmp_path: Path, keys: dict[str, bytes], tensors: list[Tensor]) -> Geometry:
    return read_geometry(Gguf(keys, tensors).write(tmp_path / "m.gguf"))


def roles(group: Group) -> list[str]:
    return [part.role for part in group.parts]


def test_two_layers(tmp_path: Path) -> None:
    tensors = DENSE + gf.expert_tensors(1) + gf.expert_tensors(0)
    geometry = read(tmp_path, moe_keys(), tensors)
    assert geometry.is_moe
    assert geometry.architecture == "olmoe"
    assert (geometry.n_layer, geometry.n_expert, geometry.top_k) == (2, 4, 2)
    assert [(g.layer, g.family, g.n_expert) for g in geometry.groups] == [
        (0, "exps", 4),
        (1, "exps", 4),
    ]
    part_bytes = 64 * 32 // 32 * 34
    for group in geometry.groups:
        assert roles(group) == ["up", "gate", "down"]
        assert group.expert_bytes == 3 * part_bytes
        assert [p.shape for p in group.parts] == [(64, 32, 4), (64, 32, 4), (32, 64, 4)]
        assert all((p.type_name, p.ggml_type) == ("Q8_0", Q8_0) for p in group.parts)
    assert geometry.max_part_bytes == part_bytes
    assert geometry.expert_bytes == 2 * 4 * 3 * part_bytes
    assert geometry.dense_bytes == 64 * 8 * 4 + 64 * 4
    assert geometry.bytes_per_token == 2 * 2 * 3 * part_bytes


def test_every_expert_is_where_it_says(tmp_path: Path) -> None:
    """Fill each tensor with its own pattern, one byte per expert, and read it back."""
    tensors = [
        Tensor(t.name, t.shape, t.ggml_type, fill=fill)
        for layer in range(2)
        for t, fill in zip(gf.expert_tensors(layer), fills(layer), strict=True)
    ]
    paths = gf.write_shards(tmp_path, moe_keys(), [tensors[:1], tensors[1:4], tensors[4:]])
    geometry = read_geometry(paths[0])
    assert {p.shard for g in geometry.groups for p in g.parts} == {0, 1, 2}
    for group in geometry.groups:
        for part in group.parts:
            data = geometry.header.shards[part.shard].path.read_bytes()
            for expert in range(group.n_expert):
                start = part.offset + expert * part.expert_bytes
                number = ["gate", "up", "down"].index(part.role)
                expected = marker(group.layer, number, expert) * part.expert_bytes
                assert data[start : start + part.expert_bytes] == expected


def marker(layer: int, number: int, expert: int) -> bytes:
    return bytes([100 * layer + 10 * number + expert])


def fills(layer: int) -> list[bytes]:
    part_bytes = 64 * 32 // 32 * 34
    return [
        b"".join(marker(layer, number, e) * part_bytes for e in range(4)) for number in range(3)
    ]


def test_only_expert_weights_are_experts(tmp_path: Path) -> None:
    others = [
        Tensor("blk.0.ffn_gate_inp.weight", (64, 4)),
        Tensor("blk.0.ffn_up_shexp.weight", (64, 32, 4)),
        Tensor("blk.0.ffn_up_exps.bias", (32, 4)),
        Tensor("blk.0.ffn_down_exps.scale", (4, 4, 4)),
        Tensor("blk.0.ffn_norm_exps.weight", (64, 4, 4)),
        Tensor("blk.0.ffn_up_exps.weight.x", (64, 4, 4)),
        Tensor("blk.00.ffn_up_exps.weight", (64, 4, 4)),
        Tensor("blk.1.ffn_up_exps.weight", (64, 4)),
        Tensor("blk.1.ffn_gate_exps.weight", (64, 4, 1)),
    ]
    geometry = read(tmp_path, moe_keys(), others + gf.expert_tensors(0))
    assert [roles(g) for g in geometry.groups] == [["up", "gate", "down"]]
    assert geometry.dense_bytes == sum(t.nbytes for t in others)


def test_fused_gate_up(tmp_path: Path) -> None:
    tensors = [
        Tensor("blk.0.ffn_down_exps.weight", (32, 64, 4), Q8_0),
        Tensor("blk.0.ffn_gate_up_exps.weight", (64, 64, 4), Q8_0),
    ]
    (group,) = read(tmp_path, moe_keys(layers=1), tensors).groups
    assert roles(group) == ["gate_up", "down"]


def test_no_gate(tmp_path: Path) -> None:
    tensors = [t for t in gf.expert_tensors(0) if "gate" not in str(t.name)]
    (group,) = read(tmp_path, moe_keys(layers=1), tensors).groups
    assert roles(group) == ["up", "down"]


def test_two_expert_blocks_in_a_layer(tmp_path: Path) -> None:
    """grovemoe: the second family has fewer experts, so top-k is capped there."""
    second = [
        Tensor(str(t.name).replace("exps", "chexps"), t.shape, t.ggml_type)
        for t in gf.expert_tensors(0, experts=2)
    ]
    keys = moe_keys("grovemoe", layers=1, top_k=3)
    geometry = read(tmp_path, keys, second + gf.expert_tensors(0))
    assert [(g.family, g.n_expert) for g in geometry.groups] == [("exps", 4), ("chexps", 2)]
    expert = geometry.groups[0].expert_bytes
    assert geometry.groups[1].expert_bytes == expert
    assert geometry.bytes_per_token == 3 * expert + 2 * expert


def test_mixed_quants(tmp_path: Path) -> None:
    tensors = [
        Tensor("blk.0.ffn_up_exps.weight", (256, 3, 4), Q4_K),
        Tensor("blk.0.ffn_down_exps.weight", (256, 3, 4), Q6_K),
    ]
    geometry = read(tmp_path, moe_keys(layers=1), tensors)
    assert [p.expert_bytes for p in geometry.groups[0].parts] == [3 * 144, 3 * 210]
    assert geometry.max_part_bytes == 630


def test_top_k_per_layer(tmp_path: Path) -> None:
    keys = moe_keys(layers=3) | {"olmoe.expert_used_count": array("u32", [0, 1, 4])}
    geometry = read(tmp_path, keys, gf.expert_tensors(1) + gf.expert_tensors(2))
    assert geometry.layer_top_k == (0, 1, 4)
    assert geometry.top_k == 4
    assert geometry.bytes_per_token == 5 * geometry.groups[0].expert_bytes


def test_prediction_layers_are_not_decoded(tmp_path: Path) -> None:
    """GLM-4.5: the last block predicts a further token."""
    keys = moe_keys(layers=2) | {"olmoe.nextn_predict_layers": u32(1)}
    geometry = read(tmp_path, keys, gf.expert_tensors(0) + gf.expert_tensors(1))
    assert len(geometry.groups) == 2
    assert geometry.decode_groups == geometry.groups[:1]
    assert geometry.bytes_per_token == 2 * geometry.groups[0].expert_bytes


def test_a_dense_model(tmp_path: Path) -> None:
    keys = {k: v for k, v in moe_keys().items() if "expert" not in k}
    geometry = read(tmp_path, keys, DENSE)
    assert not geometry.is_moe
    assert (geometry.n_expert, geometry.top_k, geometry.groups) == (0, 0, ())
    assert (geometry.max_part_bytes, geometry.bytes_per_token, geometry.expert_bytes) == (0, 0, 0)
    assert geometry.dense_bytes == sum(t.nbytes for t in DENSE)


def without(key: str) -> dict[str, bytes]:
    return {k: v for k, v in moe_keys().items() if k != key}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (without("general.architecture"), "names no architecture"),
        (without("olmoe.block_count"), "olmoe.block_count is missing"),
        (without("olmoe.expert_count"), "olmoe.expert_count is missing"),
        (without("olmoe.expert_used_count"), "olmoe.expert_used_count is missing"),
        (moe_keys(layers=0), "block_count is not a count from 1 to 512"),
        (moe_keys(layers=2**31), "block_count is not a count from 1 to 512"),
        (moe_keys(layers=1), "blk.1.ffn_gate_exps.weight is beyond the model's 1 layers"),
        (moe_keys(experts=0), "expert_count is not a count from 1 to 1024"),
        (moe_keys(top_k=0), "expert_used_count is not a count from 1 to 4"),
        (moe_keys(top_k=5), "expert_used_count is not a count from 1 to 4"),
        (moe_keys() | {"olmoe.block_count": gf.string("2")}, "block_count is not a count"),
        (moe_keys() | {"olmoe.block_count": gf.scalar("bool", 1)}, "block_count is not a count"),
        (moe_keys() | {"olmoe.expert_count": i32(-4)}, "expert_count is not a count"),
        (
            moe_keys() | {"olmoe.expert_used_count": array("u32", [2])},
            "not a count from 0 to 4 for each of 2 layers",
        ),
        (
            moe_keys() | {"olmoe.expert_used_count": array("u32", [2, 5])},
            "not a count from 0 to 4 for each of 2 layers",
        ),
        (
            moe_keys() | {"olmoe.expert_used_count": array("u32", [0, 0])},
            "not a count from 0 to 4 for each of 2 layers",
        ),
        (
            moe_keys() | {"olmoe.expert_used_count": array("u32", [2] * 5000)},
            "expert_used_count is not a count",
        ),
        (moe_keys() | {"olmoe.nextn_predict_layers": u32(3)}, "not a count from 0 to 2"),
        (moe_keys() | {"olmoe.expert_group_count": u32(4)}, "not a count from 0 to 3"),
        (moe_keys() | {"olmoe.expert_group_count": u32(3)}, "4 experts do not divide into 3"),
        (moe_keys() | {"olmoe.expert_group_count": u32(2)}, "expert_group_used_count is missing"),
    ],
)
def test_wrong_keys(tmp_path: Path, keys: dict[str, bytes], message: str) -> None:
    """Most of these make llama.cpp abort the process, so they must be caught before it."""
    with pytest.raises(ModelFileError, match=message) as caught:
        read(tmp_path, keys, gf.expert_tensors(0) + gf.expert_tensors(1))
    assert str(tmp_path / "m.gguf") in caught.value.message


def test_parts_must_agree_on_the_number_of_experts(tmp_path: Path) -> None:
    tensors = [
        Tensor("blk.0.ffn_up_exps.weight", (64, 32, 4), F32),
        Tensor("blk.0.ffn_down_exps.weight", (32, 64, 3), F32),
    ]
    with pytest.raises(ModelFileError, match=r"ffn_down_exps.weight has 3 experts, .* 4"):
        read(tmp_path, moe_keys(), tensors)

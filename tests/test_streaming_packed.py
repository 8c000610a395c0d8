"""A packed file streams like the file it came from; damage in it never becomes a token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import scenarios
import tiny_models
from flashmoe_gguf import ExpertReadError, Llama, ModelFileError
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.streaming import read_sums

PROMPT = list(range(3, 40))
OPTIONS = scenarios.context_options(1, n_ctx=512)


@pytest.fixture(scope="module")
def packed(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("packed") / f"{kind}.gguf"
            pack_model(tiny_model(kind), made[kind], progress=lambda *_: None)
        return made[kind]

    return get


def follow(model: Path, n_slots: int, **options: Any) -> Any:
    llm = Llama(str(model), n_slots=n_slots, **OPTIONS, **options)
    try:
        return scenarios.follow(llm, PROMPT, 12), llm.stats()
    finally:
        llm.close()


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_same_geometry_and_same_logits(
    kind: str, tiny_model: Callable[[str], Path], packed: Callable[[str], Path]
) -> None:
    source, model = read_geometry(tiny_model(kind)), read_geometry(packed(kind))
    assert source.packed is None and model.packed is not None
    for a, b in zip(source.groups, model.groups, strict=True):
        assert (a.layer, a.family, a.n_expert, a.expert_bytes) == (
            b.layer,
            b.family,
            b.n_expert,
            b.expert_bytes,
        )
        assert all(part.offset % 4096 == part.stride % 4096 == 0 for part in b.parts)
    assert (source.dense_bytes, source.expert_bytes) == (model.dense_bytes, model.expert_bytes)
    want, _ = follow(tiny_model(kind), 3)
    for n_slots in (0, model.top_k, model.n_expert):
        got, stats = follow(packed(kind), n_slots)
        assert np.array_equal(got, want), f"{n_slots} slots"
        assert stats.verified > 0


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_stripes_give_the_same_logits(
    kind: str, count: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    drives = [tmp_path / f"drive{i}" for i in range(count)]
    for drive in drives:
        drive.mkdir()
    out = tmp_path / "striped.gguf"
    pack_model(tiny_model(kind), out, stripes=drives)
    want, _ = follow(tiny_model(kind), 3)
    for n_slots in (0, read_geometry(out).top_k):
        got, stats = follow(out, n_slots)
        assert np.array_equal(got, want), f"{n_slots} slots"
        assert stats.verified > 0


def test_damage_in_a_stripe_names_its_file(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "striped.gguf"
    (tmp_path / "other").mkdir()
    pack_model(tiny_model("mixed"), out, stripes=[tmp_path, tmp_path / "other"])
    geometry = read_geometry(out)
    part = geometry.groups[0].parts[0]
    path = geometry.files[2].path
    places = [part.place(e) for e in range(geometry.groups[0].n_expert)]
    flip(path, path, [place.offset for place in places if place.file == 2])
    error = error_of(out)
    assert error.file == str(path)
    assert error.expert % 2 == 1 and error.tensor == part.tensor and error.corrupt


def test_checksums_are_those_of_the_bytes(packed: Callable[[str], Path]) -> None:
    """The known answer: the C side checks against what xxhash's own binding gives."""
    geometry = read_geometry(packed("split"))
    sums = read_sums(geometry)
    data = packed("split").read_bytes()
    for group in geometry.groups:
        for part in group.parts:
            for e in range(group.n_expert):
                start = part.offset + e * part.stride
                one = data[start : start + part.expert_bytes]
                assert xxhash.xxh3_64_intdigest(one) == sums[part.tensor][e]


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_what_is_verified(packed: Callable[[str], Path], verify: str) -> None:
    model = packed("qwen3moe")
    llm = Llama(str(model), n_slots=0, verify=verify, **OPTIONS)
    verified = []
    for _ in range(2):
        llm.reset()
        scenarios.follow(llm, PROMPT, 0)
        verified.append(llm.stats().verified)
    n_parts = sum(g.n_expert * len(g.parts) for g in llm.geometry.groups)
    llm.close()
    first, second = verified
    if verify == "off":
        assert first == second == 0
    elif verify == "first":  # the second time only what is read ahead and was not needed before
        assert 0 < first <= second <= n_parts
        assert second - first < first
    else:
        assert first > 0 and second >= 2 * first


def flip(source: Path, target: Path, offsets: list[int]) -> Path:
    data = bytearray(source.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    target.write_bytes(data)
    return target


def error_of(model: Path) -> ExpertReadError:
    """What evaluating many tokens on a damaged file raises."""
    llm = Llama(str(model), n_slots=0, **OPTIONS)
    try:
        with pytest.raises(ExpertReadError, match="checksum does not match") as caught:
            llm.eval(list(range(200)))
        assert llm.n_tokens == 0
        return caught.value
    finally:
        llm.close()


def test_a_flipped_byte_is_caught_and_named(packed: Callable[[str], Path], tmp_path: Path) -> None:
    model = packed("mixed")
    rng = np.random.default_rng(3)
    for group in read_geometry(model).groups:
        for part in group.parts:
            places = [
                part.offset + e * part.stride + int(rng.integers(part.expert_bytes))
                for e in range(group.n_expert)
            ]
            # damaged everywhere: the error names an expert that these tokens use
            used = error_of(flip(model, tmp_path / "damaged.gguf", places)).expert
            # damaged only there: it must be that one
            error = error_of(flip(model, tmp_path / "damaged.gguf", [places[used]]))
            assert (error.layer, error.expert, error.tensor) == (group.layer, used, part.tensor)
            assert error.corrupt


def test_nothing_is_said_when_not_verifying(packed: Callable[[str], Path], tmp_path: Path) -> None:
    model = packed("mixed")
    part = read_geometry(model).groups[0].parts[0]
    damaged = flip(model, tmp_path / "damaged.gguf", [part.offset])
    _, stats = follow(damaged, 0, verify="off")
    assert stats.verified == 0 and stats.failed_loads == 0


@pytest.mark.parametrize("column", ["ne0", "block_offset", "expert_bytes", "type", "n_expert"])
def test_a_table_that_cannot_be(column: str, packed: Callable[[str], Path], tmp_path: Path) -> None:
    """A damaged part table is an error of the file, not a read of the wrong bytes."""
    data = bytearray(packed("qwen3moe").read_bytes())
    name = f"flashmoe.parts.{column}".encode()
    at = data.index(name) + len(name) + 4 + 4 + 8  # type, element type, count
    data[at] ^= 0xFF
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with pytest.raises(ModelFileError):
        read_geometry(damaged)

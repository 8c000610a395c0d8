"""Every type that stock can compute experts in on a CPU: streamed logits equal stock's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

import followed
from flashmoe_gguf import Llama
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.store import read_geometry
from tiny_models import archs
from tiny_models.blocks import QTYPES, QType, random_blocks
from tiny_models.builder import Builder, Spec
from tiny_models.child import stock_libraries

TYPES: dict[str, QType] = {q.name: q for q in (*QTYPES, T.F32)}
Pair = tuple[Path, followed.Rows]


def write(folder: Path, name: str) -> Path:
    """A model whose experts are of one type; every width is whole blocks of every type."""
    spec = Spec(
        name,
        "qwen3moe",
        f"{name} experts",
        partial(archs.qwen3moe_of, qtype=TYPES[name]),
        n_layer=2,
        n_expert=4,
        width=256,
        expert_width=256,
        n_head=4,
    )
    builder = Builder(spec)
    spec.build(builder)
    return builder.write(folder / f"{name}.gguf")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """By type: a model, and what stock answers; all in one process."""
    if stock_libraries() is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    folder = tmp_path_factory.mktemp("types")
    paths = [write(folder, name) for name in TYPES]
    jobs = [(path, followed.prompt(256), "decoder") for path in paths]
    rows = followed.stock(folder / "rows.npz", jobs)
    return dict(zip(TYPES, zip(paths, rows, strict=True), strict=True))


def test_all_types_are_here() -> None:
    """The types with a name in llama.cpp's table that can be multiplied: all but Q8_1 and Q8_K."""
    assert set(TYPES) == {
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q1_0", "Q2_0"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "BF16", "F16", "F32"),
    }


@pytest.mark.parametrize("name", [n for n in TYPES if n not in ("F32", "Q1_0", "Q2_0")])
def test_random_blocks_have_the_spread_asked_for(name: str) -> None:
    from gguf.quants import dequantize

    qtype = TYPES[name]
    assert isinstance(qtype, T)
    weights = dequantize(random_blocks(qtype, 4096, 0.1, np.random.default_rng(3)), qtype)
    assert np.isfinite(weights).all()
    assert 0.05 < weights.std() < 0.2
    assert abs(weights.mean()) < 0.06


@pytest.mark.parametrize("name", TYPES)
def test_streamed_is_stock(name: str, models: dict[str, Pair], tmp_path: Path) -> None:
    in_place, want = models[name]
    packed = tmp_path / "packed.gguf"
    pack_model(in_place, packed)
    geometry = read_geometry(in_place)
    assert {p.type_name for g in geometry.groups for p in g.parts} == {name}
    assert np.isfinite(want).all() and want.std() > 0.1
    for path, n_slots in [(path, n) for path in (in_place, packed) for n in (geometry.top_k, 0)]:
        llm = Llama(str(path), n_slots=n_slots, **followed.options("decoder"))
        try:
            got = followed.follow(llm, followed.prompt(256), "decoder")
            stats = llm.stats()
        finally:
            llm.close()
        assert np.array_equal(got, want), f"{path.stem}, {n_slots} slots"
        assert stats is not None and stats.operations == 6 * len(got)  # three parts, two layers

"""Every MoE architecture of the pinned llama.cpp: streamed logits equal stock's bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import flashmoe_gguf
import followed
import tiny_models
from flashmoe_gguf import Llama
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.store import read_geometry
from tiny_models.arch_docs import markdown
from tiny_models.arch_table import EXCEPTIONS
from tiny_models.child import stock_libraries

LIST = Path(flashmoe_gguf.__file__).parent / "lib" / "moe_architectures.json"
DOCS = Path(__file__).parents[1] / "docs" / "ARCHITECTURES.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of an architecture, made once."""
    if stock_libraries() is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    folder = tmp_path_factory.mktemp("archs")

    def get(arch: str) -> Path:
        path = folder / f"{arch}.gguf"
        return path if path.exists() else tiny_models.make_arch(path, arch)

    return get


def kind(arch: str) -> str:
    return tiny_models.arch_row(arch).kind


@pytest.fixture(scope="module")
def stock(
    model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[followed.Rows, followed.Rows]]:
    """Per architecture what stock answers to two prompts; all in one process."""
    prompts = followed.prompt(256, 7), followed.prompt(256, 8)
    jobs = [(model(a), p, kind(a)) for a in tiny_models.ARCHS for p in prompts]
    rows = followed.stock(tmp_path_factory.mktemp("stock") / "rows.npz", jobs)
    pairs = zip(rows[0::2], rows[1::2], strict=True)
    return dict(zip(tiny_models.ARCHS, pairs, strict=True))


def test_the_list_of_architectures_is_complete() -> None:
    """The build computes the list from the pinned source: a new architecture fails here."""
    if not LIST.is_file():
        pytest.skip(f"the package has no lib/{LIST.name}: it was not built with llama.cpp")
    in_source = set(json.loads(LIST.read_text(encoding="utf-8")))
    here = set(tiny_models.ARCHS) | set(EXCEPTIONS)
    assert here == in_source
    assert not set(tiny_models.ARCHS) & set(EXCEPTIONS)
    assert len(tiny_models.ARCHS) == len(set(tiny_models.ARCHS)) >= 40


def test_the_documentation_is_the_table() -> None:
    assert DOCS.read_text(encoding="utf-8") == markdown()


@pytest.mark.parametrize("arch", tiny_models.ARCHS)
def test_stock_computes_with_the_input(
    arch: str, stock: dict[str, tuple[followed.Rows, followed.Rows]]
) -> None:
    rows, other = stock[arch]
    assert np.isfinite(rows).all()
    assert 0.01 < rows.std() < 100
    assert (rows[0] != other[0]).all()
    if kind(arch) == "decoder":
        assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("arch", tiny_models.ARCHS)
def test_streamed_is_stock(
    arch: str,
    model: Callable[[str], Path],
    stock: dict[str, tuple[followed.Rows, followed.Rows]],
    tmp_path: Path,
) -> None:
    in_place, packed = model(arch), tmp_path / "packed.gguf"
    geometry = read_geometry(in_place)
    assert geometry.architecture == arch and geometry.is_moe
    pack_model(in_place, packed)
    runs = [(path, n) for path in (in_place, packed) for n in (geometry.top_k, 0)]
    for path, n_slots in runs:
        llm = Llama(str(path), n_slots=n_slots, **followed.options(kind(arch)))
        try:
            assert llm.is_streamed
            got = followed.follow(llm, followed.prompt(256, 7), kind(arch))
            stats = llm.stats()
        finally:
            llm.close()
        assert np.array_equal(got, stock[arch][0]), f"{path.stem}, {n_slots} slots"
        n_parts = sum(len(group.parts) for group in geometry.decode_groups)
        assert stats is not None and stats.operations == n_parts * len(got)

"""Damaged files that `make fuzz` met: each gets a typed error, or passes, as it did before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz import collect, target
from fuzz.mutate import damaged
from fuzz.seeds import make_seeds

EXPECTED: dict[str, dict[str, str]] = json.loads(collect.ANSWERS.read_text())


def test_the_corpus_is_all_there() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in collect.CORPUS.glob("*.bin"))
    assert len(EXPECTED) >= 50


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_inspect_pack_verify_and_unpack_answer(name: str, tmp_path: Path) -> None:
    # Whatever is no typed error comes through, and so fails the test.
    assert collect.answers(collect.read(name), tmp_path) == EXPECTED[name]


@pytest.mark.parametrize("name", sorted(n for n in EXPECTED if n.startswith("found-load-")))
def test_loading_answers(name: str, tmp_path: Path) -> None:
    """These end the process, or compute on nothing, where llama.cpp alone loads them."""
    model = target.write(tmp_path / "m", [("model.gguf", collect.read(name))])
    answer = target.load(model)
    assert answer.startswith(f"{model}: ") and "\n" not in answer


def test_a_run_can_be_done_again(tmp_path: Path) -> None:
    """The same number is the same file wherever the seeds were made, and each is damaged."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    seeds, again = make_seeds(tmp_path / "a"), make_seeds(tmp_path / "b")
    assert seeds == again
    for index in range(50):
        item = damaged(seeds, 7, index)
        assert item == damaged(again, 7, index)
        assert item.files != item.seed.files
        results = target.examine(target.write(tmp_path / "m", item.files), tmp_path / "work")
        assert set(results) >= {"inspect", "pack", "verify", "unpack"}

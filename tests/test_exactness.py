"""Streamed logits equal stock's bit for bit, whatever the slots, the threads and the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scenarios
import tiny_models
from flashmoe_gguf import Llama
from flashmoe_gguf.store import read_geometry

TINY = tuple(tiny_models.KINDS)
SHORT = ("state", "shift", "in_turn", "at_once")


def slot_counts(model: Path) -> dict[str, int]:
    """The four sizes that take different paths through the cache."""
    geometry = read_geometry(model)
    return {
        "all": geometry.n_expert,
        "half": geometry.n_expert // 2,
        "k": geometry.top_k,
        "fewer than k": geometry.top_k - 1,
        "ring only": 0,
    }


def streamed(model: Path, n_threads: int, n_slots: int, policy: str = "auto") -> Callable[[], Any]:
    def make() -> Llama:
        return Llama(
            str(model),
            n_slots=n_slots,
            policy=policy,
            **scenarios.context_options(n_threads),
        )

    return make


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Stock logits, once per question."""
    known: dict[Any, Any] = {}

    def get(model: Path, names: tuple[str, ...], tokens: Any, n_greedy: int, n_threads: int) -> Any:
        key = (model, names, n_greedy, n_threads)
        if key not in known:
            out = tmp_path_factory.mktemp("stock") / "out.npz"
            known[key] = scenarios.stock(out, model, names, tokens, n_greedy, n_threads)
        return known[key]

    return get


def tiny_tokens(model: Path) -> list[int]:
    n_vocab = read_geometry(model).header.get("vocab_size")
    assert isinstance(n_vocab, int)
    return [int(t) for t in np.random.default_rng(7).integers(0, n_vocab, 96)]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kind", TINY)
def test_tiny_models(
    kind: str, n_threads: int, tiny_model: Callable[[str], Path], reference: Callable[..., Any]
) -> None:
    model = tiny_model(kind)
    tokens = tiny_tokens(model)
    want = reference(model, ("decode",), tokens, 32, n_threads)["decode"]
    assert np.isfinite(want).all()
    for name, n_slots in slot_counts(model).items():
        for policy in ("lru", "dlfu"):
            make = streamed(model, n_threads, n_slots, policy)
            got = scenarios.decode(make, tokens, 32)
            assert np.array_equal(got, want), f"{kind}, slots {name}, {policy}"


@pytest.mark.parametrize("scenario", SHORT)
@pytest.mark.parametrize("kind", ["qwen3moe", "split", "gptoss"])
def test_scenarios_on_tiny_models(
    kind: str, scenario: str, tiny_model: Callable[[str], Path], reference: Callable[..., Any]
) -> None:
    model = tiny_model(kind)
    tokens = tiny_tokens(model)
    want = reference(model, SHORT, tokens, 12, 2)[scenario]
    for name, n_slots in slot_counts(model).items():
        got = scenarios.SCENARIOS[scenario](streamed(model, 2, n_slots), tokens, 12)
        assert np.array_equal(got, want), f"{kind}, slots {name}"


@pytest.mark.parametrize("kind", TINY)
def test_patched_libraries_without_a_stream_are_stock(
    kind: str, tiny_model: Callable[[str], Path], reference: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model(kind)
    tokens = tiny_tokens(model)
    want = reference(model, ("decode",), tokens, 32, 2)["decode"]
    got = scenarios.stock(tmp_path / "out.npz", model, ("decode",), tokens, 32, 2, "patched")
    assert np.array_equal(got["decode"], want)


def test_two_contexts_on_one_model_share_its_cache(tiny_model: Callable[[str], Path]) -> None:
    """One object's model, a second context beside its own, computing at the same time."""
    import threading

    import llama_cpp

    model = tiny_model("qwen3moe")
    tokens = tiny_tokens(model)
    llm = streamed(model, 1, 3)()
    alone = scenarios.follow(llm, tokens, 24)
    llm.reset()
    second = llama_cpp.llama_init_from_model(llm.model, llm.context_params)
    rows: list[Any] = []

    def run_second() -> None:
        n_vocab = llm.n_vocab()
        step = tokens
        for _ in range(25):
            ids = (llama_cpp.llama_token * len(step))(*step)
            assert (
                llama_cpp.llama_decode(second, llama_cpp.llama_batch_get_one(ids, len(step))) == 0
            )
            row = llama_cpp.llama_get_logits_ith(second, -1)
            rows.append(np.ctypeslib.as_array(row, shape=(n_vocab,)).copy())
            step = [int(rows[-1].argmax())]

    thread = threading.Thread(target=run_second)
    thread.start()
    beside = scenarios.follow(llm, tokens, 24)
    thread.join()
    assert np.array_equal(beside, alone)
    assert np.array_equal(np.stack(rows), alone)
    llm._experts.native.verify()
    llama_cpp.llama_free(second)
    llm.close()


def english(llm: Any, n_tokens: int) -> list[int]:
    from importlib.resources import files

    text = files("flashmoe_gguf.demo").joinpath("prompts.txt").read_text(encoding="utf-8")
    tokens = llm.tokenize(text.encode())
    while len(tokens) < n_tokens:
        tokens += tokens
    return [int(t) for t in tokens[:n_tokens]]


@pytest.fixture(scope="module")
def embedded_tokens(embedded_model: Path) -> list[int]:
    llm = Llama(str(embedded_model), vocab_only=True, verbose=False)
    try:
        return english(llm, 700)
    finally:
        llm.close()


@pytest.mark.embedded
@pytest.mark.parametrize(
    ("slots", "n_threads"), [("all", 1), ("half", 2), ("k", 1), ("fewer than k", 2)]
)
def test_embedded_model(
    slots: str,
    n_threads: int,
    embedded_model: Path,
    embedded_tokens: list[int],
    reference: Callable[..., Any],
) -> None:
    """Prefill of 700 tokens, then 512 greedy ones."""
    want = reference(embedded_model, ("decode",), embedded_tokens, 512, n_threads)["decode"]
    make = streamed(embedded_model, n_threads, slot_counts(embedded_model)[slots])
    assert np.array_equal(scenarios.decode(make, embedded_tokens, 512), want)


@pytest.mark.embedded
@pytest.mark.parametrize("scenario", SHORT)
@pytest.mark.parametrize("slots", ["fewer than k"])
def test_scenarios_on_the_embedded_model(
    slots: str,
    scenario: str,
    embedded_model: Path,
    embedded_tokens: list[int],
    reference: Callable[..., Any],
) -> None:
    tokens = embedded_tokens[:200]
    want = reference(embedded_model, SHORT, tokens, 24, 2)[scenario]
    make = streamed(embedded_model, 2, slot_counts(embedded_model)[slots])
    assert np.array_equal(scenarios.SCENARIOS[scenario](make, tokens, 24), want)

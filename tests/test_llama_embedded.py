"""What people do with llama_cpp.Llama, on a streamed model that has a vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scenarios
from flashmoe_gguf import Llama

pytestmark = pytest.mark.embedded

QUESTION = [{"role": "user", "content": "What is the capital of England?"}]


@pytest.fixture(scope="module")
def llm(embedded_model: Path) -> Iterator[Any]:
    options = {**scenarios.context_options(2), "n_slots": 16, "logits_all": True}
    llm = Llama(str(embedded_model), **options)
    yield llm
    llm.close()


def test_chat_answers(llm: Any) -> None:
    answer = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=32)
    assert "London" in answer["choices"][0]["message"]["content"]
    assert llm.is_streamed and llm.stats().bytes_read > 0


def test_streaming_gives_the_same_text(llm: Any) -> None:
    whole = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=24)
    pieces = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=24, stream=True)
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]


def test_a_grammar_is_kept_to(llm: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
    }
    answer = llm.create_chat_completion(
        QUESTION,
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_object", "schema": schema},
    )
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert isinstance(value["city"], str) and isinstance(value["big"], bool)


def test_log_probabilities(llm: Any) -> None:
    answer = llm.create_completion(
        "The capital of England is", max_tokens=3, temperature=0, logprobs=4
    )
    found = answer["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 3
    for chosen, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert chosen == max(top.values()) <= 0.0


def test_a_seed_repeats(llm: Any) -> None:
    texts = {
        llm.create_completion("Once upon a time", max_tokens=16, temperature=0.9, seed=seed)[
            "choices"
        ][0]["text"]
        for seed in (5, 5, 6)
    }
    assert len(texts) == 2


def test_text_survives_tokens(llm: Any) -> None:
    text = "Grüße, world! 123"
    assert llm.detokenize(llm.tokenize(text.encode(), add_bos=False)).decode() == text


def test_embeddings_equal_stock(embedded_model: Path, tmp_path: Path) -> None:
    texts = ["A quick brown fox", "Experts are read from disk when they are used"]
    request = {"model": str(embedded_model), "texts": texts, "n_threads": 2}
    want = scenarios.child(tmp_path / "stock.npz", "embeddings", request)["embeddings"]
    options = scenarios.context_options(2)
    llm = Llama(str(embedded_model), n_slots=8, embedding=True, **options)
    rows = [np.asarray(llm.embed(text), np.float64) for text in texts]
    llm.close()
    assert np.array_equal(np.concatenate([r.ravel() for r in rows]), want)


def test_a_dense_model_runs_as_in_llama_cpp(embedded_model: Path) -> None:
    from flashmoe_gguf.demo.source import find_source

    llm = Llama(str(find_source()), **scenarios.context_options(2))
    assert not llm.is_streamed and llm.stats() is None
    assert llm.create_completion("The sky is", max_tokens=4, temperature=0)["choices"][0]["text"]
    llm.close()

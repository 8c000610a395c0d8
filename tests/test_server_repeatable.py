"""With `repeatable`, what was computed before changes no bit of an answer, and yet is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scenarios
from flashmoe_gguf.server.served import ServedLlama

# isort: split
import llama_cpp

N_GENERATED = 4


class Repeatable(ServedLlama):
    ours = {"repeatable": True, "n_slots": 4}  # noqa: RUF012


class Usual(ServedLlama):
    ours = {"repeatable": False, "n_slots": 4}  # noqa: RUF012


def load(kind: type[ServedLlama], model: Path, n_batch: int, n_ubatch: int) -> Any:
    options = scenarios.context_options(1, n_ctx=1024)
    return kind(str(model), **{**options, "n_batch": n_batch, "n_ubatch": n_ubatch})


def answer(llm: Any, prompt: Sequence[int]) -> tuple[list[int], list[bytes], int]:
    """The greedy tokens, the logits before each, and how many tokens were computed."""
    logits, computed = [], 0
    evaluate = type(llm).eval

    def counting(self: Any, tokens: Sequence[int]) -> None:
        nonlocal computed
        computed += len(tokens)
        evaluate(self, tokens)

    tokens = []
    llm.eval = counting.__get__(llm)
    try:
        for token in islice(llm.generate(prompt, temp=0.0), N_GENERATED):
            row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
            logits.append(np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).tobytes())
            tokens.append(token)
    finally:
        del llm.eval
    return tokens, logits, computed


def prompts(n_vocab: int) -> list[list[int]]:
    """What shares a beginning with the one before it, in every way that there is."""
    draw = np.random.default_rng(3)
    base, other = (draw.integers(3, n_vocab, 400).tolist() for _ in range(2))
    return [
        base[:300],
        base[:300],  # the same once more
        base[:200] + other[:60],
        base[:200] + other[:60] + other[100:103],
        base[:128],  # ends where a ubatch does
        base[:129],
        base[:31],
        other[:300],
        base[:400],
        base[:64] + other[:300],
    ]


@pytest.mark.parametrize("kind", ["mixed", "gptoss"])
@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(128, 64), (100, 64), (64, 64)])
def test_every_answer_is_that_of_the_prompt_alone(
    n_batch: int, n_ubatch: int, kind: str, tiny_model: Callable[[str], Path]
) -> None:
    model = tiny_model(kind)
    llm = load(Repeatable, model, n_batch, n_ubatch)
    alone = load(Repeatable, model, n_batch, n_ubatch)
    saved = 0
    asked = prompts(llm.n_vocab())
    for i, prompt in enumerate(asked):
        alone.reset()
        want = answer(alone, prompt)
        got = answer(llm, prompt)
        assert got[:2] == want[:2], i
        saved += want[2] - got[2]
    assert saved > 300
    # a conversation: the prompt goes on after the answer
    prompt = asked[-1] + got[0] + asked[0][:50]
    alone.reset()
    want, got = answer(alone, prompt), answer(llm, prompt)
    assert got[:2] == want[:2] and got[2] < want[2]
    # a state that was saved: nobody knows how it was computed
    state = llm.save_state()
    answer(llm, asked[0])
    llm.load_state(state)
    assert answer(llm, prompt)[:2] == want[:2]
    alone.close()
    llm.close()


def test_without_it_everything_is_taken_over(tiny_model: Callable[[str], Path]) -> None:
    llm = load(Usual, tiny_model("mixed"), 128, 64)
    first, again, other = (answer(llm, prompt) for prompt in prompts(llm.n_vocab())[:3])
    assert [done[2] for done in (first, again, other)] == [303, 4, 63]
    assert first[1] != again[1]  # the last token of the prompt was computed alone
    llm.close()

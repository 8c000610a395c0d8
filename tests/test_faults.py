"""A read that fails never becomes a token: typed error, nothing kept, and the object goes on."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scenarios
from flashmoe_gguf import ExpertReadError, FlashMoEError, Llama
from flashmoe_gguf._native import LatchedError
from flashmoe_gguf.store import read_geometry

PROMPT = list(range(3, 40))


def load(model: Path, n_slots: int = 3) -> Any:
    return Llama(str(model), n_slots=n_slots, **scenarios.context_options(2))


@pytest.fixture(params=["qwen3moe", "split", "nogate"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(request.param)


def set_fault(llm: Any, **fault: Any) -> None:
    llm._experts.native.set_fault(**fault)


def names_a_part(error: ExpertReadError, model: Path) -> bool:
    """Whether the error points at a tensor, layer, expert and file that go together."""
    geometry = read_geometry(model)
    return any(
        error.tensor == part.tensor
        and error.layer == group.layer
        and 0 <= error.expert < group.n_expert
        and error.file == str(geometry.header.shards[part.shard].path)
        for group in geometry.groups
        for part in group.parts
    )


def test_no_memory_is_called_that(tiny_model: Callable[[str], Path]) -> None:
    llm = load(tiny_model("qwen3moe"))
    nothing_known = LatchedError(-1, -1, -1, "", 0, corrupt=False, no_memory=True, count=1)
    llm._experts.native.take_error = lambda: nothing_known
    with pytest.raises(FlashMoEError, match="no memory to compute with"):
        llm.eval([1])
    llm.close()


@pytest.mark.parametrize("number", [errno.EIO, 0])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_error_while_decoding(model: Path, number: int, after: int) -> None:
    good = scenarios.decode(lambda: load(model), PROMPT, 6)
    llm = load(model)
    llm.eval(PROMPT)
    before = llm.n_tokens
    token = int(scenarios.last_logits(llm).argmax())
    set_fault(llm, errno=number, after=after, count=2)
    with pytest.raises(ExpertReadError) as caught:
        for _ in range(20):  # a step may find all it needs in the cache
            llm.eval([token])
            token = int(scenarios.last_logits(llm).argmax())
    assert caught.value.errno == number
    assert names_a_part(caught.value, model)
    assert str(caught.value.expert) in caught.value.message
    assert llm.n_tokens <= before + 19
    set_fault(llm, count=0)

    llm.reset()
    assert np.array_equal(scenarios.follow(llm, PROMPT, 6), good)
    llm._experts.native.verify()
    llm.close()


@pytest.mark.parametrize("n_slots", [0, 3, 6])
def test_error_in_prefill(model: Path, n_slots: int) -> None:
    good = scenarios.decode(lambda: load(model, n_slots), PROMPT, 4)
    llm = load(model, n_slots)
    set_fault(llm, errno=errno.EIO, after=5, count=1)
    with pytest.raises(ExpertReadError):
        llm.eval(PROMPT)
    assert llm.n_tokens == 0
    assert np.array_equal(scenarios.follow(llm, PROMPT, 4), good)
    llm.close()


def test_the_conversation_goes_on_from_where_it_was(tiny_model: Callable[[str], Path]) -> None:
    """Attention models keep everything before the failed step."""
    model = tiny_model("qwen3moe")
    good = scenarios.decode(lambda: load(model), PROMPT, 6)
    llm = load(model, 0)
    rows = [scenarios.follow(llm, PROMPT, 0)[0]]
    for _ in range(6):
        token = int(rows[-1].argmax())
        set_fault(llm, errno=errno.EIO, count=1)
        before = llm.n_tokens
        with pytest.raises(ExpertReadError):
            llm.eval([token])
        assert llm.n_tokens == before
        rows.append(scenarios.follow(llm, [token], 0)[0])
    assert np.array_equal(np.stack(rows), good)
    llm.close()


def test_late_reads_are_waited_for(model: Path) -> None:
    good = scenarios.decode(lambda: load(model, 0), PROMPT, 0)
    llm = load(model, 0)
    set_fault(llm, hold=True, count=3)
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(scenarios.follow(llm, PROMPT, 0)))
    thread.start()
    tick = threading.Event()
    while llm._experts.native.held() == 0:
        assert thread.is_alive()
        tick.wait(0.001)
    assert not result
    llm._experts.native.release_held()
    thread.join()
    assert np.array_equal(result[0], good)
    llm.close()


def test_generation_raises_and_keeps_what_it_had(tiny_model: Callable[[str], Path]) -> None:
    """Through llama_cpp's own generate(): tokens before the error were real, none comes after."""
    model = tiny_model("gptoss")
    llm = load(model, 0)
    want = [t for t, _ in zip(llm.generate(PROMPT, temp=0.0), range(8), strict=False)]
    llm.reset()
    got: list[int] = []
    with pytest.raises(ExpertReadError):
        for token in llm.generate(PROMPT, temp=0.0):
            got.append(token)
            if len(got) == 4:
                set_fault(llm, errno=errno.EIO, count=1)
    assert got == want[:4]
    llm.close()


def test_memory_is_what_the_slots_say(model: Path) -> None:
    """Slot accounting: reserved bytes are the plan's, residents never exceed them."""
    llm = load(model, 3)
    costs = llm._experts.costs()
    assert llm.stats().slot_bytes == sum(c.slot_bytes * min(3, c.n_expert) for c in costs)
    for _ in range(3):
        llm.reset()
        scenarios.follow(llm, PROMPT, 8)
        stats = llm.stats()
        assert 0 < stats.resident_bytes <= stats.slot_bytes
        assert stats.inserted - stats.evicted == sum(g.n_resident for g in llm._experts.groups())
    llm.close()

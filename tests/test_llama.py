"""flashmoe_gguf.Llama as an object: options, refusals, statistics, life and death."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import scenarios
from flashmoe_gguf import BudgetError, Llama, OptionError, Stats
from flashmoe_gguf.store import read_geometry

OPTIONS = scenarios.context_options(2, n_ctx=512)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3moe")


def test_statistics_add_up(model: Path) -> None:
    llm = Llama(str(model), n_slots=4, policy="lru", **OPTIONS)
    before = llm.stats()
    assert isinstance(before, Stats)
    assert before.lookups == 0 and before.hit_rate == 0.0
    scenarios.follow(llm, range(5, 25), 0)
    middle = llm.stats()
    scenarios.follow(llm, [7], 15)
    assert middle is not None
    geometry = read_geometry(model)
    delta = llm.stats() - middle
    assert delta.policy == "lru" and delta.n_slots == 4
    assert delta.tokens == 16
    assert delta.decode_lookups == 16 * geometry.top_k * len(geometry.groups)
    assert delta.lookups == delta.decode_lookups
    assert delta.misses == delta.inserted == delta.lookups - delta.hits
    assert delta.operations == 16 * sum(len(g.parts) for g in geometry.groups)
    assert delta.missed_bytes == delta.inserted * geometry.groups[0].expert_bytes
    assert delta.bytes_read >= delta.missed_bytes
    assert 0 < delta.hit_rate < 1
    llm.close()
    assert llm.stats() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "mru"}, "no policy 'mru'"),
        ({"io": "mmap"}, "no I/O mode 'mmap'"),
        ({"ram": "lots"}, "not an amount of memory"),
        ({"n_slots": -2}, "-2 slots"),
        ({"use_mlock": True}, "mlock"),
        ({"lora_path": "adapter.gguf"}, "LoRA"),
    ],
)
def test_options_that_cannot_be(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        Llama(str(model), **{**OPTIONS, **options})
    assert caught.value.hint


def test_a_budget_below_the_floor(model: Path) -> None:
    with pytest.raises(BudgetError, match=r"below the floor of .*dense weights .*read ring"):
        Llama(str(model), ram="10M", **OPTIONS)


def test_a_budget_becomes_slots(model: Path) -> None:
    llm = Llama(str(model), ram="4G", **OPTIONS)
    assert llm.plan is not None
    assert llm.plan.cached_share == 1.0
    assert llm.plan.ram_bytes == 4 << 30
    assert llm.plan.total_bytes <= 4 << 30
    assert llm.stats().slot_bytes == llm.plan.slot_bytes
    llm.close()


def test_without_a_vocabulary_text_is_refused_and_tokens_work(model: Path) -> None:
    llm = Llama(str(model), **OPTIONS)
    assert not llm.has_vocabulary
    for ask in (
        lambda: llm.tokenize(b"text"),
        lambda: llm.detokenize([1, 2]),
        lambda: llm.create_completion("text", max_tokens=2),
        lambda: llm.create_completion([1, 2], max_tokens=2),
    ):
        with pytest.raises(OptionError, match="no vocabulary"):
            ask()
    tokens = [t for t, _ in zip(llm.generate([1, 2, 3], temp=0.0), range(5), strict=False)]
    assert len(tokens) == 5
    llm.close()


def test_loading_progress_rises_to_one(model: Path) -> None:
    seen: list[float] = []
    Llama(str(model), progress=seen.append, **OPTIONS).close()
    assert seen == sorted(seen)
    assert seen[0] < 0.5 and seen[-1] == 1.0


def test_prefill_progress_is_visible_from_another_thread(model: Path) -> None:
    llm = Llama(str(model), n_slots=0, **OPTIONS)
    assert llm.eval_progress() is None
    llm._experts.native.set_fault(hold=True, after=40, count=1)
    thread = threading.Thread(target=lambda: llm.eval(list(range(64))))
    thread.start()
    tick = threading.Event()
    while llm._experts.native.held() == 0:
        assert thread.is_alive()
        tick.wait(0.001)
    done, total = llm.eval_progress()
    assert total == 64 and 0 < done < 64
    llm._experts.native.release_held()
    thread.join()
    assert llm.eval_progress() is None
    llm.close()


def test_pickles_to_the_same_options(model: Path) -> None:
    llm = Llama(str(model), n_slots=3, policy="lru", **OPTIONS)
    llm2 = pickle.loads(pickle.dumps(llm))
    assert llm2.stats().n_slots == 3 and llm2.stats().policy == "lru"
    llm.close()
    llm2.close()


def test_without_streaming_it_is_llama_cpp(model: Path) -> None:
    llm = Llama(str(model), stream=False, **OPTIONS)
    assert not llm.is_streamed and llm.stats() is None and llm.plan is None
    scenarios.follow(llm, [1, 2, 3], 2)
    llm.close()
    llm.close()


def test_buffered_and_direct_reads_give_the_same(model: Path) -> None:
    rows = []
    for io in ("buffered", "auto"):
        llm = Llama(str(model), io=io, n_slots=2, **OPTIONS)
        rows.append(scenarios.follow(llm, range(30), 6))
        if io == "buffered":
            assert llm.stats().io_mode == "buffered"
        llm.close()
    assert (rows[0] == rows[1]).all()


def test_other_libraries_are_refused(tmp_path: Path) -> None:
    """llama_cpp can load only one set of libraries per process."""
    program = (
        "from flashmoe_gguf.libs import load_llama_cpp\n"
        "load_llama_cpp('stock')\n"
        "from flashmoe_gguf import LibraryError\n"
        "try:\n"
        "    from flashmoe_gguf import Llama\n"
        "except LibraryError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "llama_cpp was imported before with the libraries in" in done.stdout


def test_the_environment_is_left_as_it_was() -> None:
    import os

    assert "flashmoe_gguf" not in os.environ.get("LLAMA_CPP_LIB_PATH", "")

"""flashmoe_gguf.Llama as an object: options, refusals, statistics, life and death."""

from __future__ import annotations

import gc
import pickle
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scenarios
from flashmoe_gguf import BudgetError, FlashMoEError, Llama, OptionError, Stats
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.streaming import untouched_slot_bytes

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
        ({"n_slots": "3"}, "not a whole number"),
        ({"n_slots": 1.5}, "not a whole number"),
        ({"n_slots": 2, "ram": "4G"}, "exclude each other"),
        ({"n_ctx": -5}, "n_ctx is -5"),
        ({"n_ctx": None}, "n_ctx is None"),
        ({"n_batch": 0}, "n_batch is 0"),
        ({"verify": "never"}, "no way to verify"),
    ],
)
def test_options_that_cannot_be(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        Llama(str(model), **{**OPTIONS, **options})
    assert caught.value.hint or options.get("n_slots")


def test_a_misspelt_argument_is_not_swallowed(model: Path) -> None:
    with pytest.raises(TypeError, match="no argument 'polcy'"):
        Llama(str(model), polcy="lru", **OPTIONS)


def test_a_path_that_llama_cpp_cannot_take() -> None:
    with pytest.raises(OptionError, match="not valid UTF-8"):
        Llama(b"\xff.gguf".decode(errors="surrogateescape"))


def n_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_the_last_reference_frees_everything(model: Path) -> None:
    """No cycle keeps the model: a reload must not hold two."""
    before = n_threads()
    llm = Llama(str(model), n_slots=3, progress=lambda fraction: None, **OPTIONS)
    assert n_threads() == before + 5  # four readers, and the gauge
    gone = weakref.ref(llm)
    del llm
    assert gone() is None
    assert n_threads() == before


@pytest.mark.usefixtures("no_collector")
def test_a_failed_load_leaves_nothing(model: Path) -> None:
    def stop(fraction: float) -> None:
        raise KeyError("stop")

    before, files = n_threads(), len(list(Path("/proc/self/fd").iterdir()))
    failures: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"progress": stop}, KeyError),
        ({"ram": "1M"}, BudgetError),
        ({"policy": "mru"}, OptionError),
    ]
    kept = []
    for options, kind in failures:
        with pytest.raises(kind) as caught:
            Llama(str(model), **{**OPTIONS, **options})
        kept.append(caught.value)  # with its traceback and frames
        assert n_threads() == before
        assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_following_the_hint_is_enough(model: Path) -> None:
    """The floor that is printed before loading is one that loading accepts."""
    with pytest.raises(BudgetError) as caught:
        Llama(str(model), ram="1M", **OPTIONS)
    hinted = re.search(r"--ram (\d+M)", caught.value.hint)
    assert hinted is not None
    Llama(str(model), ram=hinted[1], **OPTIONS).close()


def test_slots_of_other_objects_count(model: Path) -> None:
    """Reserved and not yet touched: the second object must not plan with it again."""
    first = Llama(str(model), n_slots=8, **OPTIONS)
    untouched = first.stats().slot_bytes
    second = Llama(str(model), n_slots=0, **OPTIONS)
    assert untouched_slot_bytes() == untouched
    assert second.plan.fixed.process >= first.plan.fixed.process
    first.close()
    assert untouched_slot_bytes() == 0
    second.close()


def test_a_quantized_context_is_not_taken_for_more(tiny_model: Callable[[str], Path]) -> None:
    sizes = []
    for kind in (None, 8):  # Q8_0
        options = {**OPTIONS, "n_ctx": 16384, "flash_attn": True, "type_k": kind, "type_v": kind}
        llm = Llama(str(tiny_model("mixed")), n_slots=0, **options)
        sizes.append(llm.plan.fixed.context)
        llm.close()
    assert sizes[1] < sizes[0]


def test_after_closing_it_says_so(model: Path) -> None:
    llm = Llama(str(model), n_slots=3, **OPTIONS)
    tokens = llm.generate([1, 2, 3], temp=0.0)
    next(tokens)
    llm.close()
    for use in (
        lambda: llm.eval([1]),
        lambda: next(tokens),
        lambda: llm.tokenize(b"x"),
        lambda: llm._ctx.decode(llm._batch),
    ):
        with pytest.raises(FlashMoEError, match="the model is closed"):
            use()


def test_a_forked_child_is_told(model: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from flashmoe_gguf import FlashMoEError, Llama\n"
        "llm = Llama(sys.argv[1], n_slots=0, n_ctx=256, n_threads=1, n_threads_batch=1,"
        " verbose=False)\n"
        "llm.eval([1, 2, 3])\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        llm.eval([4])\n"
        "    except FlashMoEError as error:\n"
        "        print(error.message, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "before this process was forked" in done.stdout


def test_the_user_s_abort_callback_is_free(model: Path) -> None:
    import llama_cpp

    llm = Llama(str(model), n_slots=0, **OPTIONS)
    callback = llama_cpp.ggml_abort_callback(lambda _data: True)
    llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
    with pytest.raises(RuntimeError, match="llama_decode returned 2"):
        llm.eval([1, 2, 3])
    llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(0), None)
    scenarios.follow(llm, [1, 2, 3], 2)
    llm._experts.native.verify()
    llm.close()


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


def test_what_fits_as_a_whole_fills_in_the_background(model: Path) -> None:
    llm = Llama(str(model), n_slots=99, **OPTIONS)
    tick = threading.Event()
    while llm.stats().resident_bytes < llm.stats().slot_bytes:
        tick.wait(0.001)
    before = llm.stats()
    assert before.lookups == 0
    rows = scenarios.follow(llm, range(40), 8)
    delta = llm.stats() - before
    assert delta.hit_rate == 1.0 and delta.inserted == 0
    llm._experts.native.verify()
    llm.close()
    assert (
        rows == scenarios.decode(lambda: Llama(str(model), n_slots=0, **OPTIONS), range(40), 8)
    ).all()


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


@pytest.mark.parametrize(
    ("absent", "hint"),
    [
        ("libcuda.so.1", "libcuda.so.1 comes with NVIDIA's driver"),
        ("libcublas.so.13", "libcublas.so.13 is missing"),
        ("libgomp.so.1", "libgomp.so.1 is missing"),
        ("libggml.so", "reinstall the package on this machine"),
        ("", "reinstall the package on this machine"),
    ],
)
def test_libraries_that_do_not_load(absent: str, hint: str, tmp_path: Path) -> None:
    """With a hint that fits what is missing: a GPU's driver or toolkit, or our own."""
    program = (
        "import importlib, sys\n"
        "from flashmoe_gguf import LibraryError, libs\n"
        "def broken(name):\n"
        "    raise RuntimeError(sys.argv[1])\n"
        "importlib.import_module = broken\n"
        "try:\n"
        "    libs.load_llama_cpp()\n"
        "except LibraryError as error:\n"
        "    print(error.message, error.hint, sep='\\n')\n"
    )
    why = "Failed to load shared library '/x/libllama.so': "
    why += f"{absent}: cannot open shared object file: No such file or directory" if absent else "?"
    done = subprocess.run(
        [sys.executable, "-c", program, why],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    message, advice = done.stdout.splitlines()
    assert message.startswith("the llama.cpp libraries in ") and message.endswith(why)
    assert advice.startswith(hint)
    assert ("for the processor" in advice) == absent.startswith("libcu")


def test_the_environment_is_left_as_it_was() -> None:
    import os

    assert "flashmoe_gguf" not in os.environ.get("LLAMA_CPP_LIB_PATH", "")

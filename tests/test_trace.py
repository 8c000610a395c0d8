"""Routing traces: the file, what `Llama(trace=...)` records, and prompts out of files."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scenarios
from cli_tools import make_replay_model
from flashmoe_gguf import ExpertReadError, Llama, OptionError
from flashmoe_gguf.bench.synthetic import synthetic_trace
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.pack import pack_model
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.trace import (
    NO_EXPERT,
    Collection,
    Column,
    Rows,
    Trace,
    check_target,
    read_prompts,
    read_trace,
    write_trace,
)

OPTIONS = scenarios.context_options(1, n_ctx=512)


def same(a: Trace, b: Trace) -> bool:
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__]
    return all(
        np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
        else x == y
        for x, y in pairs
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n_tokens, n_layers = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    k = draw(st.integers(1, 3))
    n_expert = np.array(draw(st.lists(st.integers(1, 400), min_size=n_layers, max_size=n_layers)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    experts = random.integers(0, n_expert[None, :, None], (n_tokens, n_layers, k))
    experts[random.random(experts.shape) < 0.1] = NO_EXPERT
    begins = sorted(draw(st.lists(st.integers(0, n_tokens), max_size=3)))
    probs = random.random(experts.shape).astype(np.float16) if draw(st.booleans()) else None
    phase = random.integers(0, 2, n_tokens).astype(np.uint8) if draw(st.booleans()) else None
    return Trace(
        experts.astype(np.uint16),
        np.array([0, *begins, n_tokens]),
        n_expert.astype(np.int32),
        np.arange(n_layers, dtype=np.int32) * 2,
        probs,
        draw(st.text("0123456789abcdef", max_size=32)),
        phase,
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(traces())
def test_what_is_written_is_read(tmp_path: Path, trace: Trace) -> None:
    write_trace(tmp_path / "t.npz", trace)
    assert same(read_trace(tmp_path / "t.npz"), trace)
    assert not list(tmp_path.glob("*.partial"))


@given(traces())
def test_sequences_are_selected(trace: Trace) -> None:
    n = len(trace.seq) - 1
    assert same(trace.select(range(n)), trace)
    picked = trace.select([n - 1, 0])
    a, b = trace.seq[n - 1], trace.seq[n]
    assert np.array_equal(picked.experts[: b - a], trace.experts[a:b])
    assert picked.seq.tolist() == [0, b - a, b - a + trace.seq[1]]
    assert picked.n_tokens == picked.seq[-1]


@given(traces())
def test_answers_alone(trace: Trace) -> None:
    answers = trace.answers()
    if trace.phase is None:
        assert answers is trace
        return
    assert np.array_equal(answers.experts, trace.experts[trace.phase == 1])
    kept = [int(trace.phase[a:b].sum()) for a, b in zip(trace.seq, trace.seq[1:], strict=False)]
    assert np.diff(answers.seq).tolist() == kept


GOOD: dict[str, Any] = {"experts": np.zeros((3, 2, 2), np.uint16), "seq": np.array([0, 2, 3])}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"seq": GOOD["seq"]}, "no array 'experts'"),
        ({"experts": np.zeros((3, 2))}, "not \\[tokens, layers, k\\]"),
        ({"experts": np.zeros((3, 2, 2), np.float32)}, "not \\[tokens, layers, k\\]"),
        ({"experts": np.zeros((3, 0, 2), np.uint16)}, "not \\[tokens, layers, k\\]"),
        ({"experts": np.full((3, 2, 2), -1)}, "holds -1 to -1"),
        ({"experts": np.full((3, 2, 2), 70000)}, "holds 70000"),
        ({**GOOD, "seq": np.array([0, 2])}, "does not go from 0 to 3"),
        ({**GOOD, "seq": np.array([0, 3, 2, 3])}, "does not go from 0 to 3"),
        ({**GOOD, "seq": np.array([0.0, 3.0])}, "'seq' is float64"),
        ({**GOOD, "n_expert": np.array([4])}, "'n_expert' has shape"),
        ({**GOOD, "experts": np.full((3, 2, 2), 4), "n_expert": np.array([5, 4])}, "layer 1 uses"),
        ({**GOOD, "layers": np.array([4])}, "'layers' has shape"),
        ({**GOOD, "probs": np.zeros((3, 2, 1), np.float32)}, "'probs' is float32"),
        ({**GOOD, "phase": np.zeros(2, np.uint8)}, "'phase' is uint8"),
        ({"experts": np.array([{}], object)}, "not a routing trace"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "t.npz")


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(TraceError, match="No such file"):
        read_trace(path)
    path.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(TraceError, match="not a routing trace"):
        read_trace(path)
    np.save(tmp_path / "t.npy", np.zeros(3))
    with pytest.raises(TraceError, match="one array"):
        read_trace(tmp_path / "t.npy")
    write_trace(path, read_only(GOOD))
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError):
            read_trace(path)
    for at in range(0, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(TraceError):
            assert read_trace(path).n_tokens == 3  # a byte that nobody looks at


def read_only(arrays: dict[str, Any]) -> Trace:
    counts = np.full(2, 4, np.int32)
    return Trace(arrays["experts"], arrays["seq"], counts, np.arange(2, dtype=np.int32))


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "folder"), (tmp_path / "none" / "t.npz", "no such folder")):
        with pytest.raises(TraceError, match=words):
            check_target(path)
    with pytest.raises(TraceError, match="cannot write"):
        write_trace(tmp_path / "none" / "t.npz", read_only(GOOD))
    check_target(tmp_path / "t.npz")


def test_a_token_that_names_an_expert_twice_uses_it_once() -> None:
    ids = np.array([[[3, 3, 1], [9, 9, 9]], [[1, 2, 1], [9, 9, 9]]], np.uint16)
    collection = Collection([Column(0, 7, 4)], "f")
    collection.add(Rows(ids, None, np.array([0, 1], np.uint8), np.array([0, 0], np.uint8)))
    trace = collection.trace()
    assert trace.experts[:, 0].tolist() in (
        [[NO_EXPERT, 3, 1], [NO_EXPERT, 2, 1]],
        [[3, NO_EXPERT, 1], [1, 2, NO_EXPERT]],
    )
    assert (trace.seq.tolist(), trace.layers.tolist(), trace.n_expert.tolist()) == (
        [0, 2],
        [7],
        [4],
    )


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "replay.gguf"
    make_replay_model(path, 60)
    return path


def test_the_routing_is_the_models(replay: Path, tmp_path: Path) -> None:
    """The model's greedy answers follow a known routing: prompt, answer, and a second sequence."""
    known = np.sort(synthetic_trace(60, 3, 8, 2), axis=2)
    llm = Llama(str(replay), n_slots=3, trace=tmp_path / "t.npz", **OPTIONS)
    for start, n_prompt, n_answer in ((0, 20, 30), (30, 4, 6)):
        llm.reset()
        llm.eval(list(range(start, start + n_prompt)))
        for token in range(start + n_prompt, start + n_prompt + n_answer):
            llm.eval([token])
    assert llm.recorded_tokens == 60
    llm.save_trace()
    assert read_trace(tmp_path / "t.npz").n_tokens == 60
    llm.close()
    trace = read_trace(tmp_path / "t.npz")
    order = [*range(50), *range(30, 40)]
    ids = np.sort(trace.experts.astype(int), axis=2)
    assert np.array_equal(ids[:, :-1], known[order][:, :-1])
    answer = trace.phase == 1
    assert np.array_equal(ids[answer], known[order][answer])
    # llama.cpp computes the last layer for the last token of a prompt only
    assert (ids[:19, -1] == NO_EXPERT).all() and np.array_equal(ids[19], known[19])
    assert trace.seq.tolist() == [0, 50, 60]
    assert np.flatnonzero(~answer).tolist() == [*range(20), *range(50, 54)]
    assert (trace.layers.tolist(), trace.n_expert.tolist()) == ([0, 1, 2], [8, 8, 8])
    assert trace.probs is None
    assert trace.fingerprint == read_geometry(replay).fingerprint


def test_a_packed_model_is_known_by_its_source(replay: Path, tmp_path: Path) -> None:
    pack_model(replay, tmp_path / "packed.gguf")
    of_packed = read_geometry(tmp_path / "packed.gguf").fingerprint
    assert of_packed == read_geometry(replay).fingerprint
    other = make_replay_model(tmp_path / "other.gguf", 50)
    assert other is None or read_geometry(tmp_path / "other.gguf").fingerprint != of_packed


@pytest.mark.parametrize("kind", ["qwen3moe", "gptoss", "fused"])
def test_probabilities(kind: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_model(kind))
    traces = []
    for probs in (False, True):
        path = tmp_path / f"{probs}.npz"
        llm = Llama(model, n_slots=3, trace=path, trace_probs=probs, **OPTIONS)
        scenarios.follow(llm, range(1, 13), 6)
        llm.close()
        traces.append(read_trace(path))
    plain, full = traces
    assert np.array_equal(plain.experts, full.experts)
    assert full.probs is not None and plain.probs is None
    used = full.experts != NO_EXPERT
    probs = full.probs.astype(float)
    assert np.array_equal(~np.isnan(probs), used)
    assert (probs[used] > 0).all() and (probs[used] < 1).all()
    rows = used.all(axis=2)
    assert (np.diff(probs[rows], axis=1) <= 0).all()  # the router's order
    total = probs[rows].sum(axis=1)
    # gpt-oss takes the softmax over the chosen experts, the others over all
    assert np.allclose(total, 1, atol=2e-3) if kind == "gptoss" else (total < 1.002).all()


def test_the_same_logits_with_and_without(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = str(tiny_model("qwen3moe"))
    rows = []
    for extra in (
        {},
        {"trace": tmp_path / "a.npz"},
        {"trace": tmp_path / "b", "trace_probs": True},
    ):
        llm = Llama(model, n_slots=3, **extra, **OPTIONS)
        rows.append(scenarios.follow(llm, range(1, 13), 6))
        llm.close()
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


def test_a_decode_that_fails_leaves_no_rows(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    llm = Llama(str(tiny_model("qwen3moe")), n_slots=0, trace=tmp_path / "t.npz", **OPTIONS)
    llm.eval([1, 2, 3])
    llm._experts.native.set_fault(errno=5, after=3, count=20)
    with pytest.raises(ExpertReadError):
        llm.eval([4])
    assert llm.recorded_tokens == 3
    llm._experts.native.set_fault(count=0)
    llm.eval([4])
    llm.reset()
    llm._experts.native.set_fault(errno=5, after=3, count=20)
    with pytest.raises(ExpertReadError):
        llm.eval([7, 8])
    llm._experts.native.set_fault(count=0)
    llm.eval([7, 8, 9])
    llm.close()
    trace = read_trace(tmp_path / "t.npz")
    assert trace.phase is not None and trace.phase.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert trace.seq.tolist() == [0, 4, 7]
    assert (trace.experts[3] != NO_EXPERT).all()


def test_a_prompt_that_shares_its_beginning_is_another_request(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    llm = Llama(str(tiny_model("qwen3moe")), n_slots=3, trace=tmp_path / "t.npz", **OPTIONS)
    llm.eval(list(range(10)))
    llm.n_tokens = 8  # goes on with most of what was there
    llm.eval([3, 4, 5])
    llm.n_tokens = 1
    llm.eval([6, 7])
    llm.close()
    assert read_trace(tmp_path / "t.npz").seq.tolist() == [0, 13, 15]


def test_refusals(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_model("qwen3moe"))
    with pytest.raises(TraceError, match="no such folder"):
        Llama(model, n_slots=3, trace=tmp_path / "none" / "t", **OPTIONS)
    with pytest.raises(OptionError, match="not streamed"):
        Llama(model, stream=False, trace=tmp_path / "t", **OPTIONS)
    with pytest.raises(OptionError, match="needs trace"):
        Llama(model, n_slots=3, trace_probs=True, **OPTIONS)
    llm = Llama(model, n_slots=3, **OPTIONS)
    assert llm.recorded_tokens == 0
    with pytest.raises(OptionError, match="no routing is recorded"):
        llm.save_trace()
    llm.close()


def test_a_pickled_copy_does_not_write(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    llm = Llama(str(tiny_model("qwen3moe")), n_slots=3, trace=tmp_path / "t.npz", **OPTIONS)
    llm.eval([1, 2])
    copy = pickle.loads(pickle.dumps(llm))
    llm.close()
    copy.eval([1])
    copy.close()
    assert read_trace(tmp_path / "t.npz").n_tokens == 2


@pytest.mark.parametrize(
    ("lines", "field", "prompts"),
    [
        ([{"question": "a", "answer": "b"}], None, [("a",)]),
        ([{"id": 1, "prompt": "a"}, {"prompt": "b", "text": "c"}], None, [("a",), ("b",)]),
        ([{"turns": ["a", "b"]}], None, [("a", "b")]),
        ([{"turns": ["a", "b"], "text": "c"}], "text", [("c",)]),
        ([{"messages": [{"role": "system", "content": "s"}, {"content": "a"}]}], None, [("a",)]),
    ],
)
def test_prompts(tmp_path: Path, lines: list[Any], field: str | None, prompts: Any) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert read_prompts(path, field) == prompts


def test_prompts_in_plain_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\n\ntwo {}\n", encoding="utf-8")
    assert read_prompts(path) == [("one",), ("two {}",)]


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("", None, "no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', None, "line 2: this is no JSON"),
        ('{"prompt": "a"}\n[1]', None, "line 2: this is no JSON object"),
        ('{"q": "a"}', None, "no prompt found"),
        ('{"q": "a"}', "w", "no prompt found"),
        ('{"prompt": 3}', None, "'prompt' is no text"),
        ('{"prompt": " "}', None, "'prompt' is no text"),
        ("plain", "q", "plain lines have no fields"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, text: str, field: str | None, words: str) -> None:
    (tmp_path / "p").write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=words):
        read_prompts(tmp_path / "p", field)

"""Synthetic models by name: crowded routing, the cache of models, interrupted builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import scenarios
from flashmoe_gguf import Llama
from flashmoe_gguf.bench.synthetic import unfinished_path
from flashmoe_gguf.bench.synthetic_models import (
    SyntheticModel,
    default_cache,
    list_cached,
    remove_cached,
    synthetic_model,
)
from flashmoe_gguf.bench.synthetic_routing import crowded_routing
from flashmoe_gguf.errors import FlashMoEError, OptionError, TraceError
from flashmoe_gguf.trace import NO_EXPERT, Trace, read_trace, write_trace
from tiny_models.child import decode, stock_libraries

# 96 experts in the 64 dimensions that width 256 leaves for routing.
TINY = {"n_layer": 3, "n_expert": 32, "top_k": 2, "width": 256, "expert_width": 256}
N_TOKENS = 80


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def crowded(cache: Path) -> SyntheticModel:
    return synthetic_model("custom", custom=TINY, n_tokens=N_TOKENS, cache=cache)


def some_trace(
    n_tokens: int, n_layer: int, n_expert: int, top_k: int, seed: int = 0
) -> npt.NDArray[np.uint16]:
    """Routing without any structure: the hardest to obtain."""
    rng = np.random.default_rng(seed)
    rows = np.tile(np.arange(n_expert, dtype=np.uint16), (n_tokens, n_layer, 1))
    return rng.permuted(rows, axis=2)[:, :, :top_k]


def save(path: Path, experts: npt.NDArray[np.uint16], n_expert: int) -> Path:
    n_tokens, n_layer, _ = experts.shape
    counts, layers = np.full(n_layer, n_expert), np.arange(n_layer)
    seq = np.array([0, n_tokens])
    write_trace(path, Trace(experts, seq, counts.astype(np.int32), layers.astype(np.int32)))
    return path


def test_stock_routes_as_the_stored_trace_says(crowded: SyntheticModel) -> None:
    folder = stock_libraries()
    if folder is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    trace = read_trace(crowded.trace)
    assert crowded.wished_share == 1.0
    assert trace.experts.shape == (N_TOKENS, 3, 2) and trace.n_expert.tolist() == [32] * 3
    n_prompt = 16
    run = decode(folder, [(crowded.path, range(n_prompt), n_prompt)], greedy=N_TOKENS - n_prompt)[0]
    assert run.logits.argmax(axis=1).tolist() == list(range(n_prompt, N_TOKENS + 1))
    for layer in range(3):
        # In the last layer only the prompt token whose logits are asked for is computed.
        first = n_prompt - 1 if layer == 2 else 0
        chosen = run.experts[str(layer)][:, :2]
        assert np.array_equal(chosen, trace.experts[first:, layer])


def test_streamed_reads_what_the_stored_trace_says(crowded: SyntheticModel) -> None:
    trace = read_trace(crowded.trace)
    llama = Llama(str(crowded.path), n_slots=2, policy="lru", n_ctx=256, n_threads=1, verbose=False)
    try:
        before: set[tuple[int, int]] = set()
        misses = 0
        for token in range(N_TOKENS):
            llama.eval([token])
            assert int(np.argmax(scenarios.last_logits(llama))) == token + 1
            used = {(layer, int(e)) for layer in range(3) for e in trace.experts[token, layer]}
            # As many slots as a token uses: they hold the experts of the token before.
            now = llama.stats().misses
            if token:
                assert now - misses == len(used - before)
            before, misses = used, now
        assert llama.stats().hits > N_TOKENS / 2  # else any routing would have passed
    finally:
        llama.close()


def test_wishes_beyond_the_width_come_true() -> None:
    wished = some_trace(300, 5, 32, 2)
    routing = crowded_routing(wished, 32, 64, seed=0)
    assert routing.wished_share == 1.0
    assert routing.gap >= 0.02
    assert np.array_equal(np.sort(routing.experts, axis=2), np.sort(wished, axis=2))
    assert (routing.experts == wished).mean() > 0.99  # in the order of the ranks, too


def test_what_cannot_be_had_is_recorded() -> None:
    wished = some_trace(100, 6, 64, 4)
    routing = crowded_routing(wished, 64, 64, seed=0)
    rows = np.concatenate([routing.router(layer, 64) for layer in range(6)])
    logits = (routing.embedding.astype(np.float64) @ rows.T).reshape(100, 6, 64)
    best = np.argsort(-logits, axis=2)[:, :, :4]
    assert np.array_equal(best, routing.experts)
    share = (best[:, :, :, None] == wished[:, :, None, :]).any(axis=3).mean()
    assert routing.wished_share == pytest.approx(share)
    assert 0.3 < share < 0.9
    ordered = np.sort(logits, axis=2)
    # The router multiplies by its gain of 2.
    assert (ordered[:, :, -4] - ordered[:, :, -5]).min() / 2 == pytest.approx(routing.gap, abs=1e-5)
    assert routing.gap > 1e-4


def test_a_model_is_made_once(crowded: SyntheticModel, cache: Path) -> None:
    before = crowded.path.stat().st_mtime_ns
    calls: list[int] = []
    again = synthetic_model(
        "custom",
        custom=TINY,
        n_tokens=N_TOKENS,
        cache=cache,
        progress=lambda done, total: calls.append(done),
    )
    assert again == crowded
    assert again.path.stat().st_mtime_ns == before and not calls
    assert [entry.path for entry in list_cached(cache)] == [crowded.path]


def test_every_input_is_in_the_key(tmp_path: Path) -> None:
    sizes = {**TINY, "n_layer": 1}
    trace = some_trace(20, 1, 32, 2)
    made = [
        synthetic_model("custom", custom=custom, n_tokens=n, trace=file, cache=tmp_path / "c")
        for custom, n, file in (
            (sizes, 10, None),
            (sizes, 11, None),
            ({**sizes, "expert_width": 512}, 10, None),
            ({**sizes, "n_head_kv": 1}, 10, None),
            (sizes, 10, save(tmp_path / "a.npz", trace, 32)),
            (sizes, 10, save(tmp_path / "b.npz", trace[::-1], 32)),
        )
    ]
    assert len({model.path for model in made}) == len(made)
    # The trace counts, not the file's name, and only as far as it is replayed.
    same = save(tmp_path / "c.npz", np.concatenate([trace[:10], trace[:3]]), 32)
    sizes_of_c = {"custom": sizes, "n_tokens": 10, "trace": same, "cache": tmp_path / "c"}
    assert synthetic_model("custom", **sizes_of_c) == made[4]  # type: ignore[arg-type]


def test_a_trace_file_is_replayed_without_its_gaps(tmp_path: Path) -> None:
    trace = some_trace(20, 1, 32, 2)
    trace[7, 0, 1] = NO_EXPERT
    file = save(tmp_path / "t.npz", trace, 32)
    model = synthetic_model("custom", custom={**TINY, "n_layer": 1}, trace=file, cache=tmp_path)
    assert np.array_equal(read_trace(model.trace).experts, np.delete(trace, 7, axis=0))


def test_a_model_that_lost_its_trace_or_end_is_made_again(tmp_path: Path) -> None:
    def make() -> SyntheticModel:
        return synthetic_model("custom", custom={**TINY, "n_layer": 1}, n_tokens=9, cache=tmp_path)

    model = make()
    whole = model.path.read_bytes()
    model.trace.unlink()
    assert make() == model and model.trace.is_file()
    model.path.write_bytes(whole[: len(whole) // 2])
    assert make() == model and model.path.read_bytes() == whole


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        (unfinished,) = (entry for entry in list_cached(tmp_path))
        assert not unfinished.complete
        assert remove_cached(tmp_path) == []  # it is being made
        with pytest.raises(FlashMoEError, match="another process is writing"):
            make(None)
        raise KeyboardInterrupt

    def make(progress: Any) -> SyntheticModel:
        sizes = {**TINY, "n_layer": 1}
        return synthetic_model(
            "custom", custom=sizes, n_tokens=9, cache=tmp_path, progress=progress
        )

    with pytest.raises(KeyboardInterrupt):
        make(stop)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_build_are_listed_and_go(tmp_path: Path) -> None:
    model = synthetic_model("custom", custom={**TINY, "n_layer": 1}, n_tokens=9, cache=tmp_path)
    killed = tmp_path / "olmoe-0123.gguf"
    unfinished_path(killed).write_bytes(bytes(100))
    (tmp_path / "mine.txt").write_text("not ours")
    listed = {entry.path.name: entry for entry in list_cached(tmp_path)}
    assert set(listed) == {model.path.name, killed.name}
    assert listed[killed.name].n_bytes == 100 and not listed[killed.name].complete
    n_bytes = model.path.stat().st_size + model.trace.stat().st_size
    assert listed[model.path.name].n_bytes == n_bytes and listed[model.path.name].complete
    assert {entry.path.name for entry in remove_cached(tmp_path)} == set(listed)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    assert remove_cached(tmp_path / "nowhere") == []


def test_no_room_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int = 1_000_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Usage())
    with pytest.raises(FlashMoEError, match=r"needs 16\.\d\d GB in .* has 1\.00") as caught:
        synthetic_model("qwen3-30b", n_tokens=4, cache=tmp_path)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "flashmoe-gguf" / "synthetic"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache() == tmp_path / "home" / ".cache" / "flashmoe-gguf" / "synthetic"
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(FlashMoEError, match="cannot write"):
        synthetic_model("custom", custom=TINY, n_tokens=4, cache=in_the_way / "folder")


@pytest.mark.parametrize(
    ("name", "custom", "words"),
    [
        ("mixtral", None, "no synthetic model is called 'mixtral'"),
        ("olmoe", TINY, "has its own"),
        ("custom", None, "lacks n_layer, n_expert, top_k, width, expert_width"),
        ("custom", {**TINY, "layers": 3}, "unknown dimension 'layers'"),
        ("custom", {**TINY, "width": 0}, "width 0 is out of range"),
        ("custom", {**TINY, "n_layer": 513}, "n_layer 513 is out of range"),
        ("custom", {**TINY, "top_k": 33}, "top-33 of 32"),
        ("custom", {**TINY, "width": 300}, "not multiples of 256"),
        ("custom", {**TINY, "n_head": 3}, "3 heads of width 128"),
        ("custom", {**TINY, "n_layer": 40}, "40 layers of 32 experts need width 352"),
    ],
)
def test_impossible_models_are_refused(
    name: str, custom: dict[str, int] | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=words):
        synthetic_model(name, custom=custom, n_tokens=4, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_traces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    trace = some_trace(20, 3, 32, 2)
    file = save(tmp_path / "t.npz", trace, 32)

    def refused(words: str, kind: type[FlashMoEError] = OptionError, **options: Any) -> None:
        with pytest.raises(kind, match=words):
            synthetic_model("custom", trace=file, cache=tmp_path / "c", **options)

    refused("3 layers and 2 experts per token, the model 4 and 2", custom={**TINY, "n_layer": 4})
    refused("3 layers and 2 experts per token, the model 3 and 4", custom={**TINY, "top_k": 4})
    refused("has 20 tokens, not 21", custom=TINY, n_tokens=21)
    refused("0 tokens", custom=TINY, n_tokens=0)
    refused("beyond its 8", TraceError, custom={**TINY, "n_expert": 8})
    save(file, np.full_like(trace, NO_EXPERT), 32)
    refused("no token with 2 experts", custom=TINY)
    assert not (tmp_path / "c").exists()

"""The window of last routing, the gauge that replays it, and what `auto` makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from flashmoe_gguf import Llama, auto_policy
from flashmoe_gguf.auto_policy import choose_by_replay, keep_recent, recent_file
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.cli.stats_text import regret_text
from flashmoe_gguf.regret import LEAST_TOKENS, Regret, RegretGauge, measure_regret
from flashmoe_gguf.trace import read_trace

N_LAYER, N_EXPERT, TOP_K, N_SLOTS = 3, 16, 2, 5
Ids = npt.NDArray[np.uint16]


def lru_hits(experts: Ids, n_slots: int) -> npt.NDArray[np.uint32]:
    """Hits of each token with LRU caches, from their definition."""
    caches: list[list[int]] = [[] for _ in range(experts.shape[1])]
    hits = []
    for token in experts:
        hit = 0
        for cache, used in zip(caches, token.tolist(), strict=True):
            hit += sum(e in cache for e in used)
            for e in used:
                if e in cache:
                    cache.remove(e)
                cache.append(e)
            del cache[: max(0, len(cache) - n_slots)]
        hits.append(hit)
    return np.array(hits, np.uint32)


@pytest.fixture
def sizes() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    return np.full(N_LAYER, N_EXPERT, np.int32), np.full(N_LAYER, N_SLOTS, np.int32)


def test_a_cache_with_lru_has_the_rate_of_lru(
    sizes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> None:
    experts = synthetic_trace(400, N_LAYER, N_EXPERT, TOP_K, seed=1)
    regret = measure_regret(experts, lru_hits(experts, N_SLOTS), *sizes)
    assert regret is not None
    assert regret.tokens == 300
    assert regret.actual == pytest.approx(regret.lru, abs=1e-9)
    assert regret.lru < regret.belady and regret.dlfu < regret.belady
    assert regret.gap_closed == pytest.approx(0)
    assert "lru" in regret_text(regret) and "(0% of the way)" in regret_text(regret)


def test_no_gap_is_no_share() -> None:
    assert Regret(10, 1.0, 1.0, 1.0, 1.0).gap_closed is None


class FakeStream:
    def __init__(self) -> None:
        self.experts = synthetic_trace(2000, N_LAYER, N_EXPERT, TOP_K, seed=1)
        self.n = 0
        self.read = 0

    def window_tokens(self) -> int:
        return self.n

    def n_slots(self) -> npt.NDArray[np.int32]:
        return np.full(N_LAYER, N_SLOTS, np.int32)

    def window(self) -> tuple[Ids, npt.NDArray[np.uint32]]:
        self.read += 1
        return self.experts[: self.n], lru_hits(self.experts[: self.n], N_SLOTS)


def test_the_gauge_measures_when_enough_is_new(
    sizes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> None:
    stream = FakeStream()
    gauge = RegretGauge(stream, sizes[0], interval=1000)
    for n, read in [(LEAST_TOKENS - 1, 0), (LEAST_TOKENS, 1), (200, 1), (700, 2), (701, 2)]:
        stream.n = n
        gauge.step()
        assert stream.read == read
        assert (gauge.regret is not None) == (read > 0)
    gauge.close()


def test_a_model_measures_itself_and_remembers(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trace = tmp_path / "t.npz"
    model = str(tiny_model("qwen3moe"))
    llm = Llama(model, n_ctx=512, n_threads=1, n_slots=3, policy="lru", trace=trace, verbose=False)
    llm.eval([1, 2, 3])
    for token in range(300):
        llm.eval([token % 50])
    experts = llm._experts
    assert experts is not None and experts._gauge is not None
    deadline = time.monotonic() + 30
    while experts._gauge.regret is None and time.monotonic() < deadline:
        time.sleep(0.05)
    regret = llm.stats().regret  # type: ignore[union-attr]
    assert regret is not None
    assert regret.lru - 0.02 < regret.actual <= regret.belady + 0.02
    ids, _ = experts.window()
    fingerprint = llm.geometry.fingerprint
    llm.close()

    recorded = read_trace(trace).experts[3:]
    assert len(ids) == 299  # the last may be under way
    assert np.array_equal(ids, recorded[:-1])
    kept = read_trace(recent_file(fingerprint))
    assert np.array_equal(kept.experts, ids)

    again = Llama(model, n_ctx=64, n_threads=1, n_slots=3, policy="auto", verbose=False)
    stats = again.stats()
    assert stats is not None
    assert stats.policy in auto_policy.CANDIDATES
    assert "on the last 299 tokens" in stats.policy_reason
    again.close()


def test_auto_takes_what_was_better_by_a_margin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layers = np.arange(N_LAYER, dtype=np.int32)
    choice = choose_by_replay("model", *sizes)
    assert (choice.policy, choice.reason) == ("learned", "no routing of this model is known yet")
    # everything in turn, ever more recent: what came last comes back first, which LRU keeps
    up = np.arange(N_EXPERT)
    zigzag = np.concatenate([up, up[::-1]])
    ids = np.stack([zigzag[:-1:2], zigzag[1::2]], axis=1).astype(np.uint16)
    experts = np.repeat(np.tile(ids, (40, 1))[:, None], N_LAYER, axis=1)
    keep_recent("model", experts, sizes[0], layers)
    choice = choose_by_replay("model", *sizes)
    rates = {
        policy: float(part.split()[-1].rstrip("%"))
        for policy in auto_policy.CANDIDATES
        for part in choice.reason.replace("against ", "").split(", ")
        if policy in part
    }
    assert choice.reason.startswith(tuple("0123456789"))
    best = float(choice.reason.split("%")[0])
    assert all(rate <= best + 0.3 for rate in rates.values())
    keep_recent("model", experts, sizes[0] + 1, layers)  # another model under the same name
    assert choose_by_replay("model", *sizes).reason == "no routing of this model is known yet"


def test_damaged_and_missing_memories_are_no_obstacle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("not a folder")
    experts = synthetic_trace(300, N_LAYER, N_EXPERT, TOP_K)
    keep_recent("model", experts, sizes[0], np.arange(N_LAYER, dtype=np.int32))
    assert choose_by_replay("model", *sizes).policy == "learned"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recent_file("model").parent.mkdir(parents=True)
    recent_file("model").write_bytes(b"PK\3\4 but no archive")
    assert choose_by_replay("model", *sizes).policy == "learned"

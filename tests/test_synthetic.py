"""Replay models decode their trace, and the pieces they are made of hold."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from flashmoe_gguf.bench.q4k import random_q4_k
from flashmoe_gguf.bench.replay_weights import MAX_TOKENS, ReplayModel
from flashmoe_gguf.bench.synthetic import SHAPES, build_replay_model, replay_text, synthetic_trace
from flashmoe_gguf.bench.synthetic_file import DirectWriter
from flashmoe_gguf.errors import FlashMoEError, OptionError
from tiny_models.child import decode, stock_libraries, tokenize

N_TOKENS, N_LAYER, N_EXPERT, TOP_K = 96, 3, 8, 2
SIZES: dict[str, Any] = {
    "n_expert": N_EXPERT,
    "width": 256,
    "expert_width": 256,
    "n_head": 4,
    "n_head_kv": 2,
    "n_ctx": 2048,
}
READ_ONLY = N_LAYER * N_EXPERT + 128


class Replay(NamedTuple):
    path: Path
    trace: npt.NDArray[np.uint16]


@pytest.fixture(scope="module")
def stock() -> Path:
    folder = stock_libraries()
    if folder is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    return folder


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    trace = synthetic_trace(N_TOKENS, N_LAYER, N_EXPERT, TOP_K, seed=3)
    path = tmp_path_factory.mktemp("replay") / "replay.gguf"
    return Replay(build_replay_model(path, trace, **SIZES), trace)


def test_greedy_decoding_replays_the_trace(replay: Replay, stock: Path) -> None:
    n_prompt = 32
    n_more = N_TOKENS - n_prompt
    run = decode(stock, [(replay.path, range(n_prompt), n_prompt)], greedy=n_more)[0]
    end_of_text = N_TOKENS
    assert run.logits.argmax(axis=1).tolist() == [*range(n_prompt, N_TOKENS), end_of_text]
    best_two = np.sort(run.logits, axis=1)[:, -2:]
    assert (best_two[:, 1] - best_two[:, 0]).min() > 20
    for layer in range(N_LAYER):
        # In the last layer llama.cpp computes only the prompt token whose logits are asked for.
        first = n_prompt - 1 if layer == N_LAYER - 1 else 0
        chosen = run.experts[str(layer)][:, :TOP_K]
        assert np.array_equal(chosen, replay.trace[first:, layer])


def test_text_prompt_is_the_trace_tokens(replay: Replay, stock: Path) -> None:
    assert tokenize(stock, replay.path, replay_text(10, 64)) == list(range(10, 74))
    latin = tokenize(stock, replay.path, "a\n")
    assert latin == [N_TOKENS + 3 + ord("a"), N_TOKENS + 3 + ord("\n")]


def test_a_wrong_expert_changes_the_logits(replay: Replay, stock: Path, tmp_path: Path) -> None:
    tokens, layer = [5, 6], 1
    wrong = tmp_path / "wrong.gguf"
    shutil.copy(replay.path, wrong)
    used, unused = int(replay.trace[5, layer, 0]), 0
    while unused in replay.trace[5:7, layer]:
        unused += 1
    tensor = next(
        t for t in GGUFReader(replay.path).tensors if t.name == f"blk.{layer}.ffn_up_exps.weight"
    )
    data = np.memmap(wrong, np.uint8, "r+", tensor.data_offset, tensor.data.shape)
    data[used] = tensor.data[unused]
    data.flush()
    right, other = decode(stock, [(replay.path, tokens, 1), (wrong, tokens, 1)])
    assert (right.logits[0] != other.logits[0]).mean() > 0.9


def test_experts_differ_and_write_nothing_to_the_routing(replay: Replay) -> None:
    seen = set()
    for tensor in GGUFReader(replay.path).tensors:
        if "exps" in tensor.name:
            seen |= {expert.tobytes() for expert in tensor.data}
        if "ffn_down_exps" in tensor.name or "attn_output" in tensor.name:
            weights = dequantize(tensor.data, tensor.tensor_type)
            assert not weights[..., :READ_ONLY, :].any()
            assert weights[..., READ_ONLY:, :].any(axis=-1).all()
    assert len(seen) == 3 * N_LAYER * N_EXPERT


def test_same_arguments_same_bytes(replay: Replay, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    again = build_replay_model(
        tmp_path / "again.gguf",
        replay.trace,
        progress=lambda done, total: seen.append((done, total)),
        **SIZES,
    )
    assert again.read_bytes() == replay.path.read_bytes()
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    other = build_replay_model(tmp_path / "other.gguf", replay.trace, seed=1, **SIZES)
    assert other.read_bytes() != again.read_bytes()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["again.gguf", "other.gguf"]


def test_nothing_is_left_behind_on_failure(replay: Replay, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_replay_model(tmp_path / "r.gguf", replay.trace, progress=stop, **SIZES)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_first(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 1_000_000

    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: Usage())
    with pytest.raises(FlashMoEError, match=r"needs 0\.07 GB .* has 0\.00") as caught:
        build_replay_model(tmp_path / "r.gguf", replay.trace, **SIZES)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_one_line(
    replay: Replay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_fd: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(FlashMoEError, match=r"cannot write .*r\.gguf\.partial: No space left"):
        build_replay_model(tmp_path / "r.gguf", replay.trace, **SIZES)
    assert list(tmp_path.iterdir()) == []


GOOD = np.tile(np.arange(2, dtype=np.uint8), (4, 3, 1))


@pytest.mark.parametrize(
    ("experts", "sizes", "words"),
    [
        (GOOD[0], {}, "whole numbers"),
        (GOOD[:0], {}, "whole numbers"),
        (GOOD.astype(float), {}, "whole numbers"),
        (GOOD + 7, {}, "expert 8 of only 8"),
        (GOOD * 0, {}, "repeats an expert"),
        (np.tile(GOOD, (1, 22, 1)), {}, "66 layers of 8 experts need width 258, not 256"),
        (np.tile(GOOD, (MAX_TOKENS // 4 + 1, 1, 1)), {}, "more than the"),
        (GOOD, {"expert_width": 96}, "not multiples of 256"),
        (GOOD, {"n_head": 3}, "3 heads"),
    ],
)
def test_impossible_replays_are_refused(
    experts: npt.NDArray[Any], sizes: dict[str, int], words: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=words):
        build_replay_model(tmp_path / "r.gguf", experts, **{**SIZES, **sizes})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("gpt-oss-20b", 4.2), ("olmoe", 3.8), ("qwen3-30b", 16.8)]
)
def test_shapes_can_be_built(name: str, gigabytes: float) -> None:
    s = SHAPES[name]
    trace = synthetic_trace(16, s.n_layer, s.n_expert, s.top_k)
    heads = (s.n_head, s.n_head_kv)
    model = ReplayModel(trace, s.n_expert, s.width, s.expert_width, *heads, head_width=s.head_width)
    model.check()
    assert sum(t.n_bytes for t in model.tensors()) / 1e9 == pytest.approx(gigabytes, abs=0.15)


@pytest.mark.parametrize("direct", [True, False])
def test_the_writer_appends_any_sizes(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refusals = os.write, [0]

    def write(fd: int, data: memoryview) -> int:
        if refusals[0]:
            refusals[0] -= 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data[: len(data) // 2 + 1])

    if not direct:  # as on a file system with larger blocks, and with short writes
        monkeypatch.setattr(os, "write", write)
    rng = np.random.default_rng(1)
    path = tmp_path / "file"
    for there in (0, 1, 4096, 5000):
        for sizes in ((), (10,), (4096,), (3, 8 << 20, 77_777)):
            wanted = rng.bytes(there)
            path.write_bytes(wanted)
            refusals[0] = 1
            with DirectWriter(path) as file:
                for size in sizes:
                    more = rng.bytes(size)
                    wanted += more
                    file.write(memoryview(more))
                    assert file.n_bytes == len(wanted)
            assert path.read_bytes() == wanted
            assert direct or refusals[0] == 0 or not sizes


def test_text_of_tokens_beyond_the_first_range() -> None:
    text = replay_text(20_990, 4)
    assert [ord(c) for c in text] == [0x9FFE, 0x9FFF, 0x20000, 0x20001]
    assert len(set(replay_text(0, MAX_TOKENS))) == MAX_TOKENS


def test_q4_k_blocks_have_the_spread_asked_for() -> None:
    data = random_q4_k(64, 512, 0.02, np.random.SFC64(1), zero_rows=10)
    weights = dequantize(data, GGMLQuantizationType.Q4_K)
    assert weights.shape == (64, 512)
    assert not weights[:10].any()
    assert weights[10:].std() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean()) < 0.001

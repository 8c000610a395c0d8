"""The generated models are what they claim to be, and their experts matter."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

import tiny_models
from tiny_models import scale_byte
from tiny_models.child import decode, stock_libraries

TOKENS = [17, 203, 5, 88, 149, 230, 64, 121]
N_PROMPT = 2


@pytest.fixture(scope="module")
def stock() -> Path:
    folder = stock_libraries()
    if folder is None:
        pytest.skip("the stock llama.cpp libraries are not built")
    return folder


@pytest.fixture(scope="module", params=tiny_models.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(tmp_path_factory.mktemp("tiny") / f"{kind}.gguf", kind)


def shards(first: Path) -> list[Path]:
    """The files of a model, given the one llama.cpp opens."""
    return sorted(first.parent.glob(first.name.replace("00001-of", "*-of")))


def expert_tensors(first: Path) -> list[tuple[Path, ReaderTensor]]:
    return [
        (file, tensor)
        for file in shards(first)
        for tensor in GGUFReader(file).tensors
        if tensor.name.endswith("exps.weight")
    ]


def test_dimensions_and_size(kind: str, model: Path) -> None:
    spec = tiny_models.spec(kind)
    experts = expert_tensors(model)
    layers = {tensor.name.split(".")[1] for _, tensor in experts}
    assert len(layers) >= 3
    assert spec.n_expert >= 8 and spec.top_k >= 2
    main = [t for _, t in experts if not t.name.endswith("chexps.weight")]
    assert {int(t.shape[2]) for t in main} == {spec.n_expert}
    assert sum(file.stat().st_size for file in shards(model)) < 3_700_000
    context = GGUFReader(model).get_field(f"{spec.arch}.context_length")
    assert context is not None and context.contents() >= 2048


def test_same_bytes_every_time(kind: str, model: Path, tmp_path: Path) -> None:
    again = tiny_models.make(tmp_path / f"{kind}.gguf", kind)
    assert [f.read_bytes() for f in shards(again)] == [f.read_bytes() for f in shards(model)]


def test_decodes_on_stock_llama_cpp(kind: str, model: Path, stock: Path) -> None:
    backwards = TOKENS[::-1]
    jobs = [(model, TOKENS, N_PROMPT), (model, TOKENS, N_PROMPT), (model, backwards, N_PROMPT)]
    once, twice, other = decode(stock, jobs)
    assert once.logits.shape == (1 + len(TOKENS) - N_PROMPT, 256)
    assert np.isfinite(once.logits).all()
    assert 0.1 < once.logits.std() < 10
    assert np.array_equal(once.logits, twice.logits)
    assert (once.logits != other.logits).all(axis=1).all()
    assert len(np.unique(once.logits, axis=0)) == len(once.logits)
    top_k = tiny_models.spec(kind).top_k
    for ranked in once.experts.values():
        assert len({tuple(row) for row in np.sort(ranked[:, :top_k])}) > 1, "routing never varies"


def flipped(first: Path, file: Path, offsets: Iterable[int], to: Path) -> Path:
    """A copy of the model in folder `to` with one bit changed at each offset."""
    to.mkdir()
    for shard in shards(first):
        shutil.copy(shard, to)
    with (to / file.name).open("r+b") as handle:
        for offset in offsets:
            handle.seek(offset)
            value = handle.read(1)[0]
            handle.seek(offset)
            handle.write(bytes([value ^ 0x04]))
    return to / first.name


def test_every_part_of_a_used_expert_matters(
    kind: str, model: Path, stock: Path, tmp_path: Path
) -> None:
    """A byte in a chosen expert's rows moves the logits; the same byte of another does not.

    In each of six rows, because the activation function may silence one for these tokens.
    """
    few = TOKENS[:2]
    spec = tiny_models.spec(kind)
    plain = decode(stock, [(model, few, 1)])[0]
    jobs, labels = [], []
    for file, tensor in expert_tensors(model):
        layer = tensor.name.split(".")[1]
        n_expert = int(tensor.shape[2])
        # grovemoe's chunk expert c serves the experts 2c and 2c + 1.
        chosen = plain.experts[layer][:, : spec.top_k] * n_expert // spec.n_expert
        used = set(chosen.ravel().tolist())
        unused = set(range(n_expert)) - used
        expert_bytes = int(tensor.n_bytes) // n_expert
        for group, matters in ((used, True), (unused, False)):
            if not group:
                continue
            at = tensor.data_offset + min(group) * expert_bytes + scale_byte(tensor.tensor_type)
            row_bytes = expert_bytes // int(tensor.shape[1])
            rows = [at + row * row_bytes for row in range(6)]
            copy = flipped(model, file, rows, tmp_path / f"{tensor.name}-{matters}")
            jobs.append((copy, few, 1))
            labels.append((tensor.name, matters))
    results = decode(stock, jobs)
    changed = [
        (name, not np.array_equal(r.logits, plain.logits))
        for (name, _), r in zip(labels, results, strict=True)
    ]
    assert changed == labels
    assert {matters for _, matters in labels} == {True, False}


def test_split_is_mixed_in_three_files(stock: Path, tmp_path: Path) -> None:
    whole = tiny_models.make(tmp_path / "whole.gguf", "mixed")
    parted = tiny_models.make(tmp_path / "parted.gguf", "split")
    assert [f.name for f in shards(parted)] == [f"parted-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    files_of_layer_0 = {f for f, t in expert_tensors(parted) if t.name.startswith("blk.0.")}
    assert len(files_of_layer_0) == 3
    one, three = decode(stock, [(whole, TOKENS, N_PROMPT), (parted, TOKENS, N_PROMPT)])
    assert np.array_equal(one.logits, three.logits)


def test_qwen3moe_is_awkwardly_aligned(tmp_path: Path) -> None:
    experts = expert_tensors(tiny_models.make(tmp_path / "q.gguf", "qwen3moe"))
    for _, tensor in experts:
        assert int(tensor.n_bytes) // int(tensor.shape[2]) % 4096
        assert tensor.data_offset % 64 == 32


def test_mixed_mixes_types(tmp_path: Path) -> None:
    experts = expert_tensors(tiny_models.make(tmp_path / "m.gguf", "mixed"))
    down = {t.tensor_type for _, t in experts if "down" in t.name}
    assert down == {GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K}
    assert {t.tensor_type for _, t in experts if "down" not in t.name} == {
        GGMLQuantizationType.Q4_K
    }


def test_fused_and_gateless_parts(tmp_path: Path) -> None:
    fused = {
        t.name.split(".")[2]
        for _, t in expert_tensors(tiny_models.make(tmp_path / "f.gguf", "fused"))
    }
    assert fused == {"ffn_gate_up_exps", "ffn_down_exps"}
    gateless = {
        t.name.split(".")[2]
        for _, t in expert_tensors(tiny_models.make(tmp_path / "n.gguf", "nogate"))
    }
    assert gateless == {"ffn_up_exps", "ffn_down_exps"}

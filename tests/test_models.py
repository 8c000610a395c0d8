"""models.toml and its reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.models import (
    Hub,
    KnownModel,
    Shape,
    dense_bytes,
    find_model,
    known_models,
    part_bytes,
)

SOURCE_TREE = Path(__file__).resolve().parent.parent / "models.toml"

GOOD = """
[tiny-moe]
title = "Tiny"
[tiny-moe.hub]
repository = "someone/tiny-GGUF"
pattern = "tiny-*.gguf"
quant = "Q4_K_M"
size_bytes = 10_000_000
source = "https://example.org/hub"
[tiny-moe.shape]
architecture = "olmoe"
layers = 2
experts = 4
top_k = 2
width = 512
expert_width = 256
heads = 8
kv_width = 128
vocabulary = 1000
context = 4096
source = "https://example.org/config.json"
"""


def load(tmp_path: Path, text: str) -> dict[str, KnownModel]:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return dict(known_models(path))


def test_reads_a_model(tmp_path: Path) -> None:
    hub = Hub(
        "someone/tiny-GGUF",
        "tiny-*.gguf",
        "Q4_K_M",
        "https://example.org/hub",
        size_bytes=10_000_000,
    )
    shape = Shape(
        architecture="olmoe",
        layers=2,
        experts=4,
        top_k=2,
        width=512,
        expert_width=256,
        heads=8,
        kv_width=128,
        vocabulary=1000,
        context=4096,
        source="https://example.org/config.json",
    )
    assert load(tmp_path, GOOD) == {"tiny-moe": KnownModel("tiny-moe", "Tiny", hub, shape)}
    assert hub.revision is None and hub.about_bytes is None and hub.likely_bytes == 10_000_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[tiny-moe]", "[tiny-moe", "not TOML"),
        ("tiny-moe", "'Tiny MoE'", "a name is lower-case letters"),
        ('title = "Tiny"', "", "title is missing"),
        ('title = "Tiny"', "title = 1", "title is missing or not a string"),
        ('title = "Tiny"', 'title = "Tiny"\nurl = "x"', "unknown key url"),
        ("[tiny-moe.shape]", "[tiny-moe.shapes]", "unknown key shapes"),
        ("[tiny-moe.hub]", "[other.hub]", "hub: the table is missing"),
        ("layers = 2", "layers = 2\nlayer = 2", "shape: unknown key layer"),
        ("layers = 2", "", "shape: layers is missing"),
        ("layers = 2", 'layers = "2"', "layers is not a positive integer"),
        ("layers = 2", "layers = 0", "layers is not a positive integer"),
        ("layers = 2", "layers = true", "layers is not a positive integer"),
        ("layers = 2", "layers = 2.0", "layers is not a positive integer"),
        ("top_k = 2", "top_k = 5", "top_k is above experts"),
        ('quant = "Q4_K_M"', "quant = 8", "quant is not a string"),
        ('quant = "Q4_K_M"', 'quant = " "', "quant is not a string with text"),
        ("size_bytes = 10_000_000", "size_bytes = -1", "size_bytes is not a positive"),
        ("size_bytes = 10_000_000", "", "neither size_bytes nor about_bytes"),
        ('quant = "Q4_K_M"', 'quant = "Q4_K_S"', "quant is none of Q4_K_M, MXFP4"),
        ("context = 4096", "", "context is missing"),
        ("context = 4096", "context = 4096\ndense_layers = 2", "no layer has experts"),
        ('source = "https://example.org/hub"', "", "hub: source is missing"),
        ("tiny-*.gguf", "tiny-*", "pattern does not end in .gguf"),
        (GOOD, "x = 1", "x: not a table"),
    ],
)
def test_every_mistake_is_an_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(FlashMoEError, match=message) as caught:
        load(tmp_path, GOOD.replace(old, new))
    assert "models.toml" in caught.value.message
    assert caught.value.hint


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FlashMoEError, match="cannot read"):
        known_models(tmp_path / "models.toml")


def test_the_project_knows_these_models() -> None:
    models = known_models(SOURCE_TREE)
    shapes = {
        name: (m.shape.architecture, m.shape.layers, m.shape.experts, m.shape.top_k)
        for name, m in models.items()
    }
    assert shapes == {
        "olmoe-1b-7b": ("olmoe", 16, 64, 8),
        "qwen3-30b-a3b": ("qwen3moe", 48, 128, 8),
        "qwen3-235b-a22b": ("qwen3moe", 94, 128, 8),
        "gpt-oss-20b": ("gpt-oss", 24, 32, 4),
        "gpt-oss-120b": ("gpt-oss", 36, 128, 4),
        "mixtral-8x7b": ("llama", 32, 8, 2),
        "deepseek-v2-lite": ("deepseek2", 27, 64, 6),
        "glm-4.5-air": ("glm4moe", 46, 128, 8),
    }


def test_every_value_group_has_a_public_source() -> None:
    for model in known_models(SOURCE_TREE).values():
        for source in (model.hub.source, model.shape.source):
            assert source.startswith("https://"), model.name
        assert model.hub.repository in model.hub.source
        assert model.hub.revision is None or model.hub.revision in model.hub.source


def test_the_default_file_is_the_project_s() -> None:
    # Installed with the package, or found beside it: the same models either way.
    assert known_models() == known_models(SOURCE_TREE)


def test_find_model() -> None:
    assert find_model("gpt-oss-20b").hub.repository == "ggml-org/gpt-oss-20b-GGUF"
    with pytest.raises(OptionError, match="no known model is called 'gpt-5'") as caught:
        find_model("gpt-5")
    assert "gpt-oss-20b" in caught.value.hint


def test_expert_sizes_follow_the_shape_and_the_quantization(tmp_path: Path) -> None:
    model = load(tmp_path, GOOD)["tiny-moe"]
    # 512 x 256 values, Q4_K in both layers but for the last's down, which is Q6_K
    q4, q6 = 512 * 256 // 256 * 144, 512 * 256 // 256 * 210
    assert part_bytes(model) == [(q4, q4, q4), (q4, q4, q6)]
    assert dense_bytes(model) == 10_000_000 - 4 * (5 * q4 + q6)


def test_rows_that_blocks_do_not_divide_fall_back(tmp_path: Path) -> None:
    text = GOOD.replace("expert_width = 256", "expert_width = 352")
    model = load(tmp_path, text)["tiny-moe"]
    q4 = 512 * 352 // 256 * 144
    assert part_bytes(model) == [(q4, q4, 704 * 176), (q4, q4, 704 * 272)]


def test_dense_and_prediction_layers(tmp_path: Path) -> None:
    text = GOOD.replace("layers = 2", "layers = 2\ndense_layers = 1\nprediction_layers = 1")
    assert len(part_bytes(load(tmp_path, text)["tiny-moe"])) == 2


@pytest.mark.parametrize("name", known_models(SOURCE_TREE))
def test_the_known_shapes_fit_the_known_sizes(name: str) -> None:
    """Widths that were wrong would leave next to nothing, or far too much, for dense weights."""
    model = known_models(SOURCE_TREE)[name]
    assert model.hub.likely_bytes is not None
    assert 0.03 < dense_bytes(model) / model.hub.likely_bytes < 0.17
    # and both embeddings are part of it, at four bits or more
    assert dense_bytes(model) > 2 * model.shape.vocabulary * model.shape.width * 0.5

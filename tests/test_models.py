"""models.toml and its reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.models import Hub, KnownModel, Shape, find_model, known_models

SOURCE_TREE = Path(__file__).resolve().parent.parent / "models.toml"

GOOD = """
[tiny-moe]
title = "Tiny"
[tiny-moe.hub]
repository = "someone/tiny-GGUF"
pattern = "tiny-*.gguf"
quant = "Q8_0"
source = "https://example.org/hub"
[tiny-moe.shape]
architecture = "olmoe"
layers = 2
experts = 4
top_k = 2
source = "https://example.org/config.json"
"""


def load(tmp_path: Path, text: str) -> dict[str, KnownModel]:
    path = tmp_path / "models.toml"
    path.write_text(text)
    return dict(known_models(path))


def test_reads_a_model(tmp_path: Path) -> None:
    hub = Hub("someone/tiny-GGUF", "tiny-*.gguf", "Q8_0", "https://example.org/hub")
    shape = Shape("olmoe", 2, 4, 2, "https://example.org/config.json")
    assert load(tmp_path, GOOD) == {"tiny-moe": KnownModel("tiny-moe", "Tiny", hub, shape)}
    assert hub.revision is None and hub.size_bytes is None


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
        ('quant = "Q8_0"', "quant = 8", "quant is not a string"),
        ('quant = "Q8_0"', 'quant = " "', "quant is not a string with text"),
        ('quant = "Q8_0"', 'quant = "Q8_0"\nsize_bytes = -1', "size_bytes is not a positive"),
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

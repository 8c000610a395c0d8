"""Ends that are not close(): forked children, the end of a program, caches of no use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flashmoe_gguf import FlashMoEError, Llama, budget, governor
from flashmoe_gguf.cache_dir import cache_dir
from flashmoe_gguf.policy_weights import PolicyMemory, save_weights, weights_path
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.streaming import ExpertStream

LOAD = (
    "import os, sys\n"
    "from flashmoe_gguf import Llama\n"
    "llm = Llama(sys.argv[1], n_slots=2, n_ctx=64, n_threads=1, n_threads_batch=1,"
    " policy='learned', verbose=False)\n"
    "llm.eval([1, 2, 3])\n"
)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3moe")


def load(model: Path, **options: object) -> Llama:
    return Llama(str(model), n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, **options)


def run(program: str, model: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, str(model)],
        cwd=cache,  # not the checkout, whose package has no libraries
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


@pytest.mark.parametrize("end", ["llm.close()", "del llm"])
def test_a_forked_child_can_drop_the_model(model: Path, tmp_path: Path, end: str) -> None:
    program = LOAD + (
        "if os.fork() == 0:\n"
        f"    {end}\n"
        "    kept = os.path.exists(os.environ['XDG_CACHE_HOME'] + '/flashmoe-gguf')\n"
        "    os._exit(3 if kept else 0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "llm.eval([4])\n"
        "llm.close()\n"
    )
    assert run(program, model, tmp_path).stdout == "0\n"


def test_a_program_ends_quietly_with_a_model_open(model: Path, tmp_path: Path) -> None:
    assert run(LOAD, model, tmp_path).stderr == ""
    assert list((tmp_path / "flashmoe-gguf" / "policies").iterdir())


def test_a_policy_file_that_cannot_be_written_frees_the_model_all_the_same(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    llm = load(model, n_slots=2, policy="learned", policy_file=tmp_path / "new" / "p")
    (tmp_path / "new").touch()  # no folder can be made there
    native = llm._experts.native if llm._experts is not None else None
    assert native is not None
    with pytest.raises(FlashMoEError, match="cannot write"):
        llm.close()
    with pytest.raises(FlashMoEError, match="closed"):
        native.counters()


def test_kept_weights_that_the_policy_refuses_are_left_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fingerprint = read_geometry(model).fingerprint
    path = weights_path("learned", fingerprint)
    save_weights(path, np.ones(3, np.float32), policy="learned", fingerprint=fingerprint)
    load(model, n_slots=2, policy="learned").close()
    save_weights(path, np.ones(3, np.float32), policy="learned", fingerprint=fingerprint)
    with pytest.raises(FlashMoEError, match="cannot take"):
        load(model, n_slots=2, policy="learned", policy_file=path)


def test_a_cache_that_may_not_be_entered_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    assert PolicyMemory(tmp_path / "p", "learned", "f", is_given=False).load() is None
    with pytest.raises(FlashMoEError, match="Permission denied"):
        PolicyMemory(tmp_path / "p", "learned", "f", is_given=True).load()


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir().parent == Path(tempfile.gettempdir())


def test_a_closed_stream_is_not_resized(model: Path) -> None:
    llm = load(model, n_slots=2)
    experts = llm._experts
    assert isinstance(experts, ExpertStream)
    llm.close()
    with pytest.raises(FlashMoEError, match="closed"):
        experts.resize((1,) * len(experts.geometry.groups))


@pytest.mark.parametrize("ram_gib", [0.1, 1, 15, 64, 500])
@pytest.mark.parametrize("dense_gib", [0, 2, 20])
def test_a_limit_of_just_the_budget_closes_nothing(ram_gib: float, dense_gib: int) -> None:
    fixed = budget.Fixed(process=0, dense=dense_gib << 30, context=0, ring=0)
    ram, slots = int(ram_gib * (1 << 30)), 1 << 30
    assert governor.wanted_bytes(slots, fixed.reserve, ram) >= slots

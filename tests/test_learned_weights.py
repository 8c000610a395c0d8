"""What a policy has learned, in a file and in a stream."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import scenarios
from flashmoe_gguf import Llama
from flashmoe_gguf.errors import OptionError, TraceError
from flashmoe_gguf.policy_weights import (
    SCHEMAS,
    forget_weights,
    load_weights,
    save_weights,
    weights_path,
)

WEIGHTS = np.linspace(-2, 2, 321, dtype=np.float32)
MODEL = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "kept" / "w.safetensors"
    save_weights(made, WEIGHTS, policy="learned", fingerprint=MODEL)
    return made


def test_weights_come_back(path: Path) -> None:
    assert np.array_equal(load_weights(path, policy="learned", fingerprint=MODEL), WEIGHTS)
    save_weights(path, WEIGHTS * 2, policy="learned", fingerprint=MODEL)
    assert np.array_equal(load_weights(path, policy="learned", fingerprint=MODEL), WEIGHTS * 2)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_models_weights_are_refused(path: Path) -> None:
    with pytest.raises(TraceError, match="another model") as caught:
        load_weights(path, policy="learned", fingerprint="f" * 32)
    assert MODEL in caught.value.message
    assert "--policy-file" in caught.value.hint


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"policy": "flashmoe"}, "learned by policy flashmoe"),
        ({"schema": "1"}, "of version 1"),
        ({"schema": "\n" * 99}, "of version unknown"),
        ({"fingerprint": None}, "does not say its fingerprint"),
        (None, "does not say its policy"),
    ],
)
def test_other_metadata_is_refused(
    tmp_path: Path, metadata: dict[str, str | None] | None, why: str
) -> None:
    right = {"policy": "learned", "schema": SCHEMAS["learned"], "fingerprint": MODEL}
    given = None if metadata is None else {**right, **metadata}
    path = tmp_path / "w"
    save_file({"weights": WEIGHTS}, path, given and {k: v for k, v in given.items() if v})
    with pytest.raises(TraceError, match=why):
        load_weights(path, policy="learned", fingerprint=MODEL)


@pytest.mark.parametrize(
    "tensors",
    [{"others": WEIGHTS}, {"weights": WEIGHTS.reshape(3, -1)}, {"weights": WEIGHTS.astype("f8")}],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = tmp_path / "w"
    metadata = {"policy": "learned", "schema": SCHEMAS["learned"], "fingerprint": MODEL}
    save_file(tensors, path, metadata)
    with pytest.raises(TraceError, match="does not fit this run"):
        load_weights(path, policy="learned", fingerprint=MODEL)


def test_every_damaged_header_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    for n in [*range(0, length, 7), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(TraceError):
            load_weights(path, policy="learned", fingerprint=MODEL)
    for i in range(8):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x5A]) + whole[i + 1 :])
        with pytest.raises(TraceError):
            load_weights(path, policy="learned", fingerprint=MODEL)


def test_what_cannot_be_read_written_or_removed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        load_weights(tmp_path / "none", policy="learned", fingerprint=MODEL)
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="cannot write"):
        save_weights(tmp_path / "file" / "w", WEIGHTS, policy="learned", fingerprint=MODEL)
    with pytest.raises(TraceError, match="cannot remove"):
        forget_weights(tmp_path)
    with pytest.raises(TraceError, match="lru learns nothing"):
        save_weights(tmp_path / "w", WEIGHTS, policy="lru", fingerprint=MODEL)


def test_forget(path: Path) -> None:
    assert forget_weights(path)
    assert not forget_weights(path)


def test_one_file_per_model_and_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = weights_path("learned", MODEL)
    assert path.is_relative_to(tmp_path)
    assert MODEL in path.name
    assert path != weights_path("learned", "f" * 32)
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert weights_path("learned", MODEL).is_relative_to(Path.home() / ".cache")


def run(model: Path, policy: str, **options: Any) -> np.ndarray | None:
    """What the policy knows after some tokens."""
    base = scenarios.context_options(1, n_ctx=512)
    llm = Llama(str(model), n_slots=4, policy=policy, lookahead="off", **base, **options)
    try:
        assert llm._experts is not None
        native = llm._experts.native
        scenarios.follow(llm, range(5, 45), 12)
        native.verify()
        return native.policy_weights()
    finally:
        llm.close()


def test_what_was_learned_is_taken_up_by_the_next_run(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, file = tiny_model("qwen3moe"), tmp_path / "p.safetensors"
    fresh = run(model, "learned", policy_file=file, learn=False)
    assert not file.exists()  # nothing was learned
    first = run(model, "learned", policy_file=file)
    assert fresh is not None and first is not None
    assert np.abs(first - fresh).max() > 0.1
    kept = file.read_bytes()
    assert np.array_equal(run(model, "learned", policy_file=file, learn=False), first)
    assert file.read_bytes() == kept
    assert not np.array_equal(run(model, "learned", policy_file=file), first)
    assert file.read_bytes() != kept


def test_without_a_file_it_is_kept_per_model_until_it_is_forgotten(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model("qwen3moe")
    first = run(model, "learned")
    (kept,) = (tmp_path / "flashmoe-gguf" / "policies").iterdir()
    second = run(model, "learned")
    assert first is not None and second is not None
    assert not np.array_equal(first, second)
    assert np.array_equal(run(model, "learned", forget=True), first)
    kept.write_bytes(b"damaged")  # of the cache's own files none has to be right
    assert np.array_equal(run(model, "learned"), first)
    assert run(model, "lru") is None


def test_a_given_file_has_to_be_right(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, file = tiny_model("qwen3moe"), tmp_path / "p.safetensors"
    file.write_bytes(b"damaged")
    with pytest.raises(TraceError, match="does not fit this run"):
        run(model, "learned", policy_file=file)
    with pytest.raises(OptionError, match="policy lru learns nothing"):
        run(model, "lru", policy_file=file)
    with pytest.raises(OptionError, match="forget"):
        run(model, "learned", policy_file=file, forget=True)

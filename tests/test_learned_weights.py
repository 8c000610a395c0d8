"""What a policy has learned, in a file and in a stream."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import scenarios
from flashmoe_gguf import Llama
from flashmoe_gguf.errors import FlashMoEError, OptionError, TraceError
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


def run(model: Path, policy: str, given: np.ndarray | None, *, learn: bool) -> np.ndarray | None:
    """What the policy knows after some tokens, which begin with what is given."""
    llm = Llama(str(model), n_slots=4, policy=policy, **scenarios.context_options(1, n_ctx=512))
    try:
        assert llm._experts is not None
        native = llm._experts.native
        if given is not None:
            native.load_policy_weights(given)
        native.freeze_policy(not learn)
        scenarios.follow(llm, range(5, 45), 12)
        native.verify()
        return native.policy_weights()
    finally:
        llm.close()


def test_a_stream_learns_and_takes_up_what_was_learned(
    tiny_model: Callable[[str], Path],
) -> None:
    model = tiny_model("qwen3moe")
    fresh = run(model, "learned", None, learn=False)
    first = run(model, "learned", None, learn=True)
    again = run(model, "learned", None, learn=True)
    assert fresh is not None and first is not None and again is not None
    assert np.abs(first - fresh).max() > 0.1
    assert np.array_equal(first, again)
    assert np.array_equal(run(model, "learned", first, learn=False), first)
    assert not np.array_equal(run(model, "learned", first, learn=True), first)
    assert run(model, "lru", None, learn=True) is None
    with pytest.raises(OptionError, match="cannot take these 3 weights"):
        run(model, "learned", first[:3], learn=True)
    with pytest.raises(FlashMoEError, match="no policy that learns"):
        run(model, "lru", first, learn=True)

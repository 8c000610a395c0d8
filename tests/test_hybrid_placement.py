"""Which layers go where: pure functions over sizes, and what is refused. Needs no device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_tools import flashmoe as invoke
from flashmoe_gguf import Llama, placement
from flashmoe_gguf.devices import Device, device_backends, list_devices
from flashmoe_gguf.errors import BudgetError, OptionError
from flashmoe_gguf.placement import (
    RESERVE_BYTES,
    ContextBytes,
    LayerBytes,
    choose,
    layer_bytes,
    parse_gpu_layers,
    place,
    place_model,
    usable_devices,
)
from flashmoe_gguf.store import read_geometry

GIB = 1 << 30
WEIGHTS = LayerBytes(host=7, layers=(10, 20, 30, 40), output=5)
CONTEXT = ContextBytes(kv=3, compute=100)


def gpu(free: int, name: str = "CUDA0", **more: Any) -> Device:
    return Device(name, "a GPU", "CUDA", free, 2 * free, **more)


@pytest.mark.parametrize(
    ("n", "dense", "kv", "host_dense", "host_kv"),
    [
        (0, 0, 0, 112, 12),
        (1, 5, 0, 107, 12),
        (2, 45, 3, 67, 9),
        (5, 105, 12, 7, 0),
        (99, 105, 12, 7, 0),
        (-1, 105, 12, 7, 0),
    ],
)
def test_one_device(n: int, dense: int, kv: int, host_dense: int, host_kv: int) -> None:
    placed = place(WEIGHTS, CONTEXT, [gpu(GIB)], n)
    assert (placed.shares[0].dense, placed.shares[0].kv) == (dense, kv)
    assert (placed.host_dense, placed.host_kv) == (host_dense, host_kv)
    assert placed.shares[0].compute == (100 if placed.n_layers else 0)


def test_a_kv_cache_can_stay() -> None:
    placed = place(WEIGHTS, CONTEXT, [gpu(GIB)], -1, offload_kqv=False)
    assert (placed.shares[0].kv, placed.host_kv) == (0, 12)


def test_tied_embeddings_are_on_both_sides() -> None:
    tied = replace(WEIGHTS, tied=5)
    assert place(tied, CONTEXT, [gpu(GIB)], 1).host_dense == 107
    assert place(tied, CONTEXT, [gpu(GIB)], 0).host_dense == 107
    assert place(tied, CONTEXT, [], -1).shares == ()


@pytest.mark.parametrize(
    ("split", "counts"),
    [(None, (4, 1)), ([1.0, 1.0], (3, 2)), ([0.0, 1.0], (0, 5)), ([1.0], (5, 0)), ([0, 0], (4, 1))],
)
def test_two_devices_share_as_in_llama_cpp(
    split: list[float] | None, counts: tuple[int, int]
) -> None:
    devices = [gpu(3 * GIB), gpu(GIB, "CUDA1")]
    placed = place(WEIGHTS, CONTEXT, devices, -1, tensor_split=split)
    assert tuple(share.n_layers for share in placed.shares) == counts
    assert sum(share.dense for share in placed.shares) == 105


def test_a_device_that_shares_memory_frees_none() -> None:
    placed = place(WEIGHTS, CONTEXT, [gpu(GIB, shares_memory=True)], -1)
    assert (placed.host_dense, placed.host_kv) == (112, 12)


def test_auto_takes_what_fits_and_leaves_a_reserve() -> None:
    weights = LayerBytes(0, (GIB,) * 8, GIB)
    for free in range(GIB // 4, 14 * GIB, GIB // 4):
        placed = choose(weights, ContextBytes(GIB // 8, GIB // 2), [gpu(free)], "auto")
        taken = placed.shares[0].total
        assert placed.n_layers == 0 or taken + RESERVE_BYTES <= free
        if placed.n_layers < placed.n_all:
            more = place(
                weights, ContextBytes(GIB // 8, GIB // 2), [gpu(free)], placed.n_layers + 1
            )
            assert more.shares[0].total + RESERVE_BYTES + 0.05 * 2 * free > free
    assert choose(weights, CONTEXT, [], "auto").n_layers == 0


def test_an_automatic_ubatch_has_room_for_the_largest(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]
) -> None:
    monkeypatch.setattr(placement, "need_device", lambda _llama_cpp: [gpu(GIB)])
    geometry = read_geometry(tiny_model("qwen3moe"))

    def taken(n_ubatch: int | str, n_batch: int) -> int:
        kwargs = {"n_gpu_layers": 1, "n_ctx": 4096, "n_ubatch": n_ubatch, "n_batch": n_batch}
        placed = place_model(None, geometry, kwargs, with_experts=False)
        assert placed is not None
        return placed.shares[0].total

    assert taken("auto", 512) == taken(2048, 2048) > taken(512, 2048) == taken(2048, 512)


def test_more_than_fits_is_refused_and_says_what_does() -> None:
    weights = LayerBytes(0, (GIB,) * 8, GIB)
    with pytest.raises(BudgetError) as refused:
        choose(weights, CONTEXT, [gpu(5 * GIB)], -1)
    assert refused.value.message == (
        "9 layers do not fit into CUDA0 (a GPU): they take at least 9 GiB of it, and 5 GiB are free"
    )
    assert refused.value.hint.startswith("about 3 fit: ")
    assert choose(weights, CONTEXT, [gpu(5 * GIB)], 4).n_layers == 4


def test_a_device_that_does_not_say_its_memory() -> None:
    silent = Device("X0", "an accelerator", "X", 0, 0)
    assert choose(WEIGHTS, CONTEXT, [silent], 3).n_layers == 3
    with pytest.raises(OptionError, match="does not say how much memory"):
        choose(WEIGHTS, CONTEXT, [silent], "auto")


@pytest.mark.parametrize("text", ["all", "-2", "1.5", "", "1e3"])
def test_numbers_of_layers_are_checked(text: str) -> None:
    with pytest.raises(OptionError, match="is not a number of layers"):
        parse_gpu_layers(text)
    assert parse_gpu_layers(" AUTO ") == "auto"
    assert (parse_gpu_layers("-1"), parse_gpu_layers(7)) == (-1, 7)


def test_arguments_about_devices_are_checked() -> None:
    devices = [gpu(GIB), gpu(GIB, "CUDA1")]
    assert usable_devices(devices, 0, 1) == devices[1:]
    with pytest.raises(OptionError, match="main_gpu is 2, and there are 2 devices: CUDA0, CUDA1"):
        usable_devices(devices, 0, 2)
    with pytest.raises(OptionError, match="3 shares for 2 devices"):
        usable_devices(devices, None, 0, [1, 1, 1])
    assert usable_devices(devices, None, 0, [1, 1, 0]) == devices
    with pytest.raises(OptionError, match="tensor parallelism"):
        usable_devices(devices, 3)


@pytest.mark.parametrize("kind", ["mixed", "gptoss", "split", "deepseek2lite-like"])
def test_sizes_of_a_file(kind: str, tiny_model: Callable[[str], Path]) -> None:
    geometry = read_geometry(tiny_model(kind))
    found = layer_bytes(geometry)
    assert found.host + sum(found.layers) + found.output - found.tied == geometry.dense_bytes
    assert len(found.layers) == geometry.n_layer
    assert all(found.layers)
    with_experts = layer_bytes(geometry, with_experts=True)
    assert sum(with_experts.layers) >= sum(found.layers) + geometry.expert_bytes


def no_devices() -> bool:
    from flashmoe_gguf.llama import llama_cpp

    return not list_devices(llama_cpp)


@pytest.mark.skipif(not no_devices(), reason="there is a device here")
class TestWithoutADevice:
    """What most builds are: for the processor only."""

    @pytest.mark.parametrize("n", [99, -1, 1])
    def test_layers_are_refused(self, n: int, tiny_model: Callable[[str], Path]) -> None:
        from flashmoe_gguf.llama import llama_cpp

        with pytest.raises(OptionError, match="there is no device to put layers on") as refused:
            Llama(str(tiny_model("mixed")), n_gpu_layers=n, n_slots=2, verbose=False)
        if not device_backends(llama_cpp):
            assert "built for the processor only" in refused.value.message
            assert "CMAKE_ARGS=-DGGML_CUDA=ON" in refused.value.hint

    def test_auto_is_none(self, tiny_model: Callable[[str], Path]) -> None:
        llm = Llama(str(tiny_model("mixed")), n_gpu_layers="auto", n_slots=2, verbose=False)
        try:
            assert llm.placement is not None
            assert llm.placement.n_layers == 0
            assert llm.model_params.n_gpu_layers == 0
        finally:
            llm.close()

    def test_a_backend_without_devices_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from flashmoe_gguf import devices
        from flashmoe_gguf.llama import llama_cpp

        monkeypatch.setattr(devices, "device_backends", lambda _: ["CUDA"])
        with pytest.raises(OptionError, match="built with CUDA, which finds none"):
            devices.need_device(llama_cpp)

    def test_backends_are_named_without_a_driver(self, tmp_path: Path) -> None:
        """Their libraries are there, though ggml may not register them."""
        for name in ("libggml.so", "libggml-base.so", "libggml-cpu.so", "libllama.so"):
            (tmp_path / name).touch()
        libraries = SimpleNamespace(llama_cpp=SimpleNamespace(_base_path=tmp_path))
        assert device_backends(libraries) == []
        (tmp_path / "libggml-vulkan.so").touch()
        (tmp_path / "libggml-cuda.so").touch()
        assert device_backends(libraries) == ["CUDA", "VULKAN"]


@pytest.mark.parametrize(("given", "on"), [(None, False), (False, False), (True, True)])
def test_nothing_is_uploaded_unless_asked_for(
    given: bool | None, on: bool, tiny_model: Callable[[str], Path]
) -> None:
    """llama.cpp's default is on, and takes dense weights to any device it knows."""
    llm = Llama(str(tiny_model("mixed")), n_slots=2, op_offload=given, verbose=False)
    assert llm.context_params.op_offload is on
    llm.close()


@pytest.fixture
def big_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_gguf.plan import device

    def found(_: Any) -> list[Device]:
        return [Device("CUDA0", "NVIDIA H", "CUDA", 20 * GIB, 24 * GIB)]

    monkeypatch.setattr(device, "need_device", found)
    monkeypatch.setattr(device, "list_devices", found)


@pytest.mark.usefixtures("big_gpu")
@pytest.mark.parametrize("ngl", ["-1", "auto", "10"])
def test_plan_prints_both_memories(ngl: str) -> None:
    """Of a model that is not here."""
    arguments = ["plan", "gpt-oss-20b", "--ram", "12G", "--disk", "2", "--memory", "20"]
    before = invoke(*arguments, "--json")
    done = invoke(*arguments, "--ngl", ngl, "--json")
    assert done.exit_code == 0, done.output
    plan, without = json.loads(done.stdout), json.loads(before.stdout)
    placed = plan["placement"]
    assert placed["n_layers"] == (10 if ngl == "10" else placed["n_all"])
    assert (
        abs(plan["fixed"]["dense"] + placed["shares"][0]["dense"] - without["fixed"]["dense"]) < 99
    )
    assert plan["fixed"]["context"] < without["fixed"]["context"]
    assert plan["cache_bytes"] > without["cache_bytes"]
    text = invoke(*arguments, "--ngl", ngl).stdout
    assert f"CUDA0 (NVIDIA H), {placed['n_layers']} of {placed['n_all']} layers: dense" in text
    assert "of 20 GiB free" in text


@pytest.mark.parametrize("ngl", ["many", "-2"])
def test_ngl_is_checked(ngl: str) -> None:
    done = invoke("plan", "gpt-oss-20b", "--ngl", ngl)
    assert done.exit_code == 2
    assert f"'{ngl}' is not a number of layers for the device" in done.stderr


def test_a_bench_resolves_auto_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashmoe_gguf.bench import runner
    from flashmoe_gguf.bench.arm import Arm

    asked = []

    def run_arm(arm: Arm, *_: Any) -> tuple[dict[str, int], None]:
        asked.append((arm.n_gen, arm.n_slots, arm.n_gpu_layers))
        return {"floor_bytes": 1000, "n_gpu_layers": 7}, None

    monkeypatch.setattr(runner, "run_arm", run_arm)
    limiter: Any = None
    given = Arm("", "model.gguf", 4, n_gpu_layers=3)
    assert runner.resolve_layers(given, limiter) == given
    assert runner.resolve_layers(replace(given, n_gpu_layers="auto"), limiter).n_gpu_layers == 7
    assert asked == [(0, 0, "auto")]


def test_a_model_is_closed_when_its_layers_do_not_fit(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Device("CUDA0", "a GPU", "CUDA", 1000, 2000)
    monkeypatch.setattr(placement, "need_device", lambda _: [tiny])
    with pytest.raises(BudgetError, match="layers do not fit into CUDA0"):
        Llama(str(tiny_model("mixed")), n_gpu_layers=99, n_slots=2, verbose=False)

"""Dense layers on a device, experts streamed on the processor's side: the logits are stock's with
the same placement, and no expert ever leaves but through the cache.

The device is the one that the libraries find, or llama.cpp's RPC server where they were built with
it, see rpc_device.py; `make hybrid` builds such libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rpc_device
import test_bench_limit
from flashmoe_gguf.bench.arm import STOCK, STREAMED, Arm
from flashmoe_gguf.bench.limit import V1
from flashmoe_gguf.devices import Device, device_backends, list_devices
from flashmoe_gguf.libs import library_dir
from flashmoe_gguf.store import read_geometry
from rpc_device import LEAST_ROWS, OWN, Run

WITH_SERVER = bool(list(library_dir("patched").glob("libggml-rpc.*")))


def own_devices() -> list[Device]:
    from flashmoe_gguf.llama import llama_cpp

    return list_devices(llama_cpp)


def most_rows() -> int:
    """Of a batch in the tests that make many runs; kernels in software take their time."""
    from flashmoe_gguf.llama import llama_cpp

    return 2 * LEAST_ROWS if rpc_device.in_software(llama_cpp) else 512


def why_not() -> str:
    """Why there is no device for these tests; empty: there is one."""
    from flashmoe_gguf.llama import llama_cpp

    if WITH_SERVER or own_devices():
        return ""
    if backends := device_backends(llama_cpp):
        return f"the libraries were built with {', '.join(backends)}, which finds no device"
    return "the libraries were built for the processor only: make hybrid"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT != "", reason=WHY_NOT)

v1 = test_bench_limit.v1

EXPERT_BUFFER = "FlashMoE"  # native/hooks.c: the name of the buffer type
KINDS = ("mixed", "gptoss", "fused", "grovemoe", "deepseek2lite-like")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    if not WITH_SERVER:
        yield OWN
        return
    with rpc_device.serving() as port:
        yield port


@pytest.fixture(scope="module")
def two_devices() -> Iterator[int]:
    if not WITH_SERVER:
        if len(own_devices()) < 2:
            pytest.skip("there is one device only")
        yield OWN
        return
    with rpc_device.serving(2) as port:
        yield port


def slot_counts(model: Path) -> dict[str, int]:
    geometry = read_geometry(model)
    n = geometry.n_expert
    return {"all": n, "half": n // 2, "k": geometry.top_k, "ring only": 0}


def test_prefill_and_decode_equal_stock(
    port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("mixed")
    options = {"n_gpu_layers": 99, "n_threads": 1, "n_threads_batch": 1}
    long: dict[str, Any] = {"steps": (512,), "n_greedy": 128}
    want = rpc_device.run(tmp_path, "stock", port, model, [Run("stock", options, **long)])
    runs = [Run(k, {**options, "n_slots": n}, **long) for k, n in slot_counts(model).items()]
    got = rpc_device.run(tmp_path, "patched", port, model, runs)
    assert want["stock"].shape[0] == 129
    for name in slot_counts(model):
        assert np.array_equal(got[name], want["stock"]), name
        assert got[f"{name}.stats"]["lookups"] > 0, "nothing was streamed"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_number_of_layers(
    kind: str, port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also from nothing on the device, where llama.cpp knows it all the same."""
    model = tiny_model(kind)
    n_slots = slot_counts(model)["half"]
    layers = (0, 1, 2, -1)
    short: dict[str, Any] = {"steps": (64, 3), "n_greedy": 8}
    stock = [Run(str(n), {"n_gpu_layers": n}, **short) for n in layers]
    ours = [
        Run(str(n), {"n_gpu_layers": n, "n_slots": n_slots}, **short) for n in (*layers, "auto")
    ]
    want = rpc_device.run(tmp_path, "stock", port, model, stock)
    got = rpc_device.run(tmp_path, "patched", port, model, ours)
    for n in layers:
        assert np.array_equal(got[str(n)], want[str(n)]), n
    assert np.array_equal(got["auto"], want["-1"])


def test_no_batch_takes_experts_to_the_device(
    port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The device wants large batches, as GPUs do. Stock copies experts to it, which shows that it
    was asked; ours does not, whatever the batch, unless op_offload is given. The reserved range
    cannot be read, so a copy past the cache would end the child.
    """
    model = tiny_model("mixed")
    sizes = (1, LEAST_ROWS - 1, LEAST_ROWS, LEAST_ROWS + 1, most_rows())
    shared: dict[str, Any] = {"steps": sizes, "n_greedy": 4}
    here = {"n_gpu_layers": 99, "op_offload": False}
    stock = [Run("on", {**here, "op_offload": None}, watch=True, **shared)]
    stock += [Run(f"off {watch}", here, watch=watch, **shared) for watch in (True, False)]
    want = rpc_device.run(tmp_path, "stock", port, model, stock, offload=True)
    assert on_device(want["on.seen"]) == large(want["on.seen"]) != set()
    assert not on_device(want["off True.seen"])

    runs = []
    for name, n_slots in slot_counts(model).items():
        for op_offload in (None, False):
            options = {"n_gpu_layers": 99, "n_slots": n_slots, "op_offload": op_offload}
            for watch in (True, False):  # a callback makes llama.cpp compute in other pieces
                runs.append(Run(f"{name} {op_offload} {watch}", options, watch=watch, **shared))
    got = rpc_device.run(tmp_path, "patched", port, model, runs, offload=True)
    for each in runs:
        assert np.array_equal(got[each.name], want[f"off {each.watch}"]), each.name
        if each.watch:
            assert {buft for _, buft in got[f"{each.name}.seen"]} == {EXPERT_BUFFER}
            assert rows_of(got[f"{each.name}.seen"]) == rows_of(want["on.seen"]) >= {1, LEAST_ROWS}


def on_device(seen: list[tuple[int, str]]) -> set[int]:
    """Rows of the expert matmuls whose weights are in the device's memory."""
    return {rows for rows, buft in seen if buft not in (EXPERT_BUFFER, "host")}


def rows_of(seen: list[tuple[int, str]]) -> set[int]:
    return {rows for rows, _ in seen}


def large(seen: list[tuple[int, str]]) -> set[int]:
    return {rows for rows in rows_of(seen) if rows >= LEAST_ROWS}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_uploaded_through_the_cache(
    kind: str, port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With op_offload the device gets the large batches that it wants, as in stock."""
    model = tiny_model(kind)
    sizes = (1, LEAST_ROWS - 1, LEAST_ROWS, LEAST_ROWS + 1, most_rows())
    shared: dict[str, Any] = {"steps": sizes, "n_greedy": 4}
    options = {"n_gpu_layers": 99, "op_offload": True}
    stock = [Run(f"on {watch}", options, watch=watch, **shared) for watch in (True, False)]
    want = rpc_device.run(tmp_path, "stock", port, model, stock, offload=True)
    runs = [
        Run(f"{name} {watch}", {**options, "n_slots": n_slots}, watch=watch, **shared)
        for name, n_slots in slot_counts(model).items()
        for watch in (True, False)
    ]
    got = rpc_device.run(tmp_path, "patched", port, model, runs, offload=True)
    for each in runs:
        assert np.array_equal(got[each.name], want[f"on {each.watch}"]), each.name
        if each.watch:
            seen = got[f"{each.name}.seen"]
            assert on_device(seen) == large(seen) == large(want["on True.seen"]) != set()
            assert {buft for rows, buft in seen if rows < LEAST_ROWS} == {EXPERT_BUFFER}


def test_an_upload_reads_each_routed_expert_once(
    port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As much as the processor reads for the same batch, and nothing when all are cached."""
    model = tiny_model("mixed")
    geometry = read_geometry(model)
    plain = {"n_gpu_layers": 99, "n_slots": 0, "lookahead": "off"}
    steps: dict[str, Any] = {"steps": (LEAST_ROWS,)}  # one ubatch
    runs = [Run("here", plain, **steps), Run("there", {**plain, "op_offload": True}, **steps)]
    cached = {"n_gpu_layers": 99, "n_slots": geometry.n_expert, "op_offload": True}
    runs.append(Run("cached", cached, steps=(LEAST_ROWS, LEAST_ROWS)))
    got = rpc_device.run(tmp_path, "patched", port, model, runs, offload=True)
    assert got["there.stats"] == got["here.stats"]
    assert got["there.stats"]["lookups"] > 0
    assert got["there.stats"]["bytes_read"] < 1.5 * geometry.expert_bytes
    assert got["cached.stats"]["bytes_read"] < 1.5 * geometry.expert_bytes


def test_a_read_that_fails_during_an_upload(
    port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {"n_gpu_layers": 99, "n_slots": 2, "op_offload": True}
    runs = [Run("good", options, steps=(64,)), Run("bad", options, steps=(64,), faulty=True)]
    model = tiny_model("mixed")
    got = rpc_device.run(tmp_path, "patched", port, model, runs, offload=True)
    assert str(got["bad.error"]) in {part.tensor for part in read_geometry(model).groups[0].parts}
    assert np.array_equal(got["bad"], got["good"])


def test_nothing_on_the_device_and_it_wants_batches(
    port: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without n_gpu_layers llama.cpp offloads large batches all the same: dense weights may go."""
    model = tiny_model("mixed")
    options = {"n_slots": slot_counts(model)["half"]}
    runs = [
        Run("watched", options, steps=(64, 1), watch=True),
        Run("plain", options, steps=(64, 1)),
    ]
    got = rpc_device.run(tmp_path, "patched", port, model, runs, offload=True)
    assert {buft for _, buft in got["watched.seen"]} == {EXPERT_BUFFER}
    assert np.array_equal(got["watched"], got["plain"])


def test_two_devices(two_devices: int, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = tiny_model("mixed")
    n_slots = slot_counts(model)["half"]
    short: dict[str, Any] = {"steps": (300, 300), "n_greedy": 8}
    ways: dict[str, dict[str, Any]] = {
        "by memory": {"n_gpu_layers": 99},
        "tensor_split": {"n_gpu_layers": 99, "tensor_split": [3.0, 1.0]},
        "all on the second": {"n_gpu_layers": 99, "tensor_split": [0.0, 1.0]},
        "main_gpu": {"n_gpu_layers": 99, "split_mode": 0, "main_gpu": 1},
    }
    stock = [Run(name, options, **short) for name, options in ways.items()]
    want = rpc_device.run(tmp_path, "stock", two_devices, model, stock)
    runs = [Run(name, {**options, "n_slots": n_slots}, **short) for name, options in ways.items()]
    got = rpc_device.run(tmp_path, "patched", two_devices, model, runs)
    for name in ways:
        assert np.array_equal(got[name], want[name]), name
        assert "pipeline parallelism enabled" not in got[f"{name}.said"]


def test_ubatches_in_parallel_on_two_devices(
    two_devices: int, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp's pipeline parallelism, which a load of ours turns off, would be right too."""
    model = tiny_model("mixed")
    options = {"n_gpu_layers": 99, "n_ubatch": LEAST_ROWS}
    shared: dict[str, Any] = {"steps": (512, 100), "n_greedy": 4}
    stock = [Run("stock", options, **shared)]
    want = rpc_device.run(tmp_path, "stock", two_devices, model, stock)["stock"]
    for offload in (False, True):
        runs = [
            Run(name, {**options, "n_slots": n, "op_offload": offload}, parallel=True, **shared)
            for name, n in slot_counts(model).items()
        ]
        got = rpc_device.run(tmp_path, "patched", two_devices, model, runs, offload=offload)
        for each in runs:
            assert "pipeline parallelism enabled" in got[f"{each.name}.said"]
            assert np.array_equal(got[each.name], want), each.name


def test_on_the_command_line(port: int, tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("mixed"))
    shared = ("run", model, "--tokens", "1,2,3", "-n", "8", "--temp", "0", "-c", "256", "-t", "1")
    ours = rpc_device.command_line(port, *shared, "--n-slots", "2", "--ngl", "99")
    assert ours.returncode == 0, ours.stderr
    assert re.search(r"device +[A-Za-z]+0 \(.+\), 4 of 4 layers: dense", ours.stderr)
    stock = rpc_device.command_line(port, *shared, "--no-stream", "--ngl", "99")
    assert stock.returncode == 0, stock.stderr
    assert "4 of 4 layers" in stock.stderr
    assert len(ours.stdout.split()) == 8
    assert ours.stdout == stock.stdout


@pytest.mark.skipif(WITH_SERVER, reason="the server's devices cannot be hidden")
def test_a_hidden_device(
    port: int, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or none at all, where a driver is missing: the error says what the libraries could use."""
    if own_devices()[0].backend not in ("CUDA", "Vulkan"):
        pytest.skip("there is no variable that hides it")
    shared = ("run", str(tiny_model("mixed")), "--tokens", "1,2,3", "-n", "1", "--n-slots", "2")
    cases: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}]
    cases.append({"CUDA_VISIBLE_DEVICES": "99", "GGML_VK_VISIBLE_DEVICES": "99"})
    cases.append({**cases[0], "VK_DRIVER_FILES": "/none", "VK_ICD_FILENAMES": "/none"})
    for hidden in cases:
        with monkeypatch.context() as patch:
            for name, value in hidden.items():
                patch.setenv(name, value)
            done = rpc_device.command_line(port, *shared, "--ngl", "99")
            auto = rpc_device.command_line(port, *shared, "--ngl", "auto")
        assert done.returncode == 2
        assert f"built with {own_devices()[0].backend}, which finds none" in done.stderr
        assert auto.returncode == 0, auto.stderr


def test_a_plan_with_the_device(port: int, tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("mixed"))
    arguments = ("plan", model, "--ram", "1G", "--disk", "1", "--memory", "10", "--json")
    without = rpc_device.command_line(port, *arguments)
    done = rpc_device.command_line(port, *arguments, "--ngl", "auto")
    assert done.returncode == 0, done.stderr
    plan, before = json.loads(done.stdout), json.loads(without.stdout)
    share = plan["placement"]["shares"][0]
    assert plan["placement"]["n_layers"] == 4
    assert plan["fixed"]["dense"] + share["dense"] == before["fixed"]["dense"]
    assert plan["fixed"]["context"] + share["kv"] <= before["fixed"]["context"]
    assert share["device"]["free_bytes"] > 0


def test_arms_of_a_bench(port: int, tiny_model: Callable[[str], Path]) -> None:
    """Stock with its experts beside the device, mapped or in memory, and ours: one placement."""
    arm = Arm(
        "", str(tiny_model("mixed")), 12, prompt=range(40), n_ctx=64, n_ubatch=32, n_threads=1
    )
    rows = {}
    for kind in (STREAMED, STOCK):
        one = replace(arm, name=kind, kind=kind, n_gpu_layers=99, n_slots=2)
        rows[kind] = rpc_device.arm(port, one)
        assert rows[kind]["n_gen"] == 12
    assert rows[STREAMED]["logits"] == rows[STOCK]["logits"]
    assert rows[STREAMED]["lookups"] > 0
    tried = rpc_device.arm(port, replace(arm, n_gpu_layers="auto", n_slots=0, n_gen=0))
    assert tried["n_gpu_layers"] == 4


def test_a_bench(port: int, v1: V1, tmp_path: Path) -> None:
    """The command itself: mapped, in memory and streamed, the same output or no figure."""
    rows_file = tmp_path / "rows.jsonl"
    shape = "n_layer=4,n_expert=8,top_k=2,width=256,expert_width=256,n_head=4,n_head_kv=2"
    done = rpc_device.command_line(
        port,
        *("bench", "--synthetic", "custom", "--shape", shape, "--ngl", "99", "--ram", "300M"),
        *("--arms", "stock,streamed,in-ram", "--arm", "slots=2", "--prompt", "48", "--gen", "16"),
        *("-t", "1", "--rounds", "1", "--cold", "advise", "--jsonl", str(rows_file)),
    )
    assert done.returncode == 0, done.stderr
    assert "same output: yes (17 steps against stock llama.cpp" in done.stdout
    assert ", 99 layers on the GPU;" in done.stdout
    rows = {row["arm"]: row for row in map(json.loads, rows_file.read_text().splitlines())}
    assert set(rows) == {"stock", "streamed", "in-ram", "slots=2"}
    assert len({row["logits_hash"] for row in rows.values()}) == 1
    assert rows["slots=2"]["lookups"] > 0

"""Whoever wants an expert's bytes without asking the cache gets them from the file, or crashes.

Needs no device: what may reach for the weights outside MUL_MAT_ID is tried on the processor alone.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from flashmoe_gguf import Llama
from flashmoe_gguf.store import Part, read_geometry
from rpc_device import Tensor, function, is_expert_matmul

OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "verbose": False}


def experts_of_layer_0(llm: Llama) -> dict[str, Any]:
    """Addresses of the ggml tensors that layer 0's expert matmuls use, by name."""
    import llama_cpp

    lib = llama_cpp.llama_cpp._lib
    found: dict[str, Any] = {}

    def look(node: int, ask: bool, _data: Any) -> bool:
        tensor = Tensor.from_address(node)
        if ask and is_expert_matmul(lib, tensor):
            weights = tensor.src[0]
            name = weights.contents.name.decode()
            if name.startswith("blk.0."):
                found[name] = ctypes.addressof(weights.contents)
        return not ask

    params = llm.context_params
    callback = llama_cpp.ggml_backend_sched_eval_callback(look)
    params.cb_eval = callback
    context = llama_cpp.llama_init_from_model(llm.model, params)
    ids = (llama_cpp.llama_token * 1)(1)
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(ids, 1)) == 0
    llama_cpp.llama_free(context)
    params.cb_eval = llama_cpp.ggml_backend_sched_eval_callback(0)
    return found


def stored(model: Path, part: Part) -> bytes:
    place = part.place(0)
    file = read_geometry(model).files[place.file].path
    n = part.shape[2] * part.expert_bytes
    return file.read_bytes()[place.offset : place.offset + n]


@pytest.mark.parametrize("n_slots", [0, 2])
def test_tensor_get_reads_the_file(n_slots: int, tiny_model: Callable[[str], Path]) -> None:
    import llama_cpp

    model = tiny_model("mixed")
    llm = Llama(str(model), n_slots=n_slots, **OPTIONS)
    try:
        addresses = experts_of_layer_0(llm)
        get = function(
            llama_cpp.llama_cpp._lib,
            "ggml_backend_tensor_get",
            None,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t),
        )
        parts = read_geometry(model).groups[0].parts
        assert {part.tensor for part in parts} == set(addresses)
        for part in parts:
            want = stored(model, part)
            data = ctypes.create_string_buffer(len(want))
            get(addresses[part.tensor], data, 0, len(want))
            assert data.raw == want
            get(addresses[part.tensor], data, part.expert_bytes - 5, 10)  # of two experts
            assert data.raw[:10] == want[part.expert_bytes - 5 :][:10]
        llm.eval([1, 2, 3])  # and no error was latched
    finally:
        llm.close()


def _peek(model: str) -> None:
    llm = Llama(model, n_slots=100, **OPTIONS)
    address = next(iter(experts_of_layer_0(llm).values()))
    print("reading", flush=True)
    ctypes.string_at(Tensor.from_address(address).data, 1)
    print("read", flush=True)


def test_the_reserved_range_cannot_be_read(tiny_model: Callable[[str], Path]) -> None:
    """So every other test would crash on a bypass, and not compute on something else."""
    done = subprocess.run(
        [sys.executable, __file__, str(tiny_model("mixed"))],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"reading\n", done.stderr.decode()[-2000:]
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


@pytest.mark.parametrize("kind", ["mixed", "gptoss"])
def test_a_saved_model_has_its_experts(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    import llama_cpp

    model, saved = tiny_model(kind), tmp_path / "saved.gguf"
    llm = Llama(str(model), n_slots=1, **OPTIONS)
    try:
        llama_cpp.llama_model_save_to_file(llm.model, str(saved).encode())
    finally:
        llm.close()
    want = {t.name: t for t in GGUFReader(model).tensors}
    got = {t.name: t for t in GGUFReader(saved).tensors}
    assert set(got) == set(want)
    assert any(part.tensor in got for g in read_geometry(model).groups for part in g.parts)
    for name, tensor in got.items():
        assert np.array_equal(tensor.data, want[name].data), name


def test_an_adapter_for_experts_is_refused(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """`Llama` refuses lora_path; llama.cpp itself cannot put an adapter beside streamed weights."""
    import llama_cpp

    model, adapter = tiny_model("mixed"), tmp_path / "adapter.gguf"
    part = read_geometry(model).groups[0].parts[0]
    width, rows, n_expert = part.shape
    writer = GGUFWriter(adapter, "qwen3moe")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_tensor(f"{part.tensor}.lora_a", np.ones((n_expert, 4, width), np.float32))
    writer.add_tensor(f"{part.tensor}.lora_b", np.ones((n_expert, rows, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = str(adapter).encode()
    llm = Llama(str(model), n_slots=1, **OPTIONS)
    try:
        assert not llama_cpp.llama_adapter_lora_init(llm.model, path)
        llm.eval([1, 2, 3])
    finally:
        llm.close()
    plain = Llama(str(model), stream=False, **OPTIONS)  # the adapter itself is sound
    try:
        assert llama_cpp.llama_adapter_lora_init(plain.model, path)
    finally:
        plain.close()


if __name__ == "__main__":
    _peek(sys.argv[1])

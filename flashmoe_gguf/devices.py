"""Devices that llama.cpp can compute on beside the processor: GPUs, and what acts as one.

They depend on the backends that the libraries were built with. llama_cpp has no bindings for them,
so ggml's own functions are called, which libllama brings along.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmoe_gguf.errors import OptionError

# ggml-backend.h, enum ggml_backend_dev_type
_GPU, _INTEGRATED = 1, 2
# Of ggml's libraries, those that bring no devices beside the processor.
_NO_DEVICES = frozenset({"", "base", "cpu", "blas", "zendnn"})
_METAL = "MTL"

# llama.cpp, common/common.h: LLM_FFN_EXPS_REGEX, what --cpu-moe keeps on the processor's side.
EXPERT_PATTERN = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"

_HOW_TO_BUILD = (
    "build with a backend: CMAKE_ARGS=-DGGML_CUDA=ON (NVIDIA), -DGGML_VULKAN=ON (any GPU) or "
    "-DGGML_METAL=ON (Apple) pip install . ; or leave out the layers"
)


@dataclass(frozen=True)
class Device:
    """A device as llama.cpp names it. `free_bytes` and `total_bytes` 0: it does not say.
    `shares_memory`: its memory is the system's.
    """

    name: str
    description: str
    backend: str
    free_bytes: int
    total_bytes: int
    shares_memory: bool = False


class _Capabilities(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_bool)
        for name in ("async_", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")
    ]


class _Properties(ctypes.Structure):
    """ggml-backend.h, struct ggml_backend_dev_props"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Capabilities),
    ]


class _Override(ctypes.Structure):
    """llama.h, struct llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


_overrides: list[Any] = []  # llama.cpp keeps the pointer


def list_devices(llama_cpp: Any) -> list[Device]:
    """The devices that a model is spread over, in llama.cpp's order (src/llama.cpp,
    llama_prepare_model_devices): other machines, GPUs, and integrated ones where there is no other.
    """
    lib = llama_cpp.llama_cpp._lib
    count = _function(lib, "ggml_backend_dev_count", ctypes.c_size_t)
    get = _function(lib, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    remote: list[Device] = []
    gpus: list[Device] = []
    integrated: list[Device] = []
    seen: set[bytes] = set()
    for i in range(count()):
        kind, device_id, device = _describe(lib, get(i))
        if kind == _INTEGRATED:
            if not integrated or integrated[-1].backend == device.backend:
                integrated.append(device)
        elif kind == _GPU and device.backend == "RPC":
            remote.append(device)
        elif kind == _GPU and device_id not in seen:  # two backends may drive one GPU
            gpus.append(device)
            if device_id:
                seen.add(device_id)
    return remote + (gpus or integrated)


def _describe(lib: Any, handle: int) -> tuple[int, bytes | None, Device]:
    """(ggml's type, identity, the device)"""
    p = _Properties()
    get_props = _function(lib, "ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.c_void_p)
    get_props(handle, ctypes.byref(p))
    get_reg = _function(lib, "ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)
    get_name = _function(lib, "ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    name = (get_name(get_reg(handle)) or b"").decode("utf-8", "replace")
    backend = name.partition("[")[0]
    return (
        p.type,
        p.device_id,
        Device(
            name=(p.name or b"").decode("utf-8", "replace"),
            description=(p.description or b"").decode("utf-8", "replace"),
            backend=backend,
            free_bytes=p.memory_free,
            total_bytes=p.memory_total,
            shares_memory=p.type == _INTEGRATED or backend == _METAL,
        ),
    )


def device_backends(llama_cpp: Any) -> list[str]:
    """The backends for devices that the libraries were built with, such as "CUDA".

    By their files, as ggml does not register each of them where there is no driver.
    """
    files = Path(llama_cpp.llama_cpp._base_path).glob("libggml*")
    names = {file.name.partition(".")[0].removeprefix("libggml").lstrip("-") for file in files}
    return sorted(name.upper() for name in names - _NO_DEVICES)


def need_device(llama_cpp: Any) -> list[Device]:
    """As `list_devices`; raises OptionError where there is none."""
    found = list_devices(llama_cpp)
    if found:
        return found
    backends = device_backends(llama_cpp)
    if not backends:
        raise OptionError(
            "there is no device to put layers on: llama.cpp was built for the processor only",
            _HOW_TO_BUILD,
        )
    raise OptionError(
        f"there is no device to put layers on: llama.cpp was built with {', '.join(backends)}, "
        "which finds none",
        "check the driver, and variables such as CUDA_VISIBLE_DEVICES and GGML_VK_VISIBLE_DEVICES; "
        "or leave out the layers",
    )


def keep_experts_on_host(llama_cpp: Any, params: Any) -> None:
    """Adjusts `llama_model_params` as llama.cpp's --cpu-moe: no device gets a routed expert.

    Streamed experts stay here anyway. It also keeps their biases and scales beside them, and
    llama.cpp from computing ubatches in parallel on several devices, which with experts on the
    processor gains nothing and takes four times the buffers.
    """
    if not _overrides:
        get = _function(llama_cpp.llama_cpp._lib, "ggml_backend_cpu_buffer_type", ctypes.c_void_p)
        _overrides.append((_Override * 2)(_Override(EXPERT_PATTERN.encode(), get()), _Override()))
    params.tensor_buft_overrides = ctypes.addressof(_overrides[0])


def _function(lib: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = lib[name]  # an object of its own, unlike the attribute
    function.restype, function.argtypes = result, list(arguments)
    return function

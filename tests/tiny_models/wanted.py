"""Ask llama.cpp which tensors it wants for given metadata, in a child process.

llama.cpp can make a model from metadata alone (`llama_model_init_from_user`): it then creates
every tensor that the architecture's loader knows, optional ones too, and hands them out to be
filled. Their names and shapes are what a file has to hold, so no list of tensors has to be kept
here for each architecture. A child, because llama.cpp aborts the process where metadata
displeases it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
_ENDED = "the process ended"


def wanted(library_dir: Path, headers: Mapping[str, Path]) -> dict[str, dict[str, Shape] | str]:
    """Architecture -> its tensors as {name: shape}, fastest dimension first; a str is an error.

    `headers` are GGUF files without tensors. One child answers for all of them; where one
    aborts it, another goes on with the rest.
    """
    answers: dict[str, dict[str, Shape] | str] = {}
    left = dict(headers)
    while left:
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), *(f"{a}={p}" for a, p in left.items())],
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library_dir)},
            capture_output=True,
            check=False,
        )
        for line in done.stdout.splitlines():
            arch, answer = json.loads(line)
            if isinstance(answer, dict):
                answer = {name: tuple(shape) for name, shape in answer.items()}
            answers[arch] = answer
            del left[arch]
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()[-2000:]
            if not left:
                raise RuntimeError(f"{_ENDED} with {done.returncode}: {words}")
            arch = next(iter(left))
            answers[arch] = f"{_ENDED} with {done.returncode}: {words}"
            del left[arch]
    return answers


class _Tensor(ctypes.Structure):
    """The beginning of `struct ggml_tensor`, llama.cpp's ggml/include/ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
    )


def _shape(tensor: _Tensor) -> list[int]:
    """Its dimensions without trailing ones, as a GGUF has them."""
    shape = list(tensor.ne)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return shape


def _run(requests: Sequence[str]) -> None:
    import llama_cpp as lc  # type: ignore[import-untyped, unused-ignore]

    lines: list[str] = []
    log = lc.llama_log_callback(lambda level, text, _user: lines.append(text.decode()))
    lc.llama_log_set(log, ctypes.c_void_p(0))
    lc.llama_backend_init()
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    base = ctypes.CDLL(str(Path(os.environ["LLAMA_CPP_LIB_PATH"]) / f"libggml-base.{suffix}"))
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]

    class Init(ctypes.Structure):  # struct gguf_init_params
        _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))

    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, Init]
    for request in requests:
        arch, _, path = request.partition("=")
        found: dict[str, list[int]] = {}

        def take(tensor: int, _user: Any, found: dict[str, list[int]] = found) -> None:
            name = base.ggml_get_name(tensor).decode()
            found[name] = _shape(_Tensor.from_address(tensor))

        lines.clear()
        params = lc.llama_model_default_params()
        header = base.gguf_init_from_file(path.encode(), Init(True, None))
        callback = lc.llama_model_set_tensor_data_t(take)
        model = lc.llama_model_init_from_user(header, callback, ctypes.c_void_p(0), params)
        print(json.dumps([arch, found if model else "".join(lines)[-1500:]]), flush=True)
        if model:
            lc.llama_model_free(model)


if __name__ == "__main__":
    _run(sys.argv[1:])

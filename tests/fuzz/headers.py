"""llama.cpp on a header alone, or on a file of zeros, without our loader: what it says."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashmoe_gguf.assertions import assertions_raised
from flashmoe_gguf.libs import load_llama_cpp
from flashmoe_gguf.llama_log import _log

lc: Any = load_llama_cpp("patched")
_LIB: Any = lc.llama_cpp._lib


class _Init(ctypes.Structure):  # struct gguf_init_params
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@contextmanager
def _errors() -> Iterator[list[str]]:
    """The errors that llama.cpp logs meanwhile."""
    lines: list[str] = []

    @lc.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
    def keep(level: int, text: bytes, user: ctypes.c_void_p) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            lines.append(text.decode(errors="replace").strip())

    lc.llama_log_set(keep, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        lc.llama_log_set(_log, ctypes.c_void_p(0))


def _context(model: Any) -> Any:
    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 64, 32, 32
    params.n_threads = params.n_threads_batch = 1
    return lc.llama_init_from_model(model, params)


def _params() -> Any:
    params = lc.llama_model_default_params()
    params.use_extra_bufts = params.use_mmap = False
    return params


def reserve(path: Path) -> list[str]:
    """Make up a model for a header without tensors, and a context; the errors on the way."""
    _LIB.gguf_init_from_file.restype = ctypes.c_void_p
    _LIB.gguf_init_from_file.argtypes = [ctypes.c_char_p, _Init]
    _LIB.gguf_free.argtypes = [ctypes.c_void_p]
    header = _LIB.gguf_init_from_file(str(path).encode(), _Init(True, None))
    fill = lc.llama_model_set_tensor_data_t(lambda tensor, user: None)
    with _errors() as lines, assertions_raised(_LIB):
        model = lc.llama_model_init_from_user(header, fill, ctypes.c_void_p(0), _params())
        _LIB.gguf_free(header)
        if model:
            context = _context(model)
            if context:
                lc.llama_free(context)
            lc.llama_model_free(model)
    return lines


def decode(path: Path) -> None:
    """Load a file as llama.cpp does, and compute four tokens where it can be loaded."""
    with _errors():
        with assertions_raised(_LIB):
            model = lc.llama_model_load_from_file(str(path).encode(), _params())
            context = _context(model) if model else None
        if context:
            tokens = (lc.llama_token * 4)(1, 2, 3, 4)
            encoder = lc.llama_model_has_encoder(model) and not lc.llama_model_has_decoder(model)
            compute = lc.llama_encode if encoder else lc.llama_decode
            compute(context, lc.llama_batch_get_one(tokens, 4))
            lc.llama_free(context)
        if model:
            lc.llama_model_free(model)

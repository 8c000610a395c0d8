"""llama.cpp's log: silent unless llama_cpp's logger wants it, and its errors kept for a moment."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from flashmoe_gguf.libs import load_llama_cpp

load_llama_cpp("patched")  # llama_cpp picks its libraries when it is imported

import llama_cpp  # noqa: E402
from llama_cpp._logger import llama_log_callback as _default_log  # noqa: E402
from llama_cpp._logger import logger as _logger  # noqa: E402

_GGML_LOG_LEVEL_ERROR = 4

_recent = threading.local()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
def _log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == _GGML_LOG_LEVEL_ERROR:
        lines = getattr(_recent, "lines", None)
        if lines is not None:
            lines.append(text.decode("utf-8", "replace").strip())
    # llama_cpp takes levels for those of an older llama.cpp and would always print warnings
    if _logger.level <= logging.DEBUG:
        _default_log(level, text, user_data)


llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))


@contextmanager
def collected_errors() -> Iterator[deque[str]]:
    """The last errors that llama.cpp logs in this thread inside the block."""
    _recent.lines = deque(maxlen=16)
    try:
        yield _recent.lines
    finally:
        _recent.lines = None

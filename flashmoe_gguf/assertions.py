"""llama.cpp's assertions as exceptions, so that a model it cannot run does not end the process.

llama.cpp checks much of what a header says with GGML_ASSERT, one architecture's way of using a
number at a time. ggml calls a hook before it aborts. Here the hook is the C++ library's own
function that throws a runtime_error with the message it is given: llama.cpp catches those where
it loads a model and where it makes a context, frees what it had begun, and reports an error.

Only while loading: there the assertion is met on the calling thread, below those two functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator

# std::__throw_runtime_error(char const *) of libstdc++ and of libc++.
_THROW = ("_ZSt21__throw_runtime_errorPKc", "_ZNSt3__121__throw_runtime_errorEPKc")

_lock = threading.Lock()
_active = 0
_before: int | None = None

_FAILED = re.compile(r"(?:\S*/)?(?P<where>[\w.-]+\.\w+:[0-9]+): (?P<what>.*)")
_CONDITION = re.compile(r"GGML_ASSERT\((.*)\) failed")


@contextlib.contextmanager
def assertions_raised(library: ctypes.CDLL) -> Iterator[None]:
    """Failed assertions throw while this lasts; nests, and may overlap in several threads.

    `library` is libllama: its dependencies are searched too. Where the C++ library has no such
    function an assertion ends the process, as it does without this.
    """
    throw = next((getattr(library, name) for name in _THROW if hasattr(library, name)), None)
    if throw is None:
        yield
        return
    set_callback = library.ggml_set_abort_callback
    set_callback.restype, set_callback.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    global _active, _before
    with _lock:
        if _active == 0:
            _before = set_callback(ctypes.cast(throw, ctypes.c_void_p))
        _active += 1
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                set_callback(_before)


def failed_assertion(line: str) -> str | None:
    """What failed and where, from a line of llama.cpp's log; None if it tells of no assertion."""
    match = _FAILED.search(line)
    if match is None:
        return None
    condition = _CONDITION.search(match["what"])
    what = f"{condition[1]} does not hold" if condition else match["what"].strip()
    return f"{what} ({match['where']})"

"""The C library, bound with cffi in ABI mode: what `flashmoe.h` declares."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import cffi

from flashmoe_gguf.errors import LibraryError
from flashmoe_gguf.libs import library_dir, load_llama_cpp


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib). llama_cpp comes first: both must resolve to the same llama.cpp libraries."""
    load_llama_cpp("patched")
    header = Path(__file__).parent.parent / "flashmoe.h"
    ffi = cffi.FFI()
    try:
        ffi.cdef(header.read_text(encoding="utf-8"))
        return ffi, ffi.dlopen(str(library_dir("patched") / "libflashmoe.so"))
    except OSError as error:
        raise LibraryError(
            f"the expert cache library does not load: {error}",
            "reinstall the package on this machine: `pip install --force-reinstall .`",
        ) from error


def policy_names() -> tuple[str, ...]:
    """The eviction policies that the library has."""
    ffi, lib = library()
    names: list[str] = []
    while (name := lib.fm_policy_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)

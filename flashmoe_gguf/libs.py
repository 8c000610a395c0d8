"""Which llama.cpp libraries `llama_cpp` runs on: the patched set or the stock one.

Both are built from one tree with the same flags and installed beside this file. `llama_cpp` loads
its library once, when it is imported, from the folder that LLAMA_CPP_LIB_PATH names.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

from flashmoe_gguf.errors import LibraryError

LibrarySet = Literal["patched", "stock"]

_VARIABLE = "LLAMA_CPP_LIB_PATH"

_FOR_GPUS = ("libcu", "libnv", "libvulkan", "libamdhip", "libhip", "libroc")
# glibc's words for a library that another one needs
_ABSENT = re.compile(r"([^\s/:]+): cannot open shared object file")


def library_dir(which: LibrarySet) -> Path:
    """The folder of one library set; raises LibraryError when it was not built."""
    path = Path(__file__).parent / "lib" / which
    if not path.is_dir():
        raise LibraryError(
            f"the {which} llama.cpp libraries are missing from {path.parent}",
            "install the package with `pip install .`; the source tree alone does not run",
        )
    return path


def load_llama_cpp(which: LibrarySet = "patched") -> ModuleType:
    """Imports `llama_cpp` on one library set.

    Raises LibraryError when it was imported before with other libraries: one process can hold
    only one set.
    """
    wanted = library_dir(which)
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        if Path(loaded._base_path).resolve() != wanted.resolve():
            raise LibraryError(
                f"llama_cpp was imported before with the libraries in {loaded._base_path}",
                "import flashmoe_gguf.Llama before anything that imports llama_cpp",
            )
        return sys.modules["llama_cpp"]
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(wanted)
    try:
        return importlib.import_module("llama_cpp")
    except (OSError, RuntimeError) as error:
        raise LibraryError(
            f"the llama.cpp libraries in {wanted} do not load: {error}", _hint(str(error))
        ) from error
    finally:
        # child processes choose for themselves
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before


def _hint(error: str) -> str:
    """What to do about libraries that do not load: one of a GPU's may be missing."""
    absent = _ABSENT.search(error)
    if absent is None or absent[1].startswith(("libllama", "libggml")):
        return "reinstall the package on this machine: `pip install --force-reinstall .`"
    why = "comes with NVIDIA's driver" if absent[1].startswith("libcuda.") else "is missing"
    hint = f"{absent[1]} {why}: install it, or name its folder in LD_LIBRARY_PATH"
    if absent[1].startswith(_FOR_GPUS):
        hint += (
            "; without a GPU, `pip install --force-reinstall .` without CMAKE_ARGS builds for the "
            "processor"
        )
    return hint

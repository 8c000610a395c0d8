"""Where libggml-cuda looks for CUDA: native/cmake/toolkit_rpath.cmake, without llama.cpp."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import llama_libraries

FILE = Path(__file__).parent.parent / "native" / "cmake" / "toolkit_rpath.cmake"

# As llama.cpp has it: the backend is a project within, and its target comes after the hook.
TOP = """\
cmake_minimum_required(VERSION 3.21)
project(llama C)
function(report)
  foreach(target IN ITEMS ggml ggml-cuda)
    if(TARGET ${target})
      get_target_property(rpath ${target} INSTALL_RPATH)
      file(APPEND "${CMAKE_BINARY_DIR}/rpath" "${target}: ${rpath}\\n")
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL report)
add_subdirectory(ggml)
"""
GGML = """\
project(ggml C)
add_library(ggml SHARED a.c)
if(GGML_CUDA)
  add_library(ggml-cuda SHARED a.c)
endif()
"""

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def rpaths(folder: Path, *settings: str) -> str:
    (folder / "ggml").mkdir()
    (folder / "CMakeLists.txt").write_text(TOP)
    (folder / "ggml" / "CMakeLists.txt").write_text(GGML)
    (folder / "ggml" / "a.c").touch()
    command = ["cmake", "-S", str(folder), "-B", str(folder / "b"), "-DCMAKE_INSTALL_RPATH=$ORIGIN"]
    command += [f"-DCMAKE_PROJECT_INCLUDE={FILE}", *settings]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "b" / "rpath").read_text()


def test_only_the_backend_looks_in_the_toolkit(tmp_path: Path) -> None:
    cuda, blas = "/opt/my cuda/lib64/libcudart.so", "/opt/blas/lib/libcublas.so"
    found = rpaths(
        tmp_path, "-DGGML_CUDA=ON", f"-DCUDA_CUDART={cuda}", f"-DCUDA_cublas_LIBRARY={blas}"
    )
    assert found == "ggml: $ORIGIN\nggml-cuda: $ORIGIN;/opt/my cuda/lib64;/opt/blas/lib\n"


def test_a_folder_is_named_once_and_the_systems_never(tmp_path: Path) -> None:
    blas = "/opt/cuda/lib64/libcublas.so"
    found = rpaths(
        tmp_path,
        "-DGGML_CUDA=ON",
        "-DCUDA_CUDART=/usr/lib/libcudart.so",
        f"-DCUDA_cublas_LIBRARY={blas}",
    )
    assert found.splitlines()[1] == "ggml-cuda: $ORIGIN;/opt/cuda/lib64"


def test_without_the_backend_nothing_changes(tmp_path: Path) -> None:
    assert rpaths(tmp_path) == "ggml: $ORIGIN\n"


def test_llama_cpp_is_built_with_it() -> None:
    assert f"-DCMAKE_PROJECT_INCLUDE={FILE}" in llama_libraries._FORCED

"""CMake arguments on their way to llama.cpp: native/cmake/user_args.cmake, run as a script."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent / "native" / "cmake" / "user_args.cmake"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def collected(folder: Path, cmake_args: str, *settings: str) -> list[str]:
    script, out = folder / "script.cmake", folder / "out"
    script.write_text(f'include("{FILE}")\nfile(WRITE "{out}" "${{user_args_text}}")\n')
    command = ["cmake", *settings, "-P", str(script)]
    subprocess.run(command, env={**os.environ, "CMAKE_ARGS": cmake_args}, check=True)
    return out.read_text().splitlines()


def test_nothing(tmp_path: Path) -> None:
    assert collected(tmp_path, "") == []


@pytest.mark.parametrize("text", ["75;86", "'75;86'", r"75\;86"])
def test_a_list_stays_one_argument(text: str, tmp_path: Path) -> None:
    given = f"-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES={text} -DGGML_CUDA_FA=OFF"
    want = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=75;86", "-DGGML_CUDA_FA=OFF"]
    assert collected(tmp_path, given) == want


def test_spaces_in_quotes_stay(tmp_path: Path) -> None:
    assert collected(tmp_path, "'-DCMAKE_C_FLAGS=-O2 -g' -DA=1") == [
        "-DCMAKE_C_FLAGS=-O2 -g",
        "-DA=1",
    ]


def test_our_own_options_stay_here(tmp_path: Path) -> None:
    assert collected(tmp_path, "-DFLASHMOE_WERROR=OFF -DA=1") == ["-DA=1"]


def test_settings_from_elsewhere_count_and_the_variable_wins(tmp_path: Path) -> None:
    settings = ("-DGGML_A=1;2", "-DLLAMA_B=1", "-DOTHER=1")
    assert collected(tmp_path, "-DLLAMA_B=2", *settings) == ["-DLLAMA_B=2", "-DGGML_A=1;2"]

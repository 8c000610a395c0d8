"""`flashmoe plan`: its whole output for a model of real size, and what it refuses."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cli_tools import assert_error, flashmoe
from flashmoe_gguf.budget import parse_size
from flashmoe_gguf.cli import plan
from sparse_models import make_sparse

RUN = ("--ctx", "1024", "--ubatch", "128", "--threads", "2")
MACHINE = ("--disk", "2.2", "--memory", "25")

REPORT = """\
model         replay.gguf, 3.95 GiB
run           context 1024, ubatch 128, threads 2
budget        2.05 GiB given
always there  412 MiB, the floor: dense 152 MiB, context 112 MiB, ring 23.7 MiB, \
policy 13.3 MiB, process 56.5 MiB, reserve 55.1 MiB
cache         1.65 GiB: 13 to 14 of 32 experts per layer, 43 % of their bytes; all of them: \
--ram 4.21G
hits          about 84 % [78 88]
reads         about 79.7 MiB of 486 MiB that a token uses
disk          2.2 GB/s, given
memory        25 GB/s, given
speed         about 18.5 [15.4 21.6] tok/s: 38 ms of reading beside 26 ms of computing at the least

--ram  experts per layer  hits          tok/s
912M   4 to 5 of 32       45 % [45 62]  7.46 [7.38 10.3]
1.36G  8 to 9 of 32       66 % [62 74]  11.3 [10.3 13.8]
2.5G   17 to 18 of 32     90 % [85 94]  23.6 [19.3 27.5]
3.5G   26 to 27 of 32     98 % [95 99]  33.5 [29.6 35.7]
4.25G  32 of 32           100 %         37.8

the drive sets the pace: --ram 2.75G would give about 26.4 tok/s
"""


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse(tmp_path_factory.mktemp("sparse") / "replay.gguf")


def test_the_whole_report(replay: Path) -> None:
    result = flashmoe("plan", replay, "--ram", "2200000000", *RUN, *MACHINE)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == REPORT


def test_json_says_the_same_and_more(replay: Path) -> None:
    result = flashmoe("plan", replay, "--ram", "2200000000", *RUN, *MACHINE, "--json")
    data = json.loads(result.stdout)
    assert data["model"] == "replay.gguf" and not data["estimated"]
    assert data["machine"] == {
        "disk_bytes_per_second": 2.2e9,
        "memory_bytes_per_second": 25e9,
    }
    assert data["run"] == {"n_ctx": 1024, "n_ubatch": 128, "n_threads": 2, "flash_attn": False}
    assert (
        data["floor_bytes"]
        == data["fixed"]["total"]
        == sum(size for name, size in data["fixed"].items() if name != "total")
    )
    assert data["floor_bytes"] + data["cache_bytes"] <= data["ram_bytes"] == 2_200_000_000
    assert len(data["slots"]) == 24
    assert data["hit_rate"]["low"] < data["hit_rate"]["expected"] <= data["hit_rate"]["high"]
    assert data["missed_bytes_per_token"] == pytest.approx(
        data["bytes_per_token"] * (1 - data["hit_rate"]["expected"])
    )
    assert data["ladder"][-1]["speed"]["expected"] > data["speed"]["expected"]


def test_the_drive_is_measured_on_the_model_s_file(tiny_model: Callable[[str], Path]) -> None:
    result = flashmoe("plan", tiny_model("qwen3moe"), "--ram", "1G", "--memory", "20")
    assert result.exit_code == 0, result.output
    [disk] = [line for line in result.stdout.splitlines() if line.startswith("disk ")]
    assert "GB/s, measured on the file: 4 " in disk


def test_files_on_several_drives_are_added(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system at /dev/shm")
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_bytes(b"x")
    two.write_bytes(b"xx")
    with tempfile.NamedTemporaryFile(dir=elsewhere) as file:
        third = Path(file.name)
        assert plan._one_per_drive((one, third, two)) in ([two, third], [third, two])


def test_a_busy_machine_is_told_of(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "busy_with_others", lambda: 3.5)
    model = tiny_model("qwen3moe")
    result = flashmoe("plan", model, "--ram", "1G", "--disk", "1")
    assert "3.5 programs run for each processor" in result.stderr
    assert flashmoe("plan", model, "--ram", "1G", *MACHINE).stderr == ""  # nothing is measured


def test_memory_is_measured(tiny_model: Callable[[str], Path]) -> None:
    result = flashmoe("plan", tiny_model("qwen3moe"), "--disk", "1", "-t", "1", "--json")
    data = json.loads(result.stdout)
    assert data["memory_source"] == "measured with 1 threads"
    assert data["machine"]["memory_bytes_per_second"] > 1e8
    assert data["budget_source"] in ("available memory", "the cgroup's limit")


def test_a_known_model_that_is_not_there() -> None:
    result = flashmoe("plan", "Gpt-OSS-20b".lower(), "--ram", "8G", *MACHINE)
    assert result.exit_code == 0
    assert "gpt-oss-20b, 11.3 GiB, not here: sizes are estimates" in result.stdout
    assert "of 32 experts per layer" in result.stdout
    data = json.loads(flashmoe("plan", "qwen3-30b-a3b", *MACHINE, "--ram", "8G", "--json").stdout)
    assert data["estimated"] is True and data["top_k"] == 8
    assert parse_size("8G") == data["ram_bytes"]


def test_the_current_folder_stands_in_for_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashmoe_gguf import disk_sample

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk_sample, "_room", lambda folder, largest: 1 << 20)
    result = flashmoe("plan", "gpt-oss-20b", "--ram", "8G", "--memory", "20")
    assert "GB/s, measured in the current folder: 4 " in result.stdout
    assert os.listdir(tmp_path) == []


def test_a_drive_that_cannot_be_measured_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from types import SimpleNamespace

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    result = flashmoe("plan", "gpt-oss-20b", "--ram", "8G", "--memory", "20")
    assert result.exit_code == 0
    assert "the drive was not measured" in result.stderr and "--disk" in result.stderr
    assert "hits          about 9" in result.stdout
    assert "tok/s:" not in result.stdout and "?" in result.stdout
    data = json.loads(
        flashmoe("plan", "gpt-oss-20b", "--ram", "8G", "--memory", "20", "--json").stdout
    )
    assert data["speed"] is None and data["machine"] is None


def test_auto_is_the_default(replay: Path) -> None:
    one, two = (
        json.loads(flashmoe("plan", replay, *arguments, *RUN, *MACHINE, "--json").stdout)
        for arguments in ((), ("--ram", "auto"))
    )
    assert one["budget_source"] == two["budget_source"] != "given"


def test_a_dense_model(tmp_path: Path) -> None:
    import gguf_files

    keys = {
        "general.architecture": gguf_files.string("llama"),
        "llama.block_count": gguf_files.u32(1),
    }
    tensor = gguf_files.Tensor("output.weight", (32, 4), gguf_files.F32)
    path = gguf_files.Gguf(keys, [tensor]).write(tmp_path / "dense.gguf")
    result = flashmoe("plan", path, "--ram", "1G", *MACHINE)
    assert result.exit_code == 0
    assert result.stdout.endswith("no routed experts: run it with llama.cpp, nothing is streamed\n")
    assert flashmoe("plan", path, "--ram", "1G", *MACHINE, "--json").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("gpt-6",), "gpt-6 is neither a file nor a known model", "known: olmoe-1b-7b, qwen3"),
        (("folder/gpt-6",), "folder/gpt-6: no such file", ""),
        (("none.gguf",), "none.gguf: no such file", ""),
        (("gpt-oss-120b", "--ram", "3G"), "gpt-oss-120b needs about 3.", "--flash-attn"),
        (
            ("gpt-oss-20b", "--ram", "lots"),
            "'lots' is not an amount of memory",
            "900M, or auto",
        ),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], message: str, hint: str) -> None:
    assert_error(flashmoe("plan", *arguments, *MACHINE), message, hint)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "fast"])
def test_a_bandwidth_is_a_positive_number(value: str) -> None:
    result = flashmoe("plan", "gpt-oss-20b", "--disk", value)
    assert result.exit_code == 2 and "--disk" in result.stderr


def test_it_loads_no_llama_cpp() -> None:
    import subprocess
    import sys

    code = (
        f"import sys; sys.path[:] = {[p for p in sys.path if p]!r}\n"
        "from flashmoe_gguf.cli import main\n"
        "main(['plan', 'gpt-oss-20b', '--ram', '8G', '--disk', '1', '--memory', '1'],"
        " standalone_mode=False)\n"
        "assert 'llama_cpp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def make_trace(path: Path, n_layers: int = 24, n_expert: int = 32) -> Path:
    """Routing that keeps to eight experts for long: twice as good for a cache as the usual."""
    rng = np.random.default_rng(0)
    favourites = np.stack([rng.permutation(n_expert)[:8] for _ in range(n_layers)])
    picks = np.argsort(rng.random((400, n_layers, 8)), axis=2)[:, :, :4]
    experts = np.take_along_axis(favourites[None], picks, axis=2).astype(np.uint16)
    np.savez(path, experts=experts, n_expert=np.full(n_layers, n_expert, np.int32))
    return path


def test_a_trace_of_one_s_own_replaces_the_reference_curves(replay: Path, tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "mine.npz")
    arguments = ("--ram", "2200000000", *RUN, *MACHINE, "--trace", trace)
    result = flashmoe("plan", replay, *arguments)
    assert result.exit_code == 0, result.output
    [hits] = [line for line in result.stdout.splitlines() if line.startswith("hits ")]
    assert hits == "hits          about 100 %, from the trace"
    data = json.loads(flashmoe("plan", replay, *arguments, "--json").stdout)
    assert data["hit_rate_source"] == "trace"
    rate = data["hit_rate"]
    assert rate["low"] == rate["expected"] == rate["high"] > 0.98  # 13 slots hold the eight
    with np.load(trace) as file:
        arrays = dict(file)
    prompt = np.random.default_rng(1).permuted(np.tile(np.arange(32), (400, 24, 1)), axis=2)
    arrays["phase"] = np.repeat(np.array([0, 1], np.uint8), 400)
    arrays["experts"] = np.concatenate([prompt[:, :, :4].astype(np.uint16), arrays["experts"]])
    np.savez(trace, **arrays)
    assert json.loads(flashmoe("plan", replay, *arguments, "--json").stdout) == data  # answers only
    few = data["ladder"][0]  # 4 to 5 slots of them
    assert 0.4 < few["hit_rate"]["expected"] < 0.7
    assert [step["hit_rate"]["expected"] for step in data["ladder"]] == sorted(
        step["hit_rate"]["expected"] for step in data["ladder"]
    )


@pytest.mark.parametrize(
    ("layers", "experts", "message"), [(12, 32, "12 layers with 4 experts"), (24, 64, "mine.npz")]
)
def test_a_trace_of_another_model(
    layers: int, experts: int, message: str, replay: Path, tmp_path: Path
) -> None:
    trace = make_trace(tmp_path / "mine.npz", layers, experts)
    assert_error(flashmoe("plan", replay, *RUN, *MACHINE, "--trace", trace), message, "")


def test_a_trace_that_is_none(replay: Path, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("no")
    result = flashmoe("plan", replay, *RUN, *MACHINE, "--trace", tmp_path / "x.npz")
    assert_error(result, "x.npz", "")

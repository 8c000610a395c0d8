"""`flashmoe simulate`: whole output on a trace worked out by hand, options, files it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cli_tools import assert_error, flashmoe
from flashmoe_gguf.trace import Trace, write_trace

TABLE = """\
7 tokens of 2 sequences, 1 layer, top-1 of 4 experts

2 slots per layer, 50.0 % of the experts
  policy  hits     gap closed  refetched  evicted per token  read per token
  belady  42.86 %  100 %       50.0 %     0.3                1.14 KiB
  dlfu    28.57 %  50 %        66.7 %     0.4                1.43 KiB
  lru     14.29 %  0 %         75.0 %     0.6                1.71 KiB
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """With two slots lru hits once, dlfu twice and Belady's three times."""
    path = tmp_path / "t.npz"
    experts = np.array([0, 0, 1, 2, 0, 1, 2], np.uint16).reshape(7, 1, 1)
    seq, one = np.array([0, 3, 7]), np.ones(1, np.int32)
    write_trace(path, Trace(experts, seq, 4 * one, 0 * one))
    return path


def test_the_table(trace: Path) -> None:
    arguments = ("--policy", "dlfu", "--sizes", "50%", "--expert-bytes", "2K")
    result = flashmoe("simulate", trace, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == TABLE


def test_by_layer_and_bypass(trace: Path) -> None:
    result = flashmoe("simulate", trace, "--sizes", "2", "--by-layer", "--bypass")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    names = [line.split()[0] for line in lines[4 : lines.index("", 4)]]
    assert "belady-bypass" in names and "belady" not in names and "arc" in names
    assert lines[-2].split() == ["layer", *names]
    assert lines[-1].split()[0] == "0" and len(lines[-1].split()) == len(names) + 1


def test_json(trace: Path) -> None:
    result = flashmoe("simulate", trace, "--policy", "lru", "--sizes", "2,4", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["tokens"], data["sequences"], data["top_k"], data["experts"]) == (7, 2, 1, [4])
    assert [(r["policy"], r["size"]) for r in data["replays"]] == [
        ("belady", "2"),
        ("lru", "2"),
        ("lru", "4"),  # as good as Belady's: nothing has to leave
        ("belady", "4"),
    ]
    belady, lru, _, all_fit = data["replays"]
    assert belady["by_layer"]["hits"] == [3] and belady["gap_closed"] == 1
    assert lru["by_layer"] == {"lookups": [7], "hits": [1], "evicted": [4], "refetched": [3]}
    assert lru["missed_bytes"] is None and lru["policy_failure"] is None
    assert all_fit["hit_rate"] == pytest.approx(4 / 7) and all_fit["gap_closed"] is None


def test_a_half_of_the_sequences(trace: Path) -> None:
    texts = [flashmoe("simulate", trace, "--split", part).stdout for part in ("test", "train")]
    heads = {text.splitlines()[0] for text in texts}
    assert heads == {f"{n} tokens of 1 sequence, 1 layer, top-1 of 4 experts" for n in (3, 4)}


def test_prompts_count_only_when_asked_for(tmp_path: Path) -> None:
    path, none = tmp_path / "phases.npz", tmp_path / "prompts.npz"
    experts = np.array([0, 1, 2, 0, 0], np.uint16).reshape(5, 1, 1)
    seq, one = np.array([0, 2, 5]), np.ones(1, np.int32)
    phase = np.array([0, 0, 0, 1, 1], np.uint8)  # nothing was answered in the first sequence
    write_trace(path, Trace(experts, seq, 4 * one, 0 * one, phase=phase))
    write_trace(none, Trace(experts, seq, 4 * one, 0 * one, phase=0 * phase))
    heads = [
        flashmoe("simulate", *arguments, "--sizes", "2").stdout.splitlines()[0].split(" of ")[0]
        for arguments in ((path,), (path, "--prompts"), (none,))
    ]
    assert heads == ["2 answer tokens", "5 tokens", "5 tokens"]
    data = json.loads(flashmoe("simulate", path, "--sizes", "2", "--json").stdout)
    assert [r["hit_rate"] for r in data["replays"]] == [0.5] * len(data["replays"])


def test_a_python_policy(trace: Path) -> None:
    name = "flashmoe_gguf.policy.dlfu:Dlfu"
    result = flashmoe("simulate", trace, "--policy", name, "--policy", "dlfu", "--sizes", "2")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[4:]}
    assert rows[name] == rows["dlfu"]
    failing = "flashmoe_gguf.policy.base:Policy"
    result = flashmoe("simulate", trace, "--policy", failing, "--sizes", "2")
    assert f"  {failing} failed, so lru went on: NotImplementedError" in result.stdout.splitlines()


def test_a_plot(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rates.png"
    result = flashmoe("simulate", trace, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    result = flashmoe("simulate", trace, "--plot", tmp_path / "rates.doc")
    assert_error(result, "rates.doc does not say", "png")
    result = flashmoe("simulate", trace, "--plot", tmp_path / "no" / "rates.png")
    assert_error(result, "cannot write", "can be written")


def test_a_plot_without_matplotlib(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = flashmoe("simulate", trace, "--plot", "rates.png")
    assert_error(result, "--plot needs matplotlib", "flashmoe-gguf[plot]")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--policy", "mru"), "no policy 'mru'", "lru, "),
        (("--policy", "no.such:Policy"), "cannot import", "package.module:Class"),
        (("--sizes", "half"), "'half' is not a cache size", "12.5%"),
        (("--split", "some"), "'some' is no part of a trace", "seed"),
        (("--experts", "2"), "uses an expert beyond its 2", "flashmoe trace"),
        (("--expert-bytes", "lots"), "not an amount", "8G"),
    ],
)
def test_what_cannot_be(trace: Path, arguments: tuple[str, str], message: str, hint: str) -> None:
    assert_error(flashmoe("simulate", trace, *arguments), message, hint)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("0 1 2")
    assert_error(flashmoe("simulate", text), "t.txt is not a routing trace", "flashmoe trace")
    result = flashmoe("simulate", tmp_path / "none.npz")
    assert result.exit_code == 2 and "cannot read" in result.stderr
    empty = tmp_path / "empty.npz"
    np.savez(empty, experts=np.zeros((0, 1, 1), np.uint16))
    assert_error(flashmoe("simulate", empty), "empty.npz has no tokens", "flashmoe trace")


def test_bytes_from_two_sources(trace: Path) -> None:
    result = flashmoe("simulate", trace, "--expert-bytes", "1K", "--model", trace)
    assert result.exit_code == 2 and "exclude each other" in result.stderr

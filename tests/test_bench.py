"""The bench reports no speed without the same output, and says when an arm was killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashmoe_gguf import FlashMoEError
from flashmoe_gguf.bench.arm import Arm, run
from flashmoe_gguf.bench.limit import run_limited
from flashmoe_gguf.bench.replay import check_same_output, summary

MIB = 1 << 20


def row(arm: str, logits: list[str], **more: Any) -> dict[str, Any]:
    return {"arm": arm, "logits": logits, **more}


def test_arms_that_agree_as_far_as_they_go() -> None:
    rows = [row("a", ["1", "2", "3"]), row("b", ["1", "2"], lookups=5), {"arm": "c", "failed": "x"}]
    assert check_same_output(rows) == 2


def test_arms_that_differ() -> None:
    with pytest.raises(FlashMoEError, match="b gave different logits"):
        check_same_output([row("a", ["1", "2", "3"]), row("b", ["1", "9"], lookups=5)])


def test_an_arm_that_did_not_stream() -> None:
    with pytest.raises(FlashMoEError, match="a did not stream"):
        check_same_output([row("a", ["1"], lookups=0)])


def test_a_streamed_arm_reports(tiny_model: Callable[[str], Path]) -> None:
    arm = Arm("s", str(tiny_model("qwen3moe")), range(8), n_gen=6, n_warmup=2, n_slots=4)
    got = run(arm)
    assert len(got["logits"]) == 1 + 2 + 6
    assert got["lookups"] > 0 and got["n_slots"] == 4
    assert got["decode_tok_s"] > 0 and got["read_amplification"] >= 1.0
    table = summary("s", [{**got, "peak_bytes": MIB}])
    assert "1 MiB" in table and "%" in table


@pytest.fixture
def cgroup() -> None:
    try:
        run_limited(["true"], None)
    except FlashMoEError as error:
        pytest.skip(f"no memory cgroup: {error.message}")


@pytest.mark.usefixtures("cgroup")
def test_the_limit_is_real() -> None:
    take = "import json, sys; b = bytearray({} << 20); b[::4096] = b'x' * len(b[::4096]); print(1)"
    fits = run_limited([sys.executable, "-c", take.format(40)], 200 * MIB)
    assert not fits.killed and json.loads(fits.stdout) == 1
    assert 40 * MIB < fits.peak_bytes <= 200 * MIB
    too_big = run_limited([sys.executable, "-c", take.format(400)], 200 * MIB)
    assert too_big.killed
    assert summary("x", [{"arm": "x", "failed": "killed"}]).endswith("killed")

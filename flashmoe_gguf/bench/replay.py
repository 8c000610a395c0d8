"""Stock against streamed on a model that replays a routing trace, under a real memory limit.

    python -m flashmoe_gguf.bench.replay --model M.gguf [--trace T.npz] --limit 1.7G --rounds 5

Arms run in turn, each in a fresh process with cold caches. No speed is reported unless every arm
gave the same logits, step by step, for as many tokens as they have in common. Rows go to stdout
as JSON lines, the table to stderr.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from flashmoe_gguf.bench.arm import Arm, to_json
from flashmoe_gguf.bench.limit import run_limited
from flashmoe_gguf.bench.synthetic import SHAPES, build_replay_model
from flashmoe_gguf.budget import format_size, parse_size
from flashmoe_gguf.errors import FlashMoEError

_SHAPE = "gpt-oss-20b"
_TRACE_TOKENS = 1500


def make_model(model: Path, trace: Path) -> None:
    """Builds the replay model of gpt-oss-20b's shape from the first tokens of a trace."""
    with np.load(trace) as data:
        experts = data["experts"][:_TRACE_TOKENS]
    shape = SHAPES[_SHAPE]
    build_replay_model(
        model,
        experts,
        n_expert=shape.n_expert,
        width=shape.width,
        expert_width=shape.expert_width,
        n_head=shape.n_head,
        n_head_kv=shape.n_head_kv,
        n_ctx=4096,
    )


def run_arm(arm: Arm, limit_bytes: int | None) -> dict[str, Any]:
    """One row; an arm that the kernel killed is a row that says so."""
    command = [sys.executable, "-P", "-m", "flashmoe_gguf.bench.arm", to_json(arm)]
    ended = run_limited(command, limit_bytes)
    row: dict[str, Any] = {"arm": arm.name, "limit_bytes": limit_bytes}
    if ended.killed or not ended.stdout:
        last = ended.stderr.strip().splitlines()[-1:] or ["killed"]
        return {**row, "failed": "killed" if ended.killed else last[0]}
    return {**row, **json.loads(ended.stdout), "peak_bytes": ended.peak_bytes}


def summary(name: str, rows: list[dict[str, Any]]) -> str:
    """Medians of one arm, as a line of the table."""
    failed = [r["failed"] for r in rows if "failed" in r]
    if failed:
        return f"{name:28} {failed[0]}"

    def median(key: str) -> float:
        return float(statistics.median(r[key] for r in rows))

    hits = f"{median('hit_rate'):7.1%}" if "hit_rate" in rows[0] else "      -"
    spread = [r["decode_tok_s"] for r in rows]
    return (
        f"{name:28} {median('decode_tok_s'):7.2f} [{min(spread):.2f} {max(spread):.2f}]"
        f" {median('prefill_seconds'):8.2f} {median('load_seconds'):6.2f} {hits}"
        f" {format_size(median('peak_bytes')):>10}"
    )


@click.command()
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option(
    "--packed",
    type=click.Path(path_type=Path, exists=True),
    help="The same model, packed: measured as arms of its own.",
)
@click.option("--trace", type=click.Path(path_type=Path, exists=True), help="To build the model.")
@click.option("--limit", "limits", multiple=True, help="Memory limit; several for a sweep.")
@click.option("--rounds", default=5)
@click.option("--prompt", "n_prompt", default=64)
@click.option("--gen", "n_gen", default=128)
@click.option(
    "--stock-gen", "n_stock", default=0, help="Tokens of the slow stock arm; -1: without it."
)
@click.option("--warmup", default=0, help="Tokens decoded before the clock starts.")
@click.option("--slots", type=int, help="Slots per layer instead of what the limit allows.")
@click.option("--policy", "policies", multiple=True, default=("auto",))
@click.option("--ctx", default=1024)
@click.option("--ubatch", default=128)
@click.option("--io", type=click.Choice(("auto", "direct", "buffered")), default="auto")
@click.option("--unlimited/--no-unlimited", default=False, help="Also stock without a limit.")
def main(
    model: Path,
    packed: Path | None,
    trace: Path | None,
    limits: tuple[str, ...],
    rounds: int,
    n_prompt: int,
    n_gen: int,
    n_stock: int,
    warmup: int,
    slots: int | None,
    policies: tuple[str, ...],
    ctx: int,
    ubatch: int,
    io: str,
    unlimited: bool,
) -> None:
    """Stock against streamed on a replay model."""
    if not model.exists():
        if trace is None:
            raise click.UsageError(f"{model} does not exist; --trace builds it")
        make_model(model, trace)
    base = Arm("", str(model), range(n_prompt), n_gen, warmup, ctx, ubatch)
    arms: list[tuple[Arm, int | None]] = []
    if unlimited or not limits:
        arms.append((_arm(base, "stock, no limit", stream=False), None))
        arms += [
            (_arm(base, f"streamed {p}, no limit", policy=p, n_slots=slots), None) for p in policies
        ]
    for limit in limits:
        limit_bytes = parse_size(limit)
        few = {"n_gen": n_stock, "n_warmup": 0} if n_stock else {}
        if n_stock >= 0:
            arms.append((_arm(base, f"stock, {limit}", stream=False, **few), limit_bytes))
        for p in policies:
            name = f"streamed {p}, {limit}"
            arm = _arm(base, name, policy=p, ram=limit_bytes, n_slots=slots, io=io)
            arms.append((arm, limit_bytes))
            if packed is not None:
                arms.append(
                    (replace(arm, name=f"packed {p}, {limit}", model=str(packed)), limit_bytes)
                )
    rows = []
    for _ in range(rounds):
        for arm, size in arms:
            row = run_arm(arm, size)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(f"same logits in all arms, {check_same_output(rows)} steps: yes", file=sys.stderr)
    print(
        f"{'':28} {'tok/s':>7} [min max] {'prefill s':>9} {'load s':>6} {'hits':>7} {'peak':>10}",
        file=sys.stderr,
    )
    for arm, _ in arms:
        print(summary(arm.name, [r for r in rows if r["arm"] == arm.name]), file=sys.stderr)


def _arm(base: Arm, name: str, **changes: Any) -> Arm:
    return replace(base, name=name, **changes)


def check_same_output(rows: list[dict[str, Any]]) -> int:
    """Steps in which all arms gave the same logits; raises when one differs or did not stream."""
    good = [r for r in rows if "failed" not in r]
    longest: list[str] = max((r["logits"] for r in good), key=len, default=[])
    for row in good:
        if row.get("lookups") == 0:
            raise FlashMoEError(f"{row['arm']} did not stream")
        if row["logits"] != longest[: len(row["logits"])]:
            raise FlashMoEError(f"{row['arm']} gave different logits: no speed is reported")
    return min((len(r["logits"]) for r in good), default=0)


if __name__ == "__main__":
    main()

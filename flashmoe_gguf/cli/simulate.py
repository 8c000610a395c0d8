"""`flashmoe simulate`: what each eviction policy would have done with recorded routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashmoe_gguf.budget import format_size, parse_size
from flashmoe_gguf.cli.paths import FilePath, refuse_to_replace
from flashmoe_gguf.cli.progress import Activity, State
from flashmoe_gguf.cli.screen import Screen, count, format_table
from flashmoe_gguf.errors import TraceError

if TYPE_CHECKING:
    from flashmoe_gguf.simulate import Replay
    from flashmoe_gguf.trace import Trace


@click.command(short_help="Compare eviction policies on a trace.")
@click.argument("trace", type=FilePath())
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="A policy, or package.module:Class for one in Python; can be given several times. LRU "
    "and Belady's are always shown.",
    show_default="all",
)
@click.option(
    "--sizes",
    default="12.5%,25%,50%",
    metavar="LIST",
    help="Cache sizes: shares of a layer's experts, or slots per layer.",
)
@click.option(
    "--experts",
    "n_expert",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="Experts of a layer.",
    show_default="as the trace says",
)
@click.option(
    "--prompts",
    is_flag=True,
    help="Replay the tokens of prompts, too, one by one; else only those of answers, where the "
    "trace says which are which.",
)
@click.option("--by-layer", is_flag=True, help="Hit rates of each layer, too.")
@click.option(
    "--bypass",
    is_flag=True,
    help="An expert may leave as soon as it was used, in place of one that is cached.",
)
@click.option(
    "--split",
    metavar="test|train|SEED",
    help="Only a random half of the sequences: the one for tests, the other one, or the one for "
    "tests of another seed than 0.",
    show_default="all",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of random and lecar.")
@click.option("--expert-bytes", metavar="SIZE", help="Bytes of an expert, to show bytes read.")
@click.option("--model", type=FilePath(), metavar="MODEL", help="The same, from a model file.")
@click.option("--json", "as_json", is_flag=True, help="The same and more as JSON.")
@click.option(
    "--plot",
    type=FilePath(),
    metavar="FILE.png",
    help="Draw hit rate against cache size; needs matplotlib.",
)
def simulate(
    trace: str,
    policies: tuple[str, ...],
    sizes: str,
    n_expert: int | None,
    prompts: bool,
    by_layer: bool,
    bypass: bool,
    split: str | None,
    seed: int,
    expert_bytes: str | None,
    model: str | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Replay a routing trace through eviction policies, without the model.

    Each layer has a cache of its own, cold at the start; all that a token misses is cached, and
    hits are counted before that. "gap closed" is the share of the way from LRU to Belady's, which
    knows the future; "refetched" are evicted experts that were needed again within 5 tokens.

    \b
    Examples:
      flashmoe simulate trace.npz
      flashmoe simulate trace.npz --policy dlfu --sizes 25% --by-layer
      flashmoe simulate trace.npz --sizes 10%,20%,40%,80% --plot rates.png
    """
    if expert_bytes is not None and model is not None:
        raise click.UsageError("--expert-bytes and --model exclude each other.")
    from flashmoe_gguf import simulate as library
    from flashmoe_gguf.trace import read_trace

    if plot is not None:
        refuse_to_replace(plot, [trace, model])
    routed = read_trace(Path(trace), n_expert)
    if split is not None:
        routed = library.half(routed, split)
    tokens = "token"
    if not prompts and routed.has_answers:
        routed, tokens = routed.answers(), "answer token"
    if routed.n_tokens == 0:
        raise TraceError(f"{Path(trace).name} has no tokens", "record some with `flashmoe trace`")
    names = library.policies_to_run(policies, bypass)
    wanted = library.parse_sizes(sizes)
    total = routed.n_tokens * len(names) * len(wanted)
    state = State(total=total, tokens=True)

    def progress(policy: str, done: int) -> None:
        nonlocal state
        state = State(done, total, tokens=True, words=policy)

    with (
        Screen() as screen,
        Activity(screen, "replaying", lambda: state),
    ):
        blocks = library.replay_all(
            routed,
            names,
            wanted,
            bypass=bypass,
            seed=seed,
            expert_bytes=_expert_bytes(routed, expert_bytes, model),
            progress=progress,
        )
    if plot is not None:
        from flashmoe_gguf.simulate.plot import write_plot

        write_plot(Path(plot), blocks, Path(trace).name)
    if as_json:
        click.echo(json.dumps(as_dict(routed, blocks, library.reference(bypass)), indent=2))
        return
    click.echo(_trace_text(routed, tokens))
    for block in blocks:
        click.echo()
        for line in _block_lines(block, library.reference(bypass), by_layer, routed):
            click.echo(line)


def _expert_bytes(trace: Trace, given: str | None, model: str | None) -> Any:
    """[n_layers], or None when nobody said."""
    import numpy as np

    if given is not None:
        return np.full(trace.n_layers, parse_size(given), np.int64)
    if model is None:
        return None
    from flashmoe_gguf.simulate import expert_bytes_of
    from flashmoe_gguf.store import read_geometry

    return expert_bytes_of(trace, read_geometry(model))


def _trace_text(trace: Trace, what: str) -> str:
    sequences = count(len(trace.seq) - 1, "sequence")
    experts = sorted(set(trace.n_expert.tolist()))
    each = str(experts[0]) if len(experts) == 1 else f"{experts[0]} to {experts[-1]}"
    tokens, layers = count(trace.n_tokens, what), count(trace.n_layers, "layer")
    return f"{tokens} of {sequences}, {layers}, top-{trace.k} of {each} experts"


def gap_closed(replay: Replay, block: list[Replay], best: str) -> float | None:
    """Share of the way from LRU to Belady's, 0 to 1; None when there is no way to go."""
    rates = {r.policy: r.hit_rate for r in block}
    gap = rates[best] - rates["lru"]
    return (replay.hit_rate - rates["lru"]) / gap if gap > 0 else None


def _block_lines(block: list[Replay], best: str, by_layer: bool, trace: Trace) -> list[str]:
    sizes = sorted(set(block[0].n_slots.tolist()))
    slots = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    with_bytes = block[0].missed_bytes is not None
    head = ["policy", "hits", "gap closed", "refetched", "evicted per token"]
    table = [[*head, "read per token"] if with_bytes else head]
    for replay in block:
        gap = gap_closed(replay, block, best)
        evicted = int(replay.counts.evicted.sum())
        row = [
            replay.policy,
            f"{100 * replay.hit_rate:.2f} %",
            "-" if gap is None else f"{round(100 * gap)} %",
            f"{100 * replay.refetch_rate:.1f} %" if evicted else "-",
            f"{evicted / trace.n_tokens:.1f}",
        ]
        if replay.missed_bytes is not None:
            row.append(format_size(replay.missed_bytes / trace.n_tokens))
        table.append(row)
    lines = [f"{slots} slots per layer, {100 * block[0].cached_share:.1f} % of the experts"]
    lines += format_table(table, indent="  ")
    for replay in block:
        if replay.policy_failure:
            lines.append(f"  {replay.policy} failed, so lru went on: {replay.policy_failure}")
    if by_layer:
        rates = [
            [r.policy, *(f"{100 * rate:.1f}" for rate in r.layer_hit_rates.tolist())] for r in block
        ]
        layers = [str(layer) for layer in trace.layers.tolist()]
        columns = [["layer", *layers], *rates]
        lines += ["", *format_table([list(row) for row in zip(*columns, strict=True)], "  ")]
    return lines


def as_dict(trace: Trace, blocks: list[list[Replay]], best: str) -> dict[str, Any]:
    """Everything `--json` prints; rates from 0 to 1, bytes, and lists with a number per layer."""
    return {
        "tokens": trace.n_tokens,
        "sequences": len(trace.seq) - 1,
        "layers": trace.layers.tolist(),
        "top_k": trace.k,
        "experts": trace.n_expert.tolist(),
        "fingerprint": trace.fingerprint,
        "replays": [
            {
                "policy": replay.policy,
                "size": replay.size.text,
                "slots": replay.n_slots.tolist(),
                "hit_rate": replay.hit_rate,
                "gap_closed": gap_closed(replay, block, best),
                "refetch_rate": replay.refetch_rate,
                "missed_bytes": replay.missed_bytes,
                "policy_failure": replay.policy_failure or None,
                "by_layer": {
                    name: getattr(replay.counts, name).tolist()
                    for name in ("lookups", "hits", "evicted", "refetched")
                },
            }
            for block in blocks
            for replay in block
        ],
    }

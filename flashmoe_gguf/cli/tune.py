"""`flashmoe tune`: the settings that are fastest for a model on this machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashmoe_gguf.budget import format_size, parse_ram
from flashmoe_gguf.cli.options import DEFAULT_BATCH, DEFAULT_CTX, default_threads, threads_option
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, format_seconds
from flashmoe_gguf.cli.screen import Screen, count, format_table
from flashmoe_gguf.errors import DiskError, FlashMoEError, OptionError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.store import Geometry, read_geometry

if TYPE_CHECKING:
    from flashmoe_gguf.bench.arm import Arm
    from flashmoe_gguf.bench.limit import Limiter
    from flashmoe_gguf.bench.tuner import Decodes, Outcome
    from flashmoe_gguf.disk import Bandwidth

_PROMPT = 64
_WARMUP = 8
# Of the time, for decoding of one run at most: on slow machines it ends with fewer tokens.
_RUN_SHARE = 0.05
_DISK_SHARE = 0.1  # of the time, for all of the grid;
_DISK_SECONDS = 8.0  # no more than this
_NAMES = {
    "n_workers": "readers",
    "request_bytes": "bytes of a read",
    "lookahead": "lookahead",
    "policy": "policy",
}


@click.command(short_help="Find the fastest settings for a model on this machine.")
@click.argument("model", type=FilePath())
@click.option(
    "--ram",
    metavar="SIZE",
    help="The memory that the model is to run in, such as 8G. auto: what is available, less a "
    "tenth.",
    show_default="auto",
)
@click.option(
    "-c",
    "--ctx",
    type=click.IntRange(256, 2**31 - 1),
    metavar="N",
    help="Tokens of context, as it is to run.",
    show_default=f"{DEFAULT_CTX}, or the model's own if that is less",
)
@threads_option
@click.option(
    "--gen",
    type=click.IntRange(min=8),
    default=96,
    metavar="N",
    help="Tokens that each run decodes, after a prompt of 64 and 8 to warm up; fewer where "
    "that takes more than a twentieth of the time.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 24 * 3600),
    default=300.0,
    metavar="X",
    help="About how long to take in all. What there is no time for is not tried.",
)
@click.option("--forget", is_flag=True, help="Remove what was found for this model, and end.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def tune(
    model: str,
    ram: str | None,
    ctx: int | None,
    threads: int | None,
    gen: int,
    seconds: float,
    forget: bool,
    as_json: bool,
) -> None:
    """Find the settings that decode fastest for MODEL on this machine, and keep them.

    The drive is measured first: random reads of the model's own file, by size and number of
    threads. Then the number of reading threads, the size of a read, lookahead and the policy are
    tried one after the other by short decodes, each in a fresh process under the memory limit with
    the model's file out of the page cache; values take turns. All runs must give the same output.
    The best and the defaults then take turns once more, and the best is kept only if it wins.

    What is kept is a small file in the user's cache directory. run, chat and Llama use it from then
    on where nothing else was asked for, and say so; another version, machine or drive passes over
    it. A memory limit takes root or a systemd session; without, runs keep to the budget by
    themselves.

    \b
    Examples:
      flashmoe tune model.gguf --ram 8G
      flashmoe tune model.gguf --ram 8G --seconds 900
      flashmoe tune model.gguf --forget
    """
    limit_bytes = parse_ram(ram)
    geometry = read_geometry(model)
    if forget:
        _forget(geometry, as_json)
        return
    from flashmoe_gguf.bench.machine import facts
    from flashmoe_gguf.bench.runner import Progress
    from flashmoe_gguf.bench.tuner import DEFAULTS, Decodes, search, stages_for
    from flashmoe_gguf.cli.bench import ended_cleanly, progress_state
    from flashmoe_gguf.host import default_budget
    from flashmoe_gguf.tuning import Kept, forget_tuning, save_tuning

    begun = time.monotonic()
    _check_model(geometry)
    limit_bytes = limit_bytes or default_budget().limit_bytes
    base = _base_arm(geometry, model, ctx, threads, gen)
    base = replace(base, seconds=max(1.0, seconds * _RUN_SHARE))
    path: Path | None = None
    with Screen() as screen, ended_cleanly():
        limiter = _limiter(screen)
        with Activity(screen, "measuring the drive", lambda: None):
            grid = _grid(geometry, min(seconds * _DISK_SHARE, _DISK_SECONDS), screen)
        progress = Progress()
        decodes = Decodes(base, geometry, limit_bytes, limiter, facts(geometry), progress)
        with Activity(screen, "trying", lambda: progress_state(progress)):
            found = search(stages_for(grid, geometry.max_part_bytes), decodes, begun + seconds)
        if found.best != DEFAULTS:
            before, after = statistics.median(found.before), statistics.median(found.after)
            path = save_tuning(geometry, Kept(found.best, limit_bytes, before, after))
        else:
            forget_tuning(geometry)
    if as_json:
        click.echo(json.dumps(_as_dict(grid, found, decodes, limit_bytes, path), indent=2))
        return
    click.echo(
        f"{shown(geometry.header.path.name)}, {format_size(limit_bytes)}, context {base.n_ctx}, "
        f"{count(base.n_threads, 'thread')}; {limiter.name}; "
        f"{format_seconds(time.monotonic() - begun)}"
    )
    for line in (*_grid_lines(grid), *_trial_lines(found), *_outcome_lines(found, decodes, path)):
        click.echo(line)


def _forget(geometry: Geometry, as_json: bool) -> None:
    from flashmoe_gguf.tuning import forget_tuning

    was_there = forget_tuning(geometry)
    if as_json:
        click.echo(json.dumps({"forgotten": was_there}))
        return
    name = shown(geometry.header.path.name)
    click.echo(f"forgot what was found for {name}" if was_there else f"{name} was not tuned")


def _check_model(geometry: Geometry) -> None:
    name = shown(geometry.header.path.name)
    if not geometry.is_moe:
        raise OptionError(
            f"{name} has no experts, so nothing of it is streamed", "it runs as in llama.cpp"
        )
    if geometry.header.get("attention.causal") is False:
        raise OptionError(f"{name} makes embeddings, not text", "give a model that decodes")


def _base_arm(
    geometry: Geometry, model: str, ctx: int | None, threads: int | None, gen: int
) -> Arm:
    """What all runs have in common: loaded as `run` does, and the bench's own prompt."""
    from flashmoe_gguf.bench.arm import Arm
    from flashmoe_gguf.bench.cases import prompt_of

    own = geometry.header.get("context_length")
    n_ctx = ctx or min(DEFAULT_CTX, own if isinstance(own, int) and own > 0 else DEFAULT_CTX)
    n_prompt = min(_PROMPT, max(1, n_ctx - _WARMUP - gen))
    if n_prompt + _WARMUP + gen > n_ctx:
        raise OptionError(
            f"{gen} tokens do not fit into a context of {n_ctx}", "give a smaller --gen"
        )
    prompt, text = prompt_of(geometry, n_prompt, None)
    return Arm(
        name="",
        model=model,
        n_gen=gen,
        prompt=prompt,
        text=text,
        n_prompt=n_prompt,
        n_warmup=_WARMUP,
        n_ctx=n_ctx,
        n_ubatch=DEFAULT_BATCH,
        n_threads=threads or default_threads(),
    )


def _limiter(screen: Screen) -> Limiter:
    from flashmoe_gguf.bench.limit import Unlimited, find_limiter

    try:
        return find_limiter()
    except FlashMoEError as error:
        screen.note(f"{error.message}: runs keep to the budget by themselves")
        return Unlimited()


def _grid(geometry: Geometry, seconds: float, screen: Screen) -> list[Bandwidth]:
    """The drive under the model's first file; empty, and a note, where it cannot be measured."""
    from flashmoe_gguf.bench.tuner import DEPTHS, REQUEST_SIZES
    from flashmoe_gguf.disk import direct_io_problem, measure_grid

    path = geometry.files[0].path
    each = seconds / (len(DEPTHS) * len(REQUEST_SIZES))
    try:
        direct = not direct_io_problem(path)
        return measure_grid(path, REQUEST_SIZES, DEPTHS, each, direct=direct)
    except DiskError as error:
        screen.note(f"the drive was not measured: {error.message}")
        return []


def _grid_lines(grid: Sequence[Bandwidth]) -> list[str]:
    """GB/s by size of a read, a row each, and number of reading threads."""
    if not grid:
        return []
    depths = sorted({row.depth for row in grid})
    speeds = {(row.request_bytes, row.depth): row.bytes_per_second for row in grid}
    table = [["drive, GB/s", *(count(depth, "reader") for depth in depths)]]
    for size in sorted({row.request_bytes for row in grid}):
        table.append([format_size(size), *(f"{speeds[size, d] / 1e9:.3g}" for d in depths)])
    return ["", *format_table(table)]


def _trial_lines(found: Outcome) -> list[str]:
    from flashmoe_gguf.tuning import setting_words

    table = [["tried", "", "tok/s", "range"]]
    before = ""
    for trial in found.trials:
        what = setting_words(trial.field, getattr(trial.tuning, trial.field))
        spread = f"{min(trial.tok_s):.4g} to {max(trial.tok_s):.4g}"
        name = _NAMES[trial.field] if trial.field != before else ""
        table.append([name, what + (" *" if trial.kept else ""), f"{trial.median:.4g}", spread])
        before = trial.field
    lines = ["", *format_table(table), "* goes on with it"]
    if found.untried:
        names = ", ".join(_NAMES[field] for field in found.untried)
        lines.append(f"not tried, the time was up: {names}")
    return lines


def _outcome_lines(found: Outcome, decodes: Decodes, path: Path | None) -> list[str]:
    from flashmoe_gguf.tuning import tuning_words

    steps = decodes.gate.longest
    same = f"same output: yes ({count(steps, 'step')} of {count(len(decodes.rows), 'run')})"
    if not found.after:
        return ["", "nothing was faster than the defaults, so nothing is kept", same]
    before, after = statistics.median(found.before), statistics.median(found.after)
    rounds = count(len(found.before), "run")
    lines = [
        "",
        f"defaults {before:.4g} tok/s, {tuning_words(found.candidate)} {after:.4g} tok/s: "
        f"{100 * found.gain:+.1f} %, medians of {rounds} in turn",
        same,
    ]
    if path is None:
        return [*lines, "that is no gain, so nothing is kept and the defaults stay"]
    return [
        *lines,
        f"kept in {shown(path)}: it is used from now on for this model on this machine",
    ]


def _as_dict(
    grid: Sequence[Bandwidth],
    found: Outcome,
    decodes: Decodes,
    limit_bytes: int,
    path: Path | None,
) -> dict[str, Any]:
    return {
        "ram_bytes": limit_bytes,
        "drive": [asdict(row) for row in grid],
        "tried": [
            {
                "setting": trial.field,
                "value": getattr(trial.tuning, trial.field),
                "settings": asdict(trial.tuning),
                "tok_s": trial.tok_s,
                "kept": trial.kept,
            }
            for trial in found.trials
        ],
        "untried": list(found.untried),
        "settings": asdict(found.best),
        "candidate": asdict(found.candidate),
        "before_tok_s": found.before,
        "after_tok_s": found.after,
        "gain": found.gain,
        "same_output_steps": decodes.gate.longest,
        "file": None if path is None else str(path),
    }

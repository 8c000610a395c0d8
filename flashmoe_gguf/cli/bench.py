"""`flashmoe bench`: arms against each other under a real memory limit."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import click

from flashmoe_gguf.bench.arm import STOCK, STOCK_DEFAULT, STREAMED, Arm
from flashmoe_gguf.bench.cases import (
    IN_RAM,
    Case,
    fits_in_memory,
    is_replay,
    limit_text,
    make_cases,
    model_bytes,
    prompt_of,
    sweep_limits,
)
from flashmoe_gguf.bench.gate import Gate, OutputDiffersError
from flashmoe_gguf.bench.limit import Limiter, find_limiter
from flashmoe_gguf.bench.machine import disk_bandwidth, facts
from flashmoe_gguf.bench.plot import check_picture, draw, need_matplotlib
from flashmoe_gguf.bench.runner import (
    Bench,
    Progress,
    check_rows,
    measure_floor,
    resolve_layers,
    write_rows,
)
from flashmoe_gguf.bench.summary import Line, as_dict, summarise
from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.bench_compare import bench_compare
from flashmoe_gguf.cli.bench_options import BenchOptions, bench_options
from flashmoe_gguf.cli.bench_table import notes, print_table, result_table
from flashmoe_gguf.cli.exits import UNEXPECTED, report
from flashmoe_gguf.cli.options import read_text
from flashmoe_gguf.cli.progress import Activity, ByteCount, State
from flashmoe_gguf.cli.screen import Screen, count
from flashmoe_gguf.errors import OptionError, TraceError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.host import available_memory
from flashmoe_gguf.placement import AUTO
from flashmoe_gguf.store import Geometry, read_geometry
from flashmoe_gguf.trace import Trace, read_trace


class _WithCompare(click.Command):
    """`bench MODEL ...`, and `bench compare A B` beside it."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args and args[0] == "compare":
            return bench_compare.make_context(f"{info_name} compare", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_WithCompare, short_help="Measure against stock llama.cpp, at a memory limit.")
@bench_options
@click.pass_context
def bench(ctx: click.Context, options: BenchOptions) -> None:
    """Measure speed against stock llama.cpp under a real memory limit.

    The arms take turns, round after round, each in a fresh process in a memory cgroup with cold
    caches: stock (mmap, weights not repacked), stock-default (llama-cpp-python's defaults, which
    repack: often killed), streamed, and in-ram (stock without limit, where the model fits). With
    --ngl all of them have the same layers on the GPU and their experts beside it (--cpu-moe).

    No speed is reported, and the exit code is 1, unless all arms gave the same logits in every step
    that they have in common. stock-default is not held to that: repacking changes the last bits. An
    arm that the kernel kills is reported as killed; it is 1 too if no streamed arm is left.

    It takes root, or a systemd session of the user on cgroup v2. The table goes to stdout.

    flashmoe bench compare A.jsonl B.jsonl compares two runs (see its --help).

    \b
    Examples:
      flashmoe bench model.gguf --ram 8G
      flashmoe bench model.gguf --ram 8G --arm policy=lru --arm io=buffered
      flashmoe bench model.gguf --ram 8G --arm layout=packed --jsonl rows.jsonl
      flashmoe bench model.gguf --sweep 8 --arms streamed --plot sweep.png
      flashmoe bench --synthetic gpt-oss-20b --ram 1.7G
    """
    if options.plot is not None:
        check_picture(Path(options.plot))
        need_matplotlib()
    named, arm_names = options.named_arms, options.arm_names
    text = None if options.prompt_file is None else read_text(options.prompt_file)
    if options.jsonl is not None:
        check_rows(Path(options.jsonl))
    limiter = find_limiter()
    gate = Gate()
    with Screen() as screen, ended_cleanly():
        model, routing = _model(options, screen)
        geometry = read_geometry(model)
        _check_model(geometry, arm_names)
        trace = _trace(routing, geometry)
        prompt, prompt_text = prompt_of(geometry, options.prompt, text)
        base = replace(options.base_arm(model), prompt=prompt, text=prompt_text)
        if base.n_gpu_layers == AUTO:
            with Activity(screen, "measuring the devices", lambda: None):
                base = resolve_layers(base, limiter)
        fits = fits_in_memory(geometry, available_memory().limit_bytes)
        if IN_RAM in arm_names and not fits:
            screen.note(f"in-ram is left out: {format_size(model_bytes(geometry))} do not fit here")
        limits: list[int | None] = [options.limit_bytes]
        if options.sweep is not None:
            limits = list(_sweep(options.sweep, base, geometry, limiter, screen))
        packed = _packed(options, geometry, screen) if any(n.packed for n in named) else None
        cases = make_cases(base, limits, arms=arm_names, named=named, packed=packed, fits=fits)
        measuring = Bench(
            cases,
            options.rounds,
            limiter,
            facts(geometry),
            options.cold,
            options.timeout or None,
            partial(disk_bandwidth, geometry.files[0].path),
            trace,
        )
        with Activity(screen, "trying the arms", lambda: None):
            measuring.check()
        if trace is None:
            at = Progress()
            with Activity(screen, "recording the routing", lambda: recording_state(at)):
                measuring = replace(measuring, trace=measuring.record(at))
        try:
            rows = _measure(measuring, gate, screen, options.jsonl)
        except OutputDiffersError as error:
            report(error)
            ctx.exit(UNEXPECTED)
        lines = summarise(rows)
        if options.plot is not None:
            draw(lines, _title(geometry, cases[0]), Path(options.plot))
    _print(options, measuring, lines, gate, _median_bandwidth(rows))
    if not gate.streamed:
        ctx.exit(UNEXPECTED)


def _model(options: BenchOptions, screen: Screen) -> tuple[Path, Path | None]:
    """The model, and the file with its routing where there is one."""
    if options.synthetic is None:
        assert options.model is not None
        return Path(options.model), None if options.trace is None else Path(options.trace)
    from flashmoe_gguf.bench.synthetic_models import synthetic_model

    done = ByteCount()
    with Activity(screen, f"making the {options.synthetic} model", done.state):
        made = synthetic_model(
            options.synthetic,
            trace=None if options.trace is None else Path(options.trace),
            custom=_shape(options.shape),
            progress=done,
        )
    screen.line(f"model {made.path}; it can be deleted, and is made again when wanted", "dim")
    if made.wished_share < 1.0:
        screen.line(f"{made.wished_share:.1%} of its experts are those of the trace", "dim")
    return made.path, made.trace


def _shape(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    shape = {}
    for pair in text.split(","):
        key, _, value = pair.strip().partition("=")
        if not key or not value.isascii() or not value.isdigit():
            raise OptionError(f"'{pair}' in --shape is not KEY=N", "for example n_layer=8,top_k=4")
        shape[key] = int(value)
    return shape


def _check_model(geometry: Geometry, arm_names: tuple[str, ...]) -> None:
    name = shown(geometry.header.path.name)
    if not geometry.is_moe:
        raise OptionError(
            f"{name} has no experts, so nothing of it is streamed",
            "it runs as in llama.cpp; llama-bench measures that",
        )
    stock = [arm for arm in (STOCK, STOCK_DEFAULT, IN_RAM) if arm in arm_names]
    if geometry.packed is not None and stock:
        raise OptionError(
            f"{name} is packed, and stock llama.cpp cannot load it",
            "give the original model and --arm layout=packed --packed FILE, or --arms streamed",
        )
    if geometry.header.get("attention.causal") is False:
        raise OptionError(f"{name} makes embeddings, not text", "give a model that decodes")


def _trace(path: Path | None, geometry: Geometry) -> Trace | None:
    """The routing of the run to come, for the roofline."""
    if path is None:
        return None
    trace = read_trace(path)
    if not is_replay(geometry) and trace.fingerprint not in ("", geometry.fingerprint):
        raise TraceError(
            f"{shown(path)} was recorded with another model",
            "give the trace of this one, or leave out --trace",
        )
    return trace


def _sweep(
    steps: int, base: Arm, geometry: Geometry, limiter: Limiter, screen: Screen
) -> list[int]:
    with Activity(screen, "measuring the floor", lambda: None):
        floor = measure_floor(base, limiter)
    limits = sweep_limits(floor, model_bytes(geometry), steps)
    screen.line(f"limits: {', '.join(map(limit_text, limits))}", "dim")
    return limits


def _packed(options: BenchOptions, geometry: Geometry, screen: Screen) -> Path:
    """The packed file of the model: as given, or made in the cache directory."""
    if options.packed is not None:
        path = Path(options.packed)
        given = read_geometry(path)
        if given.packed is None or given.packed.fingerprint != geometry.fingerprint:
            raise OptionError(
                f"{shown(path.name)} was not packed from {shown(geometry.header.path.name)}",
                "leave out --packed, or pack it: flashmoe pack",
            )
        return path
    from flashmoe_gguf.cache_dir import cache_dir
    from flashmoe_gguf.pack import pack_model

    path = cache_dir() / f"bench-{geometry.fingerprint[:16]}.packed.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = ByteCount()
    with Activity(screen, "packing", done.state):
        pack_model(geometry.header.path, path, progress=done)
    screen.line(f"packed {path}; it can be deleted", "dim")
    return path


def _measure(
    measuring: Bench, gate: Gate, screen: Screen, jsonl: str | None
) -> list[dict[str, Any]]:
    progress = Progress()
    rows: list[dict[str, Any]] = []
    with Activity(screen, "measuring", lambda: progress_state(progress)):
        for of_round in measuring.rounds(gate, progress):
            rows += of_round
            if jsonl is not None:
                write_rows(Path(jsonl), of_round)
    return rows


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM ends a bench as Ctrl-C does: its arm is ended and its cgroup removed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def recording_state(progress: Progress) -> State | None:
    """Tokens of the run's phase; None before there are any."""
    return State(words=_phase(progress)) if progress.total else None


def progress_state(progress: Progress) -> State:
    """Round, arm and tokens in words; seconds as the share that is done."""
    words = (
        f"round {progress.round + 1} of {progress.n_rounds}, arm {progress.arm_number + 1} of "
        f"{progress.n_arms} ({progress.arm}), {_phase(progress)}"
    )
    return State(*progress.share, words=words)


def _phase(progress: Progress) -> str:
    tokens = f" {progress.done} of {progress.total} tokens" if progress.total else ""
    return f"{progress.phase}{tokens}"


def _title(geometry: Geometry, case: Case) -> str:
    name = geometry.header.path.name
    return f"{name}, prompt {case.arm.n_prompt}, {count(case.arm.n_threads, 'thread')}"


def _median_bandwidth(rows: list[dict[str, Any]]) -> float | None:
    known = [row["disk_bytes_per_second"] for row in rows if row["disk_bytes_per_second"]]
    return median(known) if known else None


def _print(
    options: BenchOptions,
    measuring: Bench,
    lines: list[Line],
    gate: Gate,
    bandwidth: float | None,
) -> None:
    if options.as_json:
        same = gate.same_tokens()
        result = {
            "conditions": {**measuring.facts, "limiter": measuring.limiter.name},
            "disk_bytes_per_second": bandwidth,
            "same_output": {
                "steps_against_stock": gate.steps,
                "steps": gate.longest,
                "stock_default_tokens": same,
            },
            "arms": as_dict(lines),
        }
        click.echo(json.dumps(result, indent=2))
        return
    case = next(case for case in measuring.cases if case.arm.kind == STREAMED)
    arm = case.arm
    click.echo(
        f"{shown(measuring.facts['model'])}, {format_size(measuring.facts['model_bytes'])}; "
        f"prompt {arm.n_prompt}, context {arm.n_ctx}, ubatch {arm.n_ubatch}, "
        f"{count(arm.n_threads, 'thread')}"
        + (f", {count(int(arm.n_gpu_layers), 'layer')} on the GPU" if arm.n_gpu_layers else "")
        + f"; {count(measuring.n_rounds, 'round')}, {measuring.limiter.name}"
    )
    click.echo("")
    print_table(result_table(lines))
    click.echo("")
    for note in notes(lines, gate, bandwidth):
        click.echo(note)

"""`flashmoe plan`: what running a model would be like, before it is loaded or downloaded."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashmoe_gguf.budget import RunSizes, estimate_fixed, format_size, parse_ram
from flashmoe_gguf.cli.options import (
    DEFAULT_BATCH,
    DEFAULT_CTX,
    Finite,
    ctx_option,
    default_threads,
    ngl_option,
    threads_option,
)
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.plan_text import device_rows
from flashmoe_gguf.cli.progress import format_rate
from flashmoe_gguf.cli.screen import Rows, Screen, format_rows, format_table
from flashmoe_gguf.errors import BudgetError, DiskError, OptionError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.host import MemoryLimit, busy_with_others, default_budget

if TYPE_CHECKING:
    from flashmoe_gguf.placement import Placement
    from flashmoe_gguf.plan import Forecast, HitRate, Machine, Subject
    from flashmoe_gguf.plan.forecast import Curve, Speed

_GB = 1e9


@click.command(short_help="Say how a model would run here; loads nothing.")
@click.argument("model", type=FilePath())
@click.option(
    "--ram",
    metavar="SIZE",
    default="auto",
    help="The budget to plan for, such as 8G; auto: what is available, less a tenth.",
)
@ctx_option
@threads_option
@click.option(
    "--ubatch",
    type=click.IntRange(min=1),
    metavar="N",
    default=DEFAULT_BATCH,
    help="Prompt tokens computed at once.",
)
@click.option("--flash-attn", is_flag=True, help="Plan for flash attention.")
@ngl_option
@click.option(
    "--disk",
    type=Finite(0.001, 100_000),
    metavar="GB/S",
    help="Bandwidth of the drive in 10^9 bytes per second, instead of measuring it.",
)
@click.option(
    "--memory",
    type=Finite(0.001, 100_000),
    metavar="GB/S",
    help="Bandwidth of the memory, instead of measuring it.",
)
@click.option(
    "--trace",
    type=FilePath(dir_okay=False),
    metavar="FILE",
    help="Recorded routing of this model (flashmoe trace), for its own hit rates.",
)
@click.option("--json", "as_json", is_flag=True, help="The same and more as JSON.")
def plan(
    model: str,
    ram: str,
    ctx: int | None,
    threads: int | None,
    ubatch: int,
    flash_attn: bool,
    ngl: int | str,
    disk: float | None,
    memory: float | None,
    trace: str | None,
    as_json: bool,
) -> None:
    """Say what would be in memory, what would be cached, and how fast it would be.

    MODEL is a file, of which only the header is read, or a name that `flashmoe models` lists: that
    model need not be there, and its sizes are then estimates.

    The drive is measured on the model's own file; for a model that is not there, on the current
    folder, where a temporary file of 256 MiB is written if it holds no other model. The hit rate
    comes from published routing traces, and in brackets is how far those lie apart, or from a trace
    of your own, replayed through the cache's policy. tok/s are for
    decoding: in each layer the longer of reading what is missing and of computing, at the speed at
    which weights come from memory. Slower cores, a shared machine and long contexts take off; what
    a GPU computes (--ngl) is taken to cost nothing.

    \b
    Examples:
      flashmoe plan model.gguf --ram 8G
      flashmoe plan qwen3-235b-a22b --ram 64G --disk 6.5
      flashmoe plan model.gguf --ram 8G --trace mine.npz
      flashmoe plan gpt-oss-20b --json | jq .speed.expected
    """
    from flashmoe_gguf.plan import Machine

    subject = _subject(model)
    n_ctx = _context(subject.n_ctx, ctx)
    run = RunSizes(n_ctx, min(ubatch, n_ctx), threads or default_threads(), flash_attn)
    placement = None
    if ngl != 0:
        from flashmoe_gguf.plan.device import on_devices

        subject, placement = on_devices(model, subject, run, ngl)
    given = parse_ram(ram)
    budget = default_budget() if given is None else MemoryLimit(given, "given")
    _check_floor(subject, run, budget)
    curve = _curve(trace, subject)
    with Screen() as screen:
        disk_bytes, disk_source = _disk(subject, disk, screen)
        if (disk is None or memory is None) and (load := busy_with_others()):
            screen.note(
                f"{load:.1f} programs run for each processor: what is measured now is low, and "
                "tok/s beside them will be lower still"
            )
    memory_bytes, memory_source = _memory(memory, run.n_threads)
    machine = Machine(disk_bytes, memory_bytes) if disk_bytes else None
    report = Report(subject, run, budget, machine, curve, disk_source, memory_source, placement)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        click.echo("\n".join(report.lines()))


def _subject(model: str) -> Subject:
    from flashmoe_gguf.models import known_models
    from flashmoe_gguf.plan import known_subject, read_subject

    if not Path(model).exists():
        known = known_models()
        if model in known:
            return known_subject(known[model])
        if "/" not in model and not model.endswith(".gguf"):
            raise OptionError(
                f"{shown(model)} is neither a file nor a known model",
                f"known: {', '.join(known)}",
            )
    return read_subject(model)


def _context(own: int | None, ctx: int | None) -> int:
    own = own or DEFAULT_CTX
    return min(DEFAULT_CTX, own) if ctx is None else ctx or own


def _check_floor(subject: Subject, run: RunSizes, budget: MemoryLimit) -> None:
    fixed = estimate_fixed(subject.sizes, run)
    if budget.limit_bytes < fixed.total:
        smaller = "" if run.flash_attn else ", --flash-attn"
        raise BudgetError(
            f"{shown(subject.name)} needs about {format_size(fixed.total)}, and "
            f"{format_size(budget.limit_bytes)} are {_budget_words(budget)}: {fixed.breakdown()}",
            f"a smaller --ctx{smaller} or a smaller --ubatch need less",
        )


def _budget_words(budget: MemoryLimit) -> str:
    return "given" if budget.source == "given" else f"to be had ({budget.source}, less a tenth)"


def _disk(subject: Subject, given: float | None, screen: Screen) -> tuple[float, str]:
    """Bytes per second and how they are known; 0 where they are not."""
    if given is not None:
        return given * _GB, "given"
    from flashmoe_gguf.disk import ALIGNMENT, direct_io_problem, read_bandwidth
    from flashmoe_gguf.disk_sample import sample_file

    request = min(1 << 20, -(-max(subject.part_bytes, 1) // ALIGNMENT) * ALIGNMENT)

    def measure(paths: list[Path], where: str) -> tuple[float, str]:
        speed, direct = 0.0, True
        for path in paths:
            direct = direct and not direct_io_problem(path)
            size = min(request, path.stat().st_size // ALIGNMENT * ALIGNMENT)
            speed += read_bandwidth(path, request_bytes=size, direct=direct)
        how = "direct" if direct else "buffered"
        return speed, f"measured {where}: 4 {how} reads of {format_size(request)} at a time"

    try:
        if subject.files:
            paths = _one_per_drive(subject.files)
            many = f"its files on {len(paths)} drives, added" if len(paths) > 1 else "the file"
            return measure(paths, f"on {many}")
        with sample_file(Path.cwd()) as sample:
            return measure([sample.path], "in the current folder")
    except DiskError as error:
        screen.note(f"the drive was not measured: {error.message}; --disk gives its bandwidth")
        return 0.0, "unknown"


def _curve(trace: str | None, subject: Subject) -> Curve | None:
    if trace is None:
        return None
    from flashmoe_gguf.plan.traced import trace_curve

    return trace_curve(Path(trace), subject)


def _one_per_drive(files: tuple[Path, ...]) -> list[Path]:
    """The largest file of each file system: stripes are read from all drives together."""
    largest: dict[int, Path] = {}
    for path in sorted(files, key=lambda p: p.stat().st_size):
        largest[path.stat().st_dev] = path
    return list(largest.values())


def _memory(given: float | None, n_threads: int) -> tuple[float, str]:
    if given is not None:
        return given * _GB, "given"
    from flashmoe_gguf.plan import memory_bandwidth

    return memory_bandwidth(n_threads), f"measured with {n_threads} threads"


class Report:
    """A forecast as text and as JSON."""

    def __init__(
        self,
        subject: Subject,
        run: RunSizes,
        budget: MemoryLimit,
        machine: Machine | None,
        curve: Curve | None,
        disk_source: str,
        memory_source: str,
        placement: Placement | None,
    ) -> None:
        from flashmoe_gguf.plan.forecast import advice, ladder, make_forecast

        self.subject, self.run, self.budget, self.machine = subject, run, budget, machine
        self.sources = (disk_source, memory_source)
        self.placement = placement
        self.hits_source = "reference traces" if curve is None else "trace"
        self.forecast = make_forecast(subject, run, budget.limit_bytes, machine, curve)
        self.ladder = ladder(
            subject, run, self.forecast.floor_bytes, self.forecast.full_bytes, machine, curve
        )
        self.advice = advice(subject, run, self.forecast, machine, curve)

    def lines(self) -> list[str]:
        lines = format_rows(self._rows())
        if self.subject.layers:
            lines += ["", *format_table(self._table())]
        return [*lines, "", self.advice]

    def _rows(self) -> Rows:
        subject, forecast, run = self.subject, self.forecast, self.run
        plan = forecast.plan
        fixed = plan.fixed
        there = "" if subject.files else ", not here: sizes are estimates"
        rows = [
            ("model", f"{shown(subject.name)}, {format_size(subject.file_bytes)}{there}"),
            (
                "run",
                f"context {run.n_ctx}, ubatch {run.n_ubatch}, threads {run.n_threads}"
                + (", flash attention" if run.flash_attn else ""),
            ),
            ("budget", f"{format_size(plan.ram_bytes)} {_budget_words(self.budget)}"),
            (
                "always there",
                f"{format_size(fixed.total)}, the floor: dense {format_size(fixed.dense)}, "
                f"context {format_size(fixed.context)}, ring {format_size(fixed.ring)}, "
                + (f"policy {format_size(fixed.policy)}, " if fixed.policy else "")
                + f"process {format_size(fixed.process)}, reserve {format_size(fixed.reserve)}",
            ),
            *device_rows(self.placement),
        ]
        if not subject.layers:
            return rows
        rows += [
            (
                "cache",
                f"{format_size(plan.slot_bytes)}: {_slots(plan.slots)} of {subject.n_expert} "
                f"experts per layer, {100 * plan.cached_share:.0f} % of their bytes; "
                f"all of them: --ram {_option(forecast.full_bytes)}",
            ),
            ("hits", f"about {_percent(forecast.hit_rate)}" + self._own_words()),
            (
                "reads",
                f"about {format_size(forecast.missed_bytes)} of {format_size(subject.token_bytes)} "
                "that a token uses",
            ),
        ]
        if self.machine is not None and forecast.speed is not None:
            speed = forecast.speed
            rows += [
                ("disk", f"{self.machine.disk_bytes_per_second / _GB:.3g} GB/s, {self.sources[0]}"),
                (
                    "memory",
                    f"{self.machine.memory_bytes_per_second / _GB:.3g} GB/s, {self.sources[1]}",
                ),
                (
                    "speed",
                    f"about {_speed(speed)} tok/s: {1000 * speed.read_seconds:.0f} ms of reading "
                    f"beside {1000 * speed.compute_seconds:.0f} ms of computing at the least",
                ),
            ]
        return rows

    def _own_words(self) -> str:
        return ", from the trace" if self.hits_source == "trace" else ""

    def _table(self) -> list[list[str]]:
        table = [["--ram", "experts per layer", "hits", "tok/s"]]
        for step in self.ladder:
            table.append(
                [
                    _option(step.plan.ram_bytes),
                    f"{_slots(step.plan.slots)} of {self.subject.n_expert}",
                    _percent(step.hit_rate),
                    _speed(step.speed) if step.speed else "?",
                ]
            )
        return table

    def as_dict(self) -> dict[str, Any]:
        subject, forecast = self.subject, self.forecast
        fixed = forecast.plan.fixed
        return {
            "model": subject.name,
            "architecture": subject.architecture,
            "estimated": not subject.files,
            "file_bytes": subject.file_bytes,
            "experts": subject.n_expert,
            "top_k": subject.top_k,
            "bytes_per_token": subject.token_bytes,
            "run": asdict(self.run),
            "budget_source": self.budget.source,
            "disk_source": self.sources[0],
            "memory_source": self.sources[1],
            "hit_rate_source": self.hits_source,
            "machine": asdict(self.machine) if self.machine else None,
            "fixed": {**asdict(fixed), "reserve": fixed.reserve, "total": fixed.total},
            "placement": asdict(self.placement) if self.placement else None,
            "floor_bytes": forecast.floor_bytes,
            "full_bytes": forecast.full_bytes,
            **_step(forecast),
            "ladder": [_step(step) for step in self.ladder],
            "advice": self.advice,
        }


def _step(forecast: Forecast) -> dict[str, Any]:
    return {
        "ram_bytes": forecast.plan.ram_bytes,
        "cache_bytes": forecast.plan.slot_bytes,
        "cached_share": forecast.plan.cached_share,
        "slots": list(forecast.plan.slots),
        "hit_rate": asdict(forecast.hit_rate),
        "missed_bytes_per_token": forecast.missed_bytes,
        "speed": asdict(forecast.speed) if forecast.speed else None,
    }


def _slots(slots: tuple[int, ...]) -> str:
    least, most = min(slots), max(slots)
    return str(least) if least == most else f"{least} to {most}"


def _percent(rate: HitRate) -> str:
    text = f"{100 * rate.expected:.0f} %"
    low, high = f"{100 * rate.low:.0f}", f"{100 * rate.high:.0f}"
    return text if low == high else f"{text} [{low} {high}]"


def _speed(speed: Speed) -> str:
    text = format_rate(speed.expected)
    low, high = format_rate(speed.low), format_rate(speed.high)
    return text if low == high else f"{text} [{low} {high}]"


def _option(size: int) -> str:
    """A size as --ram takes it, never less than it is."""
    gib = size / (1 << 30)
    if gib >= 1:
        return f"{-(-size * 100 // (1 << 30)) / 100:g}G"
    return f"{-(-size // (1 << 20))}M"

"""`flashmoe demo`: the whole loop on the embedded model, checked against stock llama.cpp."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.demo_arm import Request, Result, run_arm
from flashmoe_gguf.cli.exits import UNEXPECTED
from flashmoe_gguf.cli.options import default_threads, threads_option
from flashmoe_gguf.cli.progress import Activity, State, format_rate
from flashmoe_gguf.cli.screen import Screen, count, format_table
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.store import Geometry, read_geometry

QUESTION = "What is the capital of England?"
_MAX_TOKENS = 64


@click.command(short_help="Try it on a small built-in model.")
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    default=QUESTION,
    help="The question.",
)
@threads_option
@click.pass_context
def demo(ctx: click.Context, prompt: str, threads: int | None) -> None:
    """Chat with a small built-in model, and check the output against stock llama.cpp.

    The model is made on first use (a minute or two) and kept in your cache directory. It answers
    one question with half of its experts cached; then the unchanged llama.cpp library answers
    the same, and all tokens and logits are compared bit for bit. Exit code 1 if they differ.

    The model is far smaller than any memory: it shows function and exactness, not speed.
    """
    with Screen() as screen:
        model = _make_model(screen)
        geometry = read_geometry(model)
        n_slots = geometry.n_expert // 2
        request = Request(model, prompt, _MAX_TOKENS, threads or default_threads(), n_slots)
        screen.line(f"chatting with {n_slots} of {geometry.n_expert} experts cached", "dim")
        click.echo(f"> {prompt}")
        ours = _run(screen, request, "answering", _write)
        click.echo("\n")
        stock_request = Request(model, prompt, _MAX_TOKENS, request.threads)
        stock = _run(screen, stock_request, "the same with stock llama.cpp", lambda _piece: None)
    for line in report_lines(geometry, n_slots, ours, stock):
        click.echo(line)
    if not ours.same_output(stock):
        ctx.exit(UNEXPECTED)


def _make_model(screen: Screen) -> str:
    from flashmoe_gguf.demo.model import ensure_model

    at = State(words="looking for it")

    def progress(words: str, fraction: float) -> None:
        nonlocal at
        at = State(fraction, 1.0, words=words)

    with Activity(screen, "embedded model", lambda: at):
        return str(ensure_model(progress=progress))


def _run(screen: Screen, request: Request, label: str, on_piece: Callable[[str], None]) -> Result:
    with Activity(screen, label, lambda: None) as activity:

        def show(piece: str) -> None:
            activity.stop()
            on_piece(piece)

        return run_arm(request, show)


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def report_lines(geometry: Geometry, n_slots: int, ours: Result, stock: Result) -> list[str]:
    """The table, the verdict, and what it does not show."""
    table = [
        ["", "flashmoe", "stock llama.cpp"],
        ["prompt", *(f"{format_rate(r.prompt_rate)} tok/s" for r in (ours, stock))],
        ["answer", *(f"{format_rate(r.decode_rate)} tok/s" for r in (ours, stock))],
        ["memory, peak", format_size(ours.peak_bytes), format_size(stock.peak_bytes)],
        ["experts cached", f"{n_slots} of {geometry.n_expert} per layer", "-"],
        ["hit rate", f"{100 * ours.hit_rate:.1f} %", "-"],
        ["read from disk", format_size(ours.bytes_read), "-"],
    ]
    if ours.same_output(stock):
        verdict = f"same output: yes ({count(len(ours.tokens), 'token')}, all logits bit for bit)"
    else:
        verdict = f"same output: no ({_difference(ours, stock)})"
    return [
        *format_table(table),
        "",
        verdict,
        "",
        f"The model is {shown(str(geometry.header.path))}: every command takes it.",
        "It is far smaller than any memory: it shows function and exactness, not speed.",
        "Speed shows on models larger than memory: flashmoe chat MODEL.gguf --ram 8G",
    ]


def _difference(ours: Result, stock: Result) -> str:
    for step, (a, b) in enumerate(zip(ours.logits, stock.logits, strict=False)):
        if a != b:
            return f"logits differ from token {step + 1} on"
    return f"{len(ours.tokens)} tokens here, {len(stock.tokens)} there"

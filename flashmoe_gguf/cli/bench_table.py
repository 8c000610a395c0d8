"""The result of a bench for people: a table, and what must be said beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table

from flashmoe_gguf.bench.cases import limit_text
from flashmoe_gguf.bench.compare import Comparison, Pair
from flashmoe_gguf.bench.gate import Gate
from flashmoe_gguf.bench.summary import Line, worst_step
from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.progress import format_rate
from flashmoe_gguf.cli.screen import count

_PLAIN_WIDTH = 200  # where stdout is a file or a pipe, nothing is cut


def print_table(table: Table) -> None:
    """To stdout: drawn on a terminal, as Markdown elsewhere."""
    terminal = sys.stdout.isatty()
    table.box = box.SIMPLE_HEAD if terminal else box.MARKDOWN
    console = Console(
        file=sys.stdout,
        width=None if terminal else _PLAIN_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        if line.strip():  # Markdown has no empty line above its table
            click.echo(line.rstrip())


Column = tuple[str, Callable[[Line], str]]


def result_table(lines: Sequence[Line]) -> Table:
    """A row per arm and limit: medians over the rounds, the least and the most in brackets."""
    columns = [column for column in _COLUMNS if any(column[1](line) != "" for line in lines)]
    table = Table()
    for name, _ in columns:
        table.add_column(name, no_wrap=name == "arm")
    for line in lines:
        table.add_row(*(cell(line) for _, cell in columns))
    return table


def _tok_s(line: Line) -> str:
    spread = line.spread("decode_tok_s")
    if spread is None:
        return line.failed or ""
    median, least, most = (format_rate(v) for v in (spread.median, spread.least, spread.most))
    return f"{median} [{least} {most}]"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}x" if value >= 10 else f"{value:.2f}x"


def _plain(key: str, form: Callable[[float], str]) -> Callable[[Line], str]:
    def cell(line: Line) -> str:
        value = line.median(key)
        return "" if value is None else form(value)

    return cell


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _read_per_token(line: Line) -> str:
    read, n_gen = line.median("bytes_read"), line.median("n_gen")
    return "" if read is None or not n_gen else format_size(read / n_gen)


_COLUMNS: tuple[Column, ...] = (
    ("arm", lambda line: line.arm),
    ("limit", lambda line: limit_text(line.limit_bytes)),
    ("tok/s [min max]", _tok_s),
    ("x stock", lambda line: _ratio(line.ratio)),
    ("x step before", lambda line: _ratio(line.step_ratio)),
    ("tokens", _plain("n_gen", lambda value: f"{value:.0f}")),
    ("prefill tok/s", _plain("prefill_tok_s", format_rate)),
    ("again tok/s", _plain("prefill_again_tok_s", format_rate)),
    ("load s", _plain("load_seconds", lambda value: f"{value:.2f}")),
    ("first token s", _plain("first_token_seconds", lambda value: f"{value:.2f}")),
    ("slots", _plain("n_slots", lambda value: f"{value:.0f}")),
    ("hits", _plain("hit_rate", _percent)),
    ("waiting", _plain("wait_share", _percent)),
    ("read/token", _read_per_token),
    ("efficiency", _plain("efficiency", lambda value: f"{value:.2f}")),
    ("of roofline", _plain("roofline_share", lambda value: f"{value:.2f}")),
    ("peak", _plain("peak_bytes", format_size)),
)


def notes(lines: Sequence[Line], gate: Gate, bandwidth: float | None) -> list[str]:
    """The verdict of the gate first, then what a reader of the table should know."""
    found = []
    if gate.steps:
        found.append(
            f"same output: yes ({count(gate.steps, 'step')} against stock llama.cpp, all logits "
            f"bit for bit; {gate.longest} in the longest arm)"
        )
    elif not gate.streamed:
        found.append("same output: unknown, no streamed arm came to its end")
    else:
        found.append(
            f"same output: {count(gate.longest, 'step')} alike in all arms that ran, none of them "
            "against stock llama.cpp"
        )
    same = gate.same_tokens()
    if same is not None:
        found.append(
            f"stock-default: the first {same[0]} of {same[1]} greedy tokens are the same; it "
            "repacks weights, which changes the last bits of logits, so it is not held to them"
        )
    found += _tidiness(lines)
    for arm in dict.fromkeys(line.arm for line in lines):
        worst = worst_step(lines, arm)
        if worst is not None:
            found.append(
                f"worst step of {arm}: {worst.step_ratio:.2f} of the limit before, "
                f"at {limit_text(worst.limit_bytes)}"
            )
    if bandwidth is not None:
        found.append(f"drive: {bandwidth / 1e9:.2f} GB/s in reads as the cache makes them")
    return found


def _tidiness(lines: Sequence[Line]) -> list[str]:
    """Bytes written and swapped while an arm ran, which should be none."""
    found = []
    for key, words in (("bytes_written", "wrote"), ("swap_bytes", "swapped")):
        for line in lines:
            spread = line.spread(key)
            if spread is not None and spread.most > 0:
                found.append(
                    f"{line.arm}, {limit_text(line.limit_bytes)}: {words} "
                    f"{format_size(spread.most)} at the most"
                )
    return found


_COMPARED = (
    ("decode tok/s", "decode_tok_s", format_rate),
    ("prefill tok/s", "prefill_tok_s", format_rate),
    ("again tok/s", "prefill_again_tok_s", format_rate),
    ("first token s", "first_token_seconds", lambda value: f"{value:.2f}"),
    ("hits", "hit_rate", _percent),
    ("bytes read", "bytes_read", format_size),
    ("peak", "peak_bytes", format_size),
)


def comparison_table(comparison: Comparison, names: tuple[str, str]) -> Table:
    """Per arm and figure: the median in each file, and the second over the first."""
    table = Table("arm", "limit", "figure", *names, "ratio")
    for pair in comparison.pairs:
        for label, key, form in _COMPARED:
            first, second = pair.medians(key)
            if first is None or second is None:
                continue
            table.add_row(
                _pair_name(pair),
                limit_text(pair.limit_bytes),
                label,
                form(first),
                form(second),
                f"{second / first:.3f}" if first else "",
            )
    return table


def _pair_name(pair: Pair) -> str:
    return pair.arm if pair.arm == pair.other_arm else f"{pair.arm} / {pair.other_arm}"

"""`flashmoe doctor`: what on this machine would hurt, with one line of advice each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, State
from flashmoe_gguf.cli.screen import Screen, format_table
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.gguf.cursor import shown

if TYPE_CHECKING:
    from flashmoe_gguf.doctor import Finding

_MARKS = {"good": "ok", "note": "note", "hurts": "HURTS"}
_HURTS = 1  # the exit code


@click.command(short_help="Check this machine: drive, memory limits, processor, libraries.")
@click.argument("path", type=FilePath(), default=".")
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 60),
    metavar="S",
    default=0.2,
    help="How long to measure each combination of request size and threads.",
)
@click.option("--json", "as_json", is_flag=True, help="The same and more as JSON.")
@click.pass_context
def doctor(ctx: click.Context, path: str, seconds: float, as_json: bool) -> None:
    """Check what decides how fast models in a folder run, and what could make them fail.

    PATH is the folder of the models, or a model. Its drive is measured by reading the largest
    model there, or else a temporary file of up to 256 MiB that leaves nothing behind. The rest is
    looked up. Nothing is changed.

    Exit code 1 when something will hurt.

    \b
    Examples:
      flashmoe doctor
      flashmoe doctor /mnt/models
      flashmoe doctor --json | jq '.findings[] | select(.state == "hurts")'
    """
    from flashmoe_gguf.doctor import examine

    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise OptionError(f"{shown(path)}: no such folder", "name the folder of your models")
    with Screen() as screen, Activity(screen, "measuring", lambda: State(words="reading")):
        findings = examine(folder, seconds=seconds)
    hurts = any(finding.state == "hurts" for finding in findings)
    if as_json:
        document = {
            "folder": str(folder.resolve()),
            "hurts": hurts,
            "findings": [asdict(finding) for finding in findings],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo("\n".join(_lines(findings)))
    if hurts:
        ctx.exit(_HURTS)


def _lines(findings: list[Finding]) -> list[str]:
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.state]:<5}  {finding.name:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"{'':<5}  {'':<{width}}  -> {finding.advice}")
        if "rows" in finding.data:
            lines += _grid(finding, 5 + 2 + width + 2)
    return lines


def _grid(finding: Finding, indent: int) -> list[str]:
    """GB/s by request size, a row each, and number of threads."""
    rows = finding.data["rows"]
    depths = sorted({row["depth"] for row in rows})
    speeds = {(row["request_bytes"], row["depth"]): row["bytes_per_second"] for row in rows}
    table = [["GB/s", *(f"{depth} threads" if depth > 1 else "1 thread" for depth in depths)]]
    for size in sorted({row["request_bytes"] for row in rows}):
        table.append([format_size(size), *(f"{speeds[size, depth] / 1e9:.3g}" for depth in depths)])
    return format_table(table, " " * indent)

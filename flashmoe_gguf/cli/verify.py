"""`flashmoe verify`: all of a packed file against its checksums."""

from __future__ import annotations

import json

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.options import MAX_THREADS
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, ByteCount
from flashmoe_gguf.cli.screen import Screen, count
from flashmoe_gguf.errors import ModelFileError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack import VerifyReport, verify_model

_SHOWN = 20


@click.command(short_help="Check all of a packed file.")
@click.argument("packed", type=FilePath())
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, MAX_THREADS),
    default=4,
    metavar="N",
    help="Threads that read and check.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def verify(packed: str, threads: int, as_json: bool) -> None:
    """Read every expert and every dense tensor of a packed file and compare with its checksum.

    Exit code 2 if one differs; layer and expert, or the tensor, are named. The header is checked
    too; what a source file had between its tensors has no checksum.

    \b
    Examples:
      flashmoe verify model.packed.gguf
      flashmoe verify model.packed.gguf --json | jq .damaged
    """
    done = ByteCount()
    with Screen() as screen, Activity(screen, "verifying", done.state):
        report = verify_model(packed, n_threads=threads, progress=done)
    if as_json:
        click.echo(json.dumps(_as_dict(report), indent=2))
    elif report.ok:
        size = format_size(report.block_bytes + report.tensor_bytes)
        blocks = count(report.blocks, "block")
        tensors = count(report.tensors, "dense tensor")
        click.echo(f"{shown(report.path)}: all {blocks} and {tensors} are right, {size}")
    if report.ok:
        return
    if not as_json:
        for damage in report.damages[:_SHOWN]:
            click.echo(str(damage), err=True)
        if len(report.damages) > _SHOWN:
            click.echo(f"and {len(report.damages) - _SHOWN} more", err=True)
    raise ModelFileError(
        f"{shown(report.path)}: {report.damaged_blocks} of {count(report.blocks, 'block')} and "
        f"{report.damaged_tensors} of {count(report.tensors, 'dense tensor')} are damaged, "
        f"first {report.damages[0]}",
        "copy the packed file again, or pack the model again",
    )


def _as_dict(report: VerifyReport) -> dict[str, object]:
    """Sizes in bytes; `damaged` names every part that differs."""
    return {
        "path": str(report.path),
        "ok": report.ok,
        "blocks": report.blocks,
        "block_bytes": report.block_bytes,
        "damaged_blocks": report.damaged_blocks,
        "tensors": report.tensors,
        "tensor_bytes": report.tensor_bytes,
        "damaged_tensors": report.damaged_tensors,
        "damaged": [
            {"layer": d.layer, "family": d.family, "expert": d.expert, "tensor": d.tensor}
            for d in report.damages
        ],
    }

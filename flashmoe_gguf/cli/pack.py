"""`flashmoe pack`: a model's experts into aligned, checksummed blocks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, ByteCount
from flashmoe_gguf.cli.screen import Rows, Screen, format_rows
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack import PackReport, pack_model

_SHARD = re.compile(r"-00001-of-[0-9]{5}$")


@click.command(short_help="Pack a model's experts for faster reading.")
@click.argument("model", type=FilePath())
@click.option(
    "-o",
    "--out",
    type=click.Path(),
    metavar="OUT",
    help="The packed file, or a folder for it.  [default: NAME.packed.gguf beside the model]",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="Give back the model's space while packing and delete it in the end: needs room for "
    "about one layer. Once begun, finish it with the same command.",
)
@click.option(
    "--stripe",
    "stripes",
    type=click.Path(),
    multiple=True,
    metavar="DIR",
    help="A folder on another drive; give one per drive. The experts are spread over one file in "
    "each and read from all drives at once. OUT keeps the rest.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it is there and something else.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def pack(
    model: str,
    out: str | None,
    in_place: bool,
    stripes: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Write a packed file: each expert in one aligned block, with checksums.

    The packed file gives the same answers, and one read brings a whole expert. MODEL is a GGUF
    file or the first of its shards; flashmoe unpack restores it byte for byte. Stopped at any
    point, the same command goes on after the last finished layer.

    \b
    Examples:
      flashmoe pack model.gguf
      flashmoe pack model-00001-of-00003.gguf -o /fast/model.packed.gguf
      flashmoe pack model.gguf --stripe /drive1 --stripe /drive2
    """
    target = target_path(model, out)
    count = ByteCount()
    with Screen() as screen:
        try:
            with Activity(screen, "packing", count.state):
                report = pack_model(
                    model,
                    target,
                    progress=count,
                    in_place=in_place,
                    force=force,
                    stripes=stripes,
                )
        except KeyboardInterrupt:
            screen.note("stopped; the same command goes on from here")
            raise
    if as_json:
        click.echo(json.dumps(as_dict(report), indent=2))
        return
    for line in format_rows(_rows(report)):
        click.echo(line)


def target_path(model: str, out: str | None) -> Path:
    """Where the packed file of `model` goes: NAME.packed.gguf, shard numbers dropped."""
    path = Path(model)
    name = _SHARD.sub("", path.name.removesuffix(".gguf")) + ".packed.gguf"
    if out is None:
        return path.with_name(name) if path.name else Path(name)
    return Path(out) / name if Path(out).is_dir() else Path(out)


def _rows(report: PackReport) -> Rows:
    if report.already_there:
        return [("packed", f"{shown(report.out)} is there already, from this very model")]
    rows = [
        ("packed", shown(report.out)),
        (
            "size",
            f"{format_size(report.packed_bytes)}, the model has {format_size(report.source_bytes)}",
        ),
        ("blocks", f"{report.blocks} experts in {report.groups} groups"),
    ]
    rows += [("stripe", shown(path)) for path in report.stripes]
    if report.resumed_bytes:
        rows.append(("resumed", f"{format_size(report.resumed_bytes)} had been copied before"))
    if report.in_place:
        rows.append(("original", "deleted; flashmoe unpack restores it"))
    return rows


def as_dict(report: PackReport) -> dict[str, Any]:
    """Everything `--json` prints; sizes in bytes."""
    return {
        "out": str(report.out),
        "source_bytes": report.source_bytes,
        "packed_bytes": report.packed_bytes,
        "groups": report.groups,
        "blocks": report.blocks,
        "fingerprint": report.fingerprint,
        "resumed_bytes": report.resumed_bytes,
        "already_there": report.already_there,
        "in_place": report.in_place,
        "stripes": [str(path) for path in report.stripes],
    }

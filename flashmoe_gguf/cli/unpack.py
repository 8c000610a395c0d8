"""`flashmoe unpack`: the original files from a packed one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, ByteCount
from flashmoe_gguf.cli.screen import Screen, format_rows
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.pack import unpack_model


@click.command(short_help="Restore the original from a packed file.")
@click.argument("packed", type=FilePath())
@click.option(
    "-o",
    "--out",
    type=click.Path(),
    metavar="DIR",
    help="The folder for the original files.  [default: that of the packed file]",
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
def unpack(packed: str, out: str | None, force: bool, as_json: bool) -> None:
    """Restore the files that a packed file was made from, byte for byte, under their old names.

    Shard by shard; all checksums are compared on the way. The packed file stays.

    \b
    Examples:
      flashmoe unpack model.packed.gguf
      flashmoe unpack model.packed.gguf -o /other/disk
    """
    folder = Path(packed).parent if out is None else Path(out)
    count = ByteCount()
    with Screen() as screen, Activity(screen, "unpacking", count.state):
        report = unpack_model(packed, folder, progress=count, force=force)
    if as_json:
        files = [str(path) for path in report.files]
        click.echo(json.dumps({"files": files, "bytes": report.nbytes}, indent=2))
        return
    rows = [("restored" if not i else "", shown(path)) for i, path in enumerate(report.files)]
    for line in format_rows([*rows, ("size", format_size(report.nbytes))]):
        click.echo(line)

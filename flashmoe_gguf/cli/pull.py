"""`flashmoe pull`: fetches a known model from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, ByteCount, State
from flashmoe_gguf.cli.screen import Screen, count
from flashmoe_gguf.gguf.cursor import shown


@click.command(short_help="Download a known model from the Hugging Face hub.")
@click.argument("name")
@click.option(
    "-o",
    "--output",
    type=FilePath(file_okay=False),
    metavar="DIR",
    default=".",
    help="The folder that the file or its shards go to.",
)
def pull(name: str, output: str) -> None:
    """Download a model that `flashmoe models` lists, and check it.

    A stopped download goes on where it was when the command is given again; the part that is there
    ends in .part. A file gets its name when its SHA-256 is the one that the hub gives, and a file
    that has it already is checked again, not downloaded. Free space is looked at first.

    The path of the file, or of the first shard, goes to stdout. Needs huggingface_hub
    (pip install 'flashmoe-gguf[hub]'); its login and its variables, such as HF_ENDPOINT and
    HF_TOKEN, count. Single files beyond 50 GB start anew when stopped.

    \b
    Examples:
      flashmoe pull olmoe-1b-7b -o ~/models
      flashmoe chat $(flashmoe pull gpt-oss-20b)
    """
    from flashmoe_gguf.hub import bytes_here, download, find_files
    from flashmoe_gguf.models import find_model

    model = find_model(name)
    folder = Path(output)
    with Screen() as screen:
        files = find_files(model.hub)
        total = sum(file.size_bytes for file in files)
        here = bytes_here(files, folder)
        there = f", {format_size(here)} of it here already" if here else ""
        screen.line(
            f"{model.title}: {count(len(files), 'file')}, {format_size(total)}{there}, "
            f"from {model.hub.repository} at {files[0].revision[:12]}"
        )
        counted = ByteCount()

        def poll() -> State | None:
            done = bytes_here(files, folder)
            if done >= total:
                return State(words="checking")
            counted(done, total)
            return counted.state()

        try:
            with Activity(screen, "downloading", poll):
                paths = download(files, folder)
        except KeyboardInterrupt:
            here = bytes_here(files, folder)
            screen.note(f"stopped with {format_size(here)} here; the same command goes on")
            raise
        screen.line(f"{shown(paths[0].name)}: SHA-256 as on the hub" + _more(paths))
    click.echo(str(paths[0]))


def _more(paths: list[Path]) -> str:
    return f", and so {count(len(paths) - 1, 'more shard')}" if len(paths) > 1 else ""

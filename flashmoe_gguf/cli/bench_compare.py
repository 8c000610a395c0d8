"""`flashmoe bench compare`: two files of rows against each other."""

from __future__ import annotations

import json
from pathlib import Path

import click

from flashmoe_gguf.bench.compare import Comparison, compare, read_rows
from flashmoe_gguf.bench.gate import OutputDiffersError
from flashmoe_gguf.cli.bench_table import comparison_table, print_table
from flashmoe_gguf.cli.exits import UNEXPECTED, report
from flashmoe_gguf.cli.paths import FilePath

_FIGURES = ("decode_tok_s", "prefill_tok_s", "first_token_seconds", "hit_rate", "bytes_read")


@click.command(name="compare")
@click.argument("first", type=FilePath(), metavar="A.jsonl")
@click.argument("second", type=FilePath(), metavar="B.jsonl")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME",
    help="A condition that may differ, such as policy, layout, io_mode, slots or version. Can be "
    "given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
@click.pass_context
def bench_compare(
    ctx: click.Context, first: str, second: str, keys: tuple[str, ...], as_json: bool
) -> None:
    """Compare the rows of two runs of flashmoe bench, arm by arm.

    Refused, with exit code 2, when the rows of an arm were measured under conditions that differ
    in more than --key: another model, limit, machine, version or setting. Exit code 1 when the two
    gave different tokens.

    \b
    Examples:
      flashmoe bench compare before.jsonl after.jsonl --key version --key patch_hash
      flashmoe bench compare lru.jsonl dlfu.jsonl --key policy
    """
    try:
        comparison = compare(read_rows(Path(first)), read_rows(Path(second)), keys)
    except OutputDiffersError as error:
        report(error)
        ctx.exit(UNEXPECTED)
    if as_json:
        click.echo(json.dumps(_as_dict(comparison), indent=2))
        return
    print_table(comparison_table(comparison, (Path(first).name, Path(second).name)))
    if comparison.alone:
        click.echo(f"in one file only: {', '.join(comparison.alone)}")


def _as_dict(comparison: Comparison) -> dict[str, object]:
    return {
        "pairs": [
            {
                "arm": pair.arm,
                "other_arm": pair.other_arm,
                "limit_bytes": pair.limit_bytes,
                **{key: pair.medians(key) for key in _FIGURES},
            }
            for pair in comparison.pairs
        ],
        "alone": list(comparison.alone),
    }

"""`flashmoe models`: the known models, and how each would run here."""

from __future__ import annotations

import json
from typing import Any

import click

from flashmoe_gguf.budget import RunSizes, estimate_fixed, format_size, parse_ram
from flashmoe_gguf.cli.options import DEFAULT_BATCH, DEFAULT_CTX, default_threads
from flashmoe_gguf.cli.screen import format_table
from flashmoe_gguf.host import MemoryLimit, default_budget


@click.command(short_help="List known models, and how each would run here.")
@click.option(
    "--ram",
    metavar="SIZE",
    default="auto",
    help="The budget to judge by, such as 8G; auto: what is available, less a tenth.",
)
@click.option("--json", "as_json", is_flag=True, help="The same and more as JSON.")
def models(ram: str, as_json: bool) -> None:
    """List the models that plan and pull know by name, with a verdict for this machine.

    fits: everything stays in memory, and plain llama.cpp is as fast. streams: experts come from
    the drive through a cache. too big: not even the floor, what must stay in memory, fits. All
    for a context of 4096 tokens; sizes come from models.toml, which names its sources.

    \b
    Examples:
      flashmoe models
      flashmoe models --ram 16G
      flashmoe models --json | jq -r '.models[] | select(.verdict == "streams") | .name'
    """
    given = parse_ram(ram)
    budget = default_budget() if given is None else MemoryLimit(given, "given")
    rows = _rows(budget)
    if as_json:
        document = {"ram_bytes": budget.limit_bytes, "ram_source": budget.source, "models": rows}
        click.echo(json.dumps(document, indent=2))
        return
    table = [["name", "size", "experts", "floor", "verdict", "cached"]]
    for row in rows:
        share = row["cached_share"]
        table.append(
            [
                row["name"],
                format_size(row["file_bytes"]),
                f"{row['top_k']} of {row['experts']}",
                format_size(row["floor_bytes"]),
                row["verdict"],
                "" if share is None else f"{100 * share:.0f} %",
            ]
        )
    for line in format_table(table):
        click.echo(line)
    source = "" if budget.source == "given" else f" ({budget.source}, less a tenth)"
    click.echo(f"\nfor a budget of {format_size(budget.limit_bytes)}{source}")


def _rows(budget: MemoryLimit) -> list[dict[str, Any]]:
    from flashmoe_gguf.budget import plan_model
    from flashmoe_gguf.models import known_models
    from flashmoe_gguf.plan import known_subject, verdict

    rows = []
    for model in known_models().values():
        subject = known_subject(model)
        n_ctx = min(DEFAULT_CTX, subject.n_ctx or DEFAULT_CTX)
        run = RunSizes(n_ctx, DEFAULT_BATCH, default_threads())
        judged = verdict(subject, run, budget.limit_bytes)
        plan = None
        if judged != "too big":
            plan = plan_model(subject.sizes, run, budget.limit_bytes)
        rows.append(
            {
                "name": model.name,
                "title": model.title,
                "repository": model.hub.repository,
                "quant": model.hub.quant,
                "file_bytes": subject.file_bytes,
                "experts": subject.n_expert,
                "top_k": subject.top_k,
                "layers": model.shape.layers,
                "floor_bytes": estimate_fixed(subject.sizes, run).total,
                "verdict": judged,
                "cached_share": plan.cached_share if plan else None,
            }
        )
    return rows

"""`flashmoe inspect`: what a model file holds, from its header alone."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import click

from flashmoe_gguf.budget import format_size
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.screen import Rows, format_rows, format_table
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.packed import PackedInfo
from flashmoe_gguf.store import Geometry, Group, read_geometry


@click.command(short_help="Show a model's experts; loads nothing.")
@click.argument("model", type=FilePath())
@click.option("--json", "as_json", is_flag=True, help="The same and more as JSON.")
def inspect(model: str, as_json: bool) -> None:
    """Show what is in a model file: layers, experts, quant types, sizes.

    Only the header is read, of all shards where there are several. "read per token" is what
    decoding one token reads from disk when no expert is cached.

    \b
    Examples:
      flashmoe inspect model-00001-of-00003.gguf
      flashmoe inspect model.gguf --json | jq .expert_share
    """
    geometry = read_geometry(model)
    if as_json:
        click.echo(json.dumps(as_dict(geometry), indent=2))
        return
    for line in format_rows(_rows(geometry)):
        click.echo(line)
    if geometry.is_moe:
        click.echo()
        for line in format_table(_table(geometry)):
            click.echo(line)


def _rows(geometry: Geometry) -> Rows:
    header = geometry.header
    shards = header.shards
    total = sum(file.size_bytes for file in geometry.files)
    name = header.metadata.get("general.name")
    rows = [
        ("file", f"{shown(header.path.name)}, {format_size(total)}"),
        ("shards", str(len(shards)) if len(shards) > 1 else "1 (not split)"),
        ("architecture", shown(geometry.architecture)),
    ]
    if geometry.packed is not None:
        rows.append(("packed", _packed_text(geometry.packed)))
        rows += [("stripe", shown(stripe.path)) for stripe in geometry.packed.stripes]
    if isinstance(name, str):
        rows.insert(0, ("model", shown(name)))
    context = header.get("context_length")
    if isinstance(context, int):
        rows.append(("context", f"{context} tokens in training"))
    if not geometry.is_moe:
        return [
            *rows,
            ("layers", str(geometry.n_layer)),
            ("experts", "none: this model runs as it does in llama.cpp, in memory or mmapped"),
        ]
    moe_layers = len({g.layer for g in geometry.groups})
    extra = f", {geometry.n_nextn} of them for token prediction" if geometry.n_nextn else ""
    weights = geometry.expert_bytes + geometry.dense_bytes
    return [
        *rows,
        ("layers", f"{geometry.n_layer}, {moe_layers} with experts{extra}"),
        ("experts", f"{geometry.n_expert} per layer, top-{_top_k_text(geometry)}"),
        (
            "weights",
            f"experts {format_size(geometry.expert_bytes)}, "
            f"{100 * geometry.expert_bytes / weights:.1f} %; "
            f"dense {format_size(geometry.dense_bytes)}, always in memory",
        ),
        ("read per token", f"{format_size(geometry.bytes_per_token)} without a cache"),
    ]


def _packed_text(packed: PackedInfo) -> str:
    files = packed.source_files
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"format {packed.version}, from {shown(files[0])}{more}" if files else "from nothing"


def _top_k_text(geometry: Geometry) -> str:
    counts = sorted({geometry.layer_top_k[g.layer] for g in geometry.groups})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _table(geometry: Geometry) -> list[list[str]]:
    """One row for all layers whose experts are alike."""
    kinds: dict[tuple[Any, ...], list[Group]] = {}
    for group in geometry.groups:
        parts = tuple((p.role, p.type_name, p.shape[:2]) for p in group.parts)
        kinds.setdefault((group.family, group.n_expert, parts), []).append(group)
    table = [["layers", "experts", "bytes each", "parts"]]
    for (family, n_expert, parts), groups in kinds.items():
        text = ", ".join(f"{role} {kind} {'x'.join(map(str, s))}" for role, kind, s in parts)
        note = " (second block)" if family == "chexps" else ""
        table.append(
            [
                _ranges([g.layer for g in groups]),
                f"{n_expert}{note}",
                format_size(groups[0].expert_bytes),
                text,
            ]
        )
    return table


def _ranges(layers: list[int]) -> str:
    """ "0-3, 7" for [0, 1, 2, 3, 7]."""
    runs = []
    for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
        numbers = [layer for _, layer in run]
        runs.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ", ".join(runs)


def as_dict(geometry: Geometry) -> dict[str, Any]:
    """Everything `--json` prints; sizes in bytes, `expert_share` from 0 to 1."""
    header = geometry.header
    weights = geometry.expert_bytes + geometry.dense_bytes
    return {
        "path": str(header.path),
        "name": name if isinstance(name := header.metadata.get("general.name"), str) else None,
        "architecture": geometry.architecture,
        "context_length": n if isinstance(n := header.get("context_length"), int) else None,
        "layers": geometry.n_layer,
        "prediction_layers": geometry.n_nextn,
        "moe_layers": len({g.layer for g in geometry.groups}),
        "experts": geometry.n_expert,
        "top_k": geometry.top_k,
        "expert_bytes": geometry.expert_bytes,
        "dense_bytes": geometry.dense_bytes,
        "expert_share": geometry.expert_bytes / weights if weights else 0.0,
        "bytes_per_token": geometry.bytes_per_token,
        "packed": _packed_dict(geometry.packed),
        "shards": [{"path": str(shard.path), "bytes": shard.size_bytes} for shard in header.shards],
        "groups": [
            {
                "layer": group.layer,
                "family": group.family,
                "experts": group.n_expert,
                "top_k": geometry.layer_top_k[group.layer],
                "bytes_per_expert": group.expert_bytes,
                "parts": [
                    {
                        "role": part.role,
                        "tensor": part.tensor,
                        "type": part.type_name,
                        "shape": list(part.shape),
                        "shard": part.shard if len(part.places) == 1 else None,
                        "offset": part.offset if len(part.places) == 1 else None,
                        "bytes_per_expert": part.expert_bytes,
                    }
                    for part in group.parts
                ],
            }
            for group in geometry.groups
        ],
    }


def _packed_dict(packed: PackedInfo | None) -> dict[str, Any] | None:
    """None for a stock file."""
    if packed is None:
        return None
    return {
        "version": packed.version,
        "fingerprint": packed.fingerprint,
        "source_files": list(packed.source_files),
        "stripes": [{"path": str(s.path), "bytes": s.size_bytes} for s in packed.stripes],
    }

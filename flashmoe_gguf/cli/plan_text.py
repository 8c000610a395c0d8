"""The effective plan as rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashmoe_gguf.budget import Plan, format_size
from flashmoe_gguf.cli.screen import Rows
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.placement import Placement
from flashmoe_gguf.store import Geometry

if TYPE_CHECKING:
    from flashmoe_gguf.stats import Stats


def plan_rows(
    geometry: Geometry,
    *,
    streamed: bool,
    plan: Plan | None,
    budgeted: bool,
    stats: Stats | None,
    settings: str,
    placement: Placement | None = None,
) -> Rows:
    """What was loaded, where memory goes, and how experts are read.

    `streamed` is what was asked for; `plan` and `stats` are None for a model without experts.
    `budgeted` False: the number of slots was given, and no budget is obeyed.
    """
    size = sum(file.size_bytes for file in geometry.files)
    name = shown(geometry.header.path.name)
    what = f"{name}, {shown(geometry.architecture)}, {format_size(size)}"
    rows = [("model", what + _experts_text(geometry))]
    if plan is not None and stats is not None:
        fixed = plan.fixed
        budget = f"{format_size(plan.ram_bytes)} budget, " if budgeted else ""
        rows += [
            (
                "memory",
                f"{budget}{format_size(plan.total_bytes)} planned: "
                f"dense {format_size(fixed.dense)}, context {format_size(fixed.context)}, "
                f"ring {format_size(fixed.ring)}, "
                + (f"policy {format_size(fixed.policy)}, " if fixed.policy else "")
                + f"process {format_size(fixed.process)}, "
                f"reserve {format_size(fixed.reserve)}, experts {format_size(plan.slot_bytes)}",
            ),
            (
                "cache",
                f"{_slots_text(plan)} of {geometry.n_expert} experts per layer, "
                f"{100 * plan.cached_share:.0f} % of their bytes; policy {stats.policy}, "
                f"I/O {stats.io_mode}" + _found_text(plan, stats),
            ),
        ]
    elif streamed:
        rows.append(("cache", "none: no routed experts, so this is llama.cpp's usual way"))
    else:
        rows.append(("cache", "none: stock llama.cpp, mmap"))
    return [*rows, *device_rows(placement), ("run", settings)]


def device_rows(placement: Placement | None) -> Rows:
    """What each device holds; nothing where no layers were asked for."""
    if placement is None:
        return []
    if placement.n_layers == 0:
        why = "nothing fits" if placement.shares else "there is none"
        return [("device", f"no layers: {why}")]
    return [
        (
            "device",
            f"{shown(share.device.name)} ({shown(share.device.description)}), {share.n_layers} of "
            f"{placement.n_all} layers: dense {format_size(share.dense)}, "
            f"KV cache {format_size(share.kv)}, about {format_size(share.compute)} for buffers, "
            f"of {format_size(share.device.free_bytes)} free",
        )
        for share in placement.shares
        if share.n_layers
    ]


def _experts_text(geometry: Geometry) -> str:
    if not geometry.is_moe:
        return ", no experts"
    return f", {geometry.n_layer} layers, {geometry.n_expert} experts, top-{geometry.top_k}"


def _found_text(plan: Plan, stats: Stats) -> str:
    """What earlier runs have found that is in use now."""
    quotas = f"; slots by the routing of the last {plan.quota_tokens:,} tokens"
    tuned = f"; tuned: {stats.tuned}"
    return (quotas if plan.quota_tokens else "") + (tuned if stats.tuned else "")


def _slots_text(plan: Plan) -> str:
    used = sorted({n for n in plan.slots})
    return str(used[0]) if len(used) == 1 else f"{used[0]} to {used[-1]}" if used else "0"

"""How a load spends its budget: what cannot shrink is estimated before and measured after, and the
rest becomes slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashmoe_gguf.budget import (
    CONTEXT_BYTES,
    Fixed,
    Plan,
    check_floor,
    compute_bytes_about,
    fixed_slots_plan,
    kv_bytes_at_least,
    learning_bytes,
)
from flashmoe_gguf.host import process_memory
from flashmoe_gguf.placement import Placement
from flashmoe_gguf.quotas import planned
from flashmoe_gguf.settings import StreamSettings
from flashmoe_gguf.streaming import ExpertStream
from flashmoe_gguf.ubatch import DEFAULT_UBATCH, ubatch_at_most, ubatch_that_pays

# Policies whose memory is known before they are there: `auto` mostly takes `learned`.
LEARNING = ("auto", "learned")


def fixed_before_loading(
    experts: ExpertStream,
    settings: StreamSettings,
    placement: Placement | None,
    kwargs: dict[str, Any],
    process_bytes: int,
) -> Fixed:
    """What is known before loading, a lower bound. kwargs: llama_cpp.Llama's."""
    geometry, n_ctx = experts.geometry, kwargs.get("n_ctx", 512)
    if placement is None:
        dense, kv = geometry.dense_bytes, kv_bytes_at_least(geometry.header, n_ctx)
    else:
        dense, kv = placement.host_dense, placement.host_kv
    quantized = kwargs.get("type_k") is not None or kwargs.get("type_v") is not None
    return Fixed(
        process=process_bytes,
        dense=dense,
        context=0 if quantized else kv,
        ring=experts.stats().ring_bytes,
        policy=sum(learning_bytes(group.n_expert) for group in experts.geometry.groups)
        if settings.policy in LEARNING
        else 0,
    )


def check_before_loading(
    experts: ExpertStream, kwargs: dict[str, Any], fixed: Fixed, ram_bytes: int
) -> None:
    """Raises BudgetError for a hopeless budget, while that costs nothing."""
    n_ctx = kwargs.get("n_ctx", 512)
    compute = compute_bytes_about(experts.geometry.header, n_ctx, ubatch_at_most(kwargs))
    check_floor(ram_bytes, fixed, compute + CONTEXT_BYTES)


def with_ubatch(
    experts: ExpertStream,
    settings: StreamSettings,
    kwargs: dict[str, Any],
    fixed: Fixed,
    ram_bytes: int,
) -> dict[str, Any]:
    """The arguments with a ubatch that pays, and a batch that holds it."""
    geometry, n_ctx = experts.geometry, kwargs.get("n_ctx") or DEFAULT_UBATCH
    cached = ram_bytes - fixed.total
    if settings.n_slots is not None and geometry.n_expert:
        cached = geometry.expert_bytes * settings.n_slots // geometry.n_expert
    n_ubatch = ubatch_that_pays(
        geometry.expert_bytes - cached,
        n_ctx,
        ram_bytes,
        lambda n: compute_bytes_about(geometry.header, n_ctx, n),
    )
    n_batch = max(kwargs.get("n_batch", DEFAULT_UBATCH), n_ubatch)
    return {**kwargs, "n_batch": n_batch, "n_ubatch": n_ubatch}


def start_planned(
    experts: ExpertStream, settings: StreamSettings, fixed: Fixed, ram_bytes: int, top_k: int
) -> Plan:
    """Starts the stream with the slots that the budget allows, or with those asked for."""
    costs = experts.costs()

    def plan_with(policy_bytes: int) -> Plan:
        counted = replace(fixed, policy=policy_bytes)
        if settings.n_slots is not None:
            return fixed_slots_plan(counted, costs, settings.n_slots)
        return planned(ram_bytes, counted, costs, experts.geometry, top_k, settings.quotas)

    if settings.n_slots is None:
        check_floor(ram_bytes, fixed, fixed.policy // 8)  # what it takes is known within that
    plan = plan_with(0)
    _, committed = process_memory()
    experts.start(plan.slots, plan.ram_bytes, top_k)
    policy_bytes = process_memory()[1] - committed - experts.open_bytes()
    if policy_bytes > 0:  # what a policy takes is known once it is there
        plan = plan_with(policy_bytes)
        experts.shrink(plan.slots)
    return plan

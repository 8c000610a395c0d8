"""Where slots save most: miss curves of a model's own routing, and the order that they give.

A miss curve says of one group of experts how often a token misses with so many slots. The routing
that was kept of the model's last tokens gives the curves, by replay. A slot more goes where it
saves most bytes read per byte of memory. What that gains is in docs/POLICIES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import simulate
from flashmoe_gguf.auto_policy import recent_file
from flashmoe_gguf.budget import AUTO, Fixed, GroupCost, Plan, make_plan, slot_order
from flashmoe_gguf.errors import TraceError
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.trace import NO_EXPERT, Trace, read_trace

# Fewer tokens than this give curves that are mostly chance.
LEAST_TOKENS = 512
# Shares of a group's experts to replay; straight lines between them, 1 where nothing is cached
# and 0 where everything is.
SHARES = tuple(i / 16 for i in range(1, 16))
# Decayed LFU: its curves serve as well as those of `learned`, for less time.
POLICY = "dlfu"
# A group's own curve is trusted as if so many tokens had said that all groups are alike: of 1,000
# tokens, part of what tells groups apart is chance.
ALIKE_TOKENS = 1000
# A replay begins with an empty cache: this share of the tokens fills it and is not counted.
WARM_SHARE = 0.25

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Miss curves of a model. `misses` has one array [n_expert + 1] per group: experts missed per
    token with so many slots, falling, and falling less with every slot. `n_tokens`: measured on.
    """

    misses: tuple[Floats, ...]
    n_tokens: int


def slots_for_share(n_expert: npt.NDArray[np.int32], share: float) -> npt.NDArray[np.int32]:
    """Slots per group for a share (0 to 1) of its experts: to the nearest, halves up, at least one.

    n_expert [n_groups]; the same shape comes back.
    """
    slots: npt.NDArray[np.int32] = np.clip(np.floor(share * n_expert + 0.5), 1, n_expert)
    return slots.astype(np.int32)


def known_curves(fingerprint: str, n_expert: npt.NDArray[np.int32]) -> Curves | None:
    """From the routing kept of this model's last tokens; None where too little is known.

    n_expert [n_groups]: a file of other groups is not of this model.
    """
    try:
        trace = read_trace(recent_file(fingerprint))
    except TraceError:
        return None
    if not np.array_equal(trace.n_expert, n_expert) or trace.n_tokens < LEAST_TOKENS:
        return None
    return measure_curves(trace)


def measure_curves(trace: Trace, policy: str = POLICY) -> Curves:
    """Replays the trace with a few sizes of cache. About 0.2 s for 1,000 tokens of 24 layers."""
    n_expert = trace.n_expert
    warm = int(trace.n_tokens * WARM_SHARE)
    counted = trace.n_tokens - warm
    used = (trace.experts[warm:] != NO_EXPERT).sum(axis=(0, 2)) / max(counted, 1)
    routed = used > 0
    trust = counted / (counted + ALIKE_TOKENS)
    points = [(np.zeros_like(n_expert), used)]
    for share in SHARES:
        slots = slots_for_share(n_expert, share)
        counts = simulate(policy, trace.experts, trace.seq[:-1], n_expert, slots, count_from=warm)
        missed = (counts.lookups - counts.hits) / max(counted, 1)
        all_alike = used * np.mean(missed[routed] / used[routed]) if routed.any() else missed
        points.append((slots, trust * missed + (1 - trust) * all_alike))
    points.append((n_expert, np.zeros(len(n_expert))))
    curves = []
    for group, n in enumerate(n_expert.tolist()):
        known = {int(slots[group]): float(missed[group]) for slots, missed in points}
        sizes = sorted(known)
        hull = _lower_hull(sizes, [known[size] for size in sizes])
        curves.append(np.interp(np.arange(n + 1), *hull))
    return Curves(tuple(curves), trace.n_tokens)


def _lower_hull(xs: Sequence[int], ys: Sequence[float]) -> tuple[list[int], list[float]]:
    """The points that a string below them all would touch: with it, a slot never saves more than
    the one before, so that the best slots of a group are its first.
    """
    hull: list[tuple[int, float]] = []
    for x, y in zip(xs, ys, strict=True):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return [x for x, _ in hull], [y for _, y in hull]


def order_by_curves(
    groups: Sequence[GroupCost], expert_bytes: Sequence[int], curves: Curves, top_k: int
) -> list[int]:
    """The group of each slot that can be had, in the order in which a plan takes them.

    First `top_k` slots for every group, evenly: with fewer a token's own experts push each other
    out. Then each slot where it saves most bytes per token and byte of memory; of equal ones, the
    one that completes the smaller share of its group. expert_bytes: of one expert, per group.
    """
    first, rest = [], []
    taken = [0] * len(groups)
    for i in slot_order(groups):
        taken[i] += 1
        if taken[i] <= top_k:
            first.append(i)
        else:
            missed = curves.misses[i]
            saved = (missed[taken[i] - 1] - missed[taken[i]]) * expert_bytes[i]
            rest.append((-saved / groups[i].slot_bytes, taken[i] / groups[i].n_expert, i))
    return first + [i for _, _, i in sorted(rest)]


def planned(
    ram_bytes: int,
    fixed: Fixed,
    groups: Sequence[GroupCost],
    geometry: Geometry,
    top_k: int,
    quotas: str,
) -> Plan:
    """`make_plan`, with slots where they save most if `quotas` is "auto" and enough is known of
    this model's routing. `groups` in the geometry's order. Raises BudgetError as it does.
    """
    curves = None
    even = make_plan(ram_bytes, fixed, groups)
    if quotas == AUTO and 0 < even.slot_bytes < even.all_slot_bytes:
        n_expert = np.array([group.n_expert for group in geometry.groups], np.int32)
        curves = known_curves(geometry.fingerprint, n_expert)
    if curves is None:
        return even
    expert_bytes = [group.expert_bytes for group in geometry.groups]
    order = order_by_curves(groups, expert_bytes, curves, top_k)
    plan = make_plan(ram_bytes, fixed, groups, order)
    return replace(plan, quota_tokens=curves.n_tokens if plan.slots != even.slots else 0)

"""A plan with what it would feel like: hit rate, tokens per second, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashmoe_gguf.budget import Plan, RunSizes, estimate_fixed, format_size, plan_model
from flashmoe_gguf.plan.curves import HitRate, expected_hit_rate
from flashmoe_gguf.plan.sizes import Subject
from flashmoe_gguf.plan.speed import Machine, seconds_per_token

_GIB = 1 << 30
_MIB = 1 << 20

Curve = Callable[[float], float]


@dataclass(frozen=True)
class Speed:
    """Tokens per second as expected, and with the hit rates at both ends of the range."""

    expected: float
    low: float
    high: float
    read_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Forecast:
    """`speed` is None where the drive's or the memory's bandwidth is not known."""

    plan: Plan
    floor_bytes: int
    full_bytes: int
    hit_rate: HitRate
    missed_bytes: float
    speed: Speed | None


def make_forecast(
    subject: Subject,
    run: RunSizes,
    ram_bytes: int,
    machine: Machine | None,
    curve: Curve | None = None,
) -> Forecast:
    """What `ram_bytes` give. `curve`: hit rate by share cached, from the user's own trace.

    Raises BudgetError below the floor.
    """
    plan = plan_model(subject.sizes, run, ram_bytes)
    rates = [
        _hit_rate(subject, n_slots, layer.n_expert, layer.top_k, curve)
        for n_slots, layer in zip(plan.slots, subject.layers, strict=True)
    ]
    uses = [layer.top_k * layer.expert_bytes for layer in subject.layers]
    missed = sum(use * (1 - rate.expected) for use, rate in zip(uses, rates, strict=True))
    speed = None
    dense = subject.sizes.dense_bytes - subject.embedding_bytes
    if machine is not None and dense + sum(uses) > 0:
        seconds = {
            name: seconds_per_token(
                subject.layers, [getattr(rate, name) for rate in rates], dense, machine
            )
            for name in ("expected", "low", "high")
        }
        speed = Speed(
            1 / seconds["expected"],
            1 / seconds["low"],
            1 / seconds["high"],
            missed / machine.disk_bytes_per_second,
            (dense + sum(uses)) / machine.memory_bytes_per_second,
        )
    fixed = estimate_fixed(subject.sizes, run)
    return Forecast(
        plan=plan,
        floor_bytes=fixed.total,
        full_bytes=fixed.total + plan.all_slot_bytes,
        hit_rate=_mean(rates),
        missed_bytes=missed,
        speed=speed,
    )


def _hit_rate(
    subject: Subject, n_slots: int, n_expert: int, top_k: int, curve: Curve | None
) -> HitRate:
    if curve is None:
        return expected_hit_rate(n_slots, n_expert, top_k, subject.architecture)
    rate = min(curve(n_slots / n_expert), n_slots / top_k, 1.0)
    return HitRate(rate, rate, rate)


def _mean(rates: list[HitRate]) -> HitRate:
    if not rates:
        return HitRate(1.0, 1.0, 1.0)
    return HitRate(
        *(sum(getattr(r, name) for r in rates) / len(rates) for name in ("expected", "low", "high"))
    )


def verdict(subject: Subject, run: RunSizes, ram_bytes: int) -> str:
    """ "fits", "streams" or "too big" for a budget."""
    fixed = estimate_fixed(subject.sizes, run)
    if ram_bytes < fixed.total:
        return "too big"
    slots = sum(group.slot_bytes * group.n_expert for group in subject.sizes.groups)
    return "fits" if fixed.total + slots <= ram_bytes else "streams"


def ladder(
    subject: Subject,
    run: RunSizes,
    floor_bytes: int,
    full_bytes: int,
    machine: Machine | None,
    curve: Curve | None = None,
) -> list[Forecast]:
    """Forecasts for a few round budgets between the floor and everything resident."""
    sizes = {
        _round_up(floor_bytes + (full_bytes - floor_bytes) * step // 8) for step in (1, 2, 4, 6, 8)
    }
    return [make_forecast(subject, run, size, machine, curve) for size in sorted(sizes)]


def _round_up(size: int) -> int:
    unit = _GIB if size >= 16 * _GIB else _GIB // 4 if size >= 2 * _GIB else 16 * _MIB
    return -(-size // unit) * unit


def advice(
    subject: Subject,
    run: RunSizes,
    forecast: Forecast,
    machine: Machine | None,
    curve: Curve | None = None,
) -> str:
    """One line: what would change most, or that nothing needs to."""
    plan = forecast.plan
    if not subject.layers:
        return "no routed experts: run it with llama.cpp, nothing is streamed"
    if plan.slots == tuple(layer.n_expert for layer in subject.layers):
        return "everything fits: plain llama.cpp is as fast, and the budget only bounds it"
    if min(plan.slots) < subject.top_k:
        context = plan.fixed.context
        if context > plan.slot_bytes and (less := _smaller(subject, run, plan)):
            return f"the context takes more than the cache: {less}"
        return (
            f"a layer caches fewer experts than a token uses ({subject.top_k}), so most are read "
            f"every time: give more --ram if there is any"
        )
    if forecast.speed is None or machine is None:
        return f"everything resident takes --ram {format_size(forecast.full_bytes)}"
    more = _round_up(min(plan.ram_bytes * 5 // 4, forecast.full_bytes))
    then = make_forecast(subject, run, more, machine, curve).speed
    if forecast.speed.read_seconds > forecast.speed.compute_seconds:
        words = "the drive sets the pace"
    else:
        words = "memory and processor set the pace, not the drive"
    if (
        then is not None
        and more > plan.ram_bytes
        and then.expected > 1.05 * forecast.speed.expected
    ):
        words += (
            f": --ram {format_size(more).replace(' ', '').replace('iB', '')} would give about "
            f"{then.expected:.3g} tok/s"
        )
    return words


def _smaller(subject: Subject, run: RunSizes, plan: Plan) -> str:
    """Which option gives most slots, and how many; "" when none gives more than there are."""
    tries = {"--flash-attn": replace(run, flash_attn=True)}
    if run.n_ctx > 1024:
        tries[f"--ctx {run.n_ctx // 2}"] = replace(run, n_ctx=run.n_ctx // 2)
    if run.n_ubatch > 64:
        tries[f"--ubatch {run.n_ubatch // 4}"] = replace(run, n_ubatch=run.n_ubatch // 4)
    slots = {
        words: min(plan_model(subject.sizes, other, plan.ram_bytes).slots)
        for words, other in tries.items()
    }
    best = max(slots, key=lambda words: slots[words])
    if slots[best] <= min(plan.slots):
        return ""
    return f"with {best} it holds {slots[best]} experts per layer"

"""The governor: pure arithmetic, then a real stream that others press."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flashmoe_gguf import Llama
from flashmoe_gguf.budget import GroupCost
from flashmoe_gguf.governor import Governor, slots_within, wanted_bytes
from flashmoe_gguf.host import MemoryLimit
from scenarios import last_logits

MIB = 1 << 20
LIMIT = 2000 * MIB
LOW = 16 * MIB + LIMIT // 200


@pytest.mark.parametrize(
    ("room", "wanted"),
    [
        (LOW, 500 * MIB),
        (3 * LOW, 500 * MIB),
        (LOW - 1, 500 * MIB - LOW - 1),  # back up to the middle, 2 * LOW
        (-100 * MIB, 400 * MIB - 2 * LOW),
        (3 * LOW + 1, 500 * MIB + LOW + 1),
        (-5000 * MIB, 0),
    ],
)
def test_slots_follow_the_room_without_swinging(room: int, wanted: int) -> None:
    assert wanted_bytes(500 * MIB, room, LIMIT) == wanted
    after = room - (wanted - 500 * MIB)
    assert wanted_bytes(wanted, after, LIMIT) == wanted or wanted == 0


def test_each_group_keeps_about_the_same_share() -> None:
    groups = [GroupCost(10, 8), GroupCost(20, 8), GroupCost(5, 8)]
    assert slots_within((8, 4, 0), groups, 160) == (8, 4, 0)
    assert slots_within((8, 4, 0), groups, 80) == (4, 2, 0)
    assert slots_within((8, 4, 0), groups, 0) == (0, 0, 0)
    for nbytes in range(0, 170, 7):
        slots = slots_within((8, 4, 0), groups, nbytes)
        cost = sum(g.slot_bytes * n for g, n in zip(groups, slots, strict=True))
        assert nbytes - 20 < cost <= nbytes or cost == 160


class Pressed:
    """A machine where others take what they like."""

    def __init__(self, llm: Llama) -> None:
        self.limit = 10_000 * MIB
        experts = llm._experts
        assert experts is not None and llm.plan is not None
        self.governor = Governor(
            experts,
            llm.plan.slots,
            experts.costs(),
            memory=lambda: MemoryLimit(self.limit, "test"),
            committed=lambda: 1000 * MIB,
            interval=1000,
        )

    def step(self, limit: int) -> None:
        self.limit = limit
        self.governor.step()


def test_a_stream_gives_slots_back_and_takes_them_again(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("qwen3moe")
    with_pressure = Llama(str(model), n_ctx=64, n_threads=1, n_slots=3, verbose=False)
    llm = Llama(str(model), n_ctx=64, n_threads=1, n_slots=3, verbose=False)
    pressed = Pressed(with_pressure)
    start = with_pressure.stats()
    assert start is not None and start.given_back_bytes == 0
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    limits = [10_000, 900, 900, 1000, 10_000, 800, 10_000, 10_000]
    for token, limit in zip(tokens, limits, strict=True):
        pressed.step(limit * MIB)
        stats = with_pressure.stats()
        assert stats is not None
        short = limit <= 1000
        assert (stats.given_back_bytes > 0) == short
        assert stats.slot_bytes + stats.given_back_bytes == start.slot_bytes
        assert stats.n_slots == (0 if short else 3)
        with_pressure.eval([token])
        llm.eval([token])
        assert (last_logits(with_pressure) == last_logits(llm)).all()
    pressed.governor.close()
    with_pressure.close()
    llm.close()


def test_a_model_with_a_budget_is_governed_until_it_is_closed(
    tiny_model: Callable[[str], Path],
) -> None:
    def governors() -> int:
        return sum(t.name == "flashmoe-governor" for t in threading.enumerate())

    before = governors()
    llm = Llama(str(tiny_model("qwen3moe")), n_ctx=64, n_threads=1, ram="8G", verbose=False)
    assert governors() == before + 1
    llm.close()
    assert governors() == before

"""Turns: one at a time, clients in rotation, nobody lost when somebody leaves."""

from __future__ import annotations

import anyio
from hypothesis import given
from hypothesis import strategies as st

from flashmoe_gguf.server.turns import Turns


def served(arrivals: list[str], leaving: frozenset[int] = frozenset()) -> list[int]:
    """The order in which requests of these clients are served, those that leave left out.

    All arrive while a first one computes.
    """
    order: list[int] = []
    at_once = 0

    async def request(turns: Turns, i: int, scope: anyio.CancelScope) -> None:
        nonlocal at_once
        with scope:
            await turns.take(arrivals[i])
            at_once += 1
            assert at_once == 1
            order.append(i)
            await anyio.sleep(0)
            at_once -= 1
            turns.give_back()

    async def run() -> None:
        turns = Turns()
        await turns.take("first")
        scopes = [anyio.CancelScope() for _ in arrivals]
        async with anyio.create_task_group() as group:
            for i, scope in enumerate(scopes):
                group.start_soon(request, turns, i, scope)
                await anyio.wait_all_tasks_blocked()
            for i in leaving:
                scopes[i].cancel()
            await anyio.wait_all_tasks_blocked()
            turns.give_back()
        await turns.take("last")  # it is free again

    anyio.run(run)
    return order


def test_one_client_is_served_in_order() -> None:
    assert served(["a"] * 4) == [0, 1, 2, 3]


def test_clients_take_turns() -> None:
    assert served(["a", "a", "a", "a", "b", "c", "b"]) == [0, 4, 5, 1, 6, 2, 3]


def test_whoever_leaves_is_passed_over() -> None:
    assert served(["a", "a", "b", "a"], frozenset({0, 2})) == [1, 3]


def test_a_turn_that_comes_while_leaving_goes_on() -> None:
    """Cancelled in the moment in which it was given."""

    async def run() -> None:
        turns = Turns()
        await turns.take("a")
        with anyio.CancelScope() as scope:

            async def give_and_cancel() -> None:
                turns.give_back()
                scope.cancel()

            async with anyio.create_task_group() as group:
                group.start_soon(give_and_cancel)
                await turns.take("b")
                try:
                    await anyio.sleep(5)
                finally:
                    turns.give_back()
        with anyio.fail_after(5):
            await turns.take("c")

    anyio.run(run)


@given(st.lists(st.sampled_from("abc"), max_size=12), st.frozensets(st.integers(0, 11), max_size=6))
def test_everybody_who_stays_is_served_once(arrivals: list[str], leaving: frozenset[int]) -> None:
    leaving = frozenset(i for i in leaving if i < len(arrivals))
    order = served(arrivals, leaving)
    staying = [i for i in range(len(arrivals)) if i not in leaving]
    assert sorted(order) == staying
    for client in "abc":
        own = [i for i in order if arrivals[i] == client]
        assert own == sorted(own)

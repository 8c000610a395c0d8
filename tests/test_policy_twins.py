"""Every policy in C and its twin in Python name the same victims, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from flashmoe_gguf._native import ForeignPolicy, LayerCounts, policy_names, simulate
from flashmoe_gguf.bench.synthetic_trace import synthetic_trace
from flashmoe_gguf.policy import NEVER, TWINS, Belady, Policy, next_use

NONE = 0xFFFF
SIMULATED = ("belady", "belady-bypass")
Experts = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Case:
    """Routing and the sizes of the caches that it goes through."""

    experts: Experts
    n_expert: Sequence[int]
    n_slots: Sequence[int]
    bypass: bool = False

    @property
    def arguments(self) -> tuple[Experts, npt.NDArray[np.int64], npt.NDArray[np.int32], object]:
        begins = np.array([0, len(self.experts) // 3, len(self.experts)], np.int64)
        return self.experts, begins, np.array(self.n_expert, np.int32), np.array(self.n_slots)


def ragged(seed: int) -> Experts:
    """Tokens that use fewer experts than others, or one twice, or none at all."""
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, 12, (400, 2, 4)).astype(np.uint16)
    experts[rng.random(experts.shape) < 0.3] = NONE
    return experts


CASES = {
    "a quarter": Case(synthetic_trace(1500, 3, 16, 2, seed=1), [16] * 3, [4] * 3),
    "half": Case(synthetic_trace(1500, 3, 16, 4, seed=2), [16] * 3, [8] * 3),
    "many": Case(synthetic_trace(300, 1, 256, 8, seed=3), [256], [64]),
    "bypass": Case(synthetic_trace(800, 2, 16, 3, seed=4), [16] * 2, [4, 6], bypass=True),
    "sizes": Case(synthetic_trace(800, 5, 8, 2, seed=5), [8] * 5, [0, 1, 2, 7, 8]),
    "fewer than k": Case(synthetic_trace(400, 2, 16, 6, seed=6), [16] * 2, [3, 5]),
    "ragged": Case(ragged(7), [12, 12], [3, 6]),
    "ragged, bypass": Case(ragged(8), [12, 12], [3, 6], bypass=True),
}


def twin_of(name: str, case: Case, seed: int) -> Policy:
    if name in SIMULATED:
        return Belady(case.n_expert, case.n_slots, case.experts)
    kind = TWINS[name]
    if name in ("random", "lecar"):
        return kind(case.n_expert, case.n_slots, seed)  # type: ignore[call-arg]
    return kind(case.n_expert, case.n_slots)


def evict(
    policy: Policy, case: Case, layer: int, resident: set[int], pinned: set[int]
) -> list[int]:
    """The expert that has left, or nothing when all are pinned."""
    may_leave = np.zeros(case.n_expert[layer], np.bool_)
    may_leave[list(resident - pinned)] = True
    victim = policy.victim(layer, may_leave)
    if victim < 0:
        assert not may_leave.any()
        return []
    assert may_leave[victim]
    policy.on_remove(layer, victim)
    resident.remove(victim)
    return [victim]


def replay(policy: Policy, case: Case) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """(token, layer, lookups, hits, victims) of a cache in a few lines of Python."""
    resident: list[set[int]] = [set() for _ in case.n_expert]
    begins = set(case.arguments[1].tolist())
    for token, layers in enumerate(case.experts.tolist()):
        if token in begins:
            policy.begin_sequence()
        for layer, ids in enumerate(layers):
            used = list(dict.fromkeys(e for e in ids if e != NONE))
            here, victims = resident[layer], list[int]()
            missing = sorted(e for e in used if e not in here)
            for e in used:
                (policy.on_hit if e in here else policy.on_miss)(layer, e)
            policy.end_token(layer)
            hits = len(used) - len(missing)
            for e in missing if case.n_slots[layer] else []:
                if len(here) >= case.n_slots[layer] and not case.bypass:
                    victims += evict(policy, case, layer, here, pinned=set(used))
                    if len(here) >= case.n_slots[layer]:
                        break
                here.add(e)
                policy.on_insert(layer, e)
            while len(here) > case.n_slots[layer]:
                victims += evict(policy, case, layer, here, pinned=set())
            yield token, layer, len(used), hits, victims


def in_c(name: str | ForeignPolicy, case: Case, seed: int) -> LayerCounts:
    return simulate(name, *case.arguments, seed=seed, bypass=case.bypass, victims=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", [*policy_names(), *SIMULATED])
def test_same_victims(name: str, case: Case) -> None:
    if name == "belady-bypass" and not case.bypass:
        case = Case(case.experts, case.n_expert, case.n_slots, bypass=True)
    seed = 11
    counts = in_c(name, case, seed)
    assert counts.victims is not None
    lookups, hits, evicted = (np.zeros(len(case.n_expert), np.int64) for _ in range(3))
    for token, layer, n, n_hits, victims in replay(twin_of(name, case, seed), case):
        in_library = [e for e in counts.victims[token, layer].tolist() if e != NONE]
        assert in_library == victims, f"token {token}, layer {layer}"
        lookups[layer] += n
        hits[layer] += n_hits
        evicted[layer] += len(victims)
    assert counts.lookups.tolist() == lookups.tolist()
    assert counts.hits.tolist() == hits.tolist()
    assert counts.evicted.tolist() == evicted.tolist()
    assert evicted.sum() > 0


def test_every_policy_has_a_twin() -> None:
    assert set(TWINS) == set(policy_names())


@pytest.mark.parametrize("name", ["random", "lecar"])
def test_the_seed_matters(name: str) -> None:
    case = CASES["half"]
    first, again, other = (in_c(name, case, seed).victims for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_twin_in_the_library_names_the_same_victims() -> None:
    case = CASES["bypass"]
    foreign = ForeignPolicy("twin", twin_of("arc", case, 0), case.n_expert)
    called = in_c(foreign, case, 0)
    assert foreign.failure == ""
    assert foreign.seconds > 0
    assert np.array_equal(called.victims, in_c("arc", case, 0).victims)


def test_next_use_by_looking_for_it() -> None:
    experts = ragged(9)
    found = next_use(experts)
    assert found.shape == experts.shape
    for token in range(0, 400, 7):
        for layer in range(2):
            for place, expert in enumerate(experts[token, layer].tolist()):
                later = np.flatnonzero((experts[token + 1 :, layer] == expert).any(axis=1))
                expected = NEVER if expert == NONE or not later.size else token + 1 + later[0]
                assert found[token, layer, place] == expected


def test_nothing_beats_belady_that_admits_all_misses() -> None:
    """And with bypass nothing beats Belady's with bypass."""
    for case in CASES.values():
        plain = Case(case.experts, case.n_expert, case.n_slots)
        best = in_c("belady", plain, 0).hits
        bypass = Case(case.experts, case.n_expert, case.n_slots, bypass=True)
        best_bypass = in_c("belady", bypass, 0).hits
        for name in policy_names():
            assert (in_c(name, plain, 0).hits <= best).all() or case is CASES["fewer than k"]
            assert (in_c(name, bypass, 0).hits <= best_bypass).all()

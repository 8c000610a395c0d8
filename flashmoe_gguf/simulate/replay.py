"""Traces through policies and cache sizes; what each did, and how near it came to Belady's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import ForeignPolicy, LayerCounts, policy_names, simulate
from flashmoe_gguf.errors import OptionError, TraceError
from flashmoe_gguf.policy import SIMULATED, TRAINED, find_class
from flashmoe_gguf.quotas import slots_for_share
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.trace import Trace

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Size:
    """How many experts a layer's cache holds: a share of them, or a number in each layer."""

    text: str
    share: float | None = None
    number: int | None = None

    def slots(self, n_expert: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[n_layers], at least one each."""
        if self.share is not None:
            return slots_for_share(n_expert, self.share)
        wanted = np.full(n_expert.shape, self.number, np.float64)  # however large
        slots: npt.NDArray[np.int32] = np.clip(wanted, 1, n_expert).astype(np.int32)
        return slots


@dataclass(frozen=True)
class Replay:
    """What one policy did with one size of cache. `counts` are per layer.

    `policy_failure`: why lru took over from a policy in Python; empty when it did not.
    """

    policy: str
    size: Size
    n_slots: npt.NDArray[np.int32]
    n_expert: npt.NDArray[np.int32]
    counts: LayerCounts
    missed_bytes: int | None
    policy_failure: str = ""

    @property
    def hit_rate(self) -> float:
        """Hits of lookups, 0 to 1."""
        return _share(self.counts.hits, self.counts.lookups)

    @property
    def cached_share(self) -> float:
        """Slots of experts, over all layers, 0 to 1."""
        return int(self.n_slots.sum()) / int(self.n_expert.sum())

    @property
    def layer_hit_rates(self) -> npt.NDArray[np.float64]:
        """[n_layers], 0 to 1."""
        return self.counts.hits / np.maximum(self.counts.lookups, 1)

    @property
    def refetch_rate(self) -> float:
        """Evicted experts that were needed again within 5 tokens, of all evicted, 0 to 1."""
        return _share(self.counts.refetched, self.counts.evicted)


def _share(part: Counts, whole: Counts) -> float:
    return int(part.sum()) / max(int(whole.sum()), 1)


def parse_sizes(text: str) -> list[Size]:
    """ "12.5%,25%,8": shares of a layer's experts, or slots in each layer.

    Raises OptionError for anything else.
    """
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", word)
        if match and match[2] and 0 < float(match[1]) <= 100:
            sizes.append(Size(word.strip(), share=float(match[1]) / 100))
        elif match and not match[2] and match[1].isdigit() and int(match[1]) > 0:
            sizes.append(Size(word.strip(), number=int(match[1])))
        else:
            raise OptionError(
                f"'{word.strip()}' is not a cache size",
                "give shares of a layer's experts or slots per layer, such as 12.5%,25%,8",
            )
    return sizes


def policies_to_run(names: Sequence[str], bypass: bool) -> list[str]:
    """The policies asked for (none: all), with the two that gaps are measured by, each once.

    Raises OptionError for an unknown name.
    """
    known = [*(name for name in policy_names() if name not in TRAINED), *SIMULATED]
    for name in names:
        if name in TRAINED:
            raise OptionError(
                f"policy {name} decides nothing before it is trained",
                "`flashmoe train` trains it on traces and compares it with the others",
            )
        if ":" not in name and name not in known:
            raise OptionError(
                f"there is no policy '{name}'",
                f"one of {', '.join(known)}, or package.module:Class for one in Python",
            )
    wanted = [*(names or known), "lru", reference(bypass)]
    if bypass:  # Belady's with bypass goes by one name
        wanted = [name for name in wanted if name != "belady"]
    return list(dict.fromkeys(wanted))


def reference(bypass: bool) -> str:
    """The policy that no other can beat."""
    return "belady-bypass" if bypass else "belady"


def half(trace: Trace, which: str) -> Trace:
    """The half of the sequences that `numpy.random.default_rng(seed).permutation` puts first
    (`train`) or last (`test`), in file order; seed 0. A number: the test half of that seed.

    Raises TraceError when there are too few sequences, OptionError for another word.
    """
    n = len(trace.seq) - 1
    if n < 2:
        raise TraceError(
            "the trace is one sequence, which cannot be split", "leave --split away for all of it"
        )
    if which not in ("test", "train") and not which.isdecimal():
        raise OptionError(f"'{which}' is no part of a trace", "give test, train or a seed")
    seed = int(which) if which.isdecimal() else 0
    order = np.random.default_rng(seed).permutation(n)
    return trace.select(np.sort(order[: n // 2] if which == "train" else order[n // 2 :]))


def expert_bytes_of(trace: Trace, geometry: Geometry) -> Counts:
    """[n_layers] bytes of one expert in each of the trace's layers.

    Raises TraceError when the trace cannot be of this model.
    """
    groups = {g.layer: g for g in geometry.groups if g.family == "exps"}
    sizes = []
    for layer, n_expert in zip(trace.layers.tolist(), trace.n_expert.tolist(), strict=True):
        group = groups.get(layer)
        if group is None or group.n_expert != n_expert:
            has = "no experts" if group is None else f"{group.n_expert} experts"
            raise TraceError(
                f"layer {layer} of the trace has {n_expert} experts, that of the model {has}",
                "give the model that the trace was made with, or --expert-bytes",
            )
        sizes.append(group.expert_bytes)
    return np.array(sizes, np.int64)


def replay(
    trace: Trace,
    policy: str,
    size: Size,
    *,
    bypass: bool = False,
    seed: int = 0,
    expert_bytes: Counts | None = None,
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Replays the trace from a cold cache; `progress` gets the tokens done so far.

    policy: of the library, of Belady's, or `package.module:Class`. expert_bytes [n_layers].
    """
    n_slots = size.slots(trace.n_expert)
    runs: str | ForeignPolicy = policy
    if ":" in policy:
        n_expert = trace.n_expert.tolist()
        made = find_class(policy).make(n_expert, n_slots.tolist())
        runs = ForeignPolicy(policy, made, n_expert)
    counts = simulate(
        runs,
        trace.experts,
        trace.seq[:-1],
        trace.n_expert,
        n_slots,
        seed=seed,
        bypass=bypass,
        progress=progress,
    )
    missed = None
    if expert_bytes is not None:
        missed = int(((counts.lookups - counts.hits) * expert_bytes).sum())
    failure = runs.failure if isinstance(runs, ForeignPolicy) else ""
    return Replay(policy, size, n_slots, trace.n_expert, counts, missed, failure)


def replay_all(
    trace: Trace,
    policies: Sequence[str],
    sizes: Iterable[Size],
    *,
    bypass: bool = False,
    seed: int = 0,
    expert_bytes: Counts | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> list[list[Replay]]:
    """For each size the policies, best first. `progress` gets a policy's name and all tokens
    replayed so far, of n_tokens for each policy and size.
    """
    blocks: list[list[Replay]] = []
    done = 0
    for size in sizes:
        block = []
        for policy in policies:

            def told(tokens: int, policy: str = policy, before: int = done) -> None:
                if progress is not None:
                    progress(policy, before + tokens)

            block.append(
                replay(
                    trace,
                    policy,
                    size,
                    bypass=bypass,
                    seed=seed,
                    expert_bytes=expert_bytes,
                    progress=told,
                )
            )
            done += trace.n_tokens
        blocks.append(sorted(block, key=lambda r: -r.hit_rate))
    return blocks

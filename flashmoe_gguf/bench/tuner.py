"""The search behind `flashmoe tune`: one setting after the other, each tried by short decodes.

It starts from the defaults. A stage tries the values of one setting beside the best so far, taking
turns; the fastest takes over if its median is better by more than chance. In the end the winner and
the defaults take turns once more, and only that comparison says what was gained.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashmoe_gguf.bench.arm import STREAMED, Arm
from flashmoe_gguf.bench.cases import Case, limit_text
from flashmoe_gguf.bench.gate import Gate
from flashmoe_gguf.bench.limit import Limiter
from flashmoe_gguf.bench.runner import Bench, Progress, Row
from flashmoe_gguf.disk import Bandwidth
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.store import Geometry
from flashmoe_gguf.tuning import REQUEST_BYTES, Tuning

ROUNDS = 2  # of a stage, where there is time; else 1
FINAL_ROUNDS = (3, 7)  # least and most
# Medians of short decodes differ by so much without a reason.
MARGIN = 0.03
# And the winner must win so many of the last rounds, which few lucky runs do not.
WINS = 0.75

REQUEST_SIZES = (256 << 10, 512 << 10, 1 << 20, 2 << 20)
DEPTHS = (1, 2, 4, 8)
# What the drive does so much slower than its best is not tried.
_WORTH = 0.6

DEFAULTS = Tuning()


@dataclass(frozen=True)
class Stage:
    """A setting (a field of `Tuning`) and the values to try beside the one in use."""

    field: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """What one value of a stage's setting gave: tok/s of each run, and whether it took over."""

    field: str
    tuning: Tuning
    tok_s: tuple[float, ...]
    kept: bool

    @property
    def median(self) -> float:
        return statistics.median(self.tok_s)


@dataclass(frozen=True)
class Outcome:
    """`best` is `DEFAULTS` where nothing was found to be better. `before` and `after`: tok/s of
    the defaults and of `candidate`, what the stages led to, from runs in turn; empty where the
    stages led nowhere. `untried`: settings for which there was no time.
    """

    best: Tuning
    candidate: Tuning
    before: tuple[float, ...]
    after: tuple[float, ...]
    trials: tuple[Trial, ...]
    untried: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Of the candidate's median over that of the defaults, 0 where they are the same."""
        if not self.after:
            return 0.0
        return statistics.median(self.after) / statistics.median(self.before) - 1


# tok/s of each, by tuning, from so many rounds in which they take turns.
Measure = Callable[[Sequence[Tuning], int], list[tuple[float, ...]]]


def stages_for(grid: Sequence[Bandwidth], max_part_bytes: int) -> list[Stage]:
    """What to try: what matters most first. Depths and sizes with which the drive is slow are left
    out, and sizes that make no difference: a read is never larger than a part of an expert.
    `grid` may be empty: the drive is not known.
    """
    best = max((row.bytes_per_second for row in grid), default=0.0)
    depths = [d for d in DEPTHS if _reaches([r for r in grid if r.depth == d], best)]
    sizes = [
        size
        for size in REQUEST_SIZES
        if _reaches([r for r in grid if r.request_bytes == size], best)
        and min(size, max_part_bytes) != min(REQUEST_BYTES, max_part_bytes)
        and (
            size == REQUEST_SIZES[0]
            or REQUEST_SIZES[REQUEST_SIZES.index(size) - 1] < max_part_bytes
        )
    ]
    return [
        Stage("n_workers", tuple(depths)),
        Stage("request_bytes", tuple(sizes)),
        Stage("lookahead", ("off", "2")),
        Stage("policy", ("dlfu", "lru")),
    ]


def _reaches(rows: Sequence[Bandwidth], best: float) -> bool:
    return not best or max((r.bytes_per_second for r in rows), default=0.0) >= _WORTH * best


def search(
    stages: Sequence[Stage],
    measure: Measure,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Tries the stages until `clock` says `deadline`, less the time of the last comparison.

    Raises OptionError when there was no time for any stage, and what `measure` raises.
    """
    begun = clock()
    measure([DEFAULTS], 1)  # says how long a run takes; its speed counts for nothing
    taken, runs = clock() - begun, 1
    best = DEFAULTS
    trials: list[Trial] = []
    untried: list[str] = []
    for stage in stages:
        tunings = [best, *(replace(best, **{stage.field: v}) for v in stage.values)]
        tunings = list(dict.fromkeys(tunings))
        if len(tunings) == 1:
            continue
        each = taken / runs
        left = deadline - clock() - 2 * FINAL_ROUNDS[0] * each
        rounds = min(ROUNDS, int(left / (each * len(tunings))))
        if rounds < 1:
            untried.append(stage.field)
            continue
        at = clock()
        speeds = measure(tunings, rounds)
        taken, runs = taken + clock() - at, runs + rounds * len(tunings)
        medians = [statistics.median(s) for s in speeds]
        fastest = medians.index(max(medians))
        winner = fastest if medians[fastest] > medians[0] * (1 + MARGIN) else 0
        trials += [
            Trial(stage.field, tuning, tok_s, i == winner)
            for i, (tuning, tok_s) in enumerate(zip(tunings, speeds, strict=True))
        ]
        best = tunings[winner]
    if not trials:
        needed = taken / runs * (1 + len(stages[0].values) + 2 * FINAL_ROUNDS[0] + 1)
        raise OptionError(
            f"there was no time to try anything: one run takes {taken / runs:.0f} s",
            f"give --seconds {int(needed * 1.2) + 1} or more",
        )
    if best == DEFAULTS:
        return Outcome(best, best, (), (), tuple(trials), tuple(untried))
    fit = int((deadline - clock()) / (2 * taken / runs))
    before, after = measure([DEFAULTS, best], max(FINAL_ROUNDS[0], min(FINAL_ROUNDS[1], fit)))
    faster = sum(b > a for a, b in zip(before, after, strict=True))
    better = statistics.median(after) > statistics.median(before) * (
        1 + MARGIN
    ) and faster >= WINS * len(before)
    return Outcome(best if better else DEFAULTS, best, before, after, tuple(trials), tuple(untried))


class Decodes:
    """`Measure` by decoding for real: each run a fresh process under the limit, all of them held
    to the same output. `rows` has every run so far.
    """

    def __init__(
        self,
        base: Arm,
        geometry: Geometry,
        limit_bytes: int,
        limiter: Limiter,
        facts: Row,
        progress: Progress,
    ) -> None:
        self._base = replace(base, kind=STREAMED, ram=limit_bytes)
        self._limit, self._limiter, self._facts = limit_bytes, limiter, facts
        self._n_expert = [group.n_expert for group in geometry.decode_groups]
        self.progress = progress
        self.rows: list[Row] = []
        self.gate = Gate()

    def __call__(self, tunings: Sequence[Tuning], n_rounds: int) -> list[tuple[float, ...]]:
        """Raises FlashMoEError for a run that was killed or could not load, OptionError where all
        experts fit, OutputDiffersError.
        """
        cases = [Case(arm_for(self._base, tuning), self._limit) for tuning in tunings]
        bench = Bench(cases, n_rounds, self._limiter, self._facts, "advise")
        self.progress.taken.clear()
        speeds: dict[str, list[float]] = {case.name: [] for case in cases}
        for rows in bench.rounds(self.gate, self.progress):
            for row in rows:
                if "failed" in row:
                    raise FlashMoEError(
                        f"a run with {row['arm']} was {row['failed']}", "give a larger --ram"
                    )
                if row["group_slots"] == self._n_expert:
                    raise OptionError(
                        f"all experts fit into {limit_text(self._limit)}: nothing is read while "
                        "decoding, so there is nothing to tune",
                        "give the --ram that the model is to run in, if it is less",
                    )
                speeds[row["arm"]].append(row["decode_tok_s"])
            self.rows += rows
        return [tuple(speeds[case.name]) for case in cases]


def arm_for(base: Arm, tuning: Tuning) -> Arm:
    """An arm with these settings; its name tells them as `bench --arm` takes them."""
    name = (
        f"workers={tuning.n_workers},request={tuning.request_bytes >> 10}K,"
        f"lookahead={tuning.lookahead},policy={tuning.policy}"
    )
    return replace(
        base,
        name=name,
        n_workers=tuning.n_workers,
        request_bytes=tuning.request_bytes,
        lookahead=tuning.lookahead,
        policy=tuning.policy,
    )

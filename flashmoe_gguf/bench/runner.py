"""The rounds of a bench: arms in turn, each in a fresh process with cold caches; rows come out."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from flashmoe_gguf.bench import arm as arm_process
from flashmoe_gguf.bench.arm import STOCK_DEFAULT, STREAMED, Arm
from flashmoe_gguf.bench.bounds import add_bounds
from flashmoe_gguf.bench.cases import Case, limit_text
from flashmoe_gguf.bench.cold import make_cold
from flashmoe_gguf.bench.gate import Gate, Output, OutputDiffersError
from flashmoe_gguf.bench.limit import Ended, Limiter
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.placement import AUTO
from flashmoe_gguf.replacing import first_bytes
from flashmoe_gguf.store import read_geometry
from flashmoe_gguf.trace import Trace, read_trace

Row = dict[str, Any]
# Stays out of the rows: the gate has seen it, and it is long.
_NOT_IN_ROWS = ("logits", "tokens", "process_swap_bytes")


@dataclass
class Progress:
    """Where a bench is; written by the runner, read by whoever shows it. `to_run`: the cases left
    in this round, the one that runs first. `seconds_*` estimate.
    """

    round: int = 0
    n_rounds: int = 0
    arm: str = ""
    arm_number: int = 0
    n_arms: int = 0
    phase: str = ""
    done: int = 0
    total: int = 0
    arm_began: float = 0.0
    seconds_done: float = 0.0
    taken: dict[int, list[float]] = field(default_factory=dict)
    to_run: Sequence[int] = ()

    def expected(self, number: int) -> float:
        """Seconds that an arm takes: as it did, or as the others did; 0 when nothing is known."""
        mine = self.taken.get(number) or [s for each in self.taken.values() for s in each]
        return sum(mine) / len(mine) if mine else 0.0

    @property
    def share(self) -> tuple[float, float]:
        """(seconds done, seconds in all) as far as they can be known; (0, 0) at the start."""
        if not self.taken:
            return 0.0, 0.0
        each = [self.expected(number) for number in range(self.n_arms)]
        here = min(time.monotonic() - self.arm_began, each[self.to_run[0]])
        to_come = sum(each[i] for i in self.to_run) + sum(each) * (self.n_rounds - 1 - self.round)
        return self.seconds_done + here, self.seconds_done + to_come


@dataclass(frozen=True)
class Bench:
    """All that a bench needs. `facts` go into every row; `trace` is the routing of this very run,
    or None; `drive` measures bytes per second before every round, None unknown. `timeout`: seconds
    that one run of an arm may take in all.
    """

    cases: Sequence[Case]
    n_rounds: int
    limiter: Limiter
    facts: Row
    cold: str = "auto"
    timeout: float | None = None
    drive: Callable[[], float | None] = lambda: None
    trace: Trace | None = None

    def check(self) -> None:
        """Loads each streamed arm once, under its lowest limit: what it refuses is known now and
        not after an hour of the other arms. Raises FlashMoEError.
        """
        lowest: dict[str, Case] = {}
        for case in self.cases:
            if case.arm.kind == STREAMED:
                before = lowest.setdefault(case.name, case)
                if (case.limit_bytes or 0) < (before.limit_bytes or 0):
                    lowest[case.name] = case
        for case in lowest.values():
            result, _ = run_arm(
                replace(case.arm, n_gen=0), case.limit_bytes, self.limiter, Progress()
            )
            if result is None:
                raise FlashMoEError(
                    f"the arm {case.name} was killed while it loaded: "
                    f"{limit_text(case.limit_bytes)} are too little",
                    "give a larger --ram",
                )

    def record(self, progress: Progress) -> Trace:
        """The routing of this very run, by one more run of a streamed arm, outside the rounds.

        All arms make the same tokens, so it is the routing of all. Raises FlashMoEError.
        """
        streamed = [case for case in self.cases if case.arm.kind == STREAMED]
        case = max(streamed, key=lambda c: (c.limit_bytes is None, c.limit_bytes or 0))
        with tempfile.TemporaryDirectory(prefix="flashmoe-bench-") as folder:
            path = Path(folder) / "routing.npz"
            arm = replace(case.arm, name=f"{case.name} (recording)", trace=str(path), again=False)
            result, ended = run_arm(arm, case.limit_bytes, self.limiter, progress, self.timeout)
            if result is None:
                raise FlashMoEError(
                    f"the arm {arm.name} was {_how_it_failed(ended)}",
                    f"give a larger {'--timeout' if ended.timed_out else '--ram'}",
                )
            return read_trace(path)

    def rounds(self, gate: Gate, progress: Progress) -> Iterator[list[Row]]:
        """The rows of one round after the other, each held to the same output before it is given.
        A round begins with the arm after that which the one before began with: none always follows
        the same one, which may leave memory in pieces, or the drive busy.

        An arm that was killed or crashed is not run again. Raises OutputDiffersError, and
        FlashMoEError for an arm that cannot run at all.
        """
        progress.n_rounds, progress.n_arms = self.n_rounds, len(self.cases)
        left = list(range(len(self.cases)))
        for number in range(self.n_rounds):
            rows = []
            bandwidth = self.drive()
            order = left[number % len(left) :] + left[: number % len(left)] if left else []
            for position, index in enumerate(order):
                case = self.cases[index]
                progress.round, progress.arm, progress.arm_number = number, case.name, position
                progress.to_run = order[position:]
                progress.phase, progress.arm_began = "starting", time.monotonic()
                progress.done = progress.total = 0
                row = self._run(case, gate, progress)
                took = time.monotonic() - progress.arm_began
                progress.taken.setdefault(index, []).append(took)
                progress.seconds_done += took
                rows.append({**row, "round": number, "disk_bytes_per_second": bandwidth})
                if "failed" in row:
                    left.remove(index)
                    progress.taken[index] = [0.0]
            add_bounds(rows, bandwidth, self.trace, _expert_bytes(self.cases))
            yield rows

    def _run(self, case: Case, gate: Gate, progress: Progress) -> Row:
        files = [file.path for file in read_geometry(case.arm.model).files]
        cold = make_cold(files, self.cold)
        row = self._conditions(case) | {"cold": cold}
        result, ended = run_arm(case.arm, case.limit_bytes, self.limiter, progress, self.timeout)
        row |= {"peak_bytes": ended.peak_bytes, "killed": ended.killed and not ended.timed_out}
        if result is None:
            return row | {"failed": _how_it_failed(ended)}
        gate.add(
            Output(
                case.name,
                case.arm.kind,
                result["logits"],
                result["tokens"],
                result["lookups"],
            )
        )
        swapped = [s for s in (ended.swap_bytes, result["process_swap_bytes"]) if s is not None]
        return row | {
            **{key: value for key, value in result.items() if key not in _NOT_IN_ROWS},
            "swap_bytes": max(swapped, default=None),
            "token_hash": _hash_of(result["tokens"]),
            "logits_hash": _hash_of(result["logits"]),
        }

    def _conditions(self, case: Case) -> Row:
        """What was asked of an arm; what it made of it (slots, policy, I/O) overrides some."""
        arm = case.arm
        streams = arm.kind == STREAMED
        return {
            **self.facts,
            "arm": case.name,
            "kind": arm.kind,
            "limit_bytes": case.limit_bytes,
            "limiter": self.limiter.name,
            "layout": case.layout,
            "policy": arm.policy if streams else None,
            "io_mode": arm.io if streams else "mmap",
            "slots": arm.n_slots if streams else None,
            "lookahead": arm.lookahead if streams else None,
            "policy_file": arm.policy_file if streams else None,
            "workers": arm.n_workers if streams else None,
            "request_bytes": arm.request_bytes if streams else None,
            "n_gpu_layers": arm.n_gpu_layers or None,
            "n_ctx": arm.n_ctx,
            "n_threads": arm.n_threads,
            "n_ubatch": arm.n_ubatch,
            "n_prompt": arm.n_prompt,
            "n_warmup_asked": arm.n_warmup,
            "n_gen_asked": arm.n_gen,
            "seconds_cap": arm.seconds,
            "again": arm.again or None,
        }


def run_arm(
    arm: Arm,
    limit_bytes: int | None,
    limiter: Limiter,
    progress: Progress,
    timeout: float | None = None,
) -> tuple[Row | None, Ended]:
    """(what the arm reported, how it ended); the first is None for one that was killed, and for
    stock llama.cpp with its defaults that crashed: its repacking does on some processors.

    Raises FlashMoEError with the arm's own error, and OutputDiffersError for another that crashed.
    """
    result: list[Row] = []
    errors: list[FlashMoEError] = []

    def on_line(line: str) -> None:
        event = json.loads(line)
        if event["event"] == "progress":
            progress.phase = event["phase"]
            progress.done, progress.total = event["done"], event["total"]
        elif event["event"] == "error":
            errors.append(FlashMoEError(f"the arm {arm.name}: {event['message']}", event["hint"]))
        else:
            result.append(event["result"])

    with tempfile.TemporaryDirectory(prefix="flashmoe-bench-") as cache:
        request = arm_process.to_json(_from_cold(arm, Path(cache)))
        ended = limiter.run(
            arm_process.command(), limit_bytes, request, _only_json(on_line), timeout
        )
    if errors:
        raise errors[0]
    if result and ended.returncode == 0:
        return result[0], ended
    if ended.killed or (arm.kind == STOCK_DEFAULT and ended.signal is not None):
        return None, ended
    raise OutputDiffersError(
        f"the arm {arm.name} ended with code {ended.returncode}: {ended.last_words}",
        "no speed is reported",
    )


def _from_cold(arm: Arm, cache: Path) -> Arm:
    """The arm with an empty cache directory, and a copy of its policy file: policies keep what
    they learn, and would know this very routing better in each round.
    """
    given = arm.policy_file
    if given is None:
        return replace(arm, cache=str(cache))
    copy = cache / "policy"
    try:
        shutil.copyfile(given, copy)
    except OSError as error:
        raise OptionError(
            f"cannot read {given}: {error.strerror or error}", "give a policy file"
        ) from error
    return replace(arm, cache=str(cache), policy_file=str(copy))


def _how_it_failed(ended: Ended) -> str:
    if ended.killed:
        if ended.timed_out:
            return "stopped, took too long"
        return "killed, out of memory" if ended.oom_kills else "killed"
    return f"crashed, signal {ended.signal}"


def _only_json(on_line: Callable[[str], None]) -> Callable[[str], None]:
    """A process that is killed may leave half a line."""

    def guarded(line: str) -> None:
        if line.endswith("}\n"):
            on_line(line)

    return guarded


def measure_floor(base: Arm, limiter: Limiter) -> int:
    """The least memory with which the model streams in this context, in bytes, and 2 % more: what
    a process takes beside the model differs a little from one to the next.
    """
    return int(_try_without_slots(base, limiter)["floor_bytes"] * 1.02)


def resolve_layers(base: Arm, limiter: Limiter) -> Arm:
    """The arm with a number of layers on the devices in place of "auto": the same for all arms."""
    if base.n_gpu_layers != AUTO:
        return base
    return replace(base, n_gpu_layers=_try_without_slots(base, limiter)["n_gpu_layers"])


def _try_without_slots(base: Arm, limiter: Limiter) -> Row:
    floor = replace(base, name="floor", kind=STREAMED, n_gen=0, n_slots=0)
    result, _ = run_arm(floor, None, limiter, Progress())
    if result is None:
        raise FlashMoEError("the model does not load", "there is too little memory")
    return result


def _expert_bytes(cases: Sequence[Case]) -> dict[int, int]:
    """Bytes of one expert by layer, as the stock file has them."""
    geometry = read_geometry(cases[0].arm.model)
    return {group.layer: group.expert_bytes for group in geometry.decode_groups}


def _hash_of(values: Sequence[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(" ".join(map(str, values)).encode())


def check_rows(path: Path) -> None:
    """Raises FlashMoEError for a file that rows cannot be appended to, or that holds others."""
    write_rows(path, [])
    if first_bytes(path, 1) not in (b"", b"{"):
        raise FlashMoEError(
            f"{path}: a file that holds no rows is there already", "give another name"
        )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows to a JSONL file. Raises FlashMoEError when that fails."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        raise FlashMoEError(
            f"cannot write {path}: {error.strerror or error}",
            "name a file in a folder that exists and has room",
        ) from error

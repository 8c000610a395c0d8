"""`make fuzz`: so many damaged models through everything, and a list of what went wrong.

Children do the work, one model after the other; one that dies or hangs has named its model in
memory that is shared with this process, is asked again for llama.cpp's last words, and is
replaced from the next model on. The exit code is 1 if anything is found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import flashmoe_gguf.llama  # noqa: F401  before the children, which then start at once
from fuzz import target
from fuzz.mutate import damaged
from fuzz.seeds import Seed, make_seeds

MEMORY_BYTES = 2 << 30
HANG_SECONDS = 20.0
_TICK_SECONDS = 0.02
_SLOT = struct.Struct("<QQ")  # model, whether it is being loaded


@dataclass
class Findings:
    """What went wrong, by signature: how often, and the first model of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    def add(self, signature: str, index: int) -> None:
        self.counts[signature] += 1
        self.first.setdefault(signature, index)


@dataclass
class Child:
    """One child, the model it was seen at last, and for how long: see `_counted`."""

    number: int
    pid: int
    seen: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def look(self, at: tuple[int, int], passed: float) -> bool:
        """Add `passed` seconds to what it spends on model `at`; returns whether it hangs."""
        if at != self.seen:
            self.seen, self.seconds, self.cpu_seconds = at, 0.0, 0.0
        elif self.seconds <= 1.0:
            self.seconds += passed
        else:
            states, cpu_seconds = _threads(self.pid)
            self.seconds += _counted(
                states, cpu_seconds - (self.cpu_seconds or cpu_seconds), passed
            )
            self.cpu_seconds = cpu_seconds
        return self.seconds > HANG_SECONDS


def _counted(states: str, computed: float, passed: float) -> float:
    """How much of `passed` seconds counts for a child whose threads are in `states` (proc(5)).

    What it `computed`; and waiting too, but not for a processor, nor stopped by a signal.
    """
    return computed if set(states) & set("RTt") else max(passed, computed)


def _threads(pid: int) -> tuple[str, float]:
    """The states of a process's threads, and the CPU time of all; nothing if it has ended."""
    fields: list[list[str]] = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            fields.append(stat.read_text().rpartition(")")[2].split())
    ticks = sum(int(ticks) for field in fields for ticks in field[11:13])
    return "".join(field[0] for field in fields), ticks / os.sysconf("SC_CLK_TCK")


class _Clock:
    """Time in which this process ran: a run that is stopped and continued has not hung."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def wait(self) -> float:
        """Sleep for a moment; returns how long that was, but a pause counts for little."""
        time.sleep(_TICK_SECONDS)
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, 10 * _TICK_SECONDS)


@dataclass(frozen=True)
class Run:
    seeds: list[Seed]
    seed: int
    first: int
    end: int
    jobs: int
    work: Path
    with_load: bool

    def model(self, index: int, folder: Path) -> tuple[Seed, Path]:
        item = damaged(self.seeds, self.seed, index)
        return item.seed, target.write(folder, item.files)


def _work(run: Run, number: int, start: int, slots: mmap.mmap, parent: int) -> None:
    """A child's life: every jobs-th model from `start`; results go to a file of its own."""
    os.fsync = lambda fd: None  # nothing here has to survive
    target.limit_memory(MEMORY_BYTES)
    here = run.work / f"child{number}"
    here.mkdir(exist_ok=True)
    tally: Counter[str] = Counter()
    answers: set[str] = set()
    with (here / "results.jsonl").open("a") as results:
        for index in range(start, run.end, run.jobs):
            if os.getppid() != parent:
                return
            _SLOT.pack_into(slots, number * _SLOT.size, index, 0)
            seed, model = run.model(index, here / "model")
            try:
                steps = target.examine(model, here / "work")
                if run.with_load and seed.loads and steps["inspect"] == "passes":
                    _SLOT.pack_into(slots, number * _SLOT.size, index, 1)
                    steps["load"] = target.load(model)
            except (Exception, target.TooMuch) as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = (
                    f"{type(error).__name__}: {error} at {Path(where.filename).name}:{where.name}"
                )
                results.write(json.dumps({"index": index, "found": text}) + "\n")
                results.flush()
                continue
            for step, result in steps.items():
                tally[f"{step}: {'passes' if result == 'passes' else 'refused'}"] += 1
                # The first of each kind of message, for the corpus.
                kind = f"{step}: " + re.sub(r"'[^']*'|[0-9][0-9,]*|[^ ]*[/.][^ ]*", "#", result)
                if kind not in answers:
                    answers.add(kind)
                    size = sum(f.stat().st_size for f in model.parent.iterdir())
                    row = {"index": index, "kind": kind, "size": size, "files": len(seed.files)}
                    results.write(json.dumps(row) + "\n")
            results.write(json.dumps({"index": index, "tally": tally}) + "\n")
            results.flush()  # the next may be the last
            tally.clear()


def _fork(run: Callable[[], None], log: Path | None = None) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if log is not None:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def last_words(run: Run, index: int) -> str:
    """Load a model once more, with llama.cpp's messages: what it said in the end."""
    log = run.work / "last_words.txt"

    def again() -> None:
        target.limit_memory(MEMORY_BYTES)
        _, model = run.model(index, run.work / "again")
        target.load(model, verbose=True)

    pid, clock = _fork(again, log), _Clock()
    child = Child(0, pid)
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if child.look((0, 0), clock.wait()):
            os.kill(pid, signal.SIGKILL)
    lines = log.read_text(errors="replace").splitlines()
    told = [line for line in lines if re.search(r"GGML_A|terminate|what\(\)|fatal error", line)]
    words = " / ".join(told[-1:]) if told else "silent, after: " + (lines[-1] if lines else "")
    words = re.sub(r"[^ ]*/(?=[a-z0-9._-]+:[0-9])", "", words)
    return f"{_manner(ended[1])}: {words[:300]}"


def _manner(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit {os.WEXITSTATUS(status)}"


def supervise(run: Run, findings: Findings) -> None:
    """Keep the children going until all models are done."""
    parent = os.getpid()
    slots = mmap.mmap(-1, run.jobs * _SLOT.size)

    def start(number: int, index: int) -> Child:
        _SLOT.pack_into(slots, number * _SLOT.size, index, 0)
        pid = _fork(lambda: _work(run, number, index, slots, parent))
        return Child(number, pid, (index, 0))

    children = [start(n, run.first + n) for n in range(run.jobs)]
    told, clock = time.monotonic(), _Clock()
    while children:
        passed = clock.wait()
        for child in list(children):
            at = _SLOT.unpack_from(slots, child.number * _SLOT.size)
            hung = child.look(at, passed)
            if hung:
                os.kill(child.pid, signal.SIGKILL)
            pid, status = os.waitpid(child.pid, 0 if hung else os.WNOHANG)
            if pid == 0:
                continue
            children.remove(child)
            if status == 0:
                continue
            index, loading = _SLOT.unpack_from(slots, child.number * _SLOT.size)
            if hung:
                findings.add(f"hangs in {'load' if loading else 'examine'}", index)
            elif loading:
                findings.add(f"load {last_words(run, index)}", index)
            else:
                findings.add(f"examine {_manner(status)}", index)
            if index + run.jobs < run.end:
                children.append(start(child.number, index + run.jobs))
        if time.monotonic() - told > 30:
            told = time.monotonic()
            done = min((c.seen[0] for c in children), default=run.end) - run.first
            print(f"{done:,} of {run.end - run.first:,}, {sum(findings.counts.values())} found")
            sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    parser.add_argument("--jobs", type=int, default=max(1, min(os.cpu_count() or 1, 8)))
    parser.add_argument("--no-load", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--keep", type=Path, help="a folder for the first model of each finding")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    began = time.monotonic()
    findings = Findings()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        work = Path(name)
        (work / "seeds").mkdir()
        end = options.first + options.count
        jobs = min(options.jobs, options.count)
        seeds = make_seeds(work / "seeds")
        run = Run(seeds, options.seed, options.first, end, jobs, work, not options.no_load)
        supervise(run, findings)
        tally: Counter[str] = Counter()
        kinds: dict[str, dict[str, int]] = {}
        for file in work.glob("child*/results.jsonl"):
            for line in file.read_text().splitlines():
                row = json.loads(line)
                tally.update(row.get("tally", {}))
                if "found" in row:
                    findings.add(row["found"], row["index"])
                if "kind" in row:
                    kinds[row["kind"]] = min(row, kinds.get(row["kind"], row), key=_size)
        if options.keep is not None:
            _keep(run, findings, kinds, options.keep)
    for what, count in sorted(tally.items()):
        print(f"{count:9,} {what}")
    cpu_seconds = sum(os.times()[:4])
    print(f"{len(kinds)} kinds of answers")
    print(f"{time.monotonic() - began:.0f} s, {cpu_seconds:.0f} s of CPU time, {jobs} at a time")
    return _report(findings, options.seed)


def _size(row: dict[str, int]) -> int:
    return row["size"]


def _keep(run: Run, findings: Findings, kinds: dict[str, dict[str, int]], folder: Path) -> None:
    """The first model of each finding, and a list of the smallest of each kind of answer."""
    for signature, index in findings.first.items():
        _, model = run.model(index, run.work / "kept")
        place = folder / str(index)
        place.mkdir(parents=True, exist_ok=True)
        for file in model.parent.iterdir():
            (place / file.name).write_bytes(file.read_bytes())
        (place / "finding.txt").write_text(signature + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row | {"run": run.seed} for _, row in sorted(kinds.items())]
    (folder / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _report(findings: Findings, seed: int) -> int:
    for signature, count in findings.counts.most_common():
        print(f"FOUND {count:6,} x {signature}")
        index = findings.first[signature]
        print(f"      again: python -m fuzz.run --seed {seed} --first {index} --count 1")
    print(f"{len(findings.counts)} findings" if findings.counts else "nothing found")
    return 1 if findings.counts else 0


if __name__ == "__main__":
    sys.exit(main())

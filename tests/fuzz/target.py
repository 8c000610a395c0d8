"""What is done with one damaged file: inspect, pack, verify, unpack, load."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from flashmoe_gguf.cli.inspect import inspect
from flashmoe_gguf.errors import FlashMoEError
from flashmoe_gguf.gguf import Shard, TensorInfo, Value, shards
from flashmoe_gguf.pack import pack_model, unpack_model, verify_model

MAX_CPU_SECONDS = 2.0
MAX_GROWTH_BYTES = 128 << 20


class TooMuch(BaseException):
    """Time or memory; not an Exception, so that nothing on the way catches it."""


class WrongAnswer(Exception):
    """A file got through, and what was made of it is not right."""


def write(folder: Path, files: Sequence[tuple[str, bytes]]) -> Path:
    """Write a model into an emptied folder; returns the file to open."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files:
        (folder / name).write_bytes(data)
    return folder / files[0][0]


def examine(model: Path, work: Path) -> dict[str, str]:
    """Everything but loading: for each step "passes" or the message of its typed error.

    Any other exception, and a wrong answer, is let through. `work` is emptied.
    """
    with _parsed_once(model.parent):
        return _examine(model, work)


def _examine(model: Path, work: Path) -> dict[str, str]:
    shutil.rmtree(work, ignore_errors=True)
    (work / "back").mkdir(parents=True)
    out = work / "out.gguf"
    results: dict[str, str] = {}

    def step(name: str, run: Callable[[], object]) -> bool:
        with _limits():
            try:
                run()
            except FlashMoEError as error:
                if not error.message or "\n" in error.message or not error.message.isprintable():
                    raise WrongAnswer(f"not one line: {error.message!r}") from error
                results[name] = error.message.replace(str(model.parent), "").replace(str(work), "")
                return False
        results[name] = "passes"
        return True

    assert inspect.callback is not None
    show = inspect.callback
    with contextlib.redirect_stdout(io.StringIO()):
        inspected = step("inspect", lambda: show(str(model), False))
        if inspected:
            step("inspect --json", lambda: show(str(model), True))
    if step("pack", lambda: pack_model(model, out)):
        if not inspected:
            raise WrongAnswer("packed a file that inspect refuses")
        _check_round_trip(model, out, work / "back")
    step("verify", lambda: verify_model(model, n_threads=1))
    step("unpack", lambda: unpack_model(model, work / "back", force=True))
    return results


@contextlib.contextmanager
def _parsed_once(folder: Path) -> Iterator[None]:
    """Every step reads the same headers in `folder`: the reader's answer is kept meanwhile.

    What is asked of it a second time is a third of the work of all steps. Files elsewhere, such
    as those just packed, are read each time.
    """
    read = shards.read_file
    answers: dict[tuple[Path, int], tuple[Shard, dict[str, Value], list[TensorInfo]]] = {}
    refusals: dict[tuple[Path, int], FlashMoEError] = {}

    def read_once(path: Path, number: int) -> tuple[Shard, dict[str, Value], list[TensorInfo]]:
        if path.parent != folder:
            return read(path, number)
        which = path, number
        if which in refusals:
            raise type(refusals[which])(refusals[which].message, refusals[which].hint)
        if which not in answers:
            try:
                answers[which] = read(path, number)
            except FlashMoEError as error:
                refusals[which] = error
                raise
        shard, metadata, tensors = answers[which]
        return shard, dict(metadata), list(tensors)  # callers add to them

    shards.read_file = read_once
    try:
        yield
    finally:
        shards.read_file = read


def _check_round_trip(model: Path, out: Path, back: Path) -> None:
    with _limits():
        if not verify_model(out, n_threads=1).ok:
            raise WrongAnswer("what was just packed has wrong sums")
        unpack_model(out, back)
        for file in back.iterdir():
            if file.read_bytes() != (model.parent / file.name).read_bytes():
                raise WrongAnswer(f"{file.name} does not come back as it was")


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raises TooMuch for what takes too long, or makes the process grow."""

    def stop(*_: object) -> None:
        raise TooMuch(f"more than {MAX_CPU_SECONDS} s of CPU time")

    before = _peak_bytes()
    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    grown = _peak_bytes() - before
    if grown > MAX_GROWTH_BYTES:
        raise TooMuch(f"the process grew by {grown:,} bytes")


def _peak_bytes() -> int:
    """The most memory that the process ever had. Asked of the thread, which knows it too: a
    process's answer adds up the times of its threads, a good part of a millisecond."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_maxrss << 10


def load(model: Path, *, verbose: bool = False) -> str:
    """Load with llama.cpp: "passes" or the message of a typed error."""
    from flashmoe_gguf import Llama

    # What is learned of one model must not reach the next, nor the user's own.
    cache = model.parent.with_name("cache")
    shutil.rmtree(cache, ignore_errors=True)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        try:
            llm = Llama(str(model), n_slots=2, n_ctx=64, n_batch=32, n_threads=1, verbose=verbose)
        except FlashMoEError as error:
            return error.message
        llm.close()
    return "passes"


def limit_memory(nbytes: int) -> None:
    """Let this process have so much more than it has; no core files."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

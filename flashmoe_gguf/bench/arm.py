"""One arm of a speed comparison, in a process of its own: load, prefill, decode greedily, report.

Reads an `Arm` (JSON) from stdin and writes events to stdout, one JSON object per line: `progress`
now and then, in the end `result`; or `error`, with exit code 2. Decoding is timed after loading and
warming up; every step's logits are hashed, outside the time, so that arms can be held to the same
output.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import xxhash

from flashmoe_gguf.devices import keep_experts_on_host
from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.libs import load_llama_cpp
from flashmoe_gguf.placement import place_model
from flashmoe_gguf.store import read_geometry

STREAMED, STOCK, STOCK_DEFAULT = "streamed", "stock", "stock-default"

Emit = Callable[[dict[str, Any]], None]

# The child imports what its parent imports, wherever it was started.
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from flashmoe_gguf.bench.arm import main; sys.exit(main())"
)
_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class Arm:
    """What to run.

    - kind: STREAMED; STOCK, unpatched llama.cpp, mmap, weights not repacked, nothing uploaded to a
      device for large batches; STOCK_DEFAULT, the same with llama-cpp-python's defaults, which do
      both.
    - prompt: token ids, `n_prompt` of them; where it is empty `text` is tokenized, and repeated or
      cut to `n_prompt` tokens.
    - n_warmup tokens are decoded before the clock starts, then n_gen; at most `seconds` are spent
      on either, but one token of n_gen is always made. None: as long as it takes.
    - again: the prompt is computed once more in the end, from an empty context.
    - ram, n_slots, policy, policy_file, io, lookahead, n_workers, request_bytes, trace: as the
      arguments of `Llama`; streamed only.
    - n_gpu_layers: on the devices; their experts stay on the processor's side in every arm, which
      for stock llama.cpp is --cpu-moe. "auto" is for `try_out` to resolve, and for no other.
    - cache: takes the place of the user's cache directory. An empty one: nothing that an earlier
      run has learned, of this or any other routing, reaches this one.
    """

    name: str
    model: str
    n_gen: int
    prompt: Sequence[int] = ()
    text: str = ""
    n_prompt: int = 64
    n_warmup: int = 0
    seconds: float | None = None
    again: bool = False
    n_ctx: int = 1024
    n_ubatch: int = 128
    n_threads: int = 2
    n_gpu_layers: int | str = 0
    kind: str = STREAMED
    ram: int | None = None
    n_slots: int | None = None
    policy: str = "auto"
    policy_file: str | None = None
    io: str = "auto"
    lookahead: str = "auto"
    n_workers: int | None = None
    request_bytes: int | None = None
    trace: str | None = None
    cache: str | None = None


def command() -> list[str]:
    """The command of a child that runs the arm on its stdin."""
    return [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", _START, *_paths()]


def _paths() -> list[str]:
    return [path for path in sys.path if path]


def to_json(arm: Arm) -> str:
    """What the child reads."""
    return json.dumps({**asdict(arm), "prompt": list(arm.prompt)})


def load(arm: Arm) -> Any:
    """A llama_cpp.Llama on the library set that the arm asks for."""
    n_batch = min(arm.n_ctx, 2048)
    options: dict[str, Any] = {
        "n_ctx": arm.n_ctx,
        "n_batch": n_batch,
        "n_ubatch": min(arm.n_ubatch, n_batch),
        "n_threads": arm.n_threads,
        "n_threads_batch": arm.n_threads,
        "n_gpu_layers": arm.n_gpu_layers,
        "verbose": False,
    }
    if arm.kind == STREAMED:
        from flashmoe_gguf.llama import Llama

        return Llama(
            arm.model,
            ram=arm.ram if arm.n_slots is None else None,
            n_slots=arm.n_slots,
            policy=arm.policy,
            policy_file=arm.policy_file,
            io=arm.io,
            lookahead=arm.lookahead,
            n_workers=arm.n_workers,
            request_bytes=arm.request_bytes,
            trace=arm.trace,
            **options,
        )
    return _load_stock(arm, options)


def _load_stock(arm: Arm, options: dict[str, Any]) -> Any:
    from flashmoe_gguf.stock import plain_llama, without_repacking

    llama_cpp = load_llama_cpp("stock")
    placement = place_model(llama_cpp, read_geometry(arm.model), options, with_experts=False)

    if arm.kind == STOCK:
        options["op_offload"] = False  # a device has other low bits, and streamed experts stay here

    def adjust(params: Any) -> None:
        if arm.kind == STOCK:
            without_repacking(params)
        if placement is not None:
            keep_experts_on_host(llama_cpp, params)

    n_layers = placement.n_layers if placement is not None else 0
    return plain_llama("stock", adjust)(arm.model, **{**options, "n_gpu_layers": n_layers})


def run(arm: Arm, emit: Emit = lambda event: None) -> dict[str, Any]:
    """Runs the arm; one row of figures. Seconds, bytes, tokens per second.

    `logits` and `tokens` have an entry per step: the prompt's last token, each token of the
    warm-up, each token decoded.
    """
    _report(emit, "loading")
    begun = time.perf_counter()
    llm = load(arm)
    load_seconds = time.perf_counter() - begun
    try:
        return _Run(arm, llm, emit).figures(load_seconds)
    finally:
        llm.close()


class _Run:
    """A loaded model being decoded: the tokens and logits so far."""

    def __init__(self, arm: Arm, llm: Any, emit: Emit) -> None:
        import llama_cpp

        self._arm, self._llm, self._emit = arm, llm, emit
        self._logits_of = llama_cpp.llama_get_logits_ith
        self._n_vocab = int(llm.n_vocab())
        self._hashes: list[str] = []
        self._tokens: list[int] = []

    def figures(self, load_seconds: float) -> dict[str, Any]:
        arm = self._arm
        prompt = prompt_tokens(arm, self._llm)
        written = io_bytes()
        _report(self._emit, "prefill", 0, len(prompt))
        at_prompt = self._stats()
        prefill_seconds = self._step(prompt)
        first_token_seconds = process_age()
        prefill = self._stats() - at_prompt if at_prompt is not None else None
        warmup = self._decode("warming up", arm.n_warmup)
        before, read = self._stats(), io_bytes()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        seconds = self._decode("decoding", arm.n_gen, least=1)
        total = sum(seconds)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
        end = io_bytes()
        row = {
            "load_seconds": load_seconds,
            "first_token_seconds": first_token_seconds,
            "prefill_seconds": prefill_seconds,
            "prefill_tok_s": len(prompt) / prefill_seconds,
            "warmup_seconds": sum(warmup),
            "n_warmup": len(warmup),
            "n_gen": len(seconds),
            "decode_tok_s": len(seconds) / total,
            "decode_ms_median": float(np.median(seconds) * 1e3),
            "major_faults": faults,
            "bytes_read": end[0] - read[0] if end and read else None,
            "bytes_written": end[1] - written[1] if end and written else None,
            "process_swap_bytes": swapped_bytes(),
            "hit_rate": None,
            "lookups": None,
            "logits": self._hashes,
            "tokens": self._tokens,
        }
        if before is not None:
            row |= self._streamed(self._stats() - before, prefill, total)
        elif arm.kind == STREAMED:
            row["lookups"] = 0  # a model without experts
        if arm.again:
            row["prefill_again_tok_s"] = len(prompt) / self._prefill_again(prompt)
        return row

    def _prefill_again(self, prompt: Sequence[int]) -> float:
        """Seconds for the prompt, with in the cache what prompt and answer have left there."""
        _report(self._emit, "prefill again", 0, len(prompt))
        self._llm.reset()
        seconds = self._step(prompt)
        self._tokens.pop()
        if self._hashes.pop() != self._hashes[0]:
            raise FlashMoEError("the prompt gave other logits when it was computed again")
        return seconds

    def _streamed(self, delta: Any, prefill: Any, seconds: float) -> dict[str, Any]:
        plan, geometry = self._llm.plan, self._llm.geometry
        decoding = geometry.decode_groups
        return {
            "n_slots": delta.n_slots,
            "group_slots": [
                n for n, g in zip(plan.slots, geometry.groups, strict=True) if g in decoding
            ],
            "policy": delta.policy,
            "io_mode": delta.io_mode,
            "hit_rate": delta.decode_hit_rate,
            "lookups": delta.lookups,
            "expert_bytes_read": delta.bytes_read,
            "missed_bytes": delta.missed_bytes,
            "read_amplification": delta.bytes_read / max(delta.missed_bytes, 1),
            "wait_share": delta.wait_seconds / seconds,
            "policy_share": delta.policy_seconds / seconds or None,  # of one in Python
            "guesses": [delta.guesses, delta.guesses_used, delta.guesses_overtaken],
            "prefill_expert_bytes_read": prefill.bytes_read,
        }

    def _stats(self) -> Any:
        return self._llm.stats() if self._arm.kind == STREAMED else None

    def _decode(self, phase: str, n_tokens: int, least: int = 0) -> list[float]:
        """Seconds of each token; fewer than asked for when the time is up."""
        seconds: list[float] = []
        begun = said = time.monotonic()
        while len(seconds) < n_tokens:
            now = time.monotonic()
            late = self._arm.seconds is not None and now - begun >= self._arm.seconds
            if late and len(seconds) >= least:
                break
            seconds.append(self._step([self._tokens[-1]]))
            if now - said >= _PROGRESS_SECONDS or len(seconds) == 1:
                _report(self._emit, phase, len(seconds), n_tokens)
                said = now
        return seconds

    def _step(self, tokens: Sequence[int]) -> float:
        """Evaluates tokens; seconds until the logits of the last are there."""
        begun = time.perf_counter()
        self._llm.eval(list(tokens))
        row = self._logits_of(self._llm._ctx.ctx, -1)
        logits = np.ctypeslib.as_array(row, shape=(self._n_vocab,))
        token = int(logits.argmax())
        seconds = time.perf_counter() - begun
        self._hashes.append(xxhash.xxh3_64_hexdigest(logits.tobytes()))
        self._tokens.append(token)
        return seconds


def prompt_tokens(arm: Arm, llm: Any) -> list[int]:
    """The arm's prompt: exactly n_prompt ids. Raises OptionError for text that gives none."""
    if arm.prompt:
        return [int(token) % int(llm.n_vocab()) for token in arm.prompt]
    tokens: list[int] = llm.tokenize(arm.text.encode(), add_bos=True, special=False)
    if not tokens:
        raise OptionError("the prompt has no tokens", "give a file with some text")
    first, rest = tokens[:1], tokens[1:] or tokens[:1]
    repeats = -(-arm.n_prompt // len(rest))
    return (first + rest * repeats)[: arm.n_prompt]


def process_age(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process was started, the interpreter's own start included.

    psutil counts from the time of boot, which Linux tells in whole seconds.
    """
    try:
        after_name = stat.read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): field 22, starttime
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.time() - psutil.Process().create_time()


def io_bytes(path: Path = Path("/proc/self/io")) -> tuple[int, int] | None:
    """(read, written) by this process from and to drives, page faults included; None unknown."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    return values["read_bytes"], values["write_bytes"]


def swapped_bytes(path: Path = Path("/proc/self/status")) -> int | None:
    """Of this process's memory, what is in swap now; None where the system does not tell."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(row[1]) << 10 for row in rows if row and row[0] == "VmSwap:"), None)


def try_out(arm: Arm) -> dict[str, Any]:
    """Loads a streamed arm and no more; the bytes that its budget needs at the least, and how many
    layers are on devices.
    """
    llm = load(arm)
    try:
        placement = llm.placement
        return {
            "floor_bytes": llm.plan.fixed.total,
            "n_gpu_layers": placement.n_layers if placement is not None else 0,
        }
    finally:
        llm.close()


def _report(emit: Emit, phase: str, done: int = 0, total: int = 0) -> None:
    emit({"event": "progress", "phase": phase, "done": done, "total": total})


def main() -> int:
    """The child. `n_gen` 0: the arm is loaded only, see `try_out`."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # llama.cpp may print to stdout; events have it for themselves

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    try:
        arm = Arm(**json.load(sys.stdin))
        if arm.cache is not None:
            os.environ["XDG_CACHE_HOME"] = arm.cache
        emit({"event": "result", "result": run(arm, emit) if arm.n_gen else try_out(arm)})
    except FlashMoEError as error:
        emit({"event": "error", "message": error.message, "hint": error.hint})
        return 2
    return 0

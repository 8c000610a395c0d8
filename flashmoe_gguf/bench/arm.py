"""One arm of a speed comparison, in a process of its own: load, prefill, decode greedily, report.

Reads an `Arm` as JSON from its argument and prints one JSON row. Timing starts after loading; every
step's logits are hashed, so that arms can be held to the same output.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Arm:
    """What to run. `stream` False: stock llama.cpp (mmap, weights not repacked)."""

    name: str
    model: str
    prompt: Sequence[int]
    n_gen: int
    n_warmup: int = 0
    n_ctx: int = 1024
    n_ubatch: int = 128
    n_threads: int = 2
    stream: bool = True
    ram: int | None = None
    n_slots: int | None = None
    policy: str = "auto"
    io: str = "auto"
    lookahead: str = "auto"


def load(arm: Arm) -> Any:
    """A llama_cpp.Llama on the library set that the arm asks for."""
    options: dict[str, Any] = {
        "n_ctx": arm.n_ctx,
        "n_batch": min(arm.n_ctx, 2048),
        "n_ubatch": arm.n_ubatch,
        "n_threads": arm.n_threads,
        "n_threads_batch": arm.n_threads,
        "verbose": False,
    }
    if arm.stream:
        from flashmoe_gguf.llama import Llama

        return Llama(
            arm.model,
            ram=arm.ram if arm.n_slots is None else None,
            n_slots=arm.n_slots,
            policy=arm.policy,
            io=arm.io,
            lookahead=arm.lookahead,
            **options,
        )
    from flashmoe_gguf.stock import plain_llama, without_repacking

    return plain_llama("stock", without_repacking)(arm.model, **options)


def run(arm: Arm) -> dict[str, Any]:
    """Runs the arm; one row of figures. Seconds, bytes, tokens per second."""
    begun = time.perf_counter()
    llm = load(arm)
    load_seconds = time.perf_counter() - begun
    import llama_cpp

    hashes: list[str] = []
    n_vocab = llm.n_vocab()

    def step(tokens: Sequence[int]) -> tuple[int, float]:
        at = time.perf_counter()
        llm.eval(list(tokens))
        row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
        logits = np.ctypeslib.as_array(row, shape=(n_vocab,)).copy()
        seconds = time.perf_counter() - at
        hashes.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])
        return int(logits.argmax()), seconds

    token, prefill_seconds = step(arm.prompt)
    for _ in range(arm.n_warmup):
        token, _ = step([token])
    before = llm.stats() if arm.stream else None
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    seconds = []
    for _ in range(arm.n_gen):
        token, taken = step([token])
        seconds.append(taken)
    total = sum(seconds)
    row = {
        "arm": arm.name,
        "load_seconds": load_seconds,
        "prefill_seconds": prefill_seconds,
        "prefill_tok_s": len(arm.prompt) / prefill_seconds,
        "decode_tok_s": arm.n_gen / total,
        "decode_ms_median": float(np.median(seconds) * 1e3),
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
        "logits": hashes,
    }
    if before is not None:
        delta = llm.stats() - before
        row |= {
            "n_slots": delta.n_slots,
            "policy": delta.policy,
            "io_mode": delta.io_mode,
            "hit_rate": delta.decode_hit_rate,
            "lookups": delta.lookups,
            "bytes_read": delta.bytes_read,
            "read_amplification": delta.bytes_read / max(delta.missed_bytes, 1),
            "guesses": [delta.guesses, delta.guesses_used, delta.guesses_overtaken],
            "wait_share": delta.wait_seconds / total,
        }
    llm.close()
    return row


def to_json(arm: Arm) -> str:
    """The argument for a child process."""
    return json.dumps({**asdict(arm), "prompt": list(arm.prompt)})


if __name__ == "__main__":
    print(json.dumps(run(Arm(**json.loads(sys.argv[1])))))

"""What stock and streamed models must agree on bit for bit: one script for both.

Each scenario drives llama_cpp.Llama's own interface and returns the logits it saw. Streamed models
run it in the test's process; stock libraries run it in a child, because a process can hold only one
set: `stock()` does that, and this file is the child's program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Make = Callable[[], Any]


def last_logits(llm: Any) -> Logits:
    """The logits after the last token, copied. [n_vocab]"""
    import llama_cpp

    row = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    return np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).copy()


def follow(llm: Any, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Evaluates tokens, then that many greedy ones. [1 + n_greedy, n_vocab]"""
    llm.eval(list(tokens))
    rows = [last_logits(llm)]
    for _ in range(n_greedy):
        llm.eval([int(rows[-1].argmax())])
        rows.append(last_logits(llm))
    return np.stack(rows)


def decode(make: Make, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Prefill, then greedy decoding."""
    llm = make()
    try:
        return follow(llm, tokens, n_greedy)
    finally:
        llm.close()


def state(make: Make, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Decodes on from a saved state, in the same object and in a fresh one."""
    llm, other = make(), make()
    try:
        first = follow(llm, tokens, n_greedy)
        saved = llm.save_state()
        on = follow(llm, [int(first[-1].argmax())], n_greedy)
        llm.load_state(saved)
        again = follow(llm, [int(first[-1].argmax())], n_greedy)
        other.load_state(saved)
        fresh = follow(other, [int(first[-1].argmax())], n_greedy)
        return np.concatenate([first, on, again, fresh])
    finally:
        llm.close()
        other.close()


def shift(make: Make, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Drops a stretch from the middle of the context, closes the gap, and decodes on."""
    llm = make()
    try:
        before = follow(llm, tokens, n_greedy)
        begin, end = 4, 4 + len(tokens) // 2
        llm._ctx.kv_cache_seq_rm(0, begin, end)
        llm._ctx.kv_cache_seq_shift(0, end, llm.n_tokens, begin - end)
        llm.n_tokens -= end - begin
        return np.concatenate([before, follow(llm, [int(before[-1].argmax())], n_greedy)])
    finally:
        llm.close()


def in_turn(make: Make, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Two objects that take turns, token by token."""
    llms = make(), make()
    try:
        prompts = tokens, tokens[::-1]
        rows = [follow(llm, prompt, 0)[0] for llm, prompt in zip(llms, prompts, strict=True)]
        for _ in range(n_greedy):
            for llm in llms:
                rows.append(follow(llm, [int(rows[-2].argmax())], 0)[0])
        return np.stack(rows)
    finally:
        for llm in llms:
            llm.close()


def at_once(make: Make, tokens: Sequence[int], n_greedy: int) -> Logits:
    """Two objects in two threads at the same time."""
    results: dict[int, Logits] = {}

    def run(i: int, prompt: Sequence[int]) -> None:
        results[i] = decode(make, prompt, n_greedy)

    threads = [
        threading.Thread(target=run, args=(i, prompt))
        for i, prompt in enumerate((tokens, tokens[::-1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate([results[0], results[1]])


SCENARIOS = {f.__name__: f for f in (decode, state, shift, in_turn, at_once)}


def context_options(n_threads: int, n_ctx: int = 2048) -> dict[str, Any]:
    """The same on both sides: thread and batch sizes choose the kernels."""
    return {
        "n_ctx": n_ctx,
        "n_batch": 512,
        "n_ubatch": 256,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        "verbose": False,
    }


def stock(
    out: Path,
    model: Path,
    scenarios: Sequence[str],
    tokens: Sequence[int],
    n_greedy: int,
    n_threads: int,
    libraries: str = "stock",
) -> dict[str, Logits]:
    """Runs scenarios without streaming in a child process, with one of the library sets."""
    request = {
        "model": str(model),
        "scenarios": list(scenarios),
        "tokens": [int(t) for t in tokens],
        "n_greedy": n_greedy,
        "n_threads": n_threads,
        "libraries": libraries,
    }
    return child(out, "scenarios", request)


def child(out: Path, what: str, request: dict[str, Any]) -> dict[str, Any]:
    """Runs one of this file's programs in a child process on unstreamed libraries."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(out), what],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    with np.load(out) as data:
        return dict(data)


def _run_stock(request: dict[str, Any]) -> dict[str, Logits]:
    from flashmoe_gguf.stock import plain_llama, without_repacking

    plain = plain_llama(request["libraries"], without_repacking)

    def make() -> Any:
        return plain(request["model"], **context_options(request["n_threads"]))

    return {
        name: SCENARIOS[name](make, request["tokens"], request["n_greedy"])
        for name in request["scenarios"]
    }


def _run_embeddings(request: dict[str, Any]) -> dict[str, Any]:
    from flashmoe_gguf.stock import plain_llama, without_repacking

    options = context_options(request["n_threads"])
    llm = plain_llama("stock", without_repacking)(request["model"], embedding=True, **options)
    rows = [np.asarray(llm.embed(text), np.float64).ravel() for text in request["texts"]]
    llm.close()
    return {"embeddings": np.concatenate(rows)}


PROGRAMS = {"scenarios": _run_stock, "embeddings": _run_embeddings}

if __name__ == "__main__":
    arrays: dict[str, Any] = PROGRAMS[sys.argv[2]](json.load(sys.stdin))
    np.savez(sys.argv[1], **arrays)

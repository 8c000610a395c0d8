"""What stock and streamed models answer to the same tokens: many models in one stock process.

`follow` drives a llama_cpp.Llama, whichever kind of model it holds. Streamed models run it in the
test's process; `stock` runs it in a child, because a process can hold only one set of libraries,
and this file is the child's program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scenarios import follow as follow_tokens
from scenarios import last_logits

Rows = npt.NDArray[np.float32]

N_PROMPT = N_GREEDY = 64
# Without a memory each batch stands alone: so many of the last tokens are in it.
WINDOW = 16


def options(kind: str) -> dict[str, Any]:
    """Llama's arguments, the same on both sides: thread and batch sizes choose the kernels."""
    n_ctx = N_PROMPT + N_GREEDY
    return {
        "n_ctx": n_ctx,
        "n_batch": n_ctx,
        "n_ubatch": n_ctx,
        "n_threads": 1,
        "n_threads_batch": 1,
        "embedding": kind == "encoder",
        "verbose": False,
    }


def prompt(n_vocab: int, seed: int = 7) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, N_PROMPT)]


def follow(llm: Any, tokens: Sequence[int], kind: str) -> Rows:
    """Takes the tokens at once, then N_GREEDY more one by one. [1 + N_GREEDY, n_vocab or width]

    `kind`: "decoder" appends the greedy token each time. "diffusion" has no memory, so it gets the
    last WINDOW tokens anew. "encoder" gives embeddings and no logits: it gets a window of the
    prompt, and each row is the embedding of the last token.
    """
    if kind == "decoder":
        return follow_tokens(llm, tokens, N_GREEDY)
    taken = list(tokens)
    rows = [_alone(llm, taken, kind)]
    for i in range(N_GREEDY):
        if kind == "diffusion":
            taken.append(int(rows[-1].argmax()))
        else:
            taken.append(tokens[i])
        rows.append(_alone(llm, taken[-WINDOW:], kind))
    return np.stack(rows)


def _alone(llm: Any, tokens: Sequence[int], kind: str) -> Rows:
    """One batch with nothing before it."""
    import llama_cpp

    llm._ctx.kv_cache_clear()  # llama-embed has a cache; the others have none to clear
    llm._batch.set_batch(batch=tokens, n_past=0, logits_all=True)
    llm._ctx.decode(llm._batch)
    if kind == "diffusion":
        return last_logits(llm)
    row = llama_cpp.llama_get_embeddings_ith(llm._ctx.ctx, len(tokens) - 1)
    embedding: Rows = np.ctypeslib.as_array(row, shape=(llm.n_embd(),)).copy()
    return embedding


def stock(out: Path, jobs: Sequence[tuple[Path, Sequence[int], str]]) -> list[Rows]:
    """Follows each (model, tokens, kind) with the stock libraries, in one child process."""
    request = [(str(model), list(tokens), kind) for model, tokens, kind in jobs]
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), str(out)],
        input=json.dumps(request).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-2000:]
    with np.load(out) as data:
        return [data[str(i)] for i in range(len(jobs))]


def _run(request: list[tuple[str, list[int], str]]) -> dict[str, Rows]:
    from flashmoe_gguf.stock import plain_llama, without_repacking

    plain = plain_llama("stock", without_repacking)
    rows = {}
    for i, (model, tokens, kind) in enumerate(request):
        print(model, flush=True)  # so that an abort names the model
        llm = plain(model, **options(kind))
        rows[str(i)] = follow(llm, tokens, kind)
        llm.close()
    return rows


if __name__ == "__main__":
    np.savez(sys.argv[1], **_run(json.load(sys.stdin)))  # type: ignore[arg-type]

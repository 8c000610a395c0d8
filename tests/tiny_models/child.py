"""Decode by token id in a child process, with a chosen set of llama.cpp libraries.

A child, because a process can hold only one set of libraries, and because
llama.cpp aborts the whole process where a model displeases it. Run as a script
it reads one JSON request from stdin and writes an .npz; `decode` does both ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def stock_libraries() -> Path | None:
    """The folder of unpatched llama.cpp libraries: the built package's, or the environment's."""
    from flashmoe_gguf import errors

    built = Path(errors.__file__).parent / "lib" / "stock"
    given = os.environ.get("LLAMA_CPP_LIB_PATH")
    return built if built.is_dir() else Path(given) if given else None


@dataclass(frozen=True)
class Decoded:
    """What one sequence of tokens gave.

    `logits` [steps, n_vocab] float32: after the prompt, then after each further token.
    `experts` [expert blocks]: for each, in graph order, its name and the chosen ids
    [tokens of the whole sequence, n_expert] in falling order of preference.
    """

    logits: npt.NDArray[np.float32]
    experts: dict[str, npt.NDArray[np.int32]]


def decode(
    library_dir: Path,
    jobs: Sequence[tuple[Path, Sequence[int], int]],
    *,
    n_threads: int = 1,
    greedy: int = 0,
) -> list[Decoded]:
    """Run each job (model, tokens, how many of them are the prompt) in a fresh context.

    The prompt is one batch, the other tokens follow one by one, then `greedy` more
    are chosen by arg-max. Raises RuntimeError with the child's last words if it fails.
    """
    request = {
        "jobs": [(str(model), [int(t) for t in tokens], n) for model, tokens, n in jobs],
        "n_threads": n_threads,
        "greedy": greedy,
    }
    arrays = _ask(library_dir, request)
    results = []
    for i in range(len(jobs)):
        prefix = f"{i}/experts/"
        experts = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        results.append(Decoded(arrays[f"{i}/logits"], experts))
    return results


def tokenize(library_dir: Path, model: Path, text: str) -> list[int]:
    """The tokens of `text` as the library's own tokenizer sees them, special ones added."""
    request = {"jobs": [], "tokenize": [str(model), text]}
    return [int(token) for token in _ask(library_dir, request)["tokens"]]


def _ask(library_dir: Path, request: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Run one request in a child process; RuntimeError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.npz"
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), str(out)],
            input=json.dumps(request).encode(),
            env={**os.environ, "LLAMA_CPP_LIB_PATH": str(library_dir)},
            capture_output=True,
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()[-2000:]
            raise RuntimeError(f"decoding ended with {done.returncode}: {words}")
        with np.load(out) as data:
            return dict(data)


class _Routing:
    """Collects the router's full ranking of the experts through llama.cpp's eval callback."""

    def __init__(self, ggml: Any) -> None:
        self.ranked: dict[str, list[npt.NDArray[np.int32]]] = {}
        self._ggml = ggml
        ggml.ggml_get_name.restype = ctypes.c_char_p
        ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
        ggml.ggml_nbytes.restype = ctypes.c_size_t
        ggml.ggml_nbytes.argtypes = [ctypes.c_void_p]
        ggml.ggml_nrows.restype = ctypes.c_int64
        ggml.ggml_nrows.argtypes = [ctypes.c_void_p]
        size_t, pointer = ctypes.c_size_t, ctypes.c_void_p
        ggml.ggml_backend_tensor_get.argtypes = [pointer, pointer, size_t, size_t]

    def __call__(self, tensor: int, ask: bool, _user: Any) -> bool:
        name: str = self._ggml.ggml_get_name(tensor).decode()
        wanted = name.startswith("ffn_moe_argsort")
        if ask or not wanted:
            return wanted
        n_bytes, n_rows = self._ggml.ggml_nbytes(tensor), self._ggml.ggml_nrows(tensor)
        ids = np.empty((n_rows, n_bytes // 4 // n_rows), np.int32)
        self._ggml.ggml_backend_tensor_get(tensor, ids.ctypes.data, 0, n_bytes)
        self.ranked.setdefault(name.removeprefix("ffn_moe_argsort-"), []).append(ids)
        return True


def _run(request: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    import llama_cpp as lc  # type: ignore[import-untyped, unused-ignore]

    lines: list[str] = []
    log = lc.llama_log_callback(lambda level, text, _user: lines.append(text.decode()))
    lc.llama_log_set(log, ctypes.c_void_p(0))
    lc.llama_backend_init()
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    folder = Path(os.environ["LLAMA_CPP_LIB_PATH"])
    ggml = ctypes.CDLL(str(folder / f"libggml-base.{suffix}"))

    out: dict[str, npt.NDArray[Any]] = {}
    if "tokenize" in request:
        path, text = request["tokenize"]
        model_params = lc.llama_model_default_params()
        model_params.vocab_only = True
        model = lc.llama_model_load_from_file(path.encode(), model_params)
        vocab, raw = lc.llama_model_get_vocab(model), text.encode()
        found = (lc.llama_token * (len(raw) + 2))()
        count = lc.llama_tokenize(vocab, raw, len(raw), found, len(found), True, False)
        out["tokens"] = np.array(found[:count], np.int32)
        lc.llama_model_free(model)
    for number, (path, tokens, n_prompt) in enumerate(request["jobs"]):
        model_params = lc.llama_model_default_params()
        model_params.use_extra_bufts = False  # repacked weights give other low bits
        model = lc.llama_model_load_from_file(path.encode(), model_params)
        if not model:
            raise SystemExit(f"{path} does not load:\n{''.join(lines)[-1500:]}")
        n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
        routing = _Routing(ggml)
        callback = lc.ggml_backend_sched_eval_callback(routing)
        params = lc.llama_context_default_params()
        params.n_ctx = len(tokens) + request["greedy"]
        params.n_batch = params.n_ubatch = params.n_ctx
        params.n_threads = params.n_threads_batch = request["n_threads"]
        params.cb_eval = ctypes.cast(callback, type(params.cb_eval))
        ctx = lc.llama_init_from_model(model, params)
        if not ctx:
            raise SystemExit(f"{path}: no context:\n{''.join(lines)[-1500:]}")
        logits: list[npt.NDArray[np.float32]] = []
        steps = [tokens[:n_prompt], *([t] for t in tokens[n_prompt:])]
        steps += [[]] * request["greedy"]
        for step in steps:
            ids = step or [int(np.argmax(logits[-1]))]
            tokens_c = (lc.llama_token * len(ids))(*ids)  # the batch only points to it
            status = lc.llama_decode(ctx, lc.llama_batch_get_one(tokens_c, len(ids)))
            if status:
                raise SystemExit(f"{path}: llama_decode gave {status}:\n{''.join(lines)[-1500:]}")
            row = lc.llama_get_logits_ith(ctx, -1)
            logits.append(np.ctypeslib.as_array(row, (n_vocab,)).copy())
        lc.llama_free(ctx)
        lc.llama_model_free(model)
        out[f"{number}/logits"] = np.stack(logits)
        for name, parts in routing.ranked.items():
            out[f"{number}/experts/{name}"] = np.concatenate(parts)
    return out


if __name__ == "__main__":
    arrays: dict[str, Any] = _run(json.load(sys.stdin))
    np.savez(sys.argv[1], **arrays)

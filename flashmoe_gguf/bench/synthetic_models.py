"""Replay models by name, made once and kept in the user's cache directory.

A model lies beside the routing that it really has, `<name>-<key>.gguf` and `.npz`; the
key covers all that decides their bytes. The trace is written first and the model
appears when it is complete, so that a model with its trace is always whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from flashmoe_gguf.bench.replay_weights import MAX_TOKENS, ReplayModel
from flashmoe_gguf.bench.synthetic import (
    SHAPES,
    SHARE_KEY,
    Experts,
    Shape,
    check_space,
    is_being_written,
    unfinished_path,
    write_replay_model,
)
from flashmoe_gguf.bench.synthetic_trace import Statistics, statistics_for, synthetic_trace
from flashmoe_gguf.cache_dir import cache_dir
from flashmoe_gguf.errors import FlashMoEError, ModelFileError, OptionError
from flashmoe_gguf.gguf import read_header
from flashmoe_gguf.trace import NO_EXPERT, Trace, read_trace, write_trace

CUSTOM = "custom"
DEFAULT_TOKENS = 4096
# Part of every key: raise it when the same inputs give another model or trace.
_FORMAT = 1
# llama.cpp's LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS, and widths for which a row still fits.
_LIMITS = {"n_layer": 512, "n_expert": 1024, "top_k": 1024, "n_head": 1024, "n_head_kv": 1024}
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class SyntheticModel:
    """A replay model and the routing that it has: row i of `trace` is that of token i.

    `wished_share` is the share of the experts of the trace asked for that it obtains.
    """

    path: Path
    trace: Path
    wished_share: float


@dataclass(frozen=True)
class CachedModel:
    """A file pair in the cache; `n_bytes` of both, `complete` False for a leftover."""

    path: Path
    n_bytes: int
    complete: bool


def synthetic_model(
    name: str,
    *,
    trace: Path | None = None,
    custom: Mapping[str, int] | None = None,
    n_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    cache: Path | None = None,
) -> SyntheticModel:
    """The replay model of that name, made unless the cache has it.

    name: one of SHAPES, or "custom" with `custom` as the fields of a Shape (the three of
        attention may be left out).
    trace: a trace file whose routing is replayed; tokens without a full set of experts are
        left out. None: a generated one with the statistics of a real model's.
    n_tokens: replayed from its beginning; None: 4,096, or all of a shorter file.
    progress: called with bytes done and bytes in all, not at all when the model is there.
    cache: folder instead of the user's cache directory.

    Raises OptionError for dimensions, a name or a trace that do not fit, TraceError for a
    file that is no trace, FlashMoEError for a full disk, a folder that cannot be written or
    a model that another process is making.
    """
    shape = _shape(name, custom)
    if n_tokens is not None and not 1 <= n_tokens <= MAX_TOKENS:
        raise OptionError(f"{n_tokens} tokens", f"give a number from 1 to {MAX_TOKENS}")
    given: Experts | None = None
    statistics: Statistics | None = None
    source: object
    if trace is not None:
        given = _read_experts(trace, shape, n_tokens)
        wanted, source = len(given), hashlib.sha256(given.tobytes()).hexdigest()
    else:
        statistics = statistics_for(shape.n_expert)
        wanted, source = n_tokens or DEFAULT_TOKENS, asdict(statistics)
    folder = cache if cache is not None else default_cache()
    key = _key([_FORMAT, asdict(shape), wanted, source])
    path = folder / f"{name}-{key}.gguf"
    if (found := _cached(path)) is not None:
        return found
    if given is None:
        sizes = (wanted, shape.n_layer, shape.n_expert, shape.top_k)
        given = synthetic_trace(*sizes, statistics=statistics)
    model = ReplayModel(
        given,
        shape.n_expert,
        shape.width,
        shape.expert_width,
        shape.n_head,
        shape.n_head_kv,
        head_width=shape.head_width,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlashMoEError(
            f"cannot write to {folder}: {error.strerror or error}", "choose another folder"
        ) from error
    return _build(path, model, progress)


def default_cache() -> Path:
    """Where models are kept."""
    return cache_dir() / "synthetic"


def list_cached(cache: Path | None = None) -> list[CachedModel]:
    """What the cache holds, by name, leftovers of killed builds and running ones included."""
    sizes: dict[str, int] = {}
    names: set[str] = set()
    folder = cache if cache is not None else default_cache()
    for file in folder.iterdir() if folder.is_dir() else ():
        stem, dot, kind = file.name.partition(".")
        if kind.removesuffix(".partial") in ("gguf", "npz"):
            with suppress(FileNotFoundError):
                sizes[stem] = sizes.get(stem, 0) + file.stat().st_size
            names.add(stem + dot + kind)
    return [
        CachedModel(folder / f"{stem}.gguf", n_bytes, {f"{stem}.gguf", f"{stem}.npz"} <= names)
        for stem, n_bytes in sorted(sizes.items())
    ]


def remove_cached(cache: Path | None = None) -> list[CachedModel]:
    """Removes all that `list_cached` lists but what is being made now; returns what is gone."""
    removed = []
    for entry in list_cached(cache):
        if is_being_written(entry.path):
            continue
        trace = entry.path.with_suffix(".npz")
        for file in (entry.path, unfinished_path(entry.path), trace, unfinished_path(trace)):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise FlashMoEError(f"cannot remove {file}: {error.strerror or error}") from error
        removed.append(entry)
    return removed


def _shape(name: str, custom: Mapping[str, int] | None) -> Shape:
    if name != CUSTOM:
        if custom is not None:
            raise OptionError(f"dimensions are given for {name}, which has its own")
        if name not in SHAPES:
            raise OptionError(
                f"no synthetic model is called {name!r}", f"there are {', '.join(SHAPES)}, custom"
            )
        return SHAPES[name]
    known = [field.name for field in fields(Shape)]
    optional = ("n_head", "n_head_kv", "head_width")
    needed = [key for key in known if key not in optional]
    given = dict(custom or {})
    if unknown := sorted(set(given) - set(known)):
        raise OptionError(f"unknown dimension {unknown[0]!r}", f"there are {', '.join(known)}")
    if missing := [key for key in needed if key not in given]:
        raise OptionError(f"a custom model lacks {', '.join(missing)}", "give all its dimensions")
    for key, value in given.items():
        if not 1 <= value <= (most := _LIMITS.get(key, _MAX_WIDTH)):
            raise OptionError(f"{key} {value} is out of range", f"give a number from 1 to {most}")
    if given["top_k"] > given["n_expert"]:
        raise OptionError(f"top-{given['top_k']} of {given['n_expert']} experts")
    given.setdefault("head_width", 128)
    given.setdefault("n_head", max(1, given["width"] // given["head_width"]))
    given.setdefault("n_head_kv", math.gcd(given["n_head"], 4))
    return Shape(**given)


def _read_experts(path: Path, shape: Shape, n_tokens: int | None) -> Experts:
    """The tokens of a trace file [tokens, layers, k] that are to be replayed."""
    found = read_trace(path, shape.n_expert)
    if (found.n_layers, found.k) != (shape.n_layer, shape.top_k):
        raise OptionError(
            f"{path.name} has {found.n_layers} layers and {found.k} experts per token, the model "
            f"{shape.n_layer} and {shape.top_k}",
            "choose the model that the trace is of, or a custom one",
        )
    whole = found.experts[(found.experts != NO_EXPERT).all(axis=(1, 2))]
    if not len(whole):
        raise OptionError(f"{path.name} has no token with {found.k} experts in every layer")
    if n_tokens is not None and n_tokens > len(whole):
        raise OptionError(
            f"{path.name} has {len(whole)} tokens, not {n_tokens}", "ask for fewer tokens"
        )
    return np.ascontiguousarray(whole[: n_tokens or DEFAULT_TOKENS])


def _key(inputs: list[object]) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def _cached(path: Path) -> SyntheticModel | None:
    """The model at `path`, None if it is not there, not whole or without its trace."""
    trace = path.with_suffix(".npz")
    if not (path.is_file() and trace.is_file()):
        return None
    try:
        share = read_header(path).metadata.get(SHARE_KEY)
    except ModelFileError:
        return None
    return SyntheticModel(path, trace, share) if isinstance(share, float) else None


def _build(
    path: Path, model: ReplayModel, progress: Callable[[int, int], None] | None
) -> SyntheticModel:
    model.check()
    check_space(path, model)  # before the search for embeddings, which may take a while
    n_tokens, n_layer = model.n_tokens, model.n_layer
    trace = path.with_suffix(".npz")
    routing = Trace(
        model.routing.experts,
        np.array([0, n_tokens], np.int64),
        np.full(n_layer, model.n_expert, np.int32),
        np.arange(n_layer, dtype=np.int32),
    )
    write_trace(trace, routing)
    try:
        write_replay_model(path, model, n_ctx=max(4096, n_tokens + 1024), progress=progress)
    except BaseException:
        if not is_being_written(path):
            trace.unlink(missing_ok=True)
        raise
    return SyntheticModel(path, trace, model.routing.wished_share)

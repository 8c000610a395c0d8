"""Recorded routing through the policies, without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native.foreign import ForeignPolicy
from flashmoe_gguf._native.library import library
from flashmoe_gguf.errors import FlashMoEError, OptionError


@dataclass(frozen=True)
class LayerCounts:
    """What a replay counted in each layer, each [n_layers] int64.

    `refetched`: evictions whose expert was needed again within 5 tokens. `victims` [n_tokens,
    n_layers, k] uint16: who left, in order, 65535 where nobody did; None unless it was asked for.
    `weights`: what the policy has learned; None when that was not asked for, or it learns nothing.
    """

    lookups: npt.NDArray[np.int64]
    hits: npt.NDArray[np.int64]
    evicted: npt.NDArray[np.int64]
    refetched: npt.NDArray[np.int64]
    victims: npt.NDArray[np.uint16] | None = None
    weights: npt.NDArray[np.float32] | None = None


_TOKENS_AT_ONCE = 512  # between two calls of `progress`, and for Ctrl-C


def simulate(
    policy: str | ForeignPolicy,
    experts: npt.NDArray[np.uint16],
    sequences: npt.NDArray[np.int64],
    n_expert: npt.NDArray[np.int32],
    n_slots: npt.NDArray[np.int32],
    *,
    seed: int = 0,
    bypass: bool = False,
    count_from: int = 0,
    victims: bool = False,
    weights: npt.NDArray[np.float32] | None = None,
    learned: bool = False,
    progress: Callable[[int], None] | None = None,
) -> LayerCounts:
    """Replays recorded routing through a policy, one cache per layer, cold at the start.

    - experts [n_tokens, n_layers, k], 65535: none. All that a token misses is admitted, and what
      it uses cannot leave before the next; with `bypass` it can.
    - sequences [n]: tokens at which sequences begin, ascending; one that is n_tokens is ignored.
    - n_expert, n_slots [n_layers].
    - count_from: counts leave out the tokens before this one.
    - weights: what the policy has learned before, as many numbers as it wants.
    - learned: return what it has learned in the end.
    - progress: gets the tokens done so far, now and then.

    Raises OptionError for arrays that do not fit together, an unknown policy, or weights that it
    cannot take.
    """
    ffi, lib = library()
    if experts.ndim != 3 or n_expert.shape != n_slots.shape or len(n_slots) != experts.shape[1]:
        raise OptionError(f"{len(n_slots)} sizes for a trace of shape {experts.shape}")
    n_tokens, n_layers, _ = experts.shape
    ids = np.ascontiguousarray(experts, np.uint16)
    left = np.full(ids.shape if victims else 0, 0xFFFF, np.uint16)
    kept = (  # alive until the simulation is freed
        ffi.from_buffer("uint16_t[]", ids),
        ffi.from_buffer("int64_t[]", np.ascontiguousarray(sequences, np.int64)),
        ffi.from_buffer("int32_t[]", np.ascontiguousarray(n_expert, np.int32)),
        ffi.from_buffer("int32_t[]", np.ascontiguousarray(n_slots, np.int32)),
        ffi.new("char[]", (policy if isinstance(policy, str) else policy.name).encode()),
        ffi.from_buffer("uint16_t[]", left, require_writable=True),
    )
    setup = ffi.new("struct fm_simulation_setup *")
    setup.experts, setup.sequences, setup.n_expert, setup.n_slots, setup.policy = kept[:5]
    setup.n_tokens, setup.n_layers, setup.k, setup.n_sequences = (*ids.shape, len(sequences))
    if isinstance(policy, ForeignPolicy):
        setup.foreign = policy.struct
    setup.seed, setup.bypass = seed, int(bypass)
    setup.victims = kept[5] if victims else ffi.NULL
    simulation = lib.fm_simulation_new(setup)
    if simulation == ffi.NULL:
        raise OptionError(ffi.string(lib.fm_last_message()).decode("utf-8", "replace"))
    try:
        if weights is not None:
            numbers = ffi.from_buffer("float[]", np.ascontiguousarray(weights, np.float32))
            if lib.fm_simulation_load(simulation, numbers, weights.size) != 0:
                raise OptionError(ffi.string(lib.fm_last_message()).decode("utf-8", "replace"))
        before = np.zeros((n_layers, 4), np.int64)
        done = 0
        while done < n_tokens:
            stop = count_from if done < count_from else n_tokens
            done = n_tokens - lib.fm_simulation_run(simulation, min(_TOKENS_AT_ONCE, stop - done))
            if isinstance(policy, ForeignPolicy):
                policy.raise_interrupt()
            if done == count_from:
                before = _simulated(ffi, lib, simulation, n_layers)
            if progress is not None:
                progress(done)
        counted = _simulated(ffi, lib, simulation, n_layers) - before
        n_saved = lib.fm_simulation_save(simulation, ffi.NULL, 0) if learned else 0
        saved = np.empty(n_saved, np.float32)
        if saved.size:
            lib.fm_simulation_save(simulation, ffi.from_buffer("float[]", saved), saved.size)
    finally:
        lib.fm_simulation_free(simulation)
    lookups, hits, evicted, refetched = counted.T.copy()
    who, found = left if victims else None, saved if saved.size else None
    return LayerCounts(lookups, hits, evicted, refetched, who, found)


def _simulated(ffi: Any, lib: Any, simulation: Any, n_layers: int) -> npt.NDArray[np.int64]:
    """[n_layers, 4] in the order of `struct fm_layer_counts`."""
    counts = ffi.new("struct fm_layer_counts[]", n_layers)
    if lib.fm_simulation_counts(simulation, counts) != 0:
        raise FlashMoEError(ffi.string(lib.fm_last_message()).decode("utf-8", "replace"))
    numbers: npt.NDArray[np.int64] = np.frombuffer(ffi.buffer(counts), np.int64)
    by_layer: npt.NDArray[np.int64] = numbers.reshape(n_layers, 4).copy()
    return by_layer

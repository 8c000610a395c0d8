"""Tokens per second from hits, a drive and a memory.

Decoding reads every weight that it uses once from memory, and what it misses from the drive. In a
layer the reads of missing experts go on while resident ones are computed, so a layer takes the
longer of the two; attention and the other dense weights come before the router, with nothing to
read. How many of a token's k experts a layer misses varies, and a layer cannot lend its time to
another, so the expectation is taken over a binomial count: max(mean) would be too fast.

Compute time is bytes over memory bandwidth, which is a bound: kernels that reach less are slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from flashmoe_gguf.host import available_memory
from flashmoe_gguf.plan.sizes import LayerCost

_PROBE_BYTES = 64 << 20  # per thread, beyond the caches of most processors
_ALL_PROBES_BYTES = 1 << 30


@dataclass(frozen=True)
class Machine:
    """Bytes per second that experts are read with from the drive, and weights from memory."""

    disk_bytes_per_second: float
    memory_bytes_per_second: float


def seconds_per_token(
    layers: Sequence[LayerCost],
    hit_rates: Sequence[float],
    dense_bytes: int,
    machine: Machine,
) -> float:
    """Expected seconds of decoding a token; `dense_bytes` are those that each token reads."""
    seconds = dense_bytes / machine.memory_bytes_per_second
    for layer, hit_rate in zip(layers, hit_rates, strict=True):
        compute = layer.top_k * layer.expert_bytes / machine.memory_bytes_per_second
        read = layer.expert_bytes / machine.disk_bytes_per_second
        miss = 1 - hit_rate
        for n in range(layer.top_k + 1):
            chance = math.comb(layer.top_k, n) * miss**n * hit_rate ** (layer.top_k - n)
            seconds += chance * max(compute, n * read)
    return seconds


def memory_bandwidth(n_threads: int, seconds: float = 0.3) -> float:
    """Bytes per second that `n_threads` read from memory together: the best of some rounds.

    numpy's maximum over arrays larger than the caches, one per thread: nearly pure reading. The
    arrays take a quarter of what this process may have at the most, so that asking cannot kill it.
    """
    most = min(_ALL_PROBES_BYTES, available_memory().limit_bytes // 4)
    probe_bytes = max(min(_PROBE_BYTES, most // n_threads), 1 << 16)
    arrays = [np.ones(probe_bytes // 8) for _ in range(n_threads)]
    best, started = 0.0, time.perf_counter()
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(np.max, arrays))  # page faults and thread starts are not the memory's
        while best == 0.0 or time.perf_counter() - started < seconds:
            round_started = time.perf_counter()
            list(pool.map(np.max, arrays))
            elapsed = time.perf_counter() - round_started
            best = max(best, n_threads * probe_bytes / elapsed)
    return best

"""One class over `fm_stream`: a model's experts, from their description to their counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native.foreign import ForeignPolicy
from flashmoe_gguf._native.library import library
from flashmoe_gguf.errors import BudgetError, FlashMoEError, OptionError
from flashmoe_gguf.trace import Rows

IO_MODES = ("auto", "direct", "buffered")
VERIFY_MODES = ("first", "always", "off")

_NO_MEMORY = 2
_CORRUPT = 5


@dataclass(frozen=True)
class LatchedError:
    """The first failed load since it was last asked for. -1: not known. `errno` 0: short read, or
    `corrupt`: the bytes do not match their checksum, or `no_memory`: nothing was read.
    """

    file: int
    layer: int
    expert: int
    tensor: str
    errno: int
    corrupt: bool
    no_memory: bool
    count: int


@dataclass(frozen=True)
class GroupCounts:
    """One group's cache: sizes as of now, counters since the start.

    `n_bound` counts the tensors that the loaded model uses; 0 for layers outside its graph.
    """

    layer: int
    n_expert: int
    n_slots: int
    n_resident: int
    n_bound: int
    lookups: int
    hits: int
    evicted: int


@dataclass(frozen=True)
class TraceCounts:
    """Rows of a recording: since its start, not yet taken, and lost for want of room."""

    rows: int
    waiting: int
    lost: int


class NativeStream:
    """One `fm_stream`: describe it, open it, load a model inside `attached()`, start it.

    The model has to be freed before `close()`.
    """

    def __init__(
        self, *, io: str, n_workers: int, n_ring: int, request_bytes: int, verify: str = "first"
    ) -> None:
        if verify not in VERIFY_MODES:
            modes = ", ".join(VERIFY_MODES)
            raise OptionError(f"there is no way to verify called '{verify}'", f"one of {modes}")
        if io not in IO_MODES:
            raise OptionError(f"there is no I/O mode '{io}'", f"one of {', '.join(IO_MODES)}")
        self._ffi, self._lib = library()
        self._closing = threading.Lock()
        self._window_shape = (0, 0)
        options = self._ffi.new(
            "struct fm_options *",
            (IO_MODES.index(io), n_workers, n_ring, request_bytes, VERIFY_MODES.index(verify)),
        )
        self._stream = self._lib.fm_stream_new(options)
        if self._stream == self._ffi.NULL:
            raise self._failure()

    def _message(self) -> str:
        return str(self._ffi.string(self._lib.fm_last_message()).decode("utf-8", "replace"))

    def _failure(self, status: int = 1) -> FlashMoEError:
        if status == _NO_MEMORY:
            return BudgetError(self._message(), "give a smaller --ram")
        return OptionError(self._message())

    def _index(self, index: int) -> int:
        if index < 0:
            raise self._failure()
        return index

    def _check(self, status: int) -> None:
        if status != 0:
            raise self._failure(status)

    def add_file(self, path: Path, drive: int = 0) -> int:
        """Opens a model file; returns its index. Each `drive`, from 0 on, has its own readers."""
        return self._index(self._lib.fm_stream_add_file(self._stream, str(path).encode(), drive))

    def add_group(self, layer: int, family: int, n_expert: int) -> int:
        """Adds the routed experts of one layer and family; returns the group's index."""
        return self._index(self._lib.fm_stream_add_group(self._stream, layer, family, n_expert))

    def add_part(
        self,
        group: int,
        tensor: str,
        *,
        places: Sequence[tuple[int, int]],
        expert_bytes: int,
        stride: int,
        description: tuple[int, int, int] | None = None,
        sums: npt.NDArray[np.uint64] | None = None,
    ) -> int:
        """Adds one weight tensor of a group.

        `places`: file index and offset, for each of the files that have the experts in turn;
        in one file they are `stride` apart.
        `description`: ggml type, row length and rows, when the file does not describe the tensor
        to llama.cpp. `sums` [n_expert]: XXH3-64 of each expert's bytes, to check against.
        """
        ggml_type, ne0, ne1 = description or (-1, 0, 0)
        name = self._ffi.new("char[]", tensor.encode())
        numbers = self._ffi.NULL
        if sums is not None:
            numbers = self._ffi.new("uint64_t[]", sums.tolist())
        where = self._ffi.new("struct fm_place[]", list(places))
        part = self._ffi.new(
            "struct fm_part *",
            (name, where, len(places), expert_bytes, stride, numbers, ggml_type, ne0, ne1),
        )
        return self._index(self._lib.fm_stream_add_part(self._stream, group, part))

    def slot_bytes(self, group: int) -> int:
        """Bytes that one slot of this group takes."""
        return int(self._lib.fm_stream_slot_bytes(self._stream, group))

    def ring_bytes(self) -> int:
        """Bytes of the whole ring."""
        return int(self._lib.fm_stream_ring_bytes(self._stream))

    def open(self) -> None:
        """Allocates the ring; from now on a model can compute, every expert through the ring."""
        self._check(self._lib.fm_stream_open(self._stream))

    def start(self, slots: Sequence[int], policy: str | ForeignPolicy) -> None:
        """Allocates slots, one number per group, under an eviction policy."""
        if isinstance(policy, ForeignPolicy):
            self._foreign = policy  # its functions must live as long as the stream
            start, how = self._lib.fm_stream_start_foreign, policy.struct
        else:
            start, how = self._lib.fm_stream_start, policy.encode()
        self._check(start(self._stream, list(slots), how))

    def policy_weights(self) -> npt.NDArray[np.float32] | None:
        """What the policy has learned, in the library's order; None when it learns nothing."""
        with self._alive():
            n = self._lib.fm_stream_policy_save(self._stream, self._ffi.NULL, 0)
            weights = np.empty(n, np.float32)
            room = self._ffi.from_buffer("float[]", weights, require_writable=True)
            self._lib.fm_stream_policy_save(self._stream, room, n)
        return weights if n else None

    def load_policy_weights(self, weights: npt.NDArray[np.float32]) -> None:
        """Takes back what a policy of the same name and sizes has learned; after `start`.

        Raises OptionError when the policy cannot take these numbers.
        """
        numbers = np.ascontiguousarray(weights, np.float32)
        with self._alive():
            self._check(
                self._lib.fm_stream_policy_load(
                    self._stream, self._ffi.from_buffer("float[]", numbers), numbers.size
                )
            )

    def freeze_policy(self, frozen: bool = True) -> None:
        """The policy keeps what it has learned, or learns again; after `start`."""
        with self._alive():
            self._lib.fm_stream_policy_freeze(self._stream, int(frozen))

    def fill(self) -> None:
        """Reads the experts of groups with a slot for each of them, in the background."""
        self._lib.fm_stream_fill(self._stream)

    def lookahead(self, predictor: str, width: int, *, adaptive: bool) -> None:
        """Guesses experts of the next group, `width` at most; once, after the start.

        `adaptive`: only while tokens come faster with it than without.
        """
        self._check(
            self._lib.fm_stream_lookahead(self._stream, predictor.encode(), width, int(adaptive))
        )

    def resize(self, slots: Sequence[int]) -> None:
        """Uses so many slots of each group from now on, no more than at the start. Any thread may
        ask, also while closing.
        """
        with self._alive():
            self._check(self._lib.fm_stream_resize(self._stream, list(slots)))

    def start_window(self, k: int, n_tokens: int) -> None:
        """Remembers the routing of the last decoded tokens from now on."""
        self._check(self._lib.fm_window_start(self._stream, k, n_tokens))
        self._window_shape = (n_tokens, k)

    def window_tokens(self) -> int:
        """Decoded tokens since the window began. Any thread may ask, also while closing."""
        with self._closing:
            closed = self._stream == self._ffi.NULL
            return 0 if closed else int(self._lib.fm_window_tokens(self._stream))

    def window(self, n_groups: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """(experts [n, n_groups, k], 65535: none; hits [n]) of the last decoded tokens, oldest
        first. Any thread may ask, also while closing.
        """
        n_tokens, k = self._window_shape
        ids = np.empty((n_tokens, n_groups, k), np.uint16)
        hits = np.empty(n_tokens, np.uint32)
        buffer = self._ffi.from_buffer
        with self._alive():
            n = self._lib.fm_window_read(
                self._stream, buffer("uint16_t[]", ids), buffer("uint32_t[]", hits)
            )
        return ids[:n], hits[:n]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model that this thread loads inside the block takes its experts from this stream."""
        self._check(self._lib.fm_hooks_attach(self._stream))
        try:
            yield
        finally:
            self._lib.fm_hooks_attach(self._ffi.NULL)

    def upload(self) -> None:
        """Devices may take over large operations, with experts from the cache; before loading."""
        self._lib.fm_hooks_upload(self._stream, 1)

    def counters(self) -> dict[str, int]:
        """Every field of `struct fm_stats`; may be asked by any thread, also while closing."""
        stats = self._counted()
        names = [name for name, _ in self._ffi.typeof("struct fm_stats").fields]
        return {name: int(getattr(stats, name)) for name in names}

    def operations(self) -> int:
        """Expert matmuls begun so far: the one counter that is asked for at every token."""
        return int(self._counted().operations)

    def _counted(self) -> Any:
        stats = self._ffi.new("struct fm_stats *")
        with self._alive():
            self._lib.fm_stream_stats(self._stream, stats)
        return stats

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """The stream stays until the end of the block; raises FlashMoEError when it is closed."""
        with self._closing:
            if self._stream == self._ffi.NULL:
                raise FlashMoEError("the model is closed")
            yield

    def group_counts(self, group: int) -> GroupCounts:
        """The counters of one group; may be asked by any thread, also while closing."""
        stats = self._ffi.new("struct fm_group_stats *")
        with self._alive():
            self._check(self._lib.fm_stream_group_stats(self._stream, group, stats))
        return GroupCounts(
            layer=stats.layer,
            n_expert=stats.n_expert,
            n_slots=stats.n_slots,
            n_resident=stats.n_resident,
            n_bound=stats.n_bound,
            lookups=stats.lookups,
            hits=stats.hits,
            evicted=stats.evicted,
        )

    def experts(
        self, group: int, n_expert: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """(resident, uses) of a group, each [n_expert]: 1 for experts that have a slot now, and how
        many tokens have used each since the start. Any thread may ask, also while closing.
        """
        resident, uses = np.zeros(n_expert, np.uint8), np.zeros(n_expert, np.uint64)
        with self._alive():
            self._check(
                self._lib.fm_stream_experts(
                    self._stream,
                    group,
                    self._ffi.from_buffer("uint8_t[]", resident),
                    self._ffi.from_buffer("uint64_t[]", uses),
                )
            )
        return resident, uses

    def begin_sequence(self) -> None:
        """Tells policy and recording that the tokens computed next are another request's."""
        self._lib.fm_stream_begin_sequence(self._stream)

    def start_trace(self, k: int, max_rows: int, with_probs: bool) -> None:
        """Begins to record up to k experts of each token in every group."""
        self._check(self._lib.fm_trace_start(self._stream, k, max_rows, int(with_probs)))

    def set_phase(self, answering: bool) -> None:
        """Whether the tokens recorded next are an answer's or a prompt's."""
        self._lib.fm_trace_set_phase(self._stream, int(answering))

    def trace_counts(self) -> TraceCounts:
        """How much was recorded; all 0 when nothing is."""
        counts = self._ffi.new("struct fm_trace_counts *")
        self._lib.fm_trace_count(self._stream, counts)
        return TraceCounts(counts.rows, counts.waiting, counts.lost)

    def cut_trace(self, rows: int) -> None:
        """Forgets all rows but the first `rows` since the start; rows that were taken stay."""
        self._lib.fm_trace_cut(self._stream, rows)

    def take_trace(self, n_groups: int, k: int, with_probs: bool) -> Rows:
        """Moves all rows out that wait. Between two decodes."""
        n = self.trace_counts().waiting
        rows = Rows(
            np.empty((n, n_groups, k), np.uint16),
            np.empty((n, n_groups, k), np.float32) if with_probs else None,
            np.empty(n, np.uint8),
            np.empty(n, np.uint8),
        )
        buffer = self._ffi.from_buffer
        self._lib.fm_trace_take(
            self._stream,
            n,
            buffer("uint16_t[]", rows.ids),
            self._ffi.NULL if rows.probs is None else buffer("float[]", rows.probs),
            buffer("uint8_t[]", rows.phases),
            buffer("uint8_t[]", rows.starts),
        )
        return rows

    def probs_callback(self) -> tuple[int, int]:
        """Addresses of an eval callback for llama.cpp and of its user data."""
        function = self._ffi.cast("uintptr_t", self._lib.fm_hooks_probs_callback())
        return int(function), int(self._ffi.cast("uintptr_t", self._stream))

    def take_error(self) -> LatchedError | None:
        """The latched error, which this clears; None when nothing failed."""
        error = self._ffi.new("struct fm_error *")
        if self._lib.fm_stream_take_error(self._stream, error) == 0:
            return None
        return LatchedError(
            file=error.file,
            layer=error.layer,
            expert=error.expert,
            tensor=self._ffi.string(error.tensor).decode("utf-8", "replace"),
            errno=error.sys_errno,
            corrupt=error.status == _CORRUPT,
            no_memory=error.status == _NO_MEMORY,
            count=error.count,
        )

    def verify(self) -> None:
        """Checks every invariant of cache and policy; raises FlashMoEError when one is broken."""
        self._check(self._lib.fm_stream_verify(self._stream))

    def set_fault(
        self, *, errno: int = 0, hold: bool = False, after: int = 0, count: int = 1
    ) -> None:
        """For tests: after `after` reads, `count` fail with `errno` (0: short) or are held."""
        fault = self._ffi.new("struct fm_fault *", (errno, int(hold), after, count))
        self._lib.fm_fault_set(self._stream, fault)

    def release_held(self) -> None:
        """For tests: lets held reads go on."""
        self._lib.fm_fault_release(self._stream)

    def held(self) -> int:
        """For tests: reads that are held now."""
        return int(self._lib.fm_fault_held(self._stream))

    def forget(self) -> None:
        """Leaves everything as it is, for a forked child: the reading threads are the parent's."""
        self._stream = self._ffi.NULL

    def close(self) -> None:
        """Waits for reads in flight and frees everything. Safe to call twice."""
        with self._closing:
            stream, self._stream = self._stream, self._ffi.NULL
        if stream != self._ffi.NULL:
            self._lib.fm_stream_free(stream)

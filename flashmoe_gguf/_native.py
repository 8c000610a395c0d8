"""The C library: one class over `flashmoe.h`, bound with cffi in ABI mode; the only cffi."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt

from flashmoe_gguf.errors import BudgetError, FlashMoEError, LibraryError, OptionError
from flashmoe_gguf.libs import library_dir, load_llama_cpp
from flashmoe_gguf.trace import Rows

IO_MODES = ("auto", "direct", "buffered")
VERIFY_MODES = ("first", "always", "off")

_NO_MEMORY = 2
_CORRUPT = 5


@functools.cache
def _library() -> tuple[Any, Any]:
    """(ffi, lib). llama_cpp comes first: both must resolve to the same llama.cpp libraries."""
    load_llama_cpp("patched")
    header = Path(__file__).parent / "flashmoe.h"
    ffi = cffi.FFI()
    try:
        ffi.cdef(header.read_text(encoding="utf-8"))
        return ffi, ffi.dlopen(str(library_dir("patched") / "libflashmoe.so"))
    except OSError as error:
        raise LibraryError(
            f"the expert cache library does not load: {error}",
            "reinstall the package on this machine: `pip install --force-reinstall .`",
        ) from error


def policy_names() -> tuple[str, ...]:
    """The eviction policies that the library has."""
    ffi, lib = _library()
    names: list[str] = []
    while (name := lib.fm_policy_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return tuple(names)


_EVENTS = {  # of a policy: name, C type of the function
    "on_hit": "void(int32_t, int32_t)",
    "on_miss": "void(int32_t, int32_t)",
    "on_insert": "void(int32_t, int32_t)",
    "on_remove": "void(int32_t, int32_t)",
    "end_token": "void(int32_t)",
    "begin_sequence": "void()",
}
_NAMED_WRONG = 2


class ForeignPolicy:
    """A policy object of Python's, for the C library to call: see flashmoe_gguf.policy.Policy.

    `victim` must be there; what else it lacks is left out. The library calls from its computing
    threads, under its lock, one call at a time. An exception, or a victim that may not leave, ends
    the calls: lru takes over, and `failure` says why.
    """

    def __init__(self, name: str, policy: Any, n_expert: Sequence[int]) -> None:
        self.name = name
        self._ffi, _ = _library()
        self._victim: Callable[[int, npt.NDArray[np.bool_]], int] = policy.victim
        self._n_expert = list(n_expert)
        self._raised: BaseException | None = None
        self._interrupt: KeyboardInterrupt | None = None
        self.struct = self._ffi.new("struct fm_foreign_policy *")
        self._functions = [self._ffi.callback("int32_t(int32_t, const uint8_t *)", self._name)]
        self.struct.victim = self._functions[0]
        for event, kind in _EVENTS.items():
            method = getattr(policy, event, None)
            if method is not None:
                function = self._ffi.callback(kind, self._event(method))
                setattr(self.struct, event, function)
                self._functions.append(function)

    def _event(self, method: Callable[..., Any]) -> Callable[..., None]:
        def call(*numbers: int) -> None:
            try:
                method(*numbers)
            except KeyboardInterrupt as interrupt:  # meant for the program, not for the policy
                self._interrupt = interrupt
            except BaseException as error:
                self._fail(error)

        return call

    def _name(self, group: int, may_leave: Any) -> int:
        raw = self._ffi.buffer(may_leave, self._n_expert[group])
        for _ in range(2):  # again after Ctrl-C
            try:
                return int(self._victim(group, np.frombuffer(raw, np.bool_)))
            except KeyboardInterrupt as interrupt:
                self._interrupt = interrupt
            except BaseException as error:
                self._fail(error)
                break
        return -1

    def _fail(self, error: BaseException) -> None:
        self._raised = error
        self.struct.failed = 1

    @property
    def failure(self) -> str:
        """Why lru has taken over; empty while the policy works."""
        if self._raised is not None:
            return f"{type(self._raised).__name__}: {self._raised}".rstrip(": ")
        if self.struct.failed == _NAMED_WRONG:
            return f"it named expert {self.struct.named}, which may not leave"
        return ""

    @property
    def seconds(self) -> float:
        """Time spent in the policy so far."""
        return float(self.struct.ns) / 1e9

    def raise_interrupt(self) -> None:
        """Raises the KeyboardInterrupt that came while the policy was called, once."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt


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
    ffi, lib = _library()
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


@dataclass(frozen=True)
class LatchedError:
    """The first failed load since it was last asked for. -1: not known. `errno` 0: short read, or
    `corrupt`: the bytes do not match their checksum.
    """

    file: int
    layer: int
    expert: int
    tensor: str
    errno: int
    corrupt: bool
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
        self._ffi, self._lib = _library()
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
        """Uses so many slots of each group from now on, no more than at the start."""
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
        with self._closing:
            if self._stream == self._ffi.NULL:
                raise FlashMoEError("the model is closed")
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
        with self._closing:
            if self._stream == self._ffi.NULL:
                raise FlashMoEError("the model is closed")
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
        with self._closing:
            if self._stream == self._ffi.NULL:
                raise FlashMoEError("the model is closed")
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

    def close(self) -> None:
        """Waits for reads in flight and frees everything. Safe to call twice."""
        with self._closing:
            stream, self._stream = self._stream, self._ffi.NULL
        if stream != self._ffi.NULL:
            self._lib.fm_stream_free(stream)

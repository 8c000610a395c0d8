"""A model's experts as a running stream: geometry in, plan applied, counters out."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flashmoe_gguf._native import ForeignPolicy, GroupCounts, NativeStream, policy_names
from flashmoe_gguf.auto_policy import choose_by_replay, keep_recent
from flashmoe_gguf.budget import GroupCost, ring_buffers
from flashmoe_gguf.errors import ExpertReadError, FlashMoEError, ModelFileError, OptionError
from flashmoe_gguf.lookahead import parse_lookahead
from flashmoe_gguf.policy import SIMULATED, TRAINED, PolicyClass, find_class
from flashmoe_gguf.policy_weights import SCHEMAS, PolicyMemory, weights_path
from flashmoe_gguf.regret import WINDOW_TOKENS, RegretGauge
from flashmoe_gguf.settings import StreamSettings
from flashmoe_gguf.stats import ExpertUse, Stats
from flashmoe_gguf.store import FAMILIES, Geometry
from flashmoe_gguf.tuning import N_WORKERS, REQUEST_BYTES, load_tuning


def choose_policy(name: str) -> str | PolicyClass:
    """The eviction policy for a name, `auto` or `package.module:Class`, which this imports.

    Raises OptionError for one that is unknown, or that only the simulator can follow.
    """
    if ":" in name:
        return find_class(name)
    known = policy_names()
    if name in SIMULATED:
        raise OptionError(
            f"policy {name} needs to know the future, so nothing can run with it",
            "`flashmoe simulate` shows what it would reach on a recorded trace",
        )
    if name != "auto" and name not in known:
        raise OptionError(
            f"there is no policy '{name}'",
            f"one of auto, {', '.join(known)}, or package.module:Class for one in Python",
        )
    return name


def read_sums(geometry: Geometry) -> dict[str, npt.NDArray[np.uint64]]:
    """The checksums of a packed file by tensor, each [n_expert]."""
    packed = geometry.packed
    assert packed is not None
    counts = [part.tensor.shape[2] for part in packed.parts]
    with open(geometry.header.shards[0].path, "rb") as file:
        file.seek(packed.sums_offset)
        sums = np.frombuffer(file.read(8 * sum(counts)), "<u8")
    ends = np.cumsum(counts)
    return {
        part.tensor.name: sums[end - n : end]
        for part, n, end in zip(packed.parts, counts, ends, strict=True)
    }


_LIVE: weakref.WeakSet[ExpertStream] = weakref.WeakSet()


def _live() -> list[ExpertStream]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread loads or closes a model
            return list(_LIVE)


def untouched_slot_bytes() -> int:
    """Slots of all streams of this process that are reserved and hold nothing yet."""
    total = 0
    for stream in _live():
        with contextlib.suppress(FlashMoEError):  # it was closed meanwhile
            stats = stream.stats()
            total += stats.slot_bytes - stats.resident_bytes
    return total


class ExpertStream:
    """The experts of one model: owns the native stream and knows what its indices mean.

    `close()` comes after the model is gone.
    """

    def __init__(self, geometry: Geometry, settings: StreamSettings) -> None:
        self.geometry = geometry
        settings, self._tuned = settings.tuned(load_tuning(geometry))
        self._settings = settings
        self._lookahead = parse_lookahead(settings.lookahead)
        self._chosen = choose_policy(settings.policy)
        self._reason = ""
        self._foreign: ForeignPolicy | None = None
        self._gauge: RegretGauge | None = None
        self._memory: PolicyMemory | None = None
        self._process = os.getpid()
        self._budget_bytes = 0
        self._start_bytes = 0
        n_ring = ring_buffers(geometry.max_part_bytes)
        self.native = NativeStream(
            io=settings.io,
            n_workers=settings.n_workers or N_WORKERS,
            n_ring=n_ring,
            request_bytes=settings.request_bytes or REQUEST_BYTES,
            verify=settings.verify,
        )
        try:
            self._describe()
            self.native.open()
        except BaseException:
            self.native.close()
            raise
        _LIVE.add(self)

    def _describe(self) -> None:
        packed = self.geometry.packed is not None
        sums = read_sums(self.geometry) if packed else {}
        n_shards = len(self.geometry.header.shards)
        files = [  # the shards share the first drive, each stripe has one of its own
            self.native.add_file(file.path, max(0, i - n_shards))
            for i, file in enumerate(self.geometry.files)
        ]
        for group in self.geometry.groups:
            index = self.native.add_group(group.layer, FAMILIES.index(group.family), group.n_expert)
            for part in group.parts:
                self.native.add_part(
                    index,
                    part.tensor,
                    places=[(files[place.file], place.offset) for place in part.places],
                    expert_bytes=part.expert_bytes,
                    stride=part.stride,
                    description=(part.ggml_type, part.shape[0], part.shape[1]) if packed else None,
                    sums=sums.get(part.tensor),
                )

    def costs(self) -> list[GroupCost]:
        """What slots cost in each group; those outside the loaded model's graph get none."""
        return [
            GroupCost(self.native.slot_bytes(i), counts.n_expert if counts.n_bound else 0)
            for i, counts in enumerate(self.groups())
        ]

    @property
    def n_expert(self) -> npt.NDArray[np.int32]:
        """[n_groups]"""
        return np.array([group.n_expert for group in self.geometry.groups], np.int32)

    def n_slots(self) -> npt.NDArray[np.int32]:
        """[n_groups], as of now"""
        return np.array([group.n_slots for group in self.groups()], np.int32)

    def window_tokens(self) -> int:
        """Decoded tokens since the start."""
        return self.native.window_tokens()

    def window(self) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
        """(experts [n, n_groups, k], 65535: none; hits [n]) of the last of them."""
        return self.native.window(len(self.geometry.groups))

    def start(self, slots: tuple[int, ...], budget_bytes: int, top_k: int) -> None:
        """Allocates the slots of a plan, and what policy and lookahead need.

        top_k: experts that a token uses in a group at most.
        """
        self.native.start(slots, self._make_policy(slots))
        self._remember()
        if self._lookahead is not None:
            ahead = self._lookahead
            self.native.lookahead(ahead.predictor, ahead.width, adaptive=ahead.adaptive)
        self.native.start_window(top_k, WINDOW_TOKENS)
        self._start_bytes = self.open_bytes()
        self._budget_bytes = budget_bytes

    def begin(self) -> None:
        """What goes on in the background: groups that fit as a whole fill, regret is measured."""
        self.native.fill()
        self._gauge = RegretGauge(self, self.n_expert)

    def open_bytes(self) -> int:
        """Slots that can be used now."""
        return self.native.counters()["slot_bytes"]

    def shrink(self, slots: tuple[int, ...]) -> None:
        """Begins with fewer slots than were allocated."""
        self.resize(slots)
        self._start_bytes = self.open_bytes()

    def resize(self, slots: tuple[int, ...]) -> None:
        """Uses so many slots per group from now on, no more than at the start."""
        self.native.resize(slots)

    def _make_policy(self, slots: tuple[int, ...]) -> str | ForeignPolicy:
        if self._chosen == "auto":
            fingerprint, n_slots = self.geometry.fingerprint, np.array(slots, np.int32)
            choice = choose_by_replay(fingerprint, self.n_expert, n_slots)
            self._chosen, self._reason = choice.policy, choice.reason
        if isinstance(self._chosen, str):
            return self._chosen
        n_expert = [group.n_expert for group in self.geometry.groups]
        made = self._chosen.make(n_expert, list(slots))
        self._foreign = ForeignPolicy(self._chosen.name, made, n_expert)
        return self._foreign

    def _remember(self) -> None:
        """A policy that learns begins with what it has learned before."""
        policy, given = self.policy, self._settings.policy_file
        if policy not in SCHEMAS:
            if given is not None and self._settings.policy != "auto":
                raise OptionError(f"policy {policy} learns nothing", "leave out the policy file")
            return
        fingerprint = self.geometry.fingerprint
        path = Path(given) if given is not None else weights_path(policy, fingerprint)
        self._memory = PolicyMemory(path, policy, fingerprint, is_given=given is not None)
        if self._settings.forget:
            self._memory.forget()
        weights = self._memory.load()
        if (weights is None or not self._take(weights)) and policy in TRAINED:
            raise OptionError(
                f"policy {policy} decides nothing before it is trained for this model",
                "record a trace, then `flashmoe train TRACE -o FILE`, then --policy-file FILE",
            )
        self.native.freeze_policy(not self._settings.learn)

    def _take(self, weights: npt.NDArray[np.float32]) -> bool:
        """False: the policy refuses what the cache directory has. OptionError for a given file."""
        try:
            self.native.load_policy_weights(weights)
        except OptionError:
            if self._settings.policy_file is not None:
                raise
            return False
        return True

    @property
    def policy(self) -> str:
        """Who decides now: a name, and the one that failed when lru has taken its place."""
        chosen = self._chosen if isinstance(self._chosen, str) else self._chosen.name
        return f"lru, as {chosen} failed" if self._failure else chosen

    @property
    def _failure(self) -> str:
        return self._foreign.failure if self._foreign is not None else ""

    def groups(self) -> list[GroupCounts]:
        """Counters per group, in the geometry's order."""
        return [self.native.group_counts(i) for i in range(len(self.geometry.groups))]

    def use(self) -> list[ExpertUse]:
        """Counters and experts per group that the loaded model uses, in the geometry's order."""
        return [
            ExpertUse(counts, *self.native.experts(i, counts.n_expert))
            for i, counts in enumerate(self.groups())
            if counts.n_bound
        ]

    @property
    def is_forked(self) -> bool:
        """Whether this is a child that was forked after loading."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises FlashMoEError in a child that was forked after loading: threads do not follow."""
        if self.is_forked:
            raise FlashMoEError(
                "the model was loaded before this process was forked",
                "load it in the child, or start children with the spawn method",
            )

    def raise_error(self) -> None:
        """Raises ExpertReadError when a load has failed since the last call.

        Also a KeyboardInterrupt that came while a policy of Python's was called.
        """
        if self._foreign is not None:
            self._foreign.raise_interrupt()
        error = self.native.take_error()
        if error is None:
            return
        if error.no_memory:
            raise FlashMoEError("there was no memory to compute with", "give a smaller --ram")
        if error.layer < 0:
            raise FlashMoEError("an operation asked for experts that are not part of the model")
        raise ExpertReadError(
            file=str(self.geometry.files[error.file].path),
            layer=error.layer,
            expert=error.expert,
            tensor=error.tensor,
            errno=error.errno,
            corrupt=error.corrupt,
        )

    def stats(self) -> Stats:
        """The counters as of now."""
        c = self.native.counters()
        direct, buffered = c.pop("files_direct"), c.pop("files_buffered")
        return Stats(
            policy=self.policy,
            policy_reason=self._reason,
            policy_failure=self._failure,
            tuned=self._tuned,
            regret=self._gauge.regret if self._gauge is not None else None,
            io_mode="mixed" if direct and buffered else "direct" if direct else "buffered",
            n_slots=max((g.n_slots for g in self.groups()), default=0),
            given_back_bytes=self._start_bytes - c["slot_bytes"],
            budget_bytes=self._budget_bytes,
            dense_bytes=self.geometry.dense_bytes,
            bytes_read=c.pop("read_bytes"),
            wait_seconds=c.pop("wait_ns") / 1e9,
            policy_seconds=self._foreign.seconds if self._foreign is not None else 0.0,
            **c,
        )

    def _keep(self) -> None:
        """What was learned, and the last routing, for the next time."""
        with contextlib.suppress(ModelFileError):  # the file is gone
            experts, _ = self.window()
            layers = np.array([group.layer for group in self.geometry.groups], np.int32)
            keep_recent(self.geometry.fingerprint, experts, self.n_expert, layers)
        memory, self._memory = self._memory, None
        weights = self.native.policy_weights() if memory is not None else None
        if memory is not None and weights is not None:
            memory.save(weights)

    def close(self) -> None:
        """Waits for reads in flight and frees the cache. Keeps the last routing for next time.

        In a forked child nothing is kept or freed: the threads that would have to end are not
        there.
        Raises TraceError when the policy file that the user gave cannot be written.
        """
        _LIVE.discard(self)
        if self.is_forked:
            self.native.forget()
            return
        gauge, self._gauge = self._gauge, None
        try:
            if gauge is not None:
                gauge.close()
                if self._settings.learn:
                    self._keep()
        finally:
            self.native.close()

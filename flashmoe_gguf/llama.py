"""`Llama`: llama_cpp.Llama whose routed experts come from disk through a bounded cache."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashmoe_gguf.arguments import check_arguments, load_error, refuse_unstreamable
from flashmoe_gguf.assertions import assertions_raised
from flashmoe_gguf.budget import Plan, parse_ram
from flashmoe_gguf.devices import keep_experts_on_host
from flashmoe_gguf.errors import BudgetError, FlashMoEError, OptionError
from flashmoe_gguf.governor import Governor
from flashmoe_gguf.grammar import guarded
from flashmoe_gguf.host import default_budget, process_memory
from flashmoe_gguf.llama_log import collected_errors
from flashmoe_gguf.loading import (
    check_before_loading,
    fixed_before_loading,
    start_planned,
    with_ubatch,
)
from flashmoe_gguf.placement import Placement, place_model
from flashmoe_gguf.recording import Recording, used_experts
from flashmoe_gguf.settings import StreamSettings
from flashmoe_gguf.shapes import check_loadable
from flashmoe_gguf.stats import ExpertUse, Stats
from flashmoe_gguf.store import Geometry, read_geometry
from flashmoe_gguf.streaming import ExpertStream, untouched_slot_bytes
from flashmoe_gguf.trace import write_trace
from flashmoe_gguf.ubatch import DEFAULT_UBATCH

import llama_cpp  # isort: skip  # llama_log has made sure that it runs on our libraries

Progress = Callable[[float], None]

_one_at_a_time = threading.RLock()


class _Eval(NamedTuple):
    """One running eval: where it began, and how many expert matmuls it takes."""

    first_token: int
    n_tokens: int
    first_operation: int
    all_operations: int


class Llama(llama_cpp.Llama):  # type: ignore[misc,unused-ignore]
    """llama_cpp.Llama with the same constructor and methods, for MoE models larger than RAM.

    Arguments beyond llama_cpp.Llama's:

    - ram: budget of the whole process, such as "8G" or a number of bytes. None or "auto": what
      is available.
    - policy: who leaves the cache: a name of docs/POLICIES.md, "package.module:Class", or "auto",
      which replays what it last saw of this model.
    - policy_file: where a policy that learns keeps what it has learned; None: one file per model
      in the user's cache directory. Read when it is there, written by `close()`.
    - learn: False keeps a policy as it is, and nothing on disk.
    - forget: begin without what was learned about this model before.
    - io: "direct", "buffered" or "auto" (direct where the file system allows it).
    - n_slots: experts cached per layer, instead of a budget. 0: nothing is cached.
    - stream: False loads the model as llama_cpp does, which cannot load a packed file.
    - verify: of a packed file, check each expert's checksum when it is read "first", "always",
      or "off".
    - lookahead: reading experts of the next layers before their routers have run: "auto" (while it
      is measured to gain), "off", or how many per layer at most.
    - quotas: "auto" gives layers the slots that serve them best, by the routing of the model's
      last tokens, where it is known; "even" gives each the same share of its experts.
    - n_workers, request_bytes: reading threads per drive, and bytes of one read at most. None:
      what `flashmoe tune` has found for this model on this machine, else 4 and 1 MiB.
    - trace: a file for the routing of everything that is computed, see `flashmoe_gguf.trace`;
      written by `close()` and `save_trace()`. About 2 bytes of memory per expert and token.
    - trace_probs: with the router's probabilities, which slows decoding a little.
    - n_ubatch: also "auto": 512, or more where reading experts for a prompt takes longer than
      computing it. Results are those of llama.cpp with the same number.
    - progress: called with 0..1 while dense weights load; what it raises ends the loading.
    - n_gpu_layers: as in llama_cpp, and "auto": as many layers as fit. Their dense weights and KV
      cache go to the devices, routed experts are streamed all the same.
    - op_offload: True lets devices take over the expert matmuls of large batches, as llama.cpp
      does: the routed experts are uploaded through the cache for each. It gains where the device is
      faster than the processor by more than the upload takes. None and False: what lies in the
      system's memory is computed by the processor, also dense weights.

    A model without routed experts is loaded as llama_cpp does; `is_streamed` says which it was.
    Weights are not repacked (`use_extra_bufts` is off), so that logits equal those of stock
    llama.cpp without repacking bit for bit. Dense weights are read, not mapped, whatever
    `use_mmap` says. A failed read is reported to whichever context of this object computes next.

    Raises ModelFileError, UnsupportedModelError, BudgetError, OptionError; while decoding,
    ExpertReadError when an expert cannot be read: no token comes from bad data, the tokens of that
    step are discarded, and the object can be used again.
    """

    def __init__(
        self,
        model_path: str,
        *,
        ram: str | int | None = None,
        n_slots: int | None = None,
        policy: str = "auto",
        policy_file: str | os.PathLike[str] | None = None,
        learn: bool = True,
        forget: bool = False,
        io: str = "auto",
        stream: bool = True,
        verify: str = "first",
        lookahead: str | int = "auto",
        quotas: str = "auto",
        n_workers: int | None = None,
        request_bytes: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_probs: bool = False,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        self._experts: ExpertStream | None = None
        self._governor: Governor | None = None
        self._recording: Recording | None = None
        self._computed_to = 0
        self._progress = progress
        self._stopped_by: BaseException | None = None
        self._running: _Eval | None = None
        self._parts_per_pass = 0
        self._plan: Plan | None = None
        self._stream = stream
        self._placement: Placement | None = None
        self._settings = StreamSettings(
            ram=ram,
            n_slots=n_slots,
            policy=policy,
            policy_file=os.fspath(policy_file) if policy_file is not None else None,
            learn=learn,
            forget=forget,
            io=io,
            verify=verify,
            lookahead=lookahead,
            quotas=quotas,
            n_workers=n_workers,
            request_bytes=request_bytes,
            trace=os.fspath(trace) if trace is not None else None,
            trace_probs=trace_probs,
        )
        check_arguments(
            model_path, None if parse_ram(ram) is None else ram, n_slots, kwargs, llama_cpp.Llama
        )
        self._settings.check()
        self.geometry: Geometry = read_geometry(model_path)
        check_loadable(self.geometry)
        streams = stream and self.geometry.is_moe and not kwargs.get("vocab_only")
        self._placement = place_model(llama_cpp, self.geometry, kwargs, with_experts=not streams)
        if self._placement is not None:
            kwargs = {**kwargs, "n_gpu_layers": self._placement.n_layers}
        try:
            if streams:
                refuse_unstreamable(kwargs)
                with _one_at_a_time:  # what a load takes is measured by what the process grows
                    self._load_streamed(str(model_path), kwargs)
            elif trace is not None:
                raise OptionError(
                    "there is no routing to record: the model is not streamed",
                    "leave trace out, or load a model with routed experts",
                )
            else:
                if kwargs.get("n_ubatch") == "auto":
                    kwargs["n_ubatch"] = DEFAULT_UBATCH
                self._load(str(model_path), kwargs)
        except BaseException:
            self.close()  # an exception that is kept must not keep a model with it
            raise

    def _load(self, model_path: str, kwargs: dict[str, Any]) -> None:
        with collected_errors() as log:
            try:
                with assertions_raised(llama_cpp.llama_cpp._lib):
                    super().__init__(model_path, **kwargs)
            except ValueError as error:
                stopped_by, self._stopped_by = self._stopped_by, None
                if stopped_by is not None:
                    raise stopped_by from None
                raise load_error(model_path, error, list(log)) from error
            except MemoryError as error:
                raise BudgetError(
                    f"not enough memory for a batch of {kwargs.get('n_batch', 512)} tokens",
                    "give a smaller n_batch or context",
                ) from error

    def _load_streamed(self, model_path: str, kwargs: dict[str, Any]) -> None:
        settings = self._settings
        ram_bytes = parse_ram(settings.ram) or default_budget().limit_bytes
        process_bytes = process_memory()[0] + untouched_slot_bytes()
        self._experts = experts = ExpertStream(self.geometry, settings)
        if kwargs.get("op_offload"):
            experts.native.upload()
        fixed = fixed_before_loading(experts, settings, self._placement, kwargs, process_bytes)
        if kwargs.get("n_ubatch") == "auto":
            kwargs = with_ubatch(experts, settings, kwargs, fixed, ram_bytes)
        if settings.n_slots is None:
            check_before_loading(experts, kwargs, fixed, ram_bytes)
        _, committed = process_memory()
        with experts.native.attached():
            # not mmapped: dense weights live in anonymous memory, which the kernel cannot drop
            fixed_kwargs = {"use_mmap": False, "op_offload": bool(kwargs.get("op_offload"))}
            self._load(model_path, {**kwargs, **fixed_kwargs})
        grown = process_memory()[1] - committed - self._untouched_bytes()
        fixed = replace(fixed, context=max(grown - fixed.dense, fixed.context))
        top_k = used_experts(self.geometry, kwargs.get("kv_overrides"))
        self._plan = start_planned(experts, settings, fixed, ram_bytes, top_k)
        experts.begin()
        if settings.n_slots is None:
            self._governor = Governor(
                experts,
                self._plan.slots,
                experts.costs(),
                committed=lambda: process_memory()[0] + untouched_slot_bytes(),
            )
        n_bound = [g.n_bound for g in experts.groups()]
        self._parts_per_pass = sum(n_bound)
        if settings.trace is not None:
            self._recording = Recording(
                experts.native, self.geometry, n_bound, top_k, settings.trace_probs
            )
        self._watch_context()
        _open.add(self)

    def eval(self, tokens: Sequence[int]) -> None:
        """As llama_cpp.Llama.eval; `eval_progress` can watch it from another thread."""
        self._need_open()
        self._begin(len(tokens))
        self._running = _Eval(
            self.n_tokens, len(tokens), self._operations(), self._count_operations(len(tokens))
        )
        try:
            super().eval(tokens)
            self._computed_to = self.n_tokens
        finally:
            self._running = None

    def _begin(self, n_tokens: int) -> None:
        """Says whether another request begins: from nothing, or from less than half of what was
        there (most prompts share their first tokens).
        """
        if self._experts is None:
            return
        if 2 * self.n_tokens < self._computed_to or self.n_tokens == 0:
            self._experts.native.begin_sequence()
        if self._recording is not None:
            self._recording.set_phase(answering=n_tokens == 1 and self.n_tokens > 0)

    def eval_progress(self) -> tuple[float, int] | None:
        """(tokens done, tokens in all) of the eval that is running; None when none is.

        Streamed models advance layer by layer, so the first is a fraction; others by whole batches.
        """
        running = self._running
        if running is None:
            return None
        if running.all_operations == 0:
            return float(self.n_tokens - running.first_token), running.n_tokens
        done = (self._operations() - running.first_operation) / running.all_operations
        return running.n_tokens * min(done, 1.0), running.n_tokens

    def _operations(self) -> int:
        experts = self._experts  # another thread may close the model meanwhile
        return experts.native.operations() if experts is not None else 0

    def _count_operations(self, n_tokens: int) -> int:
        """Expert matmuls that evaluating so many tokens takes: one per part, layer and ubatch."""
        ubatches: int = sum(
            -(-min(self.n_batch, n_tokens - at) // self.context_params.n_ubatch)
            for at in range(0, n_tokens, self.n_batch)
        )
        return ubatches * self._parts_per_pass

    def _untouched_bytes(self) -> int:
        """llama_cpp reserves room for every row of logits and fills it only with logits_all."""
        scores: npt.NDArray[np.single] = self.scores
        return 0 if self._logits_all else int(scores.nbytes)

    def _watch_context(self) -> None:
        """Every decode and encode checks for reads that failed; state from bad data is dropped."""
        owner = weakref.ref(self)  # no cycle: dropping the last reference frees the model at once
        for name in ("decode", "encode"):
            setattr(self._ctx, name, _checked(owner, getattr(type(self._ctx), name)))

    def _need_open(self) -> None:
        if self._ctx.ctx is None:
            raise FlashMoEError("the model is closed", "load it again")

    # llama_cpp builds these structs inside its constructor; here their defaults are adjusted.
    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        if self._experts is not None and self._settings.trace_probs:
            function, stream = self._experts.native.probs_callback()
            callback = ctypes.cast(function, llama_cpp.ggml_backend_sched_eval_callback)
            params.cb_eval, params.cb_eval_user_data = callback, stream
        self._context_params = params

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.use_extra_bufts = False
        if self._placement is not None and self._experts is not None:
            keep_experts_on_host(llama_cpp, params)
        if self._progress is not None:
            params.progress_callback = _progress_callback(weakref.ref(self))
        self._model_params = params

    def _on_progress(self, fraction: float) -> bool:
        try:
            if self._progress is not None:
                self._progress(fraction)
        except BaseException as stop:  # it cannot pass through llama.cpp; _load raises it
            self._stopped_by = stop
            return False
        return True

    # llama.cpp ends the process where a grammar allows no token.
    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._init_sampler(*args, **kwargs)
        return guarded(llama_cpp, sampler, self._n_vocab, kwargs.get("grammar"))

    # llama.cpp aborts the process when a model without a vocabulary is asked for text.
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As llama_cpp.Llama.tokenize; raises OptionError when the model has no vocabulary."""
        self._need_vocabulary()
        return super().tokenize(text, add_bos, special)

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """As llama_cpp.Llama.detokenize; raises OptionError when the model has no vocabulary."""
        self._need_vocabulary()
        return super().detokenize(tokens, prev_tokens, special)

    def _need_vocabulary(self) -> None:
        self._need_open()
        if not self.has_vocabulary:
            raise OptionError(
                f"{Path(self.model_path).name} has no vocabulary, so it cannot read or write text",
                "give token ids: --tokens on the command line, eval() and generate() in Python",
            )

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model can turn text into tokens and back."""
        return self._model.vocab_type() != llama_cpp.LLAMA_VOCAB_TYPE_NONE

    @property
    def is_streamed(self) -> bool:
        """Whether experts come through the cache; False for a model without routed experts."""
        return self._experts is not None

    @property
    def plan(self) -> Plan | None:
        """How the budget was spent; None when the model is not streamed."""
        return self._plan

    @property
    def placement(self) -> Placement | None:
        """What is on devices; None when nothing was asked for."""
        return self._placement

    def stats(self) -> Stats | None:
        """The cache's counters; None when the model is not streamed."""
        experts = self._experts  # another thread may close the model meanwhile
        return experts.stats() if experts is not None else None

    def expert_use(self) -> list[ExpertUse]:
        """Counters and use of experts per layer; empty when the model is not streamed."""
        experts = self._experts  # another thread may close the model meanwhile
        return experts.use() if experts is not None else []

    @property
    def recorded_tokens(self) -> int:
        """Tokens whose routing was recorded; 0 without `trace`."""
        return self._recording.n_tokens if self._recording is not None else 0

    def save_trace(self) -> None:
        """Writes the routing recorded so far to `trace`, which goes on; not while computing.

        Raises OptionError when nothing is recorded, TraceError when the file cannot be written.
        """
        if self._recording is None or self._settings.trace is None:
            raise OptionError("no routing is recorded", "give trace= when loading the model")
        write_trace(Path(self._settings.trace), self._recording.trace())

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, **self._settings.for_a_copy(), "stream": self._stream}

    def close(self) -> None:
        """Frees the model, then the cache that it reads from. Writes the trace, if there is one.

        Whatever is still open when the program ends is closed then. A child forked after loading
        writes nothing.
        """
        experts = getattr(self, "_experts", None)
        try:
            if getattr(self, "_recording", None) is not None and not _is_childs(experts):
                self.save_trace()
        finally:
            self._recording = self._experts = None
            if hasattr(self, "_stack"):
                super().close()
            governor, self._governor = getattr(self, "_governor", None), None
            if governor is not None:
                governor.close()
            if experts is not None:
                experts.close()


def _is_childs(experts: ExpertStream | None) -> bool:
    return experts is not None and experts.is_forked


_open: weakref.WeakSet[Llama] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before modules go: what was learned is kept with numpy and safetensors."""
    for llm in list(_open):
        if llm._running is None:  # else a daemon thread computes with it
            with contextlib.suppress(FlashMoEError):
                llm.close()


def _checked(owner: weakref.ref[Llama], compute: Callable[..., None]) -> Callable[[Any], None]:
    """`compute` of a context, followed by a look at the stream's errors."""

    def checked(batch: Any) -> None:
        llm = owner()
        experts = llm._experts if llm is not None else None
        if llm is None or experts is None:
            raise FlashMoEError("the model is closed", "load it again")
        experts.check_process()
        recording = llm._recording
        try:
            try:
                compute(llm._ctx, batch)
            finally:
                experts.raise_error()  # also when llama.cpp gave up: this is why
        except BaseException as error:
            if recording is not None:
                recording.cut()
            if isinstance(error, FlashMoEError) and (llm._is_recurrent or llm._is_hybrid):
                # a recurrent state cannot go back by a few tokens
                llm.reset()  # type: ignore[no-untyped-call]
            raise
        if recording is not None:
            recording.drain()

    return checked


def _progress_callback(owner: weakref.ref[Llama]) -> Any:
    def on_progress(fraction: float, user_data: Any) -> bool:
        llm = owner()
        return llm is None or llm._on_progress(fraction)

    return llama_cpp.llama_progress_callback(on_progress)

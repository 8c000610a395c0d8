"""Loads the model of a command, ours or the stock one, with progress, and prints the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flashmoe_gguf.budget import Plan, format_size
from flashmoe_gguf.chat import LlamaEngine, grammar_from_json_schema
from flashmoe_gguf.cli.interrupts import interrupt_flag
from flashmoe_gguf.cli.options import DEFAULT_BATCH, DEFAULT_CTX, Choice, LoadOptions
from flashmoe_gguf.cli.plan_text import plan_rows
from flashmoe_gguf.cli.progress import Activity, State
from flashmoe_gguf.cli.screen import Screen, count
from flashmoe_gguf.errors import BudgetError, OptionError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.host import available_memory
from flashmoe_gguf.store import Geometry, read_geometry

_FLASH_ATTN = 1  # llama.h: LLAMA_FLASH_ATTN_TYPE_ENABLED
_NO_VOCABULARY = ("no_vocab", "none")  # llama.cpp, src/llama-vocab.cpp


@dataclass(frozen=True)
class Loaded:
    """A model that is ready. `llm` is a `llama_cpp.Llama` on the library set that was asked for."""

    llm: Any
    engine: LlamaEngine
    geometry: Geometry
    options: LoadOptions

    @property
    def plan(self) -> Plan | None:
        """How the budget is spent; None where nothing is streamed."""
        plan: Plan | None = getattr(self.llm, "plan", None)
        return plan


@contextmanager
def loaded(
    options: LoadOptions,
    screen: Screen,
    *,
    needs_text: bool,
    check: Callable[[Geometry], None] | None = None,
) -> Iterator[Loaded]:
    """The model, closed at the end. `check` sees its header first, and may raise.

    Raises what `flashmoe_gguf.Llama` raises, KeyboardInterrupt when it is stopped, OptionError for
    a model that makes no text.
    """
    if options.verbose:
        screen.is_terminal = False  # a bar and llama.cpp's log would write over each other
    geometry = read_geometry(options.model)
    _check_kind(geometry, needs_text)
    if check is not None:
        check(geometry)
    n_ctx = _context(options, geometry, screen)
    llm = _load(options, geometry, screen, n_ctx)
    try:
        if not options.verbose:
            # what goes wrong from here on is told in our words
            logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)
        model = Loaded(llm, LlamaEngine(llm), geometry, options)
        screen.rows(
            plan_rows(
                geometry,
                streamed=options.stream,
                plan=model.plan,
                budgeted=options.n_slots is None,
                stats=model.engine.stats(),
                placement=llm.placement,
                settings=f"context {model.engine.n_ctx}, threads {options.n_threads}, "
                f"batch {llm.n_batch}, ubatch {llm.context_params.n_ubatch}"
                + (
                    ", flash attention" if llm.context_params.flash_attn_type == _FLASH_ATTN else ""
                ),
            )
        )
        if model.plan is not None:
            note_memory(screen, model.plan)
        yield model
    finally:
        recorded = llm.recorded_tokens if options.trace else 0
        llm.close()
        if options.trace:
            screen.line(f"trace: {count(recorded, 'token')} in {shown(options.trace)}", "dim")


def note_template(screen: Screen, model: Loaded) -> None:
    """Says so when a model is chatted with in a template that it did not bring."""
    if not model.engine.has_template:
        screen.note("the model has no chat template, so it is chatted with in ChatML")


def note_memory(screen: Screen, plan: Plan) -> None:
    """Says so when more is planned than there is: a user may know better, so it is no error."""
    here = available_memory()
    if plan.total_bytes > here.limit_bytes:
        screen.note(
            f"{format_size(plan.total_bytes)} are planned, but this process can have "
            f"{format_size(here.limit_bytes)} ({here.source}): it may swap or be killed"
        )


def _check_kind(geometry: Geometry, needs_text: bool) -> None:
    header = geometry.header
    name = header.path.name
    if header.get("attention.causal") is False:
        raise OptionError(
            f"{name}: this model makes embeddings, not text", "use it from Python: embedding=True"
        )
    if needs_text and header.metadata.get("tokenizer.ggml.model") in _NO_VOCABULARY:
        raise OptionError(
            f"{name}: this model has no vocabulary, so it takes and gives token ids only",
            'give them with: flashmoe run MODEL --tokens "1,2,3"',
        )


def _context(options: LoadOptions, geometry: Geometry, screen: Screen) -> int:
    trained = geometry.header.get("context_length")
    own = trained if isinstance(trained, int) and trained > 0 else DEFAULT_CTX
    if options.ctx is None:
        return min(DEFAULT_CTX, own)
    if options.ctx > own:
        screen.note(f"the model was trained for {own} tokens of context, not {options.ctx}")
    return options.ctx or own


def _ubatch(options: LoadOptions, n_batch: int) -> int | str:
    """Given, or up to what is streamed; a batch that was given caps it."""
    if options.ubatch is None and options.batch is None and options.stream:
        return "auto"
    return min(options.ubatch or DEFAULT_BATCH, n_batch)


def _load(options: LoadOptions, geometry: Geometry, screen: Screen, n_ctx: int) -> Any:
    n_batch = min(options.n_batch, n_ctx)  # as llama.cpp does; llama_cpp's arrays come before it
    arguments: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "n_ubatch": _ubatch(options, n_batch),
        "flash_attn": options.flash_attn,
        "n_gpu_layers": options.ngl,
        "n_threads": options.n_threads,
        "n_threads_batch": options.n_threads,
        "verbose": options.verbose,
    }
    done = [0.0]

    def progress(fraction: float) -> None:
        done[0] = fraction
        if interrupted.is_set():
            raise KeyboardInterrupt

    with (
        _hints(options, n_ctx, n_batch),
        interrupt_flag() as interrupted,
        Activity(screen, "loading", lambda: _load_state(done[0])),
    ):
        if options.stream:
            from flashmoe_gguf.llama import Llama

            llm = Llama(
                options.model,
                **options.streaming,
                trace=options.trace,
                trace_probs=options.trace_probs,
                progress=progress,
                **arguments,
            )
        else:
            from flashmoe_gguf.cli.stock import load_stock

            llm = load_stock(options.model, geometry, progress, arguments)
    if interrupted.is_set():
        llm.close()
        raise KeyboardInterrupt
    return llm


@contextmanager
def _hints(options: LoadOptions, n_ctx: int, n_batch: int) -> Iterator[None]:
    """Errors about memory name the options that take less of it."""
    smaller = "a smaller --ubatch" if options.flash_attn else "--flash-attn and a smaller --ubatch"
    try:
        yield
    except BudgetError as error:
        hint = f"{error.hint}; {smaller} need less too"
        raise BudgetError(error.message, hint) from error
    except MemoryError:
        raise OptionError(
            f"not enough memory for {n_ctx} tokens of context and batches of {n_batch}",
            "give a smaller --ctx or --batch",
        ) from None


def _load_state(fraction: float) -> State:
    return State(fraction, 1.0) if fraction < 1 else State(words="making the context")


def prepare_grammar(choice: Choice, options: LoadOptions) -> Choice:
    """A JSON schema becomes a grammar; before loading, as it may not parse."""
    if choice.json_schema is None:
        return choice
    from flashmoe_gguf.libs import load_llama_cpp

    load_llama_cpp("patched" if options.stream else "stock")
    grammar = grammar_from_json_schema(choice.json_schema)
    return replace(choice, sampling=replace(choice.sampling, grammar=grammar))

"""`flashmoe trace`: which experts the tokens of some text use, to a file."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from flashmoe_gguf.chat import ChatSession, Completion, Sampling
from flashmoe_gguf.cli.interrupts import interrupt_flag
from flashmoe_gguf.cli.loading import Loaded, loaded, note_template
from flashmoe_gguf.cli.options import (
    Finite,
    LoadOptions,
    load_options_without_trace,
    read_text,
)
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.progress import Activity, State, format_rate
from flashmoe_gguf.cli.screen import Rows, Screen, count, format_rows
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.gguf.cursor import shown
from flashmoe_gguf.trace import (
    Trace,
    check_target,
    import_routes,
    read_prompts,
    read_trace,
    write_trace,
)

_ANSWER_TOKENS = 128


@click.command(short_help="Record which experts tokens use.")
@click.option(
    "--prompts",
    type=FilePath(),
    metavar="FILE",
    help="Prompts to answer: JSON Lines with a prompt, question, turns, instruction, input, text "
    "or messages in each, or plain text with one prompt a line.",
)
@click.option(
    "--text",
    type=FilePath(),
    metavar="FILE",
    help="Text to read through, in pieces as long as the context; nothing is answered. -: stdin.",
)
@click.option(
    "--import",
    "imported",
    type=FilePath(),
    metavar="FILE",
    help="Routes that another program wrote as CSV or JSON Lines; takes no MODEL.",
)
@click.option("-o", "--out", type=FilePath(), metavar="OUT", required=True, help="The trace, .npz.")
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of each answer at most; with --text, of the text.",
    show_default=f"{_ANSWER_TOKENS}; all of a text",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option(
    "--field", metavar="NAME", help="What the prompt is called in the lines of --prompts."
)
@click.option(
    "--raw", is_flag=True, help="Prompts are continued as they are, without the chat template."
)
@click.option(
    "--temp",
    type=Finite(min=0),
    metavar="X",
    default=0.0,
    help="Temperature of the answers; 0: always the likeliest token.",
)
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(0, 2**32 - 2),
    metavar="N",
    default=0,
    help="For the random choice.",
)
@click.option(
    "--probs",
    is_flag=True,
    help="With the router's probability of each chosen expert. Slower: llama.cpp stops once or "
    "twice in every layer.",
)
@click.option(
    "--n-expert",
    type=click.IntRange(1, 65535),
    metavar="N",
    help="With --import: experts in each layer.",
    show_default="what the file says, or the largest id and one",
)
@functools.partial(load_options_without_trace, model_required=False)
def trace(
    load: LoadOptions,
    prompts: str | None,
    text: str | None,
    imported: str | None,
    out: str,
    max_tokens: int | None,
    limit: int | None,
    field: str | None,
    raw: bool,
    temp: float,
    seed: int,
    probs: bool,
    n_expert: int | None,
) -> None:
    """Record which experts every token uses, for simulate and train.

    Each prompt with its answer, and each piece of a text, becomes one sequence of the trace. Ctrl-C
    ends it early, with exit code 130; what was recorded so far is written.

    \b
    Examples:
      flashmoe trace model.gguf --prompts questions.jsonl --limit 50 -o model.npz
      flashmoe trace model.gguf --text book.txt --ctx 2048 -o book.npz
      flashmoe trace --import routes.csv --n-expert 128 -o routes.npz
    """
    given = [value for value in (prompts, text, imported) if value is not None]
    if len(given) != 1:
        raise click.UsageError("Give one of --prompts, --text and --import.")
    if (imported is None) == (load.model == ""):
        raise click.UsageError(
            "--import takes no MODEL." if imported else "Missing argument 'MODEL'."
        )
    if prompts is None and (field is not None or limit is not None or raw):
        raise click.UsageError("--field, --limit and --raw need --prompts.")
    if imported is None and n_expert is not None:
        raise click.UsageError("--n-expert needs --import.")
    if imported is not None:
        every = set(click.get_current_context().params)
        _refuse(every - {"imported", "out", "n_expert", "verbose"}, "--import")
    if text is not None:
        _refuse({"temp", "seed"}, "--text")
    target = Path(out)
    check_target(target)
    if imported is not None:
        write_trace(target, import_routes(Path(imported), n_expert))
    else:
        source = replace(load, trace=out, trace_probs=probs)
        if prompts is not None:
            todo = read_prompts(Path(prompts), field)[:limit]
            sampling = Sampling(temperature=temp, seed=seed)
            answers = _Answers(todo, sampling, max_tokens or _ANSWER_TOKENS, raw)
            stopped = _record(source, answers.run)
        else:
            words = read_text(str(text))
            stopped = _record(source, lambda m, s: _read_through(m, s, words, max_tokens))
        if stopped:
            raise KeyboardInterrupt
    for line in format_rows(trace_rows(target, read_trace(target))):
        click.echo(line)


def _refuse(names: set[str], with_what: str) -> None:
    """Raises UsageError when one of these options was given, which would change nothing."""
    context = click.get_current_context()
    for param in context.command.params:
        given = context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if param.name in names and given:
            option = max(param.opts, key=len)
            raise click.UsageError(f"{option} means nothing with {with_what}.")


def trace_rows(path: Path, recorded: Trace) -> Rows:
    """What is in a trace."""
    most, least = int(recorded.n_expert.max()), int(recorded.n_expert.min())
    answers = "" if recorded.phase is None else f", {int(recorded.phase.sum())} of them of answers"
    return [
        ("trace", shown(str(path))),
        ("tokens", f"{recorded.n_tokens}{answers}"),
        ("sequences", str(len(recorded.seq) - 1)),
        ("layers", str(recorded.n_layers)),
        ("experts", f"{recorded.k} of {most if most == least else f'{least} to {most}'}"),
        ("probabilities", "no" if recorded.probs is None else "yes"),
    ]


def _record(load: LoadOptions, run: Callable[[Loaded, Screen], bool]) -> bool:
    """Loads the model, runs, and writes the trace; returns whether Ctrl-C was pressed."""
    with Screen() as screen, loaded(load, screen, needs_text=True) as model:
        return run(model, screen)


@dataclass
class _Progress:
    """How many of all were done, and the tokens that took."""

    total: int
    noun: str
    tokens: Callable[[], int]
    part: Callable[[], float] = lambda: 0.0  # of the one that is under way
    done: int = 0
    started: float = 0.0

    def state(self) -> State:
        seconds, tokens = time.monotonic() - self.started, self.tokens()
        words = f"{self.done} of {count(self.total, self.noun)}, {count(tokens, 'token')}"
        if tokens and seconds > 0:
            words += f", {format_rate(tokens / seconds)} tok/s"
        return State(min(self.done + self.part(), self.total), self.total, words=words)


@contextmanager
def _shown(screen: Screen, progress: _Progress) -> Iterator[None]:
    progress.started = time.monotonic()
    with Activity(screen, "recording", progress.state):
        yield


@dataclass(frozen=True)
class _Answers:
    """Prompts to answer, each afresh."""

    prompts: Sequence[tuple[str, ...]]
    sampling: Sampling
    max_tokens: int
    raw: bool

    def run(self, model: Loaded, screen: Screen) -> bool:
        if not self.raw:
            note_template(screen, model)
        running: list[Completion] = []
        progress = _Progress(len(self.prompts), "prompt", lambda: int(model.llm.recorded_tokens))
        progress.part = lambda: running[-1].answer_tokens / self.max_tokens if running else 0.0
        skipped = 0
        with (
            interrupt_flag(lambda: running[-1].cancel() if running else None) as interrupted,
            _shown(screen, progress),
        ):
            for turns in self.prompts:
                model.llm.reset()
                try:
                    self._answer(model, turns, running, interrupted)
                except OptionError:  # too long for the context, or nothing the template takes
                    skipped += 1
                if interrupted.is_set():
                    break
                running.clear()
                progress.done += 1
        if skipped == len(self.prompts):
            raise OptionError(
                "no prompt could be used: each is empty or longer than the context",
                "give a larger --ctx",
            )
        if skipped:
            screen.note(f"skipped {count(skipped, 'prompt')} that the context has no room for")
        return interrupted.is_set()

    def _answer(
        self,
        model: Loaded,
        turns: Sequence[str],
        running: list[Completion],
        interrupted: threading.Event,
    ) -> None:
        options: dict[str, Any] = {"sampling": self.sampling, "max_tokens": self.max_tokens}
        session = ChatSession(model.engine, **options)
        for text in turns[:1] if self.raw else turns:
            if self.raw:
                tokens = model.engine.tokenize_prompt(text)
                completion = Completion(model.engine, tokens, **options)
                pieces = completion.text()
            else:
                turn = session.ask(text)
                completion, pieces = turn.completion, iter(turn)
            running[:] = [completion]
            if interrupted.is_set():
                return
            with closing(pieces):
                for _ in pieces:
                    pass
            if interrupted.is_set():
                return


def _read_through(model: Loaded, screen: Screen, text: str, max_tokens: int | None) -> bool:
    """Evaluates a text in pieces as long as the context; each begins afresh."""
    tokens = model.engine.tokenize_prompt(text)[:max_tokens]
    if not tokens:
        raise OptionError("the text is empty", "give a file with some text in it")
    size, step = model.engine.n_ctx, int(model.llm.n_batch)
    progress = _Progress(len(tokens), "token", lambda: int(model.llm.recorded_tokens))
    with interrupt_flag() as interrupted, _shown(screen, progress):
        for first in range(0, len(tokens), size):
            piece = tokens[first : first + size]
            model.llm.reset()
            at = 0
            while at < len(piece) and not interrupted.is_set():
                # a last batch of one token would pass for an answer's
                end = len(piece) if len(piece) - at <= step + 1 else at + step
                model.llm.eval(piece[at:end])
                at = progress.done = end
                progress.done += first
    return interrupted.is_set()

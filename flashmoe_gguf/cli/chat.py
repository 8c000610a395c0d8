"""`flashmoe chat`: a conversation in the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from io import TextIOWrapper

import click

from flashmoe_gguf.chat import ChatSession
from flashmoe_gguf.cli.answering import note_failed_policy, show, summary_line
from flashmoe_gguf.cli.loading import Loaded, loaded, note_template, prepare_grammar
from flashmoe_gguf.cli.options import Choice, LoadOptions, load_options, sampling_options
from flashmoe_gguf.cli.screen import Screen, count
from flashmoe_gguf.cli.stats_text import stats_rows
from flashmoe_gguf.cli.std_streams import need_stdin
from flashmoe_gguf.errors import ExpertReadError, OptionError

_PROMPT = "> "

_COMMANDS = (
    ("/stats", "what the expert cache has done so far"),
    ("/clear", "forget the conversation"),
    ("/help", "this list"),
    ("/quit", "leave; Ctrl-D does too"),
)


@click.command(short_help="Chat in the terminal.")
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@load_options
@sampling_options
def chat(load: LoadOptions, choice: Choice, system: str | None) -> None:
    """Chat with a model.

    Ctrl-C stops the answer and not the chat; what was said so far counts. At the prompt, Ctrl-C
    twice in a row or Ctrl-D leaves. When stdin is not a terminal, each line is one turn, and
    Ctrl-C ends it all.

    \b
    In the chat:
      /stats  what the expert cache has done so far
      /clear  forget the conversation
      /help   this list
      /quit   leave

    When the context is full, the oldest turns are dropped, and the chat says how many. An expert
    that cannot be read ends the answer, not the chat: the unfinished turn is forgotten.

    \b
    Examples:
      flashmoe chat model.gguf --ram 8G
      flashmoe chat model.gguf --system "Answer in one sentence." --temp 0
      printf 'Hello\\nAnd now in French\\n' | flashmoe chat model.gguf
    """
    need_stdin()
    choice = prepare_grammar(choice, load)
    with Screen() as screen, loaded(load, screen, needs_text=True) as model:
        note_template(screen, model)
        session = ChatSession(
            model.engine,
            system=system,
            sampling=choice.sampling,
            max_tokens=choice.max_tokens,
            stop=choice.stop,
        )
        if sys.stdin.isatty():
            screen.line("/help lists the commands", "dim")
        for line in _lines(screen):
            if line.startswith("/"):
                if not _command(line, screen, model, session):
                    break
            elif _turn(line, screen, model, session) and not sys.stdin.isatty():
                raise KeyboardInterrupt


def _turn(text: str, screen: Screen, model: Loaded, session: ChatSession) -> bool:
    """One question and its answer; returns whether Ctrl-C was pressed meanwhile.

    An error that the chat survives is shown.
    """
    try:
        turn = session.ask(text)
        if turn.dropped:
            screen.note(
                f"the context of {model.engine.n_ctx} tokens is full: dropped "
                f"{count(turn.dropped, 'turn')}, oldest first; /clear starts afresh, "
                "--ctx gives more"
            )
        interrupted = show(screen, turn.completion, iter(turn))
    except (ExpertReadError, OptionError) as error:
        screen.error(error.message, error.hint)
        if isinstance(error, ExpertReadError):
            screen.line("the unfinished turn was forgotten")
        return False
    except KeyboardInterrupt:  # between two answers
        screen.note("stopped")
        return True
    summary = turn.summary()
    if summary.finish == "cancelled":
        screen.note("stopped")
    elif summary.finish == "context":
        screen.note(
            f"the context of {model.engine.n_ctx} tokens is full, so the answer ends here; the "
            "oldest turns are dropped with your next message, /clear starts afresh"
        )
    screen.line(summary_line(summary), "dim")
    note_failed_policy(screen, summary)
    return interrupted


def _command(line: str, screen: Screen, model: Loaded, session: ChatSession) -> bool:
    """Runs a command; returns whether the chat goes on."""
    name = line.split()[0]
    if name in ("/quit", "/exit"):
        return False
    if name == "/help":
        screen.rows(list(_COMMANDS))
    elif name == "/clear":
        session.clear()
        screen.line("the conversation is forgotten")
    elif name == "/stats":
        stats = model.engine.stats()
        if stats is None:
            screen.line("there is no expert cache: this model runs in llama.cpp's usual way")
        else:
            screen.rows(stats_rows(stats, budgeted=model.options.n_slots is None))
    else:
        screen.line(f"there is no command {name}; /help lists them")
    return True


def _lines(screen: Screen) -> Iterator[str]:
    """What the user types, empty lines left out, until the end of input or two Ctrl-C in a row."""
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if interactive:
        with suppress(ImportError):  # line editing and recall where Python has it
            import readline  # noqa: F401
    interrupts = 0
    while True:
        try:
            line = _read(screen) if interactive else _next_line()
        except EOFError:
            screen.line("")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            interrupts += 1
            screen.line("")
            if interrupts == 2:
                return
            screen.line("Ctrl-C again or /quit leaves", "dim")
            continue
        if not interactive and not line:
            return
        interrupts = 0
        if line.strip():
            yield line.strip()


def _read(screen: Screen) -> str:
    if sys.stdout.isatty():
        return input(_PROMPT)
    # stdout is the answer's alone
    screen.console.print(_PROMPT, end="")
    return input()


def _next_line() -> str:
    try:
        return sys.stdin.readline()
    except OSError as error:
        raise OptionError(
            f"cannot read stdin: {error.strerror or error}", "give a pipe or a file: < FILE"
        ) from None

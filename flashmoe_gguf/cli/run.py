"""`flashmoe run`: one completion, to stdout."""

from __future__ import annotations

from collections.abc import Generator, Iterable

import click

from flashmoe_gguf.chat import ChatSession, Completion
from flashmoe_gguf.cli.answering import note_failed_policy, show, summary_line
from flashmoe_gguf.cli.loading import Loaded, loaded, note_template, prepare_grammar
from flashmoe_gguf.cli.options import (
    Choice,
    LoadOptions,
    load_options,
    read_text,
    sampling_options,
)
from flashmoe_gguf.cli.paths import FilePath
from flashmoe_gguf.cli.screen import Screen
from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.store import Geometry


@click.command(short_help="Complete one prompt, to stdout.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f",
    "--file",
    type=FilePath(),
    metavar="FILE",
    help="Read the prompt from a file; -: from stdin.",
)
@click.option(
    "--tokens",
    metavar="IDS",
    help='The prompt as token ids, such as "1,2,3"; the answer is printed as ids too. '
    "The only way to run a model without a vocabulary.",
)
@click.option(
    "--chat/--raw",
    "as_chat",
    default=False,
    help="--chat: the prompt is a question, put into the model's chat template. "
    "--raw: it is text to be continued as it is.",
)
@click.option("--system", metavar="TEXT", help="With --chat: what the model is told beforehand.")
@load_options
@sampling_options
def run(
    load: LoadOptions,
    choice: Choice,
    prompt: str | None,
    file: str | None,
    tokens: str | None,
    as_chat: bool,
    system: str | None,
) -> None:
    """Complete one prompt and print what follows it.

    The prompt itself is not repeated. Ctrl-C stops early with exit code 130; what was made so far
    has been printed.

    \b
    Examples:
      flashmoe run model.gguf -p "Once upon a time" -n 100
      flashmoe run model.gguf --ram 8G --chat -p "What is the capital of England?"
      git diff | flashmoe run model.gguf --chat --system "Review this." -f -
    """
    given = [value for value in (prompt, file, tokens) if value is not None]
    if len(given) != 1:
        raise click.UsageError("Give the prompt with one of -p, -f and --tokens.")
    if system is not None and not as_chat:
        raise click.UsageError("--system needs --chat.")
    ids = None if tokens is None else parse_ids(tokens)
    if ids is not None and (
        as_chat or choice.stop or choice.sampling.grammar or choice.json_schema
    ):
        raise click.UsageError("--tokens takes no --chat, --stop, grammar or schema.")
    text = read_text(file) if file is not None else prompt or ""
    choice = prepare_grammar(choice, load)
    check = _check_empty if ids is None and not as_chat and not text else None
    with Screen() as screen, loaded(load, screen, needs_text=ids is None, check=check) as model:
        if as_chat:
            note_template(screen, model)
        completion, pieces = _start(model, choice, text, ids, as_chat, system)
        interrupted = show(screen, completion, pieces)
        summary = completion.summary()
        screen.line(summary_line(summary), "dim")
        note_failed_policy(screen, summary)
        if summary.finish == "context":
            screen.note(f"the context of {model.engine.n_ctx} tokens is full; --ctx gives more")
    if interrupted:
        raise KeyboardInterrupt


def _start(
    model: Loaded,
    choice: Choice,
    text: str,
    ids: list[int] | None,
    as_chat: bool,
    system: str | None,
) -> tuple[Completion, Generator[str, None, None]]:
    if as_chat:
        session = ChatSession(
            model.engine,
            system=system,
            sampling=choice.sampling,
            max_tokens=choice.max_tokens,
            stop=choice.stop,
        )
        turn = session.ask(text)
        return turn.completion, iter(turn)
    if ids is not None:
        _check_ids(ids, int(model.llm.n_vocab()))
    completion = Completion(
        model.engine,
        model.engine.tokenize_prompt(text) if ids is None else ids,
        sampling=choice.sampling,
        max_tokens=choice.max_tokens,
        stop=choice.stop,
    )
    return completion, completion.text() if ids is None else _as_text(completion.ids())


def _check_empty(geometry: Geometry) -> None:
    """Nothing is a prompt only where a start token is put before it.

    Without the key it depends on the tokenizer: llama.cpp's src/llama-vocab.cpp adds one to those
    of the "llama" kind.
    """
    metadata = geometry.header.metadata
    default = metadata.get("tokenizer.ggml.model") == "llama"
    if not metadata.get("tokenizer.ggml.add_bos_token", default):
        raise OptionError("the prompt is empty", "give some text, or at least one token: --tokens")


def _as_text(ids: Iterable[int]) -> Generator[str, None, None]:
    for i, token in enumerate(ids):
        yield f" {token}" if i else str(token)


def parse_ids(text: str) -> list[int]:
    """Token ids separated by commas or spaces; raises OptionError for anything else."""
    words = text.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise OptionError(f"'{text}' is not a list of token ids", 'for example "1,2,3"')
    return [int(word) for word in words]


def _check_ids(ids: list[int], n_vocab: int) -> None:
    if max(ids) >= n_vocab:
        raise OptionError(
            f"token {max(ids)} is not in the vocabulary", f"ids go from 0 to {n_vocab - 1}"
        )

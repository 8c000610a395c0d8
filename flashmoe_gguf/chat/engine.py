"""What making an answer needs of a model: an adapter over `llama_cpp.Llama`, ours or stock.

It hides what llama_cpp leaves to its callers: token pieces of any length, a decode that can be
interrupted, a count of the tokens that were really computed, and llama.cpp's bare error codes.
Nothing here chooses the libraries: `llama_cpp` was imported when the model was made.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.grammar import check_schema, parses

if TYPE_CHECKING:
    from flashmoe_gguf.stats import Stats

Message = Mapping[str, str]

# What llama.cpp uses for models that bring no template of their own.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_RANDOM_SEED = 0xFFFFFFFF  # llama.h: LLAMA_DEFAULT_SEED


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the defaults are llama.cpp's. `seed` None: another one each time.

    `temperature` 0 is greedy. `grammar` is GBNF text whose rule `root` the answer follows.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    grammar: str | None = None


class Engine(Protocol):
    """What completions and chats are written against; tests script one."""

    @property
    def n_ctx(self) -> int:
        """Tokens that the context holds."""

    @property
    def computed_tokens(self) -> int:
        """Tokens decoded since the model was loaded, also in decodes that were stopped."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text, markers such as <|im_end|> recognised, none added."""

    def tokenize_prompt(self, text: str) -> list[int]:
        """The same with the start token, where the model wants one."""

    def piece(self, token: int) -> bytes:
        """A token's text, which may be part of a character; nothing for markers."""

    def marker(self, token: int) -> str:
        """The name of a token that has no text, such as <|im_end|>."""

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as the model's template writes it, up to where the answer begins."""

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        """Tokens that follow `tokens`, without end; ends early when `stopped()` says so."""

    def interruptible(self, wanted: bool) -> None:
        """Whether `stopped` is also asked inside a decode."""

    def progress(self) -> tuple[float, int] | None:
        """(done, all) of the tokens that are being computed; None when none are."""

    def stats(self) -> Stats | None:
        """The cache's counters; None without a cache."""


class LlamaEngine:
    """An `Engine` over a loaded `llama_cpp.Llama`, which stays the caller's to close.

    `generate` raises OptionError for a grammar that does not parse, ExpertReadError as the model
    does, and FlashMoEError where llama.cpp cannot compute; the model can be used again after each.
    """

    def __init__(self, llm: Any) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._llm = llm
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._buffer = ctypes.create_string_buffer(64)
        self._computed = 0
        self._running: tuple[int, int] | None = None
        self._stopped: Callable[[], bool] = _never
        self._done_at_stop = 0
        self._interrupt: KeyboardInterrupt | None = None
        self._abort = llama_cpp.ggml_abort_callback(self._on_abort)
        self._no_abort = llama_cpp.ggml_abort_callback()
        self._interruptible = False
        self._formatter: Any = None

    @property
    def n_ctx(self) -> int:
        # llama.cpp rounds the context up, llama_cpp's arrays are as long as was asked for
        return min(int(self._llm.n_ctx()), len(self._llm.input_ids))

    @property
    def computed_tokens(self) -> int:
        return self._computed

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template; without one it is chatted with in ChatML."""
        return "tokenizer.chat_template" in self._llm.metadata

    def tokenize(self, text: str) -> list[int]:
        return list(self._llm.tokenize(_bytes(text), add_bos=False, special=True))

    def tokenize_prompt(self, text: str) -> list[int]:
        return list(self._llm.tokenize(_bytes(text), add_bos=True, special=True))

    def piece(self, token: int) -> bytes:
        # llama_cpp's detokenize has room for 32 bytes only
        size = self._lib.llama_token_to_piece(
            self._vocab, token, self._buffer, len(self._buffer), 0, False
        )
        if size < 0:
            self._buffer = ctypes.create_string_buffer(-size)
            size = self._lib.llama_token_to_piece(
                self._vocab, token, self._buffer, len(self._buffer), 0, False
            )
        return self._buffer.raw[:size]

    def marker(self, token: int) -> str:
        return str(self._lib.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"))

    def is_end(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._vocab, token))

    def render(self, messages: Sequence[Message]) -> str:
        try:
            if self._formatter is None:
                self._formatter = self._make_formatter()
            return str(self._formatter(messages=list(messages)).prompt)
        except Exception as error:  # a template is a program of the model's maker
            raise OptionError(
                f"the model's chat template refuses this conversation: {_one_line(error)}",
                "some models take no --system; `flashmoe run` needs no template",
            ) from error

    def _make_formatter(self) -> Any:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        return Jinja2ChatFormatter(
            template=self._llm.metadata.get("tokenizer.chat_template", CHATML),
            bos_token="" if (bos := self._llm.token_bos()) == -1 else self.marker(bos),
            eos_token="" if (eos := self._llm.token_eos()) == -1 else self.marker(eos),
        )

    def generate(
        self, tokens: Sequence[int], sampling: Sampling, stopped: Callable[[], bool]
    ) -> Generator[int, None, None]:
        llm = self._llm
        llm.set_seed(_RANDOM_SEED if sampling.seed is None else sampling.seed & _RANDOM_SEED)
        grammar = None if sampling.grammar is None else self._grammar(sampling.grammar)
        compute = llm.eval

        def counted(batch: Sequence[int]) -> None:
            self._running = (llm.n_tokens, len(batch))
            compute(batch)
            self._running = None
            self._computed += len(batch)

        self._stopped, self._interrupt, self._done_at_stop = stopped, None, 0
        llm.eval = counted
        try:
            yield from llm.generate(
                tokens,
                temp=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repeat_penalty=sampling.repeat_penalty,
                grammar=grammar,
            )
        except RuntimeError as error:  # what llama_cpp makes of llama_decode's codes
            if self._lib.llama_model_is_recurrent(llm.model) or self._lib.llama_model_is_hybrid(
                llm.model
            ):
                llm.reset()  # such a state cannot go back to before the decode that failed
            if self._interrupt is not None:
                raise self._interrupt from None
            self._computed += self._done_at_stop
            if not stopped():
                raise FlashMoEError(
                    f"llama.cpp could not compute: {_one_line(error)}",
                    "its reason is in the log: try again with --verbose",
                ) from error
        finally:
            del llm.eval
            self._running = None
            self.interruptible(False)
            self._stopped = _never

    def interruptible(self, wanted: bool) -> None:
        # without a context once the model is closed
        if wanted != self._interruptible and self._llm.ctx is not None:
            self._interruptible = wanted
            self._lib.llama_set_abort_callback(
                self._llm.ctx, self._abort if wanted else self._no_abort, None
            )

    def _on_abort(self, _data: Any) -> bool:
        try:
            if not self._stopped():
                return False
            # asked here, inside the decode: there is nothing to ask once it has ended
            progress = self.progress()
            self._done_at_stop = int(progress[0]) if progress else 0
            return True
        except KeyboardInterrupt as interrupt:  # ctypes would print it and go on
            self._interrupt = interrupt
            return True

    def progress(self) -> tuple[float, int] | None:
        running = self._running
        if running is None:
            return None
        if hasattr(self._llm, "eval_progress"):
            finer: tuple[float, int] | None = self._llm.eval_progress()
            return finer
        first, count = running
        return float(self._llm.n_tokens - first), count

    def stats(self) -> Stats | None:
        if not hasattr(self._llm, "stats"):
            return None
        stats: Stats | None = self._llm.stats()
        return stats

    def _grammar(self, text: str) -> Any:
        from llama_cpp.llama_grammar import LlamaGrammar

        with _captured_stderr() as said:
            is_right = parses(self._lib, self._vocab, text)
        if not is_right:
            reason = next((line for line in said if "error" in line), "there is no rule named root")
            raise OptionError(
                f"llama.cpp cannot parse the grammar: {reason.rpartition('grammar: ')[2]}",
                "it must be GBNF with a rule named root",
            )
        return LlamaGrammar.from_string(text, verbose=False)


def grammar_from_json_schema(schema: str) -> str:
    """GBNF for a JSON schema; raises OptionError when it is not one. Needs `llama_cpp` loaded."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        check_schema(json.loads(schema))
        return str(json_schema_to_gbnf(schema))
    except OptionError:
        raise
    except Exception as error:  # upstream's converter fails in many ways on what it does not know
        raise OptionError(
            f"the JSON schema cannot be used: {_one_line(error)}",
            "llama.cpp takes a subset of JSON schema; --grammar-file takes any grammar",
        ) from error


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Lines that C code writes to stderr inside the block; they are there after it."""
    lines: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield lines
            finally:
                os.dup2(kept, 2)
            file.seek(0)
            lines += file.read().decode("utf-8", "replace").splitlines()
    finally:
        os.close(kept)


def _never() -> bool:
    return False


def _bytes(text: str) -> bytes:
    # arguments that are not UTF-8 reach Python with surrogates in them
    return text.encode("utf-8", "surrogateescape")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""`ServedLlama`: a `Llama` that works for requests: it can be cancelled in the middle of a prompt,
counts what it does, and refuses what would crash llama.cpp.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from flashmoe_gguf.errors import OptionError
from flashmoe_gguf.grammar import parses
from flashmoe_gguf.llama import Llama
from flashmoe_gguf.server.failures import ApiError, Cancelled, api_error
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.ticket import CURRENT, Ticket

# isort: split
import llama_cpp

# Asking before every graph node costs a millisecond or two a token, so while decoding llama.cpp
# asks only where a token takes longer than that matters.
_SLOW_TOKEN_SECONDS = 0.5
_MOST_BIAS = 1e6
_LONG_TEXT_BYTES = 16 << 10


class ServedLlama(Llama):
    """See above. `alias`, `meters` and `ours` are set on a subclass by `models.py`, because
    llama_cpp.server calls the constructor with its own arguments only.
    """

    alias = ""
    meters = Meters()
    ours: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, model_path: str, **kwargs: Any) -> None:
        kwargs.pop("mul_mat_q", None)  # llama.cpp has no such choice any more
        if kwargs.pop("rpc_servers", None) is not None:
            raise OptionError("rpc_servers is not supported", "leave it out")
        self._slow = False
        self._longest = 0
        self._abort = llama_cpp.ggml_abort_callback(_asks_ticket)
        ours = dict(self.ours)
        self._repeatable = bool(ours.pop("repeatable", False))
        self._alike = 0
        super().__init__(model_path, **kwargs, **ours)
        # Tokens that are always computed together, wherever a prompt is taken up: a ubatch, if
        # batches are whole ones.
        n_ubatch = int(self.context_params.n_ubatch)
        self._unit = self.n_batch if self.n_batch % n_ubatch else n_ubatch

    def eval(self, tokens: Sequence[int]) -> None:
        """As Llama.eval; raises Cancelled when the request that it works for is."""
        begin, unit = self.n_tokens, self._unit
        self._alike = min(self._alike, begin // unit * unit)
        self._eval(tokens)
        if begin == self._alike:
            self._alike = (begin + len(tokens)) // unit * unit

    def _eval(self, tokens: Sequence[int]) -> None:
        ticket = CURRENT.get()
        if ticket is None:
            super().eval(tokens)
            return
        is_prompt = ticket.first_token_seconds is None
        started = time.monotonic()
        with self._interruptible(ticket, is_prompt or self._slow):
            super().eval(tokens)
        seconds = time.monotonic() - started
        if is_prompt:
            self.meters.prefilled(len(tokens), seconds)
        else:
            self._slow = seconds > _SLOW_TOKEN_SECONDS

    @contextmanager
    def _interruptible(self, ticket: Ticket, inside: bool) -> Iterator[None]:
        """Raises Cancelled before and, `inside` a decode, while it runs."""
        ticket.check()
        if inside:
            _interrupting.ticket = ticket
            llama_cpp.llama_set_abort_callback(self.ctx, self._abort, None)
        try:
            yield
        except RuntimeError as error:  # llama_decode says 2
            if self._is_recurrent or self._is_hybrid:
                # such a state cannot go back to before the decode that ended early
                self.reset()  # type: ignore[no-untyped-call,unused-ignore]
            if ticket.is_cancelled:
                raise Cancelled from error
            raise
        finally:
            if inside and self.ctx is not None:
                llama_cpp.llama_set_abort_callback(self.ctx, _NO_ABORT, None)

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As Llama.generate; raises OptionError for no tokens, where llama.cpp ends the process."""
        if len(tokens) == 0:
            raise OptionError("the prompt is empty", "give at least one token")
        if (ticket := CURRENT.get()) is not None:
            ticket.prompt_tokens = len(tokens)  # also those that are cached
        if self._repeatable:
            self._keep_alike(tokens)
        return super().generate(tokens, *args, **kwargs)

    def _keep_alike(self, tokens: Sequence[int]) -> None:
        """Drops what is cached of the prompt but was computed in other batches than the prompt
        alone would be: sums over other shapes have other low bits, and greedy decoding other words.
        """
        most = min(self._alike, len(tokens) - 1)  # the last one gives the logits
        same = np.equal(self.input_ids[:most], np.asarray(tokens[:most], self.input_ids.dtype))
        keep = (most if same.all() else int(same.argmin())) // self._unit * self._unit
        if self.n_tokens > keep:
            self._requires_eval = True
            self.n_tokens = keep if self._ctx.kv_cache_seq_rm(-1, keep, -1) else 0

    def load_state(self, state: Any) -> None:
        """As Llama.load_state; how it was computed is not known."""
        self._alike = 0  # also if loading fails half-way
        super().load_state(state)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As Llama.sample, counted; the token that ends an answer is none of it."""
        token: int = super().sample(*args, **kwargs)
        ticket = CURRENT.get()
        if ticket is not None and not llama_cpp.llama_vocab_is_eog(self._model.vocab, token):
            self.meters.token(ticket)
        return token

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As Llama.tokenize; raises ApiError for a text that cannot fit, without looking at it all:
        tokenizers take longer than linear time, and cannot be interrupted.
        """
        if len(text) > _LONG_TEXT_BYTES and len(text) > self.n_ctx() * self._longest_token():
            raise ApiError(
                400,
                f"the text has {len(text)} bytes, the context holds {self.n_ctx()} tokens",
                code="context_length_exceeded",
                param="messages",
            )
        return super().tokenize(text, add_bos, special)

    def _longest_token(self) -> int:
        """Bytes of text that one token can stand for at most."""
        if self._longest == 0:
            vocab, text_of = self._model.vocab, llama_cpp.llama_vocab_get_text
            # the vocabulary's own spelling, which is never shorter than the text
            self._longest = max(len(text_of(vocab, i) or b"") for i in range(self.n_vocab()))
        return self._longest

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """As Llama.detokenize; raises ApiError for no token, where llama.cpp ends the process."""
        if not all(0 <= token < self.n_vocab() for token in tokens):
            raise ApiError(400, f"token ids go from 0 to {self.n_vocab() - 1}", param="tokens")
        return super().detokenize(tokens, prev_tokens, special)

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama.create_completion; every error is an ApiError, and the ticket knows of it."""
        with _told():
            if kwargs.get("grammar") is not None:
                self._check_grammar(kwargs["grammar"])
            if kwargs.get("logit_bias") is not None:
                self._check_bias(kwargs["logit_bias"])
            kwargs["model"] = kwargs.get("model") or self.alias
            answer: Any = super().create_completion(*args, **kwargs)
        return _told_while(answer) if kwargs.get("stream") else answer

    def create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama.create_chat_completion; every error is an ApiError."""
        with _told():
            return super().create_chat_completion(*args, **kwargs)

    def create_embedding(self, input: str | list[str], model: str | None = None) -> Any:
        """As Llama.create_embedding, also on a model that was loaded to make text.

        One vector per text: where the model does not pool, the mean of its tokens' vectors. Raises
        ApiError for a text that is empty or longer than a batch, which llama_cpp would cut.
        """
        with _told():
            if not input:
                raise ApiError(400, "give at least one text to embed", param="input")
            for text in [input] if isinstance(input, str) else input:
                n_tokens = len(self.tokenize(text.encode("utf-8")))
                if not 0 < n_tokens <= self.n_batch:
                    raise ApiError(
                        400,
                        f"a text to embed takes {n_tokens} tokens; 1 to {self.n_batch} can be "
                        "embedded at once",
                        code="context_length_exceeded",
                        param="input",
                    )
            with self._embedding():
                answer = super().create_embedding(input, model or self.alias)
        for row in answer["data"]:
            if row["embedding"] and isinstance(row["embedding"][0], list):
                row["embedding"] = np.mean(row["embedding"], axis=0).tolist()
        return answer

    @contextmanager
    def _embedding(self) -> Iterator[None]:
        ticket = CURRENT.get()
        was = bool(self.context_params.embeddings)
        llama_cpp.llama_set_embeddings(self.ctx, True)
        self.context_params.embeddings = True
        try:
            if ticket is None:
                yield
            else:
                with self._interruptible(ticket, True):
                    yield
        finally:
            self.context_params.embeddings = was
            if self.ctx is not None:
                llama_cpp.llama_set_embeddings(self.ctx, was)
                # the cached prompt is gone, also where an error came first
                self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call,unused-ignore]
                self.reset()  # type: ignore[no-untyped-call,unused-ignore]

    def _check_grammar(self, grammar: Any) -> None:
        """Raises OptionError for a grammar that llama.cpp does not survive, or cannot parse."""
        if not parses(llama_cpp, self._model.vocab, str(grammar._grammar)):
            raise OptionError(
                "llama.cpp cannot parse the grammar", "it must be GBNF with a rule named root"
            )

    def _check_bias(self, bias: dict[str, float]) -> None:
        for key, value in bias.items():
            known = key.isascii() and key.isdigit() and int(key) < self.n_vocab()
            if not known or not abs(value) <= _MOST_BIAS:
                raise OptionError(
                    f"logit_bias: {key!r} with {value} is no bias of a token",
                    f"ids go from 0 to {self.n_vocab() - 1}, biases to {_MOST_BIAS:g} either way",
                )


class _Interrupting:
    """Whom the running decode works for; one decode runs at a time."""

    ticket: Ticket | None = None


_interrupting = _Interrupting()


def _asks_ticket(_data: ctypes.c_void_p) -> bool:
    ticket = _interrupting.ticket
    return ticket is not None and ticket.is_cancelled


_NO_ABORT = llama_cpp.ggml_abort_callback()


@contextmanager
def _told() -> Iterator[None]:
    """Errors become ApiErrors, and the ticket keeps the first."""
    try:
        yield
    except Exception as error:
        failure = api_error(error)
        if (ticket := CURRENT.get()) is not None and ticket.failure is None:
            ticket.failure = failure
        raise failure from error


def _told_while(chunks: Iterator[Any]) -> Generator[Any, None, None]:
    with _told():
        yield from chunks

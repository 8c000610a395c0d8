"""A conversation: history, what is dropped when the context is full, and turns that can fail.

`flashmoe chat` is written on top of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from flashmoe_gguf.chat.completion import Completion, Summary
from flashmoe_gguf.chat.engine import Engine, Message, Sampling
from flashmoe_gguf.errors import OptionError

# An answer needs room. Below an eighth of the context, the oldest turns go until half of it is
# free, so that the whole prompt is not computed anew at every turn.
_ROOM = 8


class ChatSession:
    """The turns so far and the way to the next one."""

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._system = system
        self._sampling = sampling or Sampling()
        self._max_tokens = max_tokens
        self._stop = stop
        self._turns: list[tuple[str, str]] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation: the system's words, then users' and assistants' in turn."""
        return self._messages(self._turns)

    def _messages(self, turns: Sequence[tuple[str, str]]) -> list[Message]:
        messages: list[Message] = []
        if self._system:
            messages.append({"role": "system", "content": self._system})
        for question, answer in turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        return messages

    @property
    def n_turns(self) -> int:
        """Questions that have an answer."""
        return len(self._turns)

    def clear(self) -> None:
        """Forgets all turns; the system's words stay."""
        self._turns.clear()

    def ask(self, text: str) -> Turn:
        """The next turn, whose answer is made while it is iterated over.

        When the context has no room for an answer, the oldest turns are dropped first
        (`Turn.dropped` says how many). Raises OptionError when the text alone does not fit, or
        when the model's template refuses the conversation.
        """
        tokens, dropped = self._fit(text)
        del self._turns[:dropped]
        completion = Completion(
            self._engine,
            tokens,
            sampling=self._sampling,
            max_tokens=self._max_tokens,
            stop=self._stop,
        )
        return Turn(self, text, completion, dropped)

    def _fit(self, text: str) -> tuple[list[int], int]:
        """The prompt, and how many turns have to go for it."""
        n_ctx = self._engine.n_ctx
        tokens = self._tokens(text, 0)
        if len(tokens) <= n_ctx - n_ctx // _ROOM:
            return tokens, 0
        dropped = 0
        while dropped < len(self._turns) and len(tokens) > n_ctx // 2:
            dropped += 1
            tokens = self._tokens(text, dropped)
        if len(tokens) >= n_ctx:
            raise OptionError(
                f"the message takes {len(tokens)} tokens with its template, "
                f"the context holds {n_ctx}",
                "make it shorter, or start again with a larger --ctx",
            )
        return tokens, dropped

    def _tokens(self, text: str, dropped: int) -> list[int]:
        question = {"role": "user", "content": text}
        messages = [*self._messages(self._turns[dropped:]), question]
        return self._engine.tokenize(self._engine.render(messages))

    def _keep(self, question: str, answer: str) -> None:
        self._turns.append((question, answer))


class Turn:
    """One question and the answer in the making: iterate once for pieces of text.

    The turn joins the history when the answer ends, and also when `cancel()` cut it short with
    some text made. A turn that fails leaves the history as it was.
    """

    def __init__(
        self, session: ChatSession, question: str, completion: Completion, dropped: int
    ) -> None:
        self._session = session
        self._question = question
        self.completion = completion
        self.dropped = dropped

    def __iter__(self) -> Generator[str, None, None]:
        answer = ""
        with closing(self.completion.text()) as pieces:
            for piece in pieces:
                # many tokenizers start an answer with a space
                piece = piece if answer else piece.lstrip()
                answer += piece
                if piece:
                    yield piece
        if answer or self.completion.summary().finish != "cancelled":
            self._session._keep(self._question, answer.rstrip())

    def cancel(self) -> None:
        """Ends the answer; what was made so far stays in the history."""
        self.completion.cancel()

    def summary(self) -> Summary:
        """What the answer took."""
        return self.completion.summary()

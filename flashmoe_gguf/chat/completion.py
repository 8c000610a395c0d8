"""One answer, token by token: text pieces out, stop strings held back, cancellable, timed."""

from __future__ import annotations

import codecs
import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashmoe_gguf.chat.channels import Channels
from flashmoe_gguf.chat.engine import Engine, Sampling
from flashmoe_gguf.errors import OptionError

if TYPE_CHECKING:
    from flashmoe_gguf.stats import Stats

# Why an answer ended: an end token or stop string, max_tokens, a full context, cancel().
Finish = Literal["stop", "length", "context", "cancelled"]

# Asking llama.cpp to call back before every graph node costs a millisecond or two a token, so
# while decoding it is asked only where that does not matter.
_SLOW_TOKEN_SECONDS = 0.5


@dataclass(frozen=True)
class Summary:
    """What one answer took. `prompt_tokens` counts those computed, not those already in the
    context; `cache` is what the expert cache did meanwhile, None without one.
    """

    prompt_tokens: int
    prompt_seconds: float
    answer_tokens: int
    decode_tokens: int
    decode_seconds: float
    finish: Finish
    cache: Stats | None

    @property
    def prompt_rate(self) -> float:
        """Tokens per second; 0 when nothing was computed."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first token, which is the prompt's."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time in which compute threads slept for experts, 0 to 1."""
        seconds = self.prompt_seconds + self.decode_seconds
        return self.cache.wait_seconds / seconds if self.cache and seconds > 0 else 0.0


class Completion:
    """The answer to `tokens`: iterate once over `text()` or, for token ids, `ids()`.

    `cancel()` may come from a signal handler or another thread; the answer then ends at the next
    token, in a prompt at the next graph node. Raises OptionError when the prompt is empty or does
    not fit into the context; decoding raises what `Engine.generate` raises.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        room = engine.n_ctx - len(tokens)
        if not tokens:
            raise OptionError("the prompt is empty", "give at least one token")
        if room <= 0:
            raise OptionError(
                f"the prompt takes {len(tokens)} tokens, the context holds {engine.n_ctx}",
                f"give --ctx {_round_up(len(tokens) + 256)} or more, or a shorter prompt",
            )
        self._engine = engine
        self._prompt = list(tokens)
        self._sampling = sampling or Sampling()
        self._room = room
        self._max_tokens = room if max_tokens is None else min(max_tokens, room)
        self._stop = StopFilter(stop)
        self._cancelled = threading.Event()
        self._before = engine.stats()
        self._computed_before = engine.computed_tokens
        self._prompt_tokens = 0
        self._prompt_seconds = 0.0
        self._decode_seconds = 0.0
        self._answer_tokens = 0
        self._finish: Finish = "length"

    def cancel(self) -> None:
        """Ends the answer as soon as may be; what was made so far stands."""
        self._cancelled.set()

    @property
    def in_prompt(self) -> bool:
        """Whether the first token is still to come."""
        return self._answer_tokens == 0

    @property
    def answer_tokens(self) -> int:
        """Tokens made so far."""
        return self._answer_tokens

    def progress(self) -> tuple[float, int] | None:
        """(done, all) of the prompt's tokens while they are computed, else None."""
        return self._engine.progress() if self.in_prompt else None

    def text(self) -> Generator[str, None, None]:
        """Pieces of text, each of whole characters, as soon as no stop string can begin in them.

        Of an answer in channels, only the final one.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        channels = Channels()
        with contextlib.closing(self.ids()) as tokens:
            for token in tokens:
                if not (data := self._engine.piece(token)):
                    channels.marker(self._engine.marker(token))
                piece = self._stop.feed(channels.text(decoder.decode(data)))
                if piece:
                    yield piece
                if self._stop.found:
                    self._finish = "stop"
                    return
        if rest := self._stop.feed(decoder.decode(b"", True)) + self._stop.flush():
            yield rest

    def ids(self) -> Generator[int, None, None]:
        """Token ids of the answer; the one that ends it is left out."""
        if self._max_tokens <= 0:
            return
        engine, stopped = self._engine, self._cancelled.is_set
        engine.interruptible(True)
        started = time.perf_counter()
        with contextlib.closing(engine.generate(self._prompt, self._sampling, stopped)) as tokens:
            for token in tokens:
                self._count(time.perf_counter() - started)
                if stopped():
                    break
                if engine.is_end(token):
                    self._finish = "stop"
                    return
                self._answer_tokens += 1
                yield token
                if self._answer_tokens == self._max_tokens:
                    self._finish = "context" if self._max_tokens == self._room else "length"
                    return
                if stopped():
                    break
                started = time.perf_counter()
            self._finish = "cancelled"
            if self.in_prompt:
                self._prompt_tokens = engine.computed_tokens - self._computed_before
                self._prompt_seconds = time.perf_counter() - started

    def _count(self, seconds: float) -> None:
        if self.in_prompt:
            self._prompt_tokens = self._engine.computed_tokens - self._computed_before
            self._prompt_seconds = seconds
        else:
            self._decode_seconds += seconds
        self._engine.interruptible(seconds > _SLOW_TOKEN_SECONDS)

    def summary(self) -> Summary:
        """Figures so far; complete once iteration has ended."""
        cache = self._engine.stats()
        computed = self._engine.computed_tokens - self._computed_before
        return Summary(
            prompt_tokens=self._prompt_tokens,
            prompt_seconds=self._prompt_seconds,
            answer_tokens=self._answer_tokens,
            decode_tokens=0 if self.in_prompt else computed - self._prompt_tokens,
            decode_seconds=self._decode_seconds,
            finish=self._finish,
            cache=cache - self._before if cache and self._before else None,
        )


class StopFilter:
    """Lets text through up to the first stop string, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that can be shown now; nothing more once a stop string was found."""
        if self.found:
            return ""
        text = self._held + text
        places = [at for s in self._stops if (at := text.find(s)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def _round_up(tokens: int) -> int:
    return -(-tokens // 256) * 256

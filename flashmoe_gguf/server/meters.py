"""What the server counts itself: requests, tokens and times. The cache counts the rest."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from flashmoe_gguf.server.ticket import Ticket

# Upper ends in seconds, the last one open: a prefill from disk takes minutes.
FIRST_TOKEN_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_RECENT_SECONDS = 10.0


@dataclass(frozen=True)
class Counts:
    """All counters at one moment; seconds, tokens and requests since the server started."""

    prompt_tokens: int
    answer_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_tokens: int
    tokens_per_second: float
    first_tokens: int
    first_token_seconds: float
    first_token_buckets: tuple[int, ...]
    requests: dict[tuple[str, int], int]
    errors: dict[str, int]

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decoding, first tokens left out; 0 before the second token."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass
class Meters:
    """Counters that any thread may add to."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prompt_tokens: int = 0
    _answer_tokens: int = 0
    _prefill_seconds: float = 0.0
    _decode_seconds: float = 0.0
    _decode_tokens: int = 0
    _first_token_seconds: float = 0.0
    _buckets: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BUCKETS) + 1))
    _requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    _errors: Counter[str] = field(default_factory=Counter)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=4096))

    def prefilled(self, n_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed."""
        with self._lock:
            self._prompt_tokens += n_tokens
            self._prefill_seconds += seconds

    def token(self, ticket: Ticket) -> None:
        """One token of an answer was chosen."""
        now = time.monotonic()
        ticket.answer_tokens += 1
        with self._lock:
            self._answer_tokens += 1
            self._recent.append(now)
            if ticket.first_token_seconds is None:
                ticket.first_token_seconds = now - ticket.arrived
                self._first_token_seconds += ticket.first_token_seconds
                self._buckets[bisect_left(FIRST_TOKEN_BUCKETS, ticket.first_token_seconds)] += 1
            else:
                self._decode_seconds += now - ticket.last_token
                self._decode_tokens += 1
        ticket.last_token = now

    def answered(self, path: str, status: int, error: str | None = None) -> None:
        """A request has its answer; `error`: its code or kind, where it has one."""
        with self._lock:
            self._requests[path, status] += 1
            if error is not None:
                self._errors[error] += 1

    def counts(self) -> Counts:
        """The counters as of now."""
        with self._lock:
            return Counts(
                prompt_tokens=self._prompt_tokens,
                answer_tokens=self._answer_tokens,
                prefill_seconds=self._prefill_seconds,
                decode_seconds=self._decode_seconds,
                decode_tokens=self._decode_tokens,
                tokens_per_second=self._rate(time.monotonic()),
                first_tokens=sum(self._buckets),
                first_token_seconds=self._first_token_seconds,
                first_token_buckets=tuple(self._buckets),
                requests=dict(self._requests),
                errors=dict(self._errors),
            )

    def _rate(self, now: float) -> float:
        """Tokens per second lately, 0 when there were none."""
        while self._recent and self._recent[0] < now - _RECENT_SECONDS:
            self._recent.popleft()
        if len(self._recent) < 2:
            return 0.0
        return (len(self._recent) - 1) / max(now - self._recent[0], 1e-3)

"""One request on its way: who may cancel it, and what it took. Shared by the event loop and the
thread that computes.
"""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from flashmoe_gguf.server.failures import ApiError, Cancelled


@dataclass(eq=False)
class Ticket:
    """A request that computes. `failure`: why it cannot be answered, once that is known."""

    path: str
    model: str
    stream: bool = False
    wants_usage: bool = False
    client: str = ""  # its address
    failure: ApiError | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    first_token_seconds: float | None = None
    arrived: float = field(default_factory=time.monotonic)
    last_token: float = 0.0
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self, why: ApiError | None = None) -> None:
        """Ends its computing at the next graph node or token; any thread may call it."""
        if why is not None and self.failure is None:
            self.failure = why
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raises Cancelled when nobody waits for it any more."""
        if self.is_cancelled:
            raise Cancelled


# The request that the current task or thread works for; worker threads inherit it.
CURRENT: ContextVar[Ticket | None] = ContextVar("flashmoe_ticket", default=None)

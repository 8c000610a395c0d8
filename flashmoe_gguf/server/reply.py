"""The answer to one request as it goes out: held back until it is known whether it is an error,
kept alive with comments while nothing comes, and ended with an error event when it fails half-way.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.types import Message, Send

from flashmoe_gguf.server.failures import ApiError
from flashmoe_gguf.server.ticket import Ticket

_DONE = b"data: [DONE]"


class Reply:
    """An ASGI `send` over another one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._start: Message | None = None
        self._last: Message | None = None
        self._began = False
        self._ended = False
        self._is_events = False
        self._late_error = b""
        self._last_sent = time.monotonic()
        self.ticket: Ticket | None = None
        self.status = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent."""
        return self._ended

    @property
    def silent_seconds(self) -> float:
        """Time since the client last heard anything."""
        return time.monotonic() - self._last_sent

    async def __call__(self, message: Message) -> None:
        """What the application sends."""
        async with self._lock:
            if self._ended:
                return
            if message["type"] == "http.response.start":
                self._start = message
            elif message.get("more_body", False):
                await self._body(message)
            else:
                self._last = message

    async def finish(self) -> None:
        """Sends the end of the answer, once the application has returned and cannot fail any more.

        llama_cpp.server ends a stream before it raises what went wrong in it.
        """
        async with self._lock:
            if not self._ended and self._last is not None:
                await self._body(self._last)

    async def _body(self, message: Message) -> None:
        last = not message.get("more_body", False)
        failure = self.ticket.failure if self.ticket is not None else None
        start = self._start
        if self._began and start is not None and start["status"] >= 400:
            self._late_error += message.get("body", b"")  # comments have begun an answer already
            if last:
                await self._events([b"data: " + self._late_error, _DONE], ended=True)
            return
        if failure is not None and (last or not self._began):
            await self._fail(failure)
            return
        if not self._began and start is not None:
            await self._begin(start)
        body = message.get("body", b"")
        if self.ticket is not None and self.ticket.wants_usage and body.startswith(_DONE):
            body = b"data: " + json.dumps(_usage(self.ticket)).encode() + b"\n\n" + body
        self._ended = last
        await self._pass_on({**message, "body": body})

    async def ping(self) -> None:
        """A comment: shows people and proxies that there is life."""
        async with self._lock:
            if not self._ended and (self._is_events or not self._began):
                await self._events([b": working"])

    async def fail(self, failure: ApiError) -> None:
        """Ends the answer with an error: as JSON, or as an event where an answer has begun."""
        async with self._lock:
            if not self._ended:
                await self._fail(failure)

    async def _fail(self, failure: ApiError) -> None:
        data = json.dumps(failure.body).encode()
        if self._began:
            if self._is_events:
                await self._events([b"data: " + data, _DONE], ended=True)
            else:
                self._ended = True
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        headers += [(k.lower().encode(), v.encode()) for k, v in (failure.headers or {}).items()]
        await self._begin(
            {"type": "http.response.start", "status": failure.status, "headers": headers}
        )
        self._ended = True
        await self._pass_on({"type": "http.response.body", "body": data})

    async def _events(self, lines: list[bytes], ended: bool = False) -> None:
        if not self._began:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._begin({"type": "http.response.start", "status": 200, "headers": headers})
        self._ended = ended
        body = b"".join(line + b"\n\n" for line in lines)
        await self._pass_on({"type": "http.response.body", "body": body, "more_body": not ended})

    async def _begin(self, start: Message) -> None:
        self._began = True
        self.status = start["status"]
        kinds = [v for k, v in start.get("headers", []) if k.lower() == b"content-type"]
        self._is_events = any(v.startswith(b"text/event-stream") for v in kinds)
        await self._send(start)

    async def _pass_on(self, message: Message) -> None:
        self._last_sent = time.monotonic()
        await self._send(message)


def _usage(ticket: Ticket) -> dict[str, Any]:
    """The chunk that `stream_options: {"include_usage": true}` asks for."""
    used = {
        "prompt_tokens": ticket.prompt_tokens,
        "completion_tokens": ticket.answer_tokens,
        "total_tokens": ticket.prompt_tokens + ticket.answer_tokens,
    }
    chat = ticket.path == "/v1/chat/completions"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-usage",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": ticket.model,
        "choices": [],
        "usage": used,
    }

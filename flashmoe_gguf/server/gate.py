"""The gate in front of llama_cpp.server: one request computes at a time, clients take turns.

It reads bodies within limits, refuses what is wrong, loads the model that is asked for, and ends
what nobody waits for any more. llama_cpp.server itself would only notice between two pieces of a
streamed answer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashmoe_gguf.server.failures import ApiError, api_error
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.models import Models
from flashmoe_gguf.server.reply import Reply
from flashmoe_gguf.server.requests import SCHEMAS, Request, read_request
from flashmoe_gguf.server.ticket import CURRENT, Ticket
from flashmoe_gguf.server.turns import Turns

_log = logging.getLogger(__name__)

_EXPECTED = ("model_loading", "stopping")
_STOPPING = "the server is stopping"
_CLIENT_LEFT = 499  # as nginx counts them
_DRAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Limits:
    """What one client may take. `ping_seconds` 0: no comments in streams."""

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    waiting: int = 256
    ping_seconds: float = 1.5


class _ClientLeft(Exception):
    """The client closed the connection before it had sent all of its request."""


class Gate:
    """An ASGI application around another one. `outer_lock`: llama_cpp.server's, where a waiting
    request is to interrupt a running one (its setting interrupt_requests).
    """

    def __init__(
        self,
        app: ASGIApp,
        models: Models,
        meters: Meters,
        limits: Limits,
        outer_lock: anyio.Lock | None = None,
    ) -> None:
        self._app = app
        self._models = models
        self._meters = meters
        self._limits = limits
        self._outer_lock = outer_lock
        self._turns = Turns()
        self._tickets: set[Ticket] = set()
        self._stopping = False
        self.running: Ticket | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._tickets) - (self.running is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in SCHEMAS:
            await self._app(scope, receive, send)
            return
        reply = Reply(send)
        try:
            await self._answer(scope, receive, reply)
            failure = reply.ticket.failure if reply.ticket is not None else None
        except _ClientLeft:
            return
        except ApiError as error:
            failure = error
            await reply.fail(error)
        status = reply.status or _CLIENT_LEFT
        if failure is not None:
            status = failure.status
        if status >= 500 and failure is not None and failure.code not in _EXPECTED:
            _log.error("%s: %s", scope["path"], failure.message)
        is_error = status >= 400 and status != _CLIENT_LEFT
        name = (failure.code if failure is not None else None) or f"http_{status}"
        self._meters.answered(scope["path"], status, name if is_error else None)

    async def _answer(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        body = await self._read_body(scope, receive)
        request = await anyio.to_thread.run_sync(read_request, scope["path"], body)
        alias = self._models.name(request.model)
        self._check_open()
        client = scope.get("client") or ("",)
        ticket = Ticket(scope["path"], alias, request.stream, request.wants_usage, client[0])
        reply.ticket = ticket
        left = anyio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            ticket.cancel()
            group.cancel_scope.cancel()  # a thread that computes is waited for all the same

        async def ping() -> None:
            while True:
                await anyio.sleep(max(self._limits.ping_seconds - reply.silent_seconds, 0.05))
                if reply.silent_seconds >= self._limits.ping_seconds:
                    await reply.ping()

        self._tickets.add(ticket)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                if request.stream and self._limits.ping_seconds:
                    group.start_soon(ping)
                await self._compute(scope, request, ticket, reply, left)
                group.cancel_scope.cancel()
        finally:
            self._tickets.discard(ticket)

    async def _compute(
        self, scope: Scope, request: Request, ticket: Ticket, reply: Reply, left: anyio.Event
    ) -> None:
        CURRENT.set(ticket)
        try:
            async with self._my_turn(ticket):
                if ticket.failure is not None:
                    raise ticket.failure
                await anyio.to_thread.run_sync(self._models.load, ticket.model)
                await self._app(_as_json(scope), _replay(request.body, left), reply)
            await reply.finish()
            if not reply.ended:
                raise ApiError(500, "the answer ended early")
        except Exception as error:
            failure = ticket.failure or api_error(error)
            ticket.failure = failure
            await reply.fail(failure)

    @contextlib.asynccontextmanager
    async def _my_turn(self, ticket: Ticket) -> AsyncIterator[None]:
        if self._outer_lock is None:
            await self._turns.take(ticket.client)
        else:
            async with self._outer_lock:  # its being held is what ends the running stream
                await self._turns.take(ticket.client)
        self.running = ticket
        try:
            yield
        finally:
            self.running = None
            self._turns.give_back()

    def _check_open(self) -> None:
        if self._stopping:
            raise ApiError(503, _STOPPING, code="stopping")
        loading = self._models.state in ("empty", "loading") and self.running is None
        if self._models.current is None and loading:  # the first one: nobody has its turn
            raise ApiError(
                503, "the model is loading", code="model_loading", headers={"Retry-After": "5"}
            )
        if len(self._tickets) > self._limits.waiting:
            raise ApiError(
                429,
                f"{self._limits.waiting} requests are waiting already",
                code="too_many_requests",
                headers={"Retry-After": "10"},
            )

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._limits.body_bytes
        lengths = [v for k, v in scope["headers"] if k == b"content-length"]
        if lengths and int(lengths[0]) > most:  # the protocol has checked that it is a number
            await self._refuse_body(receive)
        body = bytearray()
        with anyio.move_on_after(self._limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientLeft
                body += message.get("body", b"")
                if len(body) > most:
                    await self._refuse_body(receive)
                if not message.get("more_body", False):
                    return bytes(body)
        raise ApiError(
            408,
            f"the body did not come within {self._limits.body_seconds:g} s",
            code="body_too_slow",
            headers={"Connection": "close"},
        )

    async def _refuse_body(self, receive: Receive) -> None:
        """Raises ApiError after the rest of the body, as many clients listen only then."""
        with anyio.move_on_after(_DRAIN_SECONDS):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    break
        raise ApiError(
            413,
            f"the body is larger than {self._limits.body_bytes / (1 << 20):g} MiB",
            code="body_too_large",
            headers={"Connection": "close"},
        )

    def stop(self) -> None:
        """Nothing new is taken, and what waits is refused; what runs may go on. From any thread."""
        self._stopping = True
        for ticket in list(self._tickets):  # the event loop goes on adding and discarding
            if ticket is not self.running:
                ticket.cancel(ApiError(503, _STOPPING, code="stopping"))

    def cancel_running(self) -> None:
        """Ends what runs, with an error that says why."""
        running = self.running
        if running is not None:
            running.cancel(ApiError(503, _STOPPING, code="stopping"))


def _as_json(scope: Scope) -> Scope:
    """The body was read as JSON whatever its header said, and may have another length now."""
    described = (b"content-type", b"content-length", b"transfer-encoding")
    headers = [(k, v) for k, v in scope["headers"] if k not in described]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


def _replay(body: bytes, left: anyio.Event) -> Receive:
    """The application's `receive`: the body, then whether the client has left."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        if not left.is_set():
            await left.wait()
        return {"type": "http.disconnect"}

    return receive

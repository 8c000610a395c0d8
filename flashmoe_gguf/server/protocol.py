"""uvicorn's HTTP protocol, which does not wait for ever for a request's head."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flashmoe_gguf.server.failures import ApiError


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """A protocol that refuses a head which takes longer than this, from its first byte or, on a
    new connection, from the beginning.
    """

    class Patient(H11Protocol):
        _patience: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._wait()
            else:
                self._stop_waiting()

        def _wait(self) -> None:
            if self._patience is None:
                self._patience = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

        def _give_up(self) -> None:
            self._patience = None
            if not self.transport.is_closing():
                self._refuse(ApiError(408, "the request took too long", code="request_too_slow"))

        def send_400_response(self, msg: str) -> None:
            self._stop_waiting()
            self._refuse(ApiError(400, msg))

        def _refuse(self, failure: ApiError) -> None:
            body = json.dumps(failure.body).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            reason = b"Request Timeout" if failure.status == 408 else b"Bad Request"
            try:
                for event in (
                    h11.Response(status_code=failure.status, headers=headers, reason=reason),
                    h11.Data(data=body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            except h11.LocalProtocolError:
                pass  # an answer is under way
            self.transport.close()

    return Patient

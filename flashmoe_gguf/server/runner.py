"""Runs a server: its socket, its first model, its signals, and an end within five seconds."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from flashmoe_gguf.errors import FlashMoEError, OptionError
from flashmoe_gguf.server.app import Served
from flashmoe_gguf.server.protocol import patient_protocol

# After a signal: what runs may finish, then it is cancelled, then the process ends in any case.
FINISH_SECONDS = 2.0
_CANCEL_SECONDS = 1.0
_END_SECONDS = 4.5


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound; raises OptionError where that is impossible."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise OptionError(f"{host}: no such address: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise OptionError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}",
            "give another --port, or stop what uses this one",
        ) from None
    return sock


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """ "http://127.0.0.1:8000"; for a socket on all addresses, one that works from here."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    where = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{where}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which loads the first model beside it and stops as `Served` wants it to.

    `run_until_stopped` calls `before_free`, closes the models, and need not be in the main thread;
    then `stop` takes the place of signals.
    """

    def __init__(self, served: Served, before_free: Callable[[], object] = lambda: None) -> None:
        settings = served.settings
        super().__init__(
            uvicorn.Config(
                served.app,
                http=patient_protocol(served.limits.header_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=4,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_certfile=settings.ssl_certfile,
            )
        )
        self._served = served
        self._before_free = before_free
        self._failed: FlashMoEError | None = None
        self._loader = threading.Thread(target=self._load, name="load", daemon=True)
        self._timers: list[threading.Timer] = []
        self._ended = False
        self.stopped_by: int | None = None

    def run_until_stopped(self, sock: socket.socket) -> None:
        """Serves until a signal or `stop`; raises what kept the first model from loading."""
        self._loader.start()
        try:
            self.run(sockets=[sock])
        finally:
            self._served.models.stop()
            self._loader.join()
            self._before_free()
            self._served.models.free()
            for timer in self._timers:
                timer.cancel()
            self._ended = True
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """Takes nothing new, gives what runs a moment, and ends; any thread may call it."""
        if self.should_exit:
            return
        self.should_exit = True
        self._served.models.stop()
        self._served.gate.stop()
        self._after(FINISH_SECONDS, self._served.gate.cancel_running)
        self._after(FINISH_SECONDS + _CANCEL_SECONDS, self._served.gate.cancel_running)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _end_in_any_case(self) -> None:
        code = 128 + signal.SIGINT if self.stopped_by == signal.SIGINT else 0
        os._exit(code if self._ended else 1)

    def _load(self) -> None:
        models = self._served.models
        try:
            models.load(models.default)
        except Exception:
            if not self.should_exit:
                self._failed = models.error
            self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stop it, and do not go on to kill the process once it has ended.

        The handlers are no methods of it: sse-starlette would look there for `should_exit` and
        break every stream off at once.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, _frame: FrameType | None) -> None:
            if self.stopped_by is not None:
                self._served.gate.cancel_running()  # the second time means now
                return
            self.stopped_by = number
            # a read that hangs in the kernel would keep the process for ever; never cancelled, as
            # it also counts what Python does after this
            watch = threading.Timer(_END_SECONDS, self._end_in_any_case)
            watch.daemon = True
            watch.start()
            # not here: it may have interrupted someone who holds the same locks
            threading.Thread(target=self.stop, daemon=True).start()

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

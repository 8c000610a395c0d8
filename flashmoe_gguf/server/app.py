"""Puts the server together: the gate and our pages around llama_cpp.server's application."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from flashmoe_gguf.server.failures import api_error
from flashmoe_gguf.server.gate import Gate, Limits
from flashmoe_gguf.server.meters import Meters
from flashmoe_gguf.server.metrics import Metrics
from flashmoe_gguf.server.models import Models
from flashmoe_gguf.server.pages import KeyCheck, routes
from flashmoe_gguf.server.served import ServedLlama
from flashmoe_gguf.server.settings import ServedModelSettings, ServedSettings
from flashmoe_gguf.server.status import Status

# isort: split
import llama_cpp.server.app as upstream


@dataclass(frozen=True)
class Served:
    """A server that is ready to be run; `app` is its ASGI application."""

    app: ASGIApp
    models: Models
    gate: Gate
    status: Status
    settings: ServedSettings
    limits: Limits


def build(
    settings: ServedSettings,
    models: Sequence[ServedModelSettings],
    *,
    limits: Limits | None = None,
    on_loaded: Callable[[str, ServedLlama], None] = lambda alias, llm: None,
) -> Served:
    """The application for completed settings. It loads nothing: `Served.models.load` does.

    llama_cpp.server keeps its model in a global, so a process can have one server.
    """
    meters = Meters()
    served = Models(models, meters, on_loaded)
    # it would tell stdout of every client that leaves
    vars(upstream)["print"] = lambda *_words, **_options: None
    limits = limits or Limits()
    if settings.disable_ping_events:
        limits = Limits(**{**limits.__dict__, "ping_seconds": 0.0})
    with _in_place_of_proxy(served):
        app: FastAPI = upstream.create_app(
            # the key is checked in front of everything, in constant time
            server_settings=settings.model_copy(update={"api_key": None}),
            model_settings=list(models),
        )
    app.add_exception_handler(HTTPException, _on_http_exception)
    lock = upstream.llama_outer_lock if settings.interrupt_requests else None
    gate = Gate(app, served, meters, limits, lock)
    status = Status(served, meters, gate)
    app.router.routes[:0] = routes(status, Metrics(status))
    asgi: ASGIApp = KeyCheck(gate, settings.api_key) if settings.api_key else gate
    return Served(asgi, served, gate, status, settings, limits)


@contextlib.contextmanager
def _in_place_of_proxy(models: Models) -> Iterator[None]:
    """create_app makes a LlamaProxy of its own, which would load a model: it gets ours instead.

    CONFIG_FILE would override the settings that it is given; the command line has read it.
    """
    names: dict[str, Any] = vars(upstream)
    kept = names["LlamaProxy"]
    config = os.environ.pop("CONFIG_FILE", None)
    names["LlamaProxy"] = lambda **_settings: models
    try:
        yield
    finally:
        names["LlamaProxy"] = kept
        if config is not None:
            os.environ["CONFIG_FILE"] = config


async def _on_http_exception(_request: Request, error: Any) -> JSONResponse:
    failure = api_error(error)
    return JSONResponse(failure.body, failure.status, failure.headers)

"""The server's own pages: health, figures, metrics, the list of models, and the dashboard."""

from __future__ import annotations

import functools
import hashlib
import hmac
from importlib import resources

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flashmoe_gguf.server.failures import ApiError
from flashmoe_gguf.server.metrics import Metrics
from flashmoe_gguf.server.status import Status

# The dashboard loads nothing from elsewhere, runs no inline code and talks to this server only.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_STATIC = "/static/"


def routes(status: Status, metrics: Metrics) -> list[Route]:
    """They go before llama_cpp.server's own, whose /v1/models waits for the running answer."""

    async def health(_request: Request) -> Response:
        code, body = status.health()
        return JSONResponse(body, code, {"Cache-Control": "no-store"})

    async def stats(_request: Request) -> Response:
        return JSONResponse(status.stats(), headers={"Cache-Control": "no-store"})

    async def experts(_request: Request) -> Response:
        return JSONResponse(status.experts(), headers={"Cache-Control": "no-store"})

    async def page_metrics(_request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(_request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in status.models]})

    async def model(request: Request) -> Response:
        return JSONResponse(_model(status.models.name(request.path_params["name"])))

    async def detokenize(request: Request) -> Response:
        # llama_cpp.server's own fails where tokens end within a character
        tokens = (await request.json())["tokens"]
        text = status.models().detokenize(tokens).decode("utf-8", "replace")
        return JSONResponse({"text": text})

    return [
        Route("/extras/detokenize", detokenize, methods=["POST"]),
        Route("/", dashboard),
        Route(_STATIC + "{name}", static),
        Route("/health", health),
        Route("/flashmoe/stats", stats),
        Route("/flashmoe/experts", experts),
        Route("/metrics", page_metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "flashmoe"}


async def dashboard(_request: Request) -> Response:
    """The one page."""
    return _file("index.html")


async def static(request: Request) -> Response:
    """A file that belongs to it."""
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    found = _files().get(name)
    if found is None:
        raise ApiError(404, "there is no such file")
    kind = _KINDS[name[name.rindex(".") :]]
    return Response(found, headers={**_PAGE_HEADERS, "Content-Type": kind})


@functools.cache
def _files() -> dict[str, bytes]:
    folder = resources.files(__package__) / "static"
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.endswith(tuple(_KINDS))}


class KeyCheck:
    """Lets nothing through without the API key but the dashboard's files, which show nothing, and
    browsers' questions whether they may ask (CORS preflights).
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._digest = _digest(api_key.encode("utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        failure = ApiError(401, "a valid API key is needed", code="invalid_api_key")
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        await JSONResponse(failure.body, 401, headers)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # digests have one length, so the time says nothing about the key
        return hmac.compare_digest(_digest(key.strip()), self._digest) and (
            scheme.lower() == b"bearer"
        )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_open(scope: Scope) -> bool:
    if scope["method"] == "OPTIONS":
        return any(name == b"access-control-request-method" for name, _ in scope["headers"])
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path == "/" or path.startswith(_STATIC))

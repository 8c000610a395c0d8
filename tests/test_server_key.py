"""With an API key, everything that shows or does anything needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import Page, find_chromium
from server_tools import CHAT, error_of, running

PROTECTED = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/flashmoe/stats"),
    ("GET", "/flashmoe/experts"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/chat"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
    ("POST", "/"),
    ("OPTIONS", "/v1/models"),
    *(
        ("POST", path)
        for path in (
            CHAT,
            "/v1/completions",
            "/v1/engines/copilot-codex/completions",
            "/v1/embeddings",
            "/extras/tokenize",
            "/extras/tokenize/count",
            "/extras/detokenize",
        )
    ),
]


def test_every_endpoint_needs_the_key(chat_model: Path) -> None:
    with running(chat_model, api_key="sécret") as server:
        wrong = ["", "Bearer", "Bearer other", "Basic sécret", "Bearer sécret2", "sécret"]
        for method, path in PROTECTED:
            answer = server.client.request(method, path, json={} if method == "POST" else None)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            for value in wrong:
                headers = {"Authorization": value.encode()}
                assert server.client.request(method, path, headers=headers).status_code == 401
        routes = [r.path for r in server.served.gate._app.routes if hasattr(r, "path")]  # type: ignore[attr-defined]
        covered = {path for _, path in PROTECTED} | {"/docs/oauth2-redirect", "/redoc"}
        open_pages = {"/", "/static/{name}"}
        assert {r.replace("{name:path}", "chat") for r in routes} - covered == open_pages - covered

        for method, path in PROTECTED[:6]:
            headers = {"Authorization": "Bearer sécret".encode()}
            assert server.client.request(method, path, headers=headers).status_code == 200
        assert server.client.get("/").status_code == 200
        assert server.client.get("/static/app.js").status_code == 200
        headers = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
        assert server.client.options(CHAT, headers=headers).status_code == 200


@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_the_dashboard_asks_for_the_key(chat_model: Path, tmp_path: Path) -> None:
    chromium = find_chromium()
    assert chromium is not None
    with running(chat_model, api_key="secret") as server, Page(chromium, tmp_path) as page:
        page.open(server.url)
        page.wait("document.getElementById('key-form')?.hidden === false")
        page.run("document.getElementById('key').focus()")
        page.type("secret")
        page.press("Enter")
        page.wait("document.getElementById('status').textContent == 'ready'")
        assert page.run("document.getElementById('key-form').hidden")

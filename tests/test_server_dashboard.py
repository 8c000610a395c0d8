"""The dashboard in a headless Chromium, on a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Page, find_chromium
from server_tools import Running, running

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    with running(chat_model) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium = find_chromium()
    assert chromium is not None
    with Page(chromium, tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(server: Running, browser: Page) -> Iterator[Page]:
    browser.reset()
    browser.open(server.url)
    browser.wait("document.getElementById('status')?.textContent == 'ready'")
    yield browser
    assert browser.complaints == []
    assert browser.requests and all(url.startswith(f"{server.url}/") for url in browser.requests)


def ask(page: Page, question: str) -> str:
    """Sends it by keyboard alone; returns the answer once it is complete."""
    asked = page.run("document.querySelectorAll('#log .user').length")
    page.run("document.getElementById('question').focus()")
    page.type(question)
    page.press("Enter", modifiers=2)  # Ctrl
    page.wait(
        f"document.querySelectorAll('#log .user').length == {asked + 1}"
        " && !document.getElementById('send').disabled"
    )
    return str(page.run("document.querySelector('#log p:last-child')?.textContent"))


def events(*chunks: Any) -> bytes:
    data = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([": working\n\n", *data, "data: [DONE]\n\n"]).encode()


def piece(text: str) -> Any:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def test_headers_keep_everything_else_out(server: Running) -> None:
    for path in ("/", "/static/app.js", "/static/style.css", "/static/icon.svg"):
        headers = server.client.get(path).headers
        policy = headers["content-security-policy"].split("; ")
        assert "default-src 'none'" in policy and "connect-src 'self'" in policy
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    html = server.client.get("/").text
    assert "http://" not in html and "https://" not in html and " style=" not in html


def test_sources_never_make_html_of_text(server: Running) -> None:
    for name in ("app.js", "chat.js", "experts.js"):
        script = server.client.get(f"/static/{name}").text
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "http"):
            assert way not in script, (name, way)


@needs_chromium
def test_figures_and_chat(page: Page, server: Running) -> None:
    before = server.stats()["tokens"]["answer"]
    answer = ask(page, "Tell me a word")
    assert answer and page.run("document.querySelectorAll('#log p').length") == 2
    assert page.run("document.activeElement.id") == "question"
    assert server.stats()["tokens"]["answer"] > before
    total = server.stats()["tokens"]["answer"]
    page.wait(f"document.getElementById('rate-note').textContent.startsWith('{total} in all')")
    assert page.text("model") == "chat"
    assert "%" in page.text("hits") and "/s" in page.text("read")
    assert re.fullmatch(r"not measured yet|.* % of Belady", page.text("regret"))
    assert "of " in page.text("memory-note") or "no budget" in page.text("memory-note")
    assert page.text("requests-note").startswith("0 waiting, 0 errors")

    experts = server.client.get("/flashmoe/experts").json()["layers"]
    resident = sum(sum(layer["resident"]) for layer in experts)
    page.wait(f"document.getElementById('cell').textContent.startsWith('{resident} of 24 experts')")
    page.run("document.getElementById('experts').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.press(key)
    found = experts[1]
    where = "in memory" if found["resident"][1] else "on disk"
    assert page.text("cell") == f"layer 1, expert 1: used by {found['uses'][1]} tokens, {where}"
    drawn = page.run(
        "(() => { const c = document.getElementById('experts');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(Array.from({length: d.length / 4}, (_, i) => d[4 * i])).size })()"
    )
    assert drawn > 3  # several shades: use differs


@needs_chromium
def test_what_a_model_writes_is_text(page: Page) -> None:
    evil = '<img src="/x" onerror="document.title=1"><script>document.title=2</script><b>x</b>'
    page.intercept("/v1/chat", 200, "text/event-stream", events(piece(evil[:20]), piece(evil[20:])))
    assert ask(page, evil) == evil
    assert page.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert page.run("document.title") == "flashmoe"


@needs_chromium
def test_an_error_half_way_is_shown(page: Page) -> None:
    error = {"error": {"message": "cannot read <expert> 3"}}
    page.intercept("/v1/chat", 200, "text/event-stream", events(piece("Well"), error))
    assert ask(page, "Hello") == "cannot read <expert> 3"
    shown = page.run("[...document.querySelectorAll('#log p')].map((p) => p.className).join()")
    assert shown == "user,assistant,error"


@needs_chromium
def test_regret_once_it_is_measured(page: Page, server: Running) -> None:
    stats = {**server.stats(), "regret": {"tokens": 9, "actual": 0.6, "lru": 0.5, "belady": 0.8}}
    page.intercept("/flashmoe/stats", 200, "application/json", json.dumps(stats).encode())
    page.wait("document.getElementById('regret').textContent == '75.0 % of Belady'")
    assert page.run("document.getElementById('regret-bar').value") == pytest.approx(0.75)
    assert "LRU 50.0 %" in page.text("regret-note")


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_widths_and_colours(page: Page, width: int, scheme: str) -> None:
    page.call(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=width < 1000,
    )
    assert page.run("document.documentElement.scrollWidth") <= width
    colours = page.run(
        "[...document.querySelectorAll('body, .note, #send, .pill, h2')].map((e) => {"
        "let b = e; while (getComputedStyle(b).backgroundColor == 'rgba(0, 0, 0, 0)')"
        " b = b.parentElement;"
        "return [getComputedStyle(e).color, getComputedStyle(b).backgroundColor] })"
    )
    for text, behind in colours:
        assert contrast(text, behind) >= 4.5, (text, behind)
    background = luminance(page.run("getComputedStyle(document.body).backgroundColor"))
    assert (background < 0.2) == (scheme == "dark")


def luminance(colour: str) -> float:
    """WCAG's relative luminance of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    a, b = sorted((luminance(one), luminance(other)))
    return (b + 0.05) / (a + 0.05)


@needs_chromium
def test_the_keyboard_reaches_everything(page: Page) -> None:
    page.run("document.body.focus()")
    reached = []
    for _ in range(6):
        page.press("Tab")
        reached.append(page.run("document.activeElement.id || document.activeElement.className"))
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached == ["skip", "experts", "log", "question", "send", "clear"]
    unnamed = page.run(
        "[...document.querySelectorAll('button, textarea, input, canvas[tabindex], progress')]"
        ".filter((e) => !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label')"
        " || e.getAttribute('aria-labelledby'))).length"
    )
    assert unnamed == 0

"""Clients that leave, prompts that take long, and a disk that fails, on a live server."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from flashmoe_gguf.server.gate import Limits
from server_tools import CHAT, HELLO, SECONDS, Running, data_of, error_of, running, wait_for

LONG = [{"role": "user", "content": "abc " * 100}]


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    with running(chat_model, limits=Limits(ping_seconds=0.05)) as server:
        yield server


@pytest.fixture(scope="module")
def usual(server: Running) -> Any:
    return server.chat()["choices"]


@pytest.fixture(autouse=True)
def the_next_request_works(server: Running, usual: Any) -> Iterator[None]:
    server.llm.reset()
    yield
    server.set_fault(count=0)
    wait_for(lambda: server.served.gate.running is None)
    assert server.chat()["choices"] == usual
    server.llm._experts.native.verify()


@contextmanager
def connection(server: Running, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A request that was sent on a connection of its own."""
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=SECONDS) as sock:
        sock.sendall(head.encode() + data)
        yield sock


def wait_held(server: Running) -> None:
    wait_for(lambda: server.llm._experts.native.held() > 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_in_the_prompt(server: Running, stream: bool) -> None:
    server.set_fault(hold=True, count=1)
    with connection(server, {"messages": LONG, "stream": stream}):
        wait_held(server)
        ticket = server.served.gate.running
    assert ticket is not None
    wait_for(lambda: ticket.is_cancelled)
    server.llm._experts.native.release_held()
    wait_for(lambda: server.served.gate.running is None)
    assert ticket.answer_tokens == 0
    assert server.llm.n_tokens == 0  # the decode was ended inside, so none of it counts


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_in_the_answer(server: Running, stream: bool) -> None:
    body = {"messages": HELLO, "stream": stream, "max_tokens": 400, "temperature": 0}
    body["logit_bias"] = {"2": -100}  # it would end by itself
    with connection(server, body):
        wait_for(lambda: server.served.gate.running is not None)
        ticket = server.served.gate.running
        assert ticket is not None
        wait_for(lambda: ticket.answer_tokens > 2)
        server.set_fault(hold=True, count=1)
        wait_held(server)
    wait_for(lambda: ticket.is_cancelled)
    server.llm._experts.native.release_held()
    wait_for(lambda: server.served.gate.running is None)
    assert ticket.answer_tokens < 400
    assert server.stats()["running"] is False


def test_a_client_that_leaves_the_queue(server: Running) -> None:
    server.set_fault(hold=True, count=1)
    with connection(server, {"messages": LONG, "max_tokens": 1}) as first:
        wait_held(server)
        with connection(server, {"messages": HELLO}):
            wait_for(lambda: server.served.gate.waiting == 1)
        wait_for(lambda: server.served.gate.waiting == 0)
        server.llm._experts.native.release_held()
        assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_long_prompt_shows_life(server: Running) -> None:
    """Comments come while reads are held, and the pages answer."""
    server.set_fault(hold=True, count=1)
    body = {"messages": LONG, "stream": True, "max_tokens": 2, "temperature": 0}
    with server.client.stream("POST", CHAT, json=body, timeout=SECONDS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        for _ in range(6):
            assert next(lines) in (": working", "")
        with httpx.Client(base_url=server.url, timeout=SECONDS) as other:
            health = other.get("/health").json()
            assert health["status"] == "prefill"
            assert 0 <= health["prefill"]["done"] < health["prefill"]["total"] > 400
            assert other.get("/v1/models").status_code == 200
            assert b"flashmoe_requests_running 1.0" in other.get("/metrics").content
            assert other.get("/flashmoe/experts").json()["layers"]
        server.llm._experts.native.release_held()
        rest = [line for line in lines if line]
    assert data_of(rest)


def test_waiting_clients_see_life_too(server: Running) -> None:
    server.set_fault(hold=True, count=1)
    with connection(server, {"messages": LONG, "max_tokens": 1}) as first:
        wait_held(server)
        body = {"messages": HELLO, "stream": True, "max_tokens": 2}
        with server.client.stream("POST", CHAT, json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": working"
            server.llm._experts.native.release_held()
            assert data_of([line for line in lines if line])
        assert first.recv(1 << 16)


def test_an_error_after_comments_is_an_event(server: Running) -> None:
    """The status has gone out as 200 by then."""
    server.set_fault(hold=True, count=1)
    with connection(server, {"messages": LONG, "max_tokens": 1}) as first:
        wait_held(server)
        body = {"messages": HELLO, "stream": True, "grammar": "root ::= ("}
        with server.client.stream("POST", CHAT, json=body, timeout=SECONDS) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": working"
            server.llm._experts.native.release_held()
            (event,) = data_of([line for line in lines if line])
        assert "grammar" in event["error"]["message"]
        assert first.recv(1 << 16)


@pytest.mark.parametrize("number", [errno.EIO, 0], ids=["EIO", "short"])
def test_a_disk_error_in_the_prompt(
    server: Running, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.set_fault(errno=number, count=1)
    error = error_of(server.post(CHAT, messages=LONG), 500)
    assert error["code"] == "expert_read_failed" and error["type"] == "server_error"
    assert "layer" in error["message"]
    assert error["message"] in caplog.text  # the operator hears of it as well
    server.llm.reset()
    server.set_fault(errno=number, count=1)
    answer = server.post(CHAT, messages=LONG, stream=True)
    if answer.status_code == 200:  # comments were faster
        (event,) = data_of(answer.text.splitlines())
        assert event["error"]["code"] == "expert_read_failed"
    else:
        assert error_of(answer, 500)["code"] == "expert_read_failed"


def test_a_disk_error_in_the_answer(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 400, "temperature": 0, "logit_bias": {"2": -100}}
    whole = server.chat(**{**body, "max_tokens": 40})["choices"][0]["message"]["content"]
    server.llm.reset()
    with server.client.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        lines: list[str] = []
        for line in answer.iter_lines():
            lines += [line] if line else []
            if len(lines) == 5:
                server.set_fault(errno=errno.EIO, count=1)
    *pieces, last = data_of(lines)
    assert last["error"]["code"] == "expert_read_failed"
    text = "".join(p["choices"][0]["delta"].get("content") or "" for p in pieces)
    assert text and text[:40] == whole[: len(text)]
    errors = server.stats()["errors"]
    assert errors["expert_read_failed"] >= 1
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.post(CHAT, **body))

    thread = threading.Thread(target=ask)
    server.llm.reset()
    thread.start()
    wait_for(lambda: server.served.gate.running is not None)
    ticket = server.served.gate.running
    assert ticket is not None
    wait_for(lambda: ticket.answer_tokens > 2)
    server.set_fault(errno=errno.EIO, count=1)
    thread.join()
    error_of(answers[0], 500)


def test_metrics(server: Running) -> None:
    text = server.client.get("/metrics").text
    values = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    stats = server.stats()
    cache = stats["cache"]

    def value(name: str, **labels: str) -> float:
        return values[f"flashmoe_{name}", tuple(sorted(labels.items()))]

    assert value("tokens_total", kind="answer") == stats["tokens"]["answer"]
    assert value("tokens_total", kind="prompt") == stats["tokens"]["prompt"]
    for layer in stats["layers"]:
        assert value("expert_hits_total", layer=str(layer["layer"])) == layer["hits"]
        assert value("expert_misses_total", layer=str(layer["layer"])) == layer["misses"]
    assert sum(row["hits"] for row in stats["layers"]) == cache["hits"]
    for name, field in {
        "read_bytes_total": "bytes_read",
        "wait_seconds_total": "wait_seconds",
        "resident_bytes": "resident_bytes",
        "budget_bytes": "budget_bytes",
        "evictions_total": "evicted",
        "prefetch_used_total": "ahead_used",
        "prefetch_wasted_total": "ahead_dropped",
        "read_errors_total": "failed_loads",
        "hit_rate": "hit_rate",
    }.items():
        assert value(name) == pytest.approx(cache[field], abs=1e-6), name
    assert value("time_to_first_token_seconds_count") == stats["first_token"]["count"]
    assert value("time_to_first_token_seconds_bucket", le="+Inf") == stats["first_token"]["count"]
    assert value("requests_total", path=CHAT, status="200") > 0
    assert stats["first_token"]["seconds"] > 0 and stats["tokens"]["decode_per_second"] > 0
    info = next(key for key in values if key[0] == "flashmoe_info")[1]
    assert dict(info)["io_mode"] == cache["io_mode"] and dict(info)["model"] == "chat"


def test_regret(server: Running) -> None:
    """It is measured in the background once enough tokens were decoded."""
    while server.stats()["tokens"]["answer"] < 100:
        server.chat(max_tokens=64, logit_bias={"2": -100})
    wait_for(lambda: server.stats()["regret"] is not None)
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    samples = [s for family in families for s in family.samples if s.name == "flashmoe_regret"]
    figures = {s.labels["figure"]: s.value for s in samples}
    assert 0 <= figures["lru"] <= figures["belady"] <= 1
    assert 0 <= figures["actual"] <= 1 and figures["tokens"] > 0


def test_experts(server: Running) -> None:
    layers = server.client.get("/flashmoe/experts").json()["layers"]
    stats = server.stats()
    assert [row["layer"] for row in layers] == [0, 1, 2]
    for row, counts in zip(layers, stats["layers"], strict=True):
        assert sum(row["resident"]) == counts["resident"] <= 3
        # top-2; the last layer computes only those tokens of a prompt whose output is wanted
        assert sum(row["uses"]) <= 2 * stats["cache"]["tokens"]
    assert sum(layers[0]["uses"]) == 2 * stats["cache"]["tokens"]

"""Requests that are wrong get OpenAI-shaped errors, and the next request works; limits."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from flashmoe_gguf.server.gate import Limits
from server_tools import CHAT, HELLO, Running, error_of, running

# Comments would begin an answer before a slow machine has read a huge prompt.
LIMITS = Limits(body_bytes=4 << 20, body_seconds=0.5, header_seconds=0.5, ping_seconds=60)
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    with running(chat_model, limits=LIMITS) as server:
        yield server


@pytest.fixture(scope="module")
def usual(server: Running) -> Any:
    return server.chat(max_tokens=3)["choices"]


@pytest.fixture(autouse=True)
def the_next_request_works(server: Running, usual: Any) -> Iterator[None]:
    yield
    assert server.chat(max_tokens=3)["choices"] == usual
    server.llm._experts.native.verify()


BAD_CHATS: dict[str, tuple[dict[str, Any], int, str]] = {
    "messages of the wrong type": ({"messages": "hello"}, 400, "messages"),
    "no messages": ({"messages": []}, 400, "messages"),
    "an unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, 400, "messages"),
    "a temperature in words": ({"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
    "too many answers": ({"messages": HELLO, "n": 3}, 400, "n"),
    "no answers": ({"messages": HELLO, "n": 0}, 400, "n"),
    "less than a token": ({"messages": HELLO, "max_completion_tokens": -5}, 400, ""),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        400,
        "messages",
    ),
    "any tool where there is none": ({"messages": HELLO, "tool_choice": "required"}, 400, ""),
    "any of several tools": (
        {
            "messages": HELLO,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": {}}}
                for name in ("a", "b")
            ],
            "tool_choice": "required",
        },
        400,
        "tool_choice",
    ),
    "a grammar that takes too long": (
        {"messages": HELLO, "grammar": 'root ::= ("a"?){500}'},
        400,
        "",
    ),
    "a pattern that takes too long": (
        {
            "messages": HELLO,
            "response_format": {
                "type": "json_object",
                "schema": {"type": "string", "pattern": "^(a?){300}$"},
            },
        },
        400,
        "",
    ),
    "a schema of gigabytes": (
        {
            "messages": HELLO,
            "response_format": {
                "type": "json_object",
                "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
            },
        },
        400,
        "response_format",
    ),
    "a function of gigabytes": (
        {
            "messages": HELLO,
            "functions": [{"name": "a", "parameters": {"type": "string", "minLength": 10**9}}],
            "function_call": {"name": "a"},
        },
        400,
        "",
    ),
    "a tool of gigabytes": (
        {
            "messages": HELLO,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "a",
                        "parameters": {"type": "string", "minLength": 10**9},
                    },
                }
            ],
            "tool_choice": "required",
        },
        400,
        "tools",
    ),
    "no repeat penalty": ({"messages": HELLO, "repeat_penalty": 0}, 400, "repeat_penalty"),
    "top_p out of range": ({"messages": HELLO, "top_p": 7}, 400, "top_p"),
    "an unknown model": ({"messages": HELLO, "model": "gpt-17"}, 404, "model"),
    "a model that is a number": ({"messages": HELLO, "model": 3}, 400, "model"),
    "a grammar that does not parse": ({"messages": HELLO, "grammar": "root ::= ("}, 400, ""),
    "a grammar without a root": ({"messages": HELLO, "grammar": 'a ::= "x"'}, 400, ""),
    "a grammar that recurses for ever": ({"messages": HELLO, "grammar": "root ::= root"}, 400, ""),
    "a grammar nested deeply": (
        {"messages": HELLO, "grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
        400,
        "",
    ),
    "a schema that is none": (
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": 1}},
        400,
        "response_format",
    ),
    "a schema that cannot be followed": (
        {"messages": HELLO, "response_format": {"type": "json_object", "schema": {"$ref": "#/x"}}},
        400,
        "response_format",
    ),
    "a schema from elsewhere": (
        {
            "messages": HELLO,
            "response_format": {"type": "json_object", "schema": {"$ref": "https://127.0.0.1/x"}},
        },
        400,
        "response_format",
    ),
    "a schema that is too large": (
        {
            "messages": HELLO,
            "response_format": {
                "type": "json_object",
                "schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 20_000},
            },
        },
        400,
        "",
    ),
    "a tool with a wrong schema": (
        {
            "messages": HELLO,
            "tools": [
                {"type": "function", "function": {"name": "a", "parameters": {"$ref": "#/x"}}}
            ],
            "tool_choice": {"type": "function", "function": {"name": "a"}},
        },
        400,
        "tools",
    ),
    "a tool that is not there": (
        {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "b"}},
        },
        400,
        "",
    ),
    "no tools to choose from": (
        {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "b"}}},
        400,
        "tool_choice",
    ),
    "a bias for no token": ({"messages": HELLO, "logit_bias": {"99999": 1}}, 400, ""),
    "a bias beyond all": ({"messages": HELLO, "logit_bias": {"5": 1e308}}, 400, ""),
    "a bias for a word": ({"messages": HELLO, "logit_bias": {"word": 1}}, 400, ""),
    "log probabilities": ({"messages": HELLO, "logprobs": True, "top_logprobs": 2}, 400, ""),
    "more than the context": ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, ""),
    "a huge prompt": ({"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 400, ""),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", BAD_CHATS)
def test_bad_chats(server: Running, case: str, stream: bool) -> None:
    body, status, param = BAD_CHATS[case]
    error = error_of(server.post(CHAT, **{"max_tokens": 4, **body, "stream": stream}), status)
    assert error["type"] == "invalid_request_error"
    if param:
        assert error["param"] == param
    if "context" in case or "huge" in case:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "boss", "content": "x"}, "messages.0.role: it should be 'system', 'user'"),
        ({"role": "user", "content": 3}, "messages.0.content: input should be a valid string"),
        ({"role": "tool", "content": "x"}, "messages.0.tool_call_id: field required"),
        ({"role": "assistant", "content": {}}, "messages.0.content: input should be a valid str"),
        ("words", "messages.0: input should be a valid dictionary"),
    ],
)
def test_the_field_that_is_wrong_is_named(server: Running, message: Any, words: str) -> None:
    assert words in error_of(server.post(CHAT, messages=[message]), 400)["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": 7}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -3}),
        ("/v1/completions", {"prompt": "a", "logprobs": 2}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": [[1, 2]]}),
        ("/v1/embeddings", {"input": "x" * 600}),
        ("/v1/embeddings", {}),
        ("/extras/tokenize", {"input": 4}),
        ("/v1/completions", {"prompt": "a", "best_of": 0}),
        ("/extras/detokenize", {"tokens": ["a"]}),
        ("/extras/detokenize", {"tokens": [99_999_999]}),
        ("/extras/detokenize", {"tokens": [-5]}),
        ("/extras/detokenize", {"tokens": [2**40]}),
        ("/v1/embeddings", {"input": []}),
    ],
)
def test_bad_bodies_elsewhere(server: Running, path: str, body: dict[str, Any]) -> None:
    error_of(server.post(path, **body), 400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        f'{{"messages": {DEEP}'.encode(),
        f'{{"messages": {DEEP}{"]" * 100_000}}}'.encode(),
    ],
)
def test_bodies_that_are_no_request(server: Running, content: bytes) -> None:
    error_of(server.client.post(CHAT, content=content), 400)


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e308, "top_k": 10**30, "seed": 2**70},
    {"temperature": -1e308, "min_p": 1, "top_p": 0},
    {"repeat_penalty": 1e-300, "presence_penalty": -2, "seed": -(2**70)},
    {"repeat_penalty": 1e308, "frequency_penalty": 2},
    {"logit_bias": {"300": 1e6, "5": -1e6}},
    {"min_tokens": 10**9, "max_tokens": 10**30, "stop": ["", "a"]},
    {"mirostat_mode": 2, "mirostat_tau": 0, "mirostat_eta": 1},
    {"grammar": 'root ::= ""'},
    {"grammar": r"root ::= [^\x00-\U0010FFFF]"},
    {"grammar": 'root ::= ("a"?)*'},
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_extremes_are_survived(server: Running, extreme: dict[str, Any]) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0.9, **extreme}
    assert server.post(CHAT, **body).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"grammar": r'root ::= "\x00"'},
        {"response_format": {"type": "json_object", "schema": {"const": "a\0b"}}},
    ],
    ids=str,
)
def test_a_grammar_that_no_token_fits(server: Running, body: dict[str, Any]) -> None:
    said = error_of(server.post(CHAT, messages=HELLO, temperature=0, max_tokens=9, **body), 400)
    assert "the grammar allows none of the model's tokens here" in said["message"]


def test_what_another_path_means_is_no_stop(server: Running) -> None:
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/extras/tokenize", {"input": "x"})):
        assert server.post(path, **body, stop=5).status_code == 200


def test_half_a_character_in_any_text(server: Running) -> None:
    said = error_of(server.client.post("/extras/tokenize", content=rb'{"input": "\ud800"}'), 400)
    assert "lone surrogate" in said["message"]
    whole = server.client.post("/extras/tokenize", content=rb'{"input": "\ud83d\ude00"}')
    assert whole.status_code == 200


def test_half_a_character_is_marked(server: Running) -> None:
    assert server.post("/extras/detokenize", tokens=[4 + 0xC3]).json()["text"] == "\ufffd"


def test_unknown_paths_and_methods(server: Running) -> None:
    error_of(server.client.get("/v1/nothing"), 404)
    error_of(server.client.get("/static/nothing.js"), 404)
    error_of(server.client.get("/static/..%2f__init__.py"), 404)
    error_of(server.client.get(CHAT), 405)
    error_of(server.client.put("/v1/models"), 405)


def test_ten_megabytes(server: Running) -> None:
    text = "x" * (10 << 20)
    body = {"messages": [{"role": "user", "content": text}]}
    assert error_of(server.post(CHAT, **body), 413)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:  # chunked, so that no header tells the length
        for _ in range(10):
            yield b"x" * (1 << 20)

    answer = httpx.post(server.url + CHAT, content=pieces(), timeout=60)
    assert error_of(answer, 413)["code"] == "body_too_large"


def raw(server: Running, *pieces: bytes) -> bytes:
    """What the server says to bytes on a connection, until it closes it."""
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port), timeout=30) as sock:
        for piece in pieces:
            sock.sendall(piece)
        got = b""
        while data := sock.recv(1 << 16):
            got += data
        return got


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ((), 408),  # says nothing
        ((b"POST /v1/ch",), 408),
        ((HEAD,), 408),
        ((HEAD + b"Content-Length: 100\r\n\r\n", b'{"messages'), 408),
        ((b"nonsense\r\n\r\n",), 400),
        ((HEAD + b"Content-Length: -4\r\n\r\n",), 400),
    ],
    ids=["silence", "half a line", "half a head", "half a body", "nonsense", "no length"],
)
def test_slow_and_broken_clients(server: Running, pieces: tuple[bytes, ...], status: int) -> None:
    head, _, body = raw(server, *pieces).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_slow_client_holds_up_nobody(server: Running) -> None:
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port)) as sock:
        sock.sendall(HEAD + b"Content-Length: 100\r\n\r\n")
        server.chat()

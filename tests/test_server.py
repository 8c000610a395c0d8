"""The API over a live server: what OpenAI's clients rely on, and how several share one model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tiny_models
from flashmoe_gguf import Llama
from flashmoe_gguf.server.ticket import CURRENT
from server_tools import CHAT, HELLO, Running, data_of, error_of, running, text_of, wait_for

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[Running]:
    with running(chat_model, logits_all=True) as server:
        yield server


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_chat_equals_the_library(server: Running, chat_model: Path) -> None:
    with_library = Llama(
        str(chat_model), n_slots=3, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False
    )
    answer = with_library.create_chat_completion(
        HELLO, temperature=0, max_tokens=24, repeat_penalty=1.1
    )
    with_library.close()
    assert content(server.chat(max_tokens=24)) == answer["choices"][0]["message"]["content"]


def test_an_answer_has_openais_shape(server: Running) -> None:
    answer = server.chat()
    assert answer["object"] == "chat.completion" and answer["model"] == "chat"
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8


def test_streaming_gives_the_same_text(server: Running) -> None:
    whole = content(server.chat(max_tokens=24))
    lines = server.events(CHAT, messages=HELLO, temperature=0, max_tokens=24)
    assert text_of(lines) == whole


@pytest.mark.parametrize(
    ("question", "reason"), [("Hello there", "length"), ("what is the capital of England?", "stop")]
)
def test_usage_at_the_end_of_a_stream(server: Running, question: str, reason: str) -> None:
    messages = [{"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "repeat_penalty": 1.0, "max_tokens": 64}
    if reason == "length":
        body["max_tokens"] = 4
    whole = server.chat(**body)
    assert whole["choices"][0]["finish_reason"] == reason
    last = data_of(server.events(CHAT, **body, stream_options={"include_usage": True}))[-1]
    assert last["choices"] == [] and last["usage"] == whole["usage"]


def test_completion(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="Once", max_tokens=6, temperature=0).json()
    assert answer["object"] == "text_completion" and len(answer["choices"][0]["text"]) == 6
    lines = server.events("/v1/completions", prompt="Once", max_tokens=6, temperature=0)
    text = "".join(chunk["choices"][0]["text"] for chunk in data_of(lines))
    assert text == answer["choices"][0]["text"]


def test_stop_ends_an_answer(server: Running) -> None:
    whole = content(server.chat(max_tokens=12))
    answer = server.chat(max_tokens=12, stop=whole[5:8])
    assert content(answer) == whole[: whole.index(whole[5:8])]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_seed_repeats(server: Running) -> None:
    texts = {
        content(server.chat(temperature=1.5, seed=seed, max_tokens=16)) for seed in (5, 5, 6, 6)
    }
    assert len(texts) == 2


def test_log_probabilities(server: Running) -> None:
    answer = server.chat(max_tokens=4, logprobs=True, top_logprobs=3, repeat_penalty=1.0)
    rows = answer["choices"][0]["logprobs"]["content"]
    assert len(rows) == 4
    for row in rows:
        assert row["logprob"] == max(top["logprob"] for top in row["top_logprobs"]) <= 0


def test_log_probabilities_of_what_was_chosen(server: Running) -> None:
    answer = server.chat(max_tokens=4, logprobs=True, repeat_penalty=1.0)
    rows = answer["choices"][0]["logprobs"]["content"]
    assert len(rows) == 4 and all(row["logprob"] <= 0 for row in rows)


def test_text_in_parts_and_empty_stops(server: Running) -> None:
    parts = [{"type": "text", "text": HELLO[0]["content"][:2]}]
    parts.append({"type": "text", "text": HELLO[0]["content"][2:]})
    whole = server.chat(max_tokens=6)["choices"]
    assert (
        server.chat(messages=[{"role": "user", "content": parts}], max_tokens=6)["choices"] == whole
    )
    for stop in ("", [""], ["", "\0"]):
        assert server.chat(max_tokens=6, stop=stop)["choices"] == whole


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"type": "json_object", "schema": SCHEMA},
    ],
)
def test_json_schema(server: Running, response_format: dict[str, Any]) -> None:
    value = json.loads(content(server.chat(response_format=response_format, max_tokens=80)))
    assert isinstance(value["city"], str) and isinstance(value["big"], bool)


def test_grammar(server: Running) -> None:
    answer = server.chat(grammar='root ::= "yes" | "no"', max_tokens=8)
    assert content(answer) in ("yes", "no")


def test_a_tool_that_must_be_called(server: Running) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    answer = server.chat(tools=[TOOL], tool_choice=choice, max_tokens=80)
    required = server.chat(tools=[TOOL], tool_choice="required", max_tokens=80)
    assert required["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look_up"
    assert isinstance(json.loads(call["arguments"])["big"], bool)
    lines = server.events(
        CHAT, messages=HELLO, tools=[TOOL], tool_choice=choice, temperature=0, max_tokens=80
    )
    calls = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in data_of(lines)]
    pieces = [call[0]["function"].get("arguments") or "" for call in calls if call]
    assert json.loads("".join(pieces)) == json.loads(call["arguments"])


def test_newer_names_for_old_things(server: Running) -> None:
    answer = server.chat(
        max_tokens=None,
        max_completion_tokens=5,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be brief"}]},
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "look_up", "arguments": "{}"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Paris"}]},
        ],
    )
    assert answer["usage"]["completion_tokens"] == 5


def test_embeddings(server: Running) -> None:
    before = content(server.chat(max_tokens=16))
    answer = server.post("/v1/embeddings", input=["one text", "another"]).json()
    assert [row["index"] for row in answer["data"]] == [0, 1]
    first, second = (row["embedding"] for row in answer["data"])
    assert len(first) == len(second) == 128 and first != second
    alone = server.post("/v1/embeddings", input="one text").json()
    assert alone["data"][0]["embedding"] == pytest.approx(first, abs=1e-4)
    assert content(server.chat(max_tokens=16)) == before


def test_tokenize(server: Running) -> None:
    tokens = server.post("/extras/tokenize", input="abc").json()["tokens"]
    assert len(tokens) == server.post("/extras/tokenize/count", input="abc").json()["count"] == 3
    assert server.post("/extras/detokenize", tokens=tokens).json()["text"] == "abc"


def test_models_are_listed(server: Running) -> None:
    listed = server.client.get("/v1/models").json()
    assert [row["id"] for row in listed["data"]] == ["chat"]
    assert server.client.get("/v1/models/chat").json()["id"] == "chat"
    error_of(server.client.get("/v1/models/other"), 404)


def test_a_request_may_come_without_a_content_type(server: Running) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    assert server.client.post(CHAT, content=body).status_code == 200


def test_many_clients_at_once_get_what_they_get_alone(server: Running) -> None:
    questions = [[{"role": "user", "content": f"Question {i}"}] for i in range(6)]
    alone = [content(server.chat(messages=q, max_tokens=12)) for q in questions]
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {"messages": questions[i], "temperature": 0, "max_tokens": 12}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answers[i] = content(client.post(CHAT, json=body).json())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(6)] == alone


def test_first_come_first_served(server: Running) -> None:
    """While reads are held one request computes; the others are answered in their order."""
    server.set_fault(hold=True, count=1)
    server.llm.reset()
    gate, tickets = server.served.gate, []
    application = gate._app

    async def noted(*arguments: Any) -> None:
        tickets.append(CURRENT.get())
        await application(*arguments)

    gate._app = noted

    def ask(i: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": f"{i} " * 40}], "max_tokens": 1}
            client.post(CHAT, json=body).raise_for_status()

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=ask, args=(i,)))
        threads[-1].start()
        wait_for(lambda n=i: gate.running is not None and gate.waiting == n)  # type: ignore[misc]
    server.llm._experts.native.release_held()
    for thread in threads:
        thread.join()
    gate._app = application
    arrivals = [ticket.arrived for ticket in tickets if ticket is not None]
    assert len(arrivals) == 4 and arrivals == sorted(arrivals)


def test_models_switch_when_they_are_asked_for(chat_model: Path, tmp_path: Path) -> None:
    other = tiny_models.make_chat(tmp_path / "other.gguf", seed=2)
    with running(chat_model, other) as server:
        first = content(server.chat())
        assert server.stats()["model"] == "chat"
        second = server.chat(model="other")
        assert second["model"] == "other" and content(second) != first
        assert server.stats()["model"] == "other"
        assert content(server.chat()) == first  # the first is the default
        assert content(server.chat(model=str(chat_model))) == first  # llama_cpp.server's own name
        listed = server.client.get("/v1/models").json()["data"]
        assert [row["id"] for row in listed] == ["chat", "other"]


def test_requests_wait_while_another_model_is_loaded(chat_model: Path, tmp_path: Path) -> None:
    other = tiny_models.make_chat(tmp_path / "other.gguf", seed=2)
    with running(chat_model, other) as server:
        models, entered, go_on = server.served.models, threading.Event(), threading.Event()
        build = models._build

        def slow(alias: str) -> Any:
            entered.set()
            assert go_on.wait(60)
            return build(alias)

        models._build = slow  # type: ignore[method-assign]
        answers: dict[str, Any] = {}

        def ask(model: str) -> None:
            answers[model] = httpx.post(
                server.url + CHAT,
                json={"messages": HELLO, "model": model, "max_tokens": 1},
                timeout=60,
            ).json()

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("other", "chat")]
        threads[0].start()
        assert entered.wait(60)
        health = server.client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "loading"
        threads[1].start()
        wait_for(lambda: server.served.gate.waiting == 1)
        go_on.set()
        for thread in threads:
            thread.join()
        assert answers["other"]["model"] == "other" and answers["chat"]["model"] == "chat"


def test_a_model_that_cannot_be_loaded_any_more(chat_model: Path, tmp_path: Path) -> None:
    other = tiny_models.make_chat(tmp_path / "other.gguf", seed=2)
    with running(chat_model, other) as server:
        other.unlink()
        assert error_of(server.post(CHAT, model="other", messages=HELLO), 500)
        health = server.client.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "error"
        server.chat()
        assert server.client.get("/health").json()["status"] == "ready"


@pytest.mark.embedded
def test_the_embedded_model_answers(embedded_model: Path) -> None:
    """English in, English out, through the whole of it."""
    question = [{"role": "user", "content": "What is the capital of England?"}]
    with running(embedded_model, n_slots=16, n_ctx=1024) as server:
        answer = server.chat(messages=question, max_tokens=32)
        assert "London" in content(answer)
        lines = server.events(CHAT, messages=question, temperature=0, max_tokens=32)
        assert text_of(lines) == content(answer)
        assert server.stats()["cache"]["bytes_read"] > 0

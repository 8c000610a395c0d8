"""`flashmoe serve` as a command: start, stop, its options and its config file."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import cli_tools
import tiny_models
from cli_tools import assert_error, flashmoe
from server_tools import CHAT, HELLO, Command, data_of, error_of

FAST = ("--n-slots", "3", "-t", "1", "-c", "512")
NEVER_ENDING = {"messages": HELLO, "max_tokens": 480, "temperature": 0, "logit_bias": {"2": -100}}


def test_it_says_what_it_does_and_stops(chat_model: Path) -> None:
    with Command(chat_model, *FAST) as server:
        assert httpx.get(server.url + "/health").json()["status"] in ("loading", "ready")
        server.wait_ready()
        answer = httpx.post(server.url + CHAT, json={"messages": HELLO, "max_tokens": 2})
        assert answer.status_code == 200
        server.signal()
        assert server.exit_code() == 0
        rows = [line.split()[0] for line in server.lines]
        assert rows == ["listening", "model", "memory", "cache", "run", "chat", "stopped"]
        assert "3 of 8 experts per layer" in server.lines[3]


def test_ctrl_c(chat_model: Path) -> None:
    with Command(chat_model, *FAST) as server:
        server.wait_ready()
        server.signal(signal.SIGINT)
        assert server.exit_code() == 130


def test_sigterm_lets_a_short_answer_finish_and_ends_a_long_one(tmp_path: Path) -> None:
    """Within five seconds, with a whole last event."""
    slow = tiny_models.make_chat(tmp_path / "slow.gguf", n_layer=40, n_expert=16)
    with Command(slow, "--n-slots", "0", "-t", "1", "-c", "4096") as server:
        server.wait_ready()
        lines: list[str] = []
        late: list[httpx.Response] = []
        begun = threading.Event()

        def ask() -> None:
            body = {**NEVER_ENDING, "max_tokens": 4000, "stream": True}
            with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        def wait_in_line() -> None:
            late.append(httpx.post(server.url + CHAT, json=NEVER_ENDING, timeout=60))

        threads = [threading.Thread(target=ask), threading.Thread(target=wait_in_line)]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        while httpx.get(server.url + "/health").json()["waiting"] == 0:
            assert threads[1].is_alive()
        started = time.monotonic()
        server.signal()
        code = server.exit_code()
        seconds = time.monotonic() - started
        for thread in threads:
            thread.join()
        assert code == 0
        assert seconds < 7  # five, and what a busy machine adds to seeing a process end
        events = data_of([line for line in lines if line])
        if "error" in events[-1]:  # else the machine was fast enough to finish
            assert events[-1]["error"]["code"] == "stopping"
        assert error_of(late[0], 503)["code"] == "stopping"


def test_the_first_model_cannot_be_loaded(chat_model: Path) -> None:
    result = cli_tools.flashmoe_child("serve", chat_model, "--ram", "10M", "--port", "0")
    assert result.returncode == 2
    assert "error: 10 MiB of memory is below the floor" in result.stderr
    assert "hint:" in result.stderr and "Traceback" not in result.stderr


def test_bad_input(chat_model: Path, tmp_path: Path) -> None:
    assert_error(flashmoe("serve"), "there is no model to serve", "--config")
    assert_error(flashmoe("serve", tmp_path / "no.gguf"), "no.gguf", "")
    assert_error(flashmoe("serve", chat_model, chat_model), "two models are called chat", "alias")
    assert_error(flashmoe("serve", chat_model, "--policy", "best", "--port", "0"), "best", "lru")
    result = flashmoe("serve", chat_model, "--host", "256.1.1.1")
    assert result.exit_code == 2 and "no such address" in result.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_error(flashmoe("serve", chat_model, "--port", port), "cannot listen", "--port")
    assert_error(flashmoe("serve", chat_model, "--api-key", ""), "API key is empty", "leave")
    result = flashmoe("serve", chat_model, "--ram", "1G", "--n-slots", "3")
    assert result.exit_code == 2 and "exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        ("[]", "no settings"),
        ('{"models": [{}]}', "models.0.model"),
        ('{"models": [{"model": "x", "n_ctx": "many"}]}', "models.0.n_ctx"),
        ('{"models": [{"model": "x", "colour": 3}]}', "models.0.colour"),
        ('{"port": "high", "models": []}', "port"),
        ('{"models": []}', "no model to serve"),
    ],
)
def test_bad_config_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert_error(flashmoe("serve", "--config", path), message, "")


def config(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


def test_a_config_file_is_honoured(chat_model: Path, tmp_path: Path) -> None:
    other = tiny_models.make_chat(tmp_path / "other.gguf", seed=2)
    small = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 256}
    path = config(
        tmp_path,
        api_key="from the file",
        models=[
            {
                "model": str(chat_model),
                "model_alias": "first",
                "n_slots": 2,
                "policy": "lfu",
                **small,
            },
            {
                "model": str(other),
                "ram": "2G",
                "policy": "lru",
                "io": "buffered",
                "logits_all": True,
                **small,
            },
        ],
    )
    env = {**os.environ, "CONFIG_FILE": str(path)}
    with Command(env=env) as server:
        server.wait_ready()
        assert httpx.get(server.url + "/health").status_code == 401
        headers = {"Authorization": "Bearer from the file"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
            names = [row["id"] for row in client.get("/v1/models").json()["data"]]
            assert names == ["first", "other"]
            cache = client.get("/flashmoe/stats").json()["cache"]
            assert (cache["n_slots"], cache["policy"]) == (2, "lfu")
            body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
            error_of(client.post(CHAT, json=body), 400)
            answer = client.post(CHAT, json={**body, "model": "other"})
            assert answer.json()["choices"][0]["logprobs"]["content"]
            cache = client.get("/flashmoe/stats").json()["cache"]
            assert (cache["policy"], cache["io_mode"]) == ("lru", "buffered")
            assert cache["budget_bytes"] == 2 << 30
            long = {"messages": [{"role": "user", "content": "x" * 300}], "model": "first"}
            assert "holds 256" in error_of(client.post(CHAT, json=long), 400)["message"]


def test_yaml_and_options_beside_it(chat_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    path = tmp_path / "config.yaml"
    path.write_text(f"models:\n  - model: {chat_model}\n    n_slots: 3\n    n_threads: 1\n")
    with Command("--config", path, "--api-key", "k") as server:
        server.wait_ready()
        assert httpx.get(server.url + "/v1/models").status_code == 401


def test_open_to_others_without_a_key_warns(chat_model: Path) -> None:
    with Command(chat_model, *FAST, "--host", "0.0.0.0") as server:
        server.wait_ready()
        assert httpx.get(server.url + "/health").status_code == 200
        assert any("WARNING: listening on 0.0.0.0 without an API key" in x for x in server.lines)
    env = {**os.environ, "FLASHMOE_API_KEY": "secret"}
    with Command(chat_model, *FAST, "--host", "0.0.0.0", env=env) as server:
        server.wait_ready()
        assert httpx.get(server.url + "/health").status_code == 401
        assert not any("WARNING" in line for line in server.lines)


def test_without_its_packages(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashmoe_gguf.cli.serve._PACKAGES", ("no_such_package",))
    assert_error(flashmoe("serve", chat_model), "no_such_package", "flashmoe-gguf[server]")


def test_interrupting_when_the_config_wants_it(chat_model: Path, tmp_path: Path) -> None:
    """llama_cpp.server's setting: a new request ends the stream that runs."""
    model = {"model": str(chat_model), "n_slots": 3, "n_threads": 1, "n_ctx": 4096}
    path = config(tmp_path, interrupt_requests=True, models=[model])
    with Command("--config", path) as server:
        server.wait_ready()
        body = {**NEVER_ENDING, "max_tokens": 4000, "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as first:
            lines = first.iter_lines()
            next(lines)
            second = httpx.post(server.url + CHAT, json={"messages": HELLO, "max_tokens": 1})
            rest = [line for line in lines if line]
        assert second.status_code == 200
        assert rest[-1] == "data: [DONE]" and len(rest) < 4000

"""Servers in tests: in a thread, where faults can be set, or as the command that users start."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

import cli_tools
from flashmoe_gguf.server.app import Served, build
from flashmoe_gguf.server.gate import Limits
from flashmoe_gguf.server.runner import Server, bind, url_of
from flashmoe_gguf.server.settings import ServedModelSettings, ServedSettings, complete

SECONDS = 60.0  # to wait for anything at most

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


class Running:
    """A server in a thread of this process."""

    def __init__(self, served: Served, server: Server, url: str) -> None:
        self.served = served
        self.server = server
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=SECONDS)

    @property
    def llm(self) -> Any:
        current = self.served.models.current
        assert current is not None
        return current[1]

    def set_fault(self, **fault: Any) -> None:
        self.llm._experts.native.set_fault(**fault)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def chat(self, **body: Any) -> Any:
        """A greedy chat completion that works."""
        body = {"messages": HELLO, "temperature": 0, "max_tokens": 8, **body}
        answer = self.post(CHAT, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[str]:
        """The lines of a streamed answer, comments included."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            return [line for line in answer.iter_lines() if line]

    def stats(self) -> Any:
        return self.client.get("/flashmoe/stats").json()


@contextmanager
def running(
    *models: Path, limits: Limits | None = None, api_key: str | None = None, **options: Any
) -> Iterator[Running]:
    """Serves models, each loaded with `options`, and stops at the end."""
    options = {"n_slots": 3, "n_threads": 1, "n_threads_batch": 1, "n_ctx": 512, **options}
    wanted = [ServedModelSettings(model=str(model), **options) for model in models]
    settings = ServedSettings(api_key=api_key)
    served = build(settings, complete(wanted)[0], limits=limits)
    with bind("127.0.0.1", 0) as sock:
        server = Server(served)
        thread = threading.Thread(target=server.run_until_stopped, args=(sock,))
        thread.start()
        run = Running(served, server, url_of(sock))
        try:
            wait_for(lambda: served.models.state in ("ready", "failed"))
            yield run
        finally:
            run.client.close()
            server.stop()
            thread.join(SECONDS)
            assert not thread.is_alive()


def wait_for(done: Callable[[], bool]) -> None:
    """Looks until it is so."""
    tick, deadline = threading.Event(), time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, "it does not come"
        tick.wait(0.005)


def data_of(lines: list[str]) -> list[Any]:
    """The JSON of a stream's events; its end is checked and left out."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data
    return [json.loads(text) for text in data[:-1]]


def text_of(lines: list[str]) -> str:
    """What a streamed chat completion says."""
    pieces = (chunk["choices"][0]["delta"].get("content") for chunk in data_of(lines))
    return "".join(piece or "" for piece in pieces)


def error_of(answer: httpx.Response, status: int) -> Any:
    """OpenAI's error object, which must be whole."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"] and "/site-packages/" not in error["message"]
    return error


class Command:
    """`flashmoe serve` in a process of its own; `url` is there once it listens."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            cli_tools.command("serve", *arguments, "--port", "0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=env,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        wait_for(lambda: self._process.poll() is not None or self._find_url() != "")
        assert self._find_url(), self.lines
        return self._find_url()

    def _find_url(self) -> str:
        found = [re.match(r"listening on (\S+),", line) for line in list(self.lines)]
        return next((match[1] for match in found if match), "")

    def wait_ready(self) -> None:
        wait_for(lambda: self._process.poll() is not None or self.is_ready())
        assert self.is_ready(), self.lines

    def is_ready(self) -> bool:
        return any(" is ready: " in line for line in list(self.lines))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def exit_code(self) -> int:
        code = self._process.wait(SECONDS)
        self._reader.join()
        return code

"""A soak: many clients for a long time, some of which leave; nothing may grow, no answer differ.

    python -m flashmoe_gguf.server.soak MODEL --seconds 3600 -- --ram 8G

starts `flashmoe serve MODEL --repeatable --ram 8G`, asks every request once alone, then sends them
from 8 clients at random, and says in one line of JSON what came of it. Exit code 1: something was
wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil

CHAT = "/v1/chat/completions"
_SAMPLE_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0
# Of a growth this large at least is spoken: allocators do not give everything back.
_GROWTH_BYTES = 32 << 20
_GROWTH_FDS = 8
_LEAVE_SHARE = 0.2
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Job:
    """One request; `status` is what it must get."""

    path: str
    body: dict[str, Any]
    status: int = 200


@dataclass
class Report:
    """What a soak has seen. It is good when `problems` is empty."""

    seconds: float = 0.0
    answers: int = 0
    left: int = 0
    refused: int = 0
    resident_bytes: tuple[int, int] = (0, 0)
    fds: tuple[int, int] = (0, 0)
    problems: dict[str, int] = field(default_factory=dict)


def jobs(long_words: int = 40) -> list[Job]:
    """Mixed requests, all greedy: short and long, whole and streamed, free and by a schema."""
    made = []
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for i in range(6):
        for words in (2, long_words):
            text = " ".join(f"word{i * j % 7}" for j in range(words))
            messages = [{"role": "user", "content": f"{i}: {text}"}]
            greedy = {"temperature": 0, "max_tokens": 8 + 4 * i}
            made.append(Job(CHAT, {"messages": messages, **greedy}))
            made.append(Job(CHAT, {"messages": messages, **greedy, "stream": True}))
            made.append(Job("/v1/completions", {"prompt": text, **greedy, "stop": ["e"]}))
        form = {"type": "json_object", "schema": schema}
        made.append(Job(CHAT, {"messages": messages, "response_format": form, **greedy}))
        made.append(Job("/v1/embeddings", {"input": text}))
    made.append(Job(CHAT, {"messages": "wrong"}, 400))
    made.append(Job(CHAT, {"messages": messages, "model": "no such model"}, 404))
    made.append(Job(CHAT, {"messages": messages, "grammar": "root ::= ("}, 400))
    return made


class Client:
    """One connection that is kept, and made anew after it was broken off."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        where = urlsplit(url)
        self._address = where.hostname or "127.0.0.1", where.port or 80
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, job: Job) -> tuple[int, Any]:
        """(status, what the answer says)."""
        answer = self._send(job)
        data = answer.read()
        return answer.status, said(job, answer.status, data)

    def ask_and_leave(self, job: Job, pieces: int) -> None:
        """Reads so many pieces of the answer, none at all for 0, and closes the connection."""
        if pieces == 0:
            self._request(job)
        else:
            answer = self._send(job)
            for _ in range(pieces):
                answer.readline()
        self.close()

    def _send(self, job: Job) -> http.client.HTTPResponse:
        try:
            return self._request(job).getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            self.close()  # it was idle for too long; a fresh one must do
            return self._request(job).getresponse()

    def _request(self, job: Job) -> http.client.HTTPConnection:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT_SECONDS)
        self._connection.request("POST", job.path, json.dumps(job.body), self._headers)
        return self._connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def said(job: Job, status: int, data: bytes) -> Any:
    """What of an answer must be the same each time: its text, or that there was an error event."""
    if status != 200:
        return json.loads(data)["error"]["message"]
    if job.body.get("stream"):
        lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
        if not lines or lines[-1] != "[DONE]":
            return ["the stream has no end"]
        events = [json.loads(line) for line in lines[:-1]]
        if any("error" in event for event in events):
            return [event["error"]["message"] for event in events if "error" in event]
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    answer = json.loads(data)
    if job.path == "/v1/embeddings":
        return [round(x, 3) for x in answer["data"][0]["embedding"]]
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


class Soak:
    """Sends `jobs` to a server, of which `pid` is the process."""

    def __init__(
        self, url: str, pid: int, *, n_clients: int = 8, seed: int = 0, api_key: str | None = None
    ) -> None:
        self._url = url
        self._process = psutil.Process(pid)
        self._n_clients = n_clients
        self._seed = seed
        self._api_key = api_key
        self._jobs = jobs()
        self._expected: list[Any] = []
        self._lock = threading.Lock()
        self._report = Report()
        self._problems: Counter[str] = Counter()
        self._samples: list[tuple[int, int]] = []
        self._over = threading.Event()

    def run(
        self, seconds: float, progress: Callable[[float, Report], None] = lambda left, report: None
    ) -> Report:
        """Everything alone, then all at once for so long. `progress` is told the seconds left."""
        client = Client(self._url, self._api_key)
        for job in self._jobs:
            status, text = client.ask(job)
            if status != job.status:
                self._problem(f"alone: {job.path} gave {status}: {text}")
            self._expected.append(text)
        client.close()
        started = time.monotonic()
        names = range(self._n_clients)
        threads = [threading.Thread(target=self._client, args=(i,)) for i in names]
        for thread in threads:
            thread.start()
        told = started
        # a client ends at the first problem that is none of an answer; without any there is no soak
        while (left := started + seconds - time.monotonic()) > 0 and any(
            thread.is_alive() for thread in threads
        ):
            if time.monotonic() - told >= _PROGRESS_SECONDS:
                told += _PROGRESS_SECONDS
                progress(left, self._report)
            self._samples.append((self._process.memory_info().rss, self._process.num_fds()))
            self._over.wait(min(left, _SAMPLE_SECONDS))
        self._over.set()
        for thread in threads:
            thread.join()
        self._report.seconds = round(time.monotonic() - started, 1)
        self._compare_samples()
        self._report.problems = dict(self._problems)
        return self._report

    def _client(self, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        client = Client(self._url, self._api_key)
        try:
            while not self._over.is_set():
                index = chance.randrange(len(self._jobs))
                if chance.random() < _LEAVE_SHARE:
                    client.ask_and_leave(self._jobs[index], chance.randrange(6))
                    self._count("left")
                else:
                    self._check(index, *client.ask(self._jobs[index]))
        except Exception as error:
            self._problem(f"{type(error).__name__}: {error}")
        finally:
            client.close()

    def _check(self, index: int, status: int, text: Any) -> None:
        job = self._jobs[index]
        if status != job.status:
            self._problem(f"{job.path} gave {status}: {text}")
        elif text != self._expected[index]:
            self._problem(f"job {index}: {text!r:.80} is not {self._expected[index]!r:.80}")
        self._count("answers" if job.status == 200 else "refused")

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._report, name, getattr(self._report, name) + 1)

    def _problem(self, text: str) -> None:
        with self._lock:
            self._problems[text] += 1

    def _compare_samples(self) -> None:
        """The second quarter, when all is warm, against the last."""
        quarter = max(1, len(self._samples) // 4)
        early, late = self._samples[quarter : 2 * quarter], self._samples[-quarter:]
        if not early:
            return
        pairs = [
            (int(median(row[i] for row in early)), int(median(row[i] for row in late)))
            for i in range(2)
        ]
        self._report.resident_bytes, self._report.fds = pairs
        for name, (before, after), most in (
            ("resident bytes", pairs[0], _GROWTH_BYTES),
            ("file descriptors", pairs[1], _GROWTH_FDS),
        ):
            if after - before > most:
                self._problem(f"{name} grew from {before} to {after}")


def _say(left: float, report: Report) -> None:
    counts = f"{report.answers} answers, {report.left} left early, {report.refused} refused"
    print(f"{left:.0f} s to go: {counts}", file=sys.stderr, flush=True)


def main() -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flashmoe_gguf.server.soak",
        epilog="What follows -- are options of flashmoe serve.",
    )
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, serve_options = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    command = [sys.executable, "-P", "-m", "flashmoe_gguf.cli", "serve", given.model]
    if sys.version_info < (3, 11):
        command.remove("-P")
    with subprocess.Popen(
        [*command, "--repeatable", "--port", "0", *serve_options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as server:
        assert server.stderr is not None
        url = ""
        lines = []
        for line in server.stderr:
            if found := re.search(r" is ready: (\S+)", line):
                url = found[1]
                break
            lines.append(line)
        if not url:
            print(f"{''.join(lines)}flashmoe serve ended with {server.wait()}", file=sys.stderr)
            return 1
        drain = threading.Thread(target=server.stderr.read, daemon=True)
        drain.start()
        try:
            soak = Soak(url, server.pid, n_clients=given.clients, seed=given.seed)
            report = soak.run(given.seconds, _say)
        finally:
            server.terminate()
            code = server.wait()
            drain.join()
    if code != 0:
        report.problems[f"the server ended with {code}"] = 1
    print(json.dumps(dataclasses.asdict(report)))
    return 1 if report.problems or report.answers == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

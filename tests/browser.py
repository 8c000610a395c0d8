"""A headless Chromium, driven over the DevTools protocol through a pipe; no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 60.0
# Chromium reads from descriptor 3 and writes to 4.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, end in zip((3, 4), ends):
    os.dup2(end, fd)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. It keeps every request's address, and what the browser complains about."""

    def __init__(self, chromium: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [
            chromium,
            "--headless",
            "--no-sandbox",  # as root in containers; it opens our own pages only
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.answer_with: dict[str, tuple[int, str, bytes]] = {}

    def __enter__(self) -> Page:
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **parameters: Any) -> Any:
        """Runs a command of the protocol and returns its result."""
        number = self._send(method, parameters)
        deadline = time.monotonic() + _SECONDS
        while True:
            message = self._read(deadline)
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def intercept(self, pattern: str, status: int, kind: str, body: bytes) -> None:
        """Answers requests whose address has `pattern` in it in the server's place."""
        self.answer_with[pattern] = (status, kind, body)
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{p}*"} for p in self.answer_with])

    def reset(self) -> None:
        """An empty page as after the start."""
        self.call("Fetch.disable")
        self.call("Emulation.clearDeviceMetricsOverride")
        self.call("Emulation.setEmulatedMedia", features=[])
        self.open("about:blank")
        self.wait("location.href == 'about:blank'")
        self.requests, self.complaints, self.answer_with = [], [], {}

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """Runs it until its value is true, and returns that."""
        deadline = time.monotonic() + _SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            select.select([self._in], [], [], 0.05)
        return value

    def text(self, element: str) -> str:
        return str(self.run(f"document.getElementById('{element}').textContent"))

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key by its name."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown" if key == "Enter" else "rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
                modifiers=modifiers,
            )

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _read(self, deadline: float) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: Any) -> None:
        method, values = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.complaints.append(values["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values))
        elif method == "Fetch.requestPaused":
            self._answer(values)

    def _answer(self, paused: Any) -> None:
        found = [v for p, v in self.answer_with.items() if p in paused["request"]["url"]]
        status, kind, body = found[0]
        self._send(
            "Fetch.fulfillRequest",
            {
                "requestId": paused["requestId"],
                "responseCode": status,
                "responseHeaders": [{"name": "Content-Type", "value": kind}],
                "body": base64.b64encode(body).decode(),
            },
        )

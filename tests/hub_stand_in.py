"""A small server that speaks the endpoints of the Hugging Face hub that a download uses.

/api/models/R/revision/V   what files there are, with sizes and SHA-256
/R/resolve/V/PATH          a redirect to the file's bytes, with its ETag
/bytes/PATH                the bytes, ranges included
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubStandIn:
    """`files` are what the hub has. `stall_at` holds a body back after so many of the file's bytes,
    `cut_at` ends it there; `damage` changes the bytes on their way; `status` answers everything.
    """

    repository: str
    files: dict[str, bytes]
    revision: str = "main"
    stall_at: int | None = None
    cut_at: int | None = None
    damage: Callable[[bytes], bytes] | None = None
    ranges: bool = True
    status: int = 200
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> HubStandIn:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, True)

            def do_HEAD(self) -> None:
                hub._answer(self, False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def bytes_asked(self) -> list[str | None]:
        """The Range of every request for a file's bytes, in order."""
        return [
            asked
            for method, path, asked in self.requests
            if path.startswith("/bytes/") and method == "GET"
        ]

    def _answer(self, handler: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if self.status != 200:
            self._send(handler, self.status, {}, b"{}", with_body)
        elif path in (
            f"/api/models/{self.repository}",
            f"/api/models/{self.repository}/revision/{self.revision}",
        ):
            body = json.dumps(self._info()).encode()
            self._send(handler, 200, {"Content-Type": "application/json"}, body, with_body)
        elif path.startswith(f"/{self.repository}/resolve/{COMMIT}/"):
            self._redirect(handler, path.partition(f"/resolve/{COMMIT}/")[2], with_body)
        elif path.startswith("/bytes/") and path[7:] in self.files:
            self._bytes(handler, self.files[path[7:]], with_body)
        else:
            headers = {"X-Error-Code": "RepoNotFound"}
            self._send(handler, 404, headers, b'{"error": "not found"}', with_body)

    def _info(self) -> dict[str, object]:
        return {
            "id": self.repository,
            "modelId": self.repository,
            "sha": COMMIT,
            "siblings": [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {
                        "sha256": hashlib.sha256(data).hexdigest(),
                        "size": len(data),
                        "pointerSize": 134,
                    },
                }
                for name, data in self.files.items()
            ]
            + [{"rfilename": "README.md", "size": 10}],
        }

    def _redirect(self, handler: BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        digest = hashlib.sha256(self.files[name]).hexdigest()
        headers = {
            "Location": f"{self.url}/bytes/{name}",
            "X-Repo-Commit": COMMIT,
            "X-Linked-ETag": f'"{digest}"',
            "X-Linked-Size": str(len(self.files[name])),
        }
        self._send(handler, 302, headers, b"", with_body)

    def _bytes(self, handler: BaseHTTPRequestHandler, data: bytes, with_body: bool) -> None:
        headers, status, first = {"ETag": '"x"', "Accept-Ranges": "bytes"}, 200, 0
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        if asked and self.ranges:
            status, first = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        body = self.damage(data)[first:] if self.damage else data[first:]
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if not with_body:
            return
        stop = self.stall_at if self.stall_at is not None else self.cut_at
        try:
            if stop is not None and first < stop < first + len(body):
                handler.wfile.write(body[: stop - first])
                handler.wfile.flush()
                if self.cut_at is not None:
                    handler.close_connection = True
                    return
                self.stalled.set()
                self.released.wait(60)
                body = body[stop - first :]
            handler.wfile.write(body)
        except OSError:  # the client has gone
            handler.close_connection = True

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        body: bytes,
        with_body: bool,
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if with_body:
            handler.wfile.write(body)

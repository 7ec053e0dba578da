"""A very small S3 server in memory in which requests go wrong by script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

XML_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>"
CODES = {404: "NoSuchKey", 409: "ConditionalRequestConflict", 412: "PreconditionFailed", 500: "InternalError"}


@dataclass(frozen=True)
class Trouble:
    """What happens to one request: `status` is answered, or for None the connection is closed without an answer.

    `after` says that the request takes effect all the same; `delay` is in seconds.
    """

    status: int | None
    after: bool = False
    delay: float = 0.0
    code: str = ""
    is_xml: bool = True


@dataclass
class FakeS3:
    """The server's state: objects by path, troubles in the order in which requests meet them, requests seen."""

    url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    ignores_conditions: bool = False
    is_closed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serve() -> Iterator[FakeS3]:
    """Run it on a free port of 127.0.0.1 for the time of a `with` block."""
    state = FakeS3()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hung up is what some tests do."""

    server = Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        state.is_closed = True
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: FakeS3

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        path = unquote(urlsplit(self.path).path)
        with self.state.lock:
            self.state.seen.append(self.command)
            trouble = self.state.troubles.pop(0) if self.state.troubles else None
        if self.state.is_closed:  # on a connection from before
            trouble = Trouble(None)
        if trouble is None:
            self._answer(*self._work(path, body))
            return
        if trouble.after:
            self._work(path, body)
        time.sleep(trouble.delay)
        if trouble.status is None:
            self.close_connection = True
            return
        code = trouble.code or CODES.get(trouble.status, "SlowDown")
        content = XML_ERROR.format(code=code) if trouble.is_xml else "<html>an error of a proxy</html>"
        self._answer(trouble.status, content.encode(), "application/xml" if trouble.is_xml else "text/html")

    do_GET = do_PUT = do_HEAD = do_DELETE = _handle

    def _work(self, path: str, body: bytes) -> tuple[int, bytes]:
        objects = self.state.objects
        with self.state.lock:
            if self.command == "PUT":
                is_conditional = self.headers.get("If-None-Match") == "*" and not self.state.ignores_conditions
                if is_conditional and path in objects:
                    return 412, XML_ERROR.format(code="PreconditionFailed").encode()
                objects[path] = body
                return 200, b""
            if self.command == "DELETE":
                objects.pop(path, None)
                return 204, b""
            if path not in objects:
                return 404, XML_ERROR.format(code="NoSuchKey").encode()
            return 200, objects[path]

    def _answer(self, status: int, content: bytes, content_type: str = "application/xml") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(content)

"""A proxy in front of a real S3 server in which requests go wrong by chance, and which can be down for a while."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("500", "503", "429", "timeout", "reset", "cut", "slow", "lost answer")
"""`cut` resets the connection in the middle of the answer; `lost answer` when all was done and nothing was said."""

_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>the proxy was told to</Message></Error>"
_CODES = {500: "InternalError", 503: "SlowDown", 429: "TooManyRequests"}


class FaultProxy:
    """`probability` of a fault for each request, drawn from `faults`; `met` counts what happened to PUTs and all. Where
    `log` is a list, each request that is passed on is noted there: method, path with query, content of the answer."""

    def __init__(self, target: str, seed: int, hang_seconds: float) -> None:
        self.target = urlsplit(target)
        self.probability = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.is_down = False
        self.hang_seconds = hang_seconds
        self.met: Counter[str] = Counter()
        self.log: list[tuple[str, str, bytes]] | None = None
        self.url = ""
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def draw(self) -> str | None:
        with self._lock:
            if self.is_down:
                fault: str | None = "down"
            elif self._random.random() < self.probability:
                fault = self._random.choice(self.faults)
            else:
                fault = None
            self.met[fault or "passed on"] += 1
            return fault


@contextmanager
def fault_proxy(target: str, *, seed: int = 0, hang_seconds: float = 2.0) -> Iterator[FaultProxy]:
    """Run it on a free port for the time of a `with` block; `hang_seconds` is how long `timeout` says nothing."""
    state = FaultProxy(target, seed, hang_seconds)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that are killed are what this is for."""

    server = Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: FaultProxy

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        fault = self.state.draw()
        if fault in {"down", "reset"}:
            self._reset()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if fault == "timeout":
            time.sleep(self.state.hang_seconds)
            self._reset()
            return
        if fault in {"500", "503", "429"}:
            self._answer(
                int(fault), {"Content-Type": "application/xml"}, _ERROR.format(code=_CODES[int(fault)]).encode()
            )
            return
        if fault == "slow":
            time.sleep(self.state.hang_seconds / 4)
        status, headers, content = self._pass_on(body)
        if self.state.log is not None:
            self.state.log.append((self.command, self.path, content))
        if fault == "lost answer":
            self._reset()
            return
        self._answer(status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _pass_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        target = self.state.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():  # Host too: it is part of what was signed
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, dict(answer.getheaders()), content
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"content-length", "transfer-encoding", "connection"}:
                self.send_header(name, value)
        length = next((value for name, value in headers.items() if name.lower() == "content-length"), None)
        is_empty = self.command == "HEAD" or status in {204, 304}
        if status != 204:
            self.send_header("Content-Length", length if is_empty and length else str(len(content)))
        self.end_headers()
        if cut:
            self.wfile.write(content[: len(content) // 2])
            self._reset()
        elif not is_empty:
            self.wfile.write(content)

    def _reset(self) -> None:
        """Close with RST, as a peer that crashed."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

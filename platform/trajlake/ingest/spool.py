"""The spool: what a writer has recorded and the object store does not have yet, on local disk.

    <spool>/<writer>/meta.json          which lake, run and worker; and the epoch, once it is claimed
    <spool>/<writer>/lock               held (flock) by the process that writes here, so freed by any death
    <spool>/<writer>/00000007.arrow     a closed segment, ready for upload; removed when the store has it
    <spool>/<writer>/00000008.open      the segment that is being written: an Arrow stream without an end

After `kill -9` an `.open` file is read up to its last whole batch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path

import pyarrow as pa

from trajlake.errors import UsageError
from trajlake.ingest.segment import EVENT_SCHEMA, decode_spool, stream_options


def default_spool() -> Path:
    """`TRAJLAKE_SPOOL`, else a folder in the user's state folder."""
    if folder := os.environ.get("TRAJLAKE_SPOOL"):
        return Path(folder)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "trajlake" / "spool"


@dataclass(frozen=True)
class SpoolMeta:
    """Whose events a spool folder holds."""

    lake: str
    run_id: str
    worker_id: str
    host: str
    pid: int
    epoch: int | None = None


class SpoolFolder:
    """One writer's folder. Only the holder of its lock may change it."""

    def __init__(self, path: Path, meta: SpoolMeta, lock: FileIO) -> None:
        self.path = path
        self.meta = meta
        self._lock = lock

    @classmethod
    def create(cls, spool: Path, meta: SpoolMeta) -> SpoolFolder:
        """A new folder, locked. Raises UsageError where the spool cannot be written."""
        path = spool / uuid.uuid4().hex
        try:
            path.mkdir(parents=True, mode=0o700)
            lock = _try_lock(path)
        except OSError as error:
            raise UsageError(
                f"the spool folder {spool} cannot be used ({error.strerror}): "
                "set TRAJLAKE_SPOOL or spool= to a writable one"
            ) from error
        assert lock is not None
        folder = cls(path, meta, lock)
        folder._write_meta()
        return folder

    @classmethod
    def adopt(cls, path: Path) -> SpoolFolder | None:
        """The folder of a writer that is gone, locked; None while its process lives or where it is no such folder."""
        try:
            lock = _try_lock(path)
        except OSError:
            return None
        if lock is None:
            return None
        try:
            return cls(path, SpoolMeta(**json.loads((path / "meta.json").read_text())), lock)
        except (OSError, ValueError, TypeError):
            lock.close()
            return None

    def _write_meta(self) -> None:
        temporary = self.path / "meta.json.new"
        with temporary.open("w") as file:
            json.dump(asdict(self.meta), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / "meta.json")
        sync_folder(self.path)

    def set_epoch(self, epoch: int) -> None:
        """Keep the claimed epoch, durably, before anything is uploaded under it."""
        self.meta = replace(self.meta, epoch=epoch)
        self._write_meta()

    def segments(self) -> Iterator[tuple[int, Path]]:
        """(number, file) of what is there, oldest first, `.open` ones included."""
        numbered = (
            (int(file.stem), file)
            for file in self.path.iterdir()
            if file.suffix in {".arrow", ".open"} and file.stem.isdigit()
        )
        yield from sorted(numbered)

    def release(self, *, remove: bool) -> None:
        """Give the folder up; remove it where nothing is left in it."""
        if remove and not any(self.segments()):
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


class SpoolSegment:
    """The segment that is being written. Each batch is one write, so a torn tail is at most one batch."""

    def __init__(self, folder: SpoolFolder, number: int) -> None:
        self.number = number
        self._whole = 0  # bytes up to the end of the last batch that was written without an error
        self._open_path = folder.path / f"{number:08d}.open"
        self._folder = folder
        self._file = FileIO(self._open_path, "x")
        self._stream = pa.ipc.new_stream(self._file, EVENT_SCHEMA, options=stream_options())

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def write(self, batch: pa.RecordBatch, *, sync: bool) -> None:
        """Append one batch; with `sync` it is on the disk when this returns."""
        self._stream.write_batch(batch)
        if sync:
            os.fsync(self._file.fileno())
        self._whole = self._file.tell()

    def close(self) -> Path:
        """End the stream and make it ready for upload. Returns the file's new path."""
        self._stream.close()
        os.fsync(self._file.fileno())
        self._file.close()
        ready = self._open_path.with_suffix(".arrow")
        self._open_path.rename(ready)
        sync_folder(self._folder.path)
        return ready

    def abandon(self) -> None:
        """Let go of the file after an error of the disk, cut back to its last whole batch."""
        with suppress(OSError):  # a torn end does no harm either
            self._file.truncate(self._whole)
        self._file.close()


def read_spooled(path: Path) -> pa.Table:
    """The events of one spool file, up to its last whole batch."""
    data = path.read_bytes()
    # A power cut can leave a file whose name is there and whose blocks never were; nobody was told they were.
    return decode_spool(data if any(data[:64]) else b"", str(path))


def abandoned(spool: Path, lake: str | None = None) -> Iterator[SpoolFolder]:
    """Folders of writers that are gone, each locked for the caller; with `lake` only those of that lake."""
    if not spool.is_dir():
        return
    for path in sorted(spool.iterdir()):
        if not (path / "meta.json").is_file():
            continue
        folder = SpoolFolder.adopt(path)
        if folder is None:
            continue
        if lake is not None and folder.meta.lake != lake:
            folder.release(remove=False)
            continue
        yield folder


def sync_folder(path: Path) -> None:
    """Make renames and new names in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> FileIO | None:
    file = FileIO(path / "lock", "a")
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return None
        raise
    return file

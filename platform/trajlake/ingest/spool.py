"""The spool: what a writer has recorded and the object store does not have yet, on local disk.

    <spool>/<writer>/meta.json          which lake, run and worker
    <spool>/<writer>/epoch              the epoch, once it is claimed; its room is taken at the start, see set_epoch
    <spool>/<writer>/lock               held (flock) by the process that writes here, so freed by any death
    <spool>/<writer>/00000007.arrow     a closed segment, ready for upload; removed when the store has it
    <spool>/<writer>/00000008.open      the segment that is being written: an Arrow stream without an end
    <spool>/<writer>/00000005.damaged   a segment that the disk damaged; what could be read of it is in the store

After `kill -9` an `.open` file is read up to its last whole batch, and a damaged one up to the last batch before the
damage, which the checksums behind a closed stream tell.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from trajlake.errors import SegmentUnreadable, UsageError
from trajlake.ingest.segment import (
    END_MARK,
    EVENT_SCHEMA,
    STREAM_HEAD,
    decode_spool,
    describe,
    encode_descriptor,
    encode_stream,
    read_tail,
)

_EPOCH_BYTES = 20
_GOOD_BATCH_BYTES = 32 * 1024  # compressed; each batch costs about 5 KiB for the names and places of its columns
_STILLBORN_SECONDS = 600.0  # far longer than it takes to begin


@dataclass(frozen=True)
class SpoolMeta:
    """Whose events a spool folder holds. `is_fork`: by a process that was forked from the worker's own. `lake_id` is
    what the lake's marker says, where the writer could read it: an address alone may be that of another server, or of
    a lake that was made anew."""

    lake: str
    run_id: str
    worker_id: str
    host: str
    pid: int
    is_fork: bool = False
    lake_id: str | None = None

    def is_of(self, lake: str, lake_id: str | None) -> bool:
        """Whether this is the lake: by its id, or by its address where that is all that is known."""
        if self.lake_id is None or lake_id is None:
            return self.lake == lake
        return self.lake_id == lake_id


class NoSpool:
    """In place of a folder, for a writer that never goes to the disk."""

    path: Path | None = None

    def __init__(self, meta: SpoolMeta) -> None:
        self.meta = meta
        self.claim = uuid.uuid4().hex
        self.claimed: int | None = None
        self.epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Nothing has to survive this process."""
        self.epoch = epoch

    def release(self, *, remove: bool) -> None:
        """There is nothing to give up."""

    def disown(self) -> None:
        """There is nothing to let go of."""


class SpoolFolder:
    """One writer's folder. Only the holder of its lock may change it."""

    def __init__(self, path: Path, meta: SpoolMeta, lock: FileIO) -> None:
        self.path = path
        self.meta = meta
        self.claim = path.name
        self.claimed: int | None = None  # an epoch that may be ours: the answer to the claim was lost
        self.epoch: int | None = None
        self._lock = lock
        self._is_durable = True

    @classmethod
    def create(cls, spool: Path, meta: SpoolMeta) -> SpoolFolder:
        """A new folder, locked. Raises UsageError where the spool cannot be written."""
        path = spool / uuid.uuid4().hex
        try:
            path.mkdir(parents=True, mode=0o700)
            lock = _try_lock(path)
            assert lock is not None
            folder = cls(path, meta, lock)
            folder._begin()
        except OSError as error:
            raise UsageError(
                f"the spool folder {spool} cannot be used ({error.strerror}): "
                "set TRAJLAKE_SPOOL or spool= to a writable one"
            ) from error
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
            folder = cls(path, read_meta(path), lock)
            folder.epoch = _read_epoch(path)
            return folder
        except (OSError, ValueError, TypeError):
            lock.close()
            return None

    def _begin(self) -> None:
        (self.path / "epoch").write_bytes(b" " * _EPOCH_BYTES)
        # Last, and whole or not at all: a folder without it is one that never held an event.
        (self.path / "meta.new").write_bytes(json.dumps(asdict(self.meta)).encode())
        (self.path / "meta.new").replace(self.path / "meta.json")
        self._is_durable = False

    def make_durable(self) -> None:
        """Bring the folder itself to the disk, before the first event in it is: who makes a writer, perhaps in an event
        loop, does not wait for that. Raises OSError."""
        if not self._is_durable:
            for path in (self.path / "epoch", self.path / "meta.json", self.path, self.path.parent):
                sync_path(path)
            self._is_durable = True

    def set_epoch(self, epoch: int) -> None:
        """Keep the claimed epoch, durably, before anything is uploaded under it.

        Written over bytes that are there already, because a full disk must not keep a spool from being emptied.
        """
        descriptor = os.open(self.path / "epoch", os.O_WRONLY)
        try:
            os.pwrite(descriptor, f"{epoch:<{_EPOCH_BYTES}d}".encode(), 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.epoch = epoch

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
        with suppress(OSError):  # a disk that fails now: the folder stays, and is looked at again at the next start
            if remove and not any(self.segments()) and not any(self.path.glob("*.damaged")):
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def disown(self) -> None:
        """In a forked child: the folder is the parent's alone. Closing our copy of the lock leaves it locked."""
        self._lock.close()


class _WholeFile:
    """A file that grows by whole pieces."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path, "x")
        self.bytes = 0  # of what was written whole, and its CRC
        self.crc = 0

    def append(self, data: bytes | memoryview, *, sync: bool) -> None:
        """Write all of `data`: a disk that is nearly full takes a part of it without an error. Raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self.crc = zlib.crc32(data, self.crc)
        self.bytes += len(data)
        if sync:
            os.fsync(self._file.fileno())

    def cut(self, size: int) -> None:
        self._file.truncate(size)

    def let_go(self) -> None:
        self._file.close()


class SpoolSegment:
    """The segment that is being written. Each batch is one write, so a torn tail is at most one batch."""

    def __init__(self, folder: SpoolFolder, number: int) -> None:
        folder.make_durable()
        self.number = number
        self.events = 0
        self.bytes = 0  # up to the end of the last batch that was written without an error
        self.arrow_bytes = 0  # of the same, without compression
        self._folder = folder
        self._synced_name = False
        self._keys: list[pa.RecordBatch] = []
        self._marks: list[tuple[int, int]] = []  # where each batch ends, and the checksum of all up to there
        self._open_path = folder.path / f"{number:08d}.open"
        self._file = _WholeFile(self._open_path)

    def write(self, batch: pa.RecordBatch, *, sync: bool) -> None:
        """Append one batch; with `sync` it is on the disk when this returns. Raises OSError: then `abandon` it."""
        message = encode_stream([batch])
        self._file.append(message if not self.events else memoryview(message)[STREAM_HEAD:], sync=sync)
        if sync and not self._synced_name:
            sync_path(self._folder.path)
            self._synced_name = True
        self.bytes = self._file.bytes
        self._marks.append((self._file.bytes, self._file.crc))
        self.events += batch.num_rows
        self.arrow_bytes += batch.nbytes
        self._keys.append(batch.select(["kind", "episode_id", "attempt", "sequence"]))

    def close(self) -> Path:
        """End the stream, with its descriptor, and make it ready for upload. Returns the file's new path."""
        self._file.append(END_MARK, sync=False)
        descriptor = describe(pa.Table.from_batches(self._keys))
        self._file.append(encode_descriptor(descriptor, marks=self._marks, arrow_bytes=self.arrow_bytes), sync=True)
        self._file.let_go()
        ready = self._open_path.with_suffix(".arrow")
        self._open_path.rename(ready)
        sync_path(self._folder.path)
        return ready

    def abandon(self) -> Path:
        """Let go of the file after an error of the disk, cut back to its last whole batch. Returns its path."""
        with suppress(OSError, ValueError):  # a torn end does no harm either
            self._file.cut(self.bytes)
        with suppress(OSError):
            self._file.let_go()
        ready = self._open_path.with_suffix(".arrow")
        return ready if ready.exists() else self._open_path

    def disown(self) -> None:
        """In a forked child: never write to the parent's file."""
        self._file.let_go()


class MemorySegment:
    """A segment that waits in memory, because the disk refuses or is not wanted."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.events = 0
        self.bytes = 0
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one batch."""
        self._batches.append(batch)
        self.bytes += batch.nbytes
        self.events += batch.num_rows

    @property
    def arrow_bytes(self) -> int:
        """Its bytes without compression: it has none."""
        return self.bytes

    def close(self) -> pa.Table:
        """Everything that was written."""
        return pa.Table.from_batches(self._batches, schema=EVENT_SCHEMA)


def keep(folder: SpoolFolder, number: int, data: bytes) -> Path:
    """Bring a segment that waited in memory to the disk after all. Raises OSError."""
    path = folder.path / f"{number:08d}.arrow"
    folder.make_durable()
    try:
        _write_whole(path.with_suffix(".new"), data)
        path.with_suffix(".new").replace(path)
    except OSError:
        with suppress(OSError):
            path.with_suffix(".new").unlink(missing_ok=True)
        raise
    sync_path(folder.path)
    return path


def read_spooled(path: Path) -> tuple[pa.Table, str]:
    """The events of one spool file up to its last whole batch, or up to where it is damaged; and what is wrong with it,
    where a part of it was lost that had been written. Raises OSError."""
    data = path.read_bytes()
    is_closed = path.suffix == ".arrow"
    if not is_closed and len(data) < STREAM_HEAD:
        return EVENT_SCHEMA.empty_table(), ""  # cut off before its first batch
    # A power cut can leave a file whose name is there and whose blocks never were; nobody was told they were.
    if not any(data[:64]):
        return EVENT_SCHEMA.empty_table(), "it holds nothing" if is_closed else ""
    tail = _tail_of(data)
    try:
        events = decode_spool(_before_damage(data, tail), str(path))
    except SegmentUnreadable as error:
        return EVENT_SCHEMA.empty_table(), str(error)
    if not is_closed:
        return events, ""
    if not tail:
        return events, f"its end is damaged; {len(events)} events can be read"
    if len(events) < tail["events"]:
        return events, f"{tail['events'] - len(events)} of its {tail['events']} events cannot be read"
    return events, ""


def _tail_of(data: bytes) -> dict[str, Any]:
    try:
        return read_tail(data) or {}
    except ValueError:
        return {}


def _before_damage(data: bytes, tail: dict[str, Any]) -> bytes:
    """The batches of a closed segment before the first that is damaged: lz4 has no checksum of its own, so that a
    reader would take one that is damaged for a good one."""
    if "marks" not in tail:
        return data
    start = checksum = 0
    for end, wanted in tail["marks"]:
        checksum = zlib.crc32(memoryview(data)[start:end], checksum)
        if checksum != wanted:
            break
        start = end
    return data[:start]


def read_ready(path: Path) -> tuple[bytes, int] | None:
    """A closed spool file that is a good segment as it is, and its number of events. None where it must be read and
    written anew: it was not closed, it is damaged, or its batches are so small that a reader would suffer."""
    if path.suffix != ".arrow":
        return None
    data = path.read_bytes()
    tail = _tail_of(data)
    marks = tail.get("marks")
    if not marks or tail["stream_bytes"] < _GOOD_BATCH_BYTES * len(marks):
        return None
    end, checksum = marks[-1]
    if zlib.crc32(memoryview(data)[:end]) != checksum or data[end : tail["stream_bytes"]] != END_MARK:
        return None
    return data, tail["events"]


def abandoned(spool: Path, lake: str, lake_id: str | None = None) -> Iterator[SpoolFolder]:
    """Folders of writers of this lake that are gone, each locked for the caller."""
    if not spool.is_dir():
        return
    for path in sorted(spool.iterdir()):
        if not (path / "meta.json").is_file():
            _remove_stillborn(path)
            continue
        folder = SpoolFolder.adopt(path)
        if folder is None:
            continue
        if not folder.meta.is_of(lake, lake_id):
            folder.release(remove=False)
            continue
        yield folder


def _remove_stillborn(path: Path) -> None:
    """Remove the folder of a writer that was killed before it could record anything."""
    with suppress(OSError):
        is_ours = {file.name for file in path.iterdir()} <= {"lock", "epoch", "meta.new"}
        if is_ours and time.time() - path.stat().st_mtime > _STILLBORN_SECONDS and (lock := _try_lock(path)):
            shutil.rmtree(path, ignore_errors=True)
            lock.close()


def sync_path(path: Path) -> None:
    """Make a file durable, or renames and new names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_meta(path: Path) -> SpoolMeta:
    """Whose folder `path` is. Raises OSError, ValueError or TypeError where it is none."""
    return SpoolMeta(**json.loads((path / "meta.json").read_text()))


def is_in_use(path: Path) -> bool:
    """Whether the process that writes to this folder lives."""
    try:
        lock = _try_lock(path)
    except OSError:
        return False
    if lock is not None:
        lock.close()
    return lock is None


def _read_epoch(path: Path) -> int | None:
    text = (path / "epoch").read_text().strip()
    return int(text) if text else None


def _write_whole(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _try_lock(path: Path) -> FileIO | None:
    try:
        file = FileIO(path / "lock", "a")
    except OSError as error:
        if error.errno not in {errno.EROFS, errno.EACCES}:
            raise
        file = FileIO(path / "lock", "r")  # a disk that became read-only can still be emptied into the store
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return None
        raise
    return file

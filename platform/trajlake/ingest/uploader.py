"""Uploads closed segments, in order, for as long as it takes; and what earlier writers left in the spool."""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from trajlake.errors import (
    AccessRefused,
    BucketMissing,
    NotDurable,
    SegmentUnreadable,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from trajlake.ingest.segment import SegmentName, decode_segment, encode_segment
from trajlake.ingest.spool import SpoolFolder, SpoolSegment, abandoned, read_spooled
from trajlake.storage import Lost, ObjectStore, Unknown, Won

log = logging.getLogger("trajlake")

EPOCHS = "epochs"
_IDENTITY = ["kind", "episode_id", "attempt", "sequence", "recorded_at"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LONGEST_PAUSE = 15.0


def check_name(what: str, name: str) -> str:
    """`name` unchanged. Raises UsageError where it cannot be part of an object's key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{what} must be of letters, digits, '.', '_' and '-', at most 128 of them, not {name!r}")
    return name


@dataclass(frozen=True)
class _Closed:
    number: int
    path: Path
    up_to: int  # every event with a lower sequence is durable once this one is


class Uploader:
    """The thread behind one writer that owns its spool folder's closed segments."""

    def __init__(self, store: ObjectStore, folder: SpoolFolder, spool: Path) -> None:
        self._store = store
        self._folder = folder
        self._spool = spool
        self._changed = threading.Condition()
        self._waiting: deque[_Closed] = deque()
        self._stopping = False
        self._finished = False
        self._refusal: StoreError | None = None
        self._damaged = ""
        self._hurry = False
        self.durable_events = 0
        self.segments = 0
        self.bytes = 0
        self.retries = 0
        self._last_up_to = 0
        self._thread = threading.Thread(target=self._loop, name="trajlake-uploader", daemon=True)

    def start(self) -> None:
        """Begin; what dead writers of the same lake left in the spool goes first."""
        self._thread.start()

    def add(self, number: int, path: Path, up_to: int) -> None:
        """A segment is closed and ready."""
        with self._changed:
            self._waiting.append(_Closed(number, path, up_to))
            self._last_up_to = up_to
            self._changed.notify_all()

    def add_torn(self, segment: SpoolSegment) -> None:
        """A segment whose file has a torn end: its whole batches are uploaded."""
        path = self._folder.path / f"{segment.number:08d}.open"
        with self._changed:
            self._waiting.append(_Closed(segment.number, path, self._last_up_to))
            self._changed.notify_all()

    def wait(self, up_to: int, deadline: float | None) -> None:
        """Return when every event below `up_to` is in the store. Raises NotDurable or the store's refusal."""
        with self._changed:
            # What an earlier call was told may have been mended since: try at once.
            self._refusal = None
            self._hurry = True
            self._changed.notify_all()
            while self.durable_events < up_to or self._damaged:
                if self._refusal is not None:
                    raise self._refusal
                if self._damaged:
                    raise NotDurable(f"a spool segment was damaged on disk: {self._damaged}")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise NotDurable(
                        f"{up_to - self.durable_events} events are not in {self._store.uri} yet; "
                        f"they are safe in {self._folder.path} and are uploaded later"
                    )
                self._changed.wait(left)

    def stop(self, timeout: float, *, finished: bool) -> None:
        """End the thread; with `finished` the epoch is marked as closed."""
        with self._changed:
            self._stopping = True
            self._finished = finished
            self._changed.notify_all()
        self._thread.join(timeout)

    def _loop(self) -> None:
        recover(self._store, self._spool)
        pause = 0.0
        while True:
            with self._changed:
                if pause:
                    self._changed.wait_for(lambda: self._stopping or self._hurry, pause)
                self._hurry = False
                self._changed.wait_for(lambda: bool(self._waiting) or self._stopping)
                if not self._waiting or (self._stopping and not self._finished and pause):
                    break
                closed = self._waiting[0]
            try:
                size = upload(self._store, self._folder, closed.number, closed.path)
            except StoreError as error:
                self.retries += 1
                pause = min(_LONGEST_PAUSE, max(0.2, pause * 2)) * random.uniform(0.5, 1.0)  # noqa: S311
                self._note(error)
                continue
            except SegmentUnreadable as error:
                log.error("the spool segment %s cannot be read and stays there: %s", closed.path, error)
                with self._changed:
                    self._waiting.popleft()
                    self._damaged = str(error)
                    self._changed.notify_all()
                continue
            pause = 0.0
            with self._changed:
                self._waiting.popleft()
                self._refusal = None
                self.durable_events = max(self.durable_events, closed.up_to)
                self.segments += 1
                self.bytes += size
                self._changed.notify_all()
        if self._finished and self._folder.meta.epoch is not None:
            close_epoch(self._store, self._folder)
        self._folder.release(remove=True)

    def _note(self, error: StoreError) -> None:
        if self.retries in {1, 10} or self.retries % 100 == 0:
            log.warning("upload to %s failed (try %d), trying again: %s", self._store.uri, self.retries, error)
        if isinstance(error, (AccessRefused, BucketMissing)):
            with self._changed:
                self._refusal = error
                self._changed.notify_all()


def upload(store: ObjectStore, folder: SpoolFolder, number: int, path: Path) -> int:
    """Bring one spool segment into landing and remove its file. Returns the bytes sent.

    The key belongs to this epoch alone, so an object that is there already is this segment, from a try whose
    answer was lost; that it holds the same events is checked. Raises StoreError; the file then stays.
    """
    events = read_spooled(path)
    size = 0
    if len(events):
        epoch = folder.meta.epoch
        if epoch is None:
            epoch = claim_epoch(store, folder)
            folder.set_epoch(epoch)
        data = encode_segment(events)
        name = SegmentName(folder.meta.run_id, folder.meta.worker_id, epoch, number)
        outcome = store.put_if_absent(name.key, data)
        if isinstance(outcome, Unknown):
            raise StoreUnavailable(str(outcome.error)) from outcome.error
        if isinstance(outcome, Lost):
            _check_same(store, name.key, events)
        size = len(data)
    path.unlink()
    return size


def _check_same(store: ObjectStore, key: str, events: pa.Table) -> None:
    """That the object at `key` holds these events, in whatever bytes another version of a library made of them."""
    try:
        same = decode_segment(store.get(key), key).select(_IDENTITY).equals(events.select(_IDENTITY))
    except SegmentUnreadable:
        same = False
    if not same:
        raise StoreError(f"{key} holds something else than the segment that belongs there; the spool keeps the segment")


def claim_epoch(store: ObjectStore, folder: SpoolFolder) -> int:
    """The next free epoch of this run and worker, now ours. Says so where another process may still write."""
    meta = folder.meta
    prefix = f"{EPOCHS}/{meta.run_id}/{meta.worker_id}/"
    keys = [info.key for info in store.list(prefix)]
    claimed = [int(key[len(prefix) : -len(".json")]) for key in keys if key.endswith(".json")]
    epoch = max(claimed, default=-1) + 1
    claim = json.dumps({"host": meta.host, "pid": meta.pid, "claim": folder.path.name}).encode()
    while True:
        outcome = store.put_if_absent(f"{prefix}{epoch:06d}.json", claim)
        if isinstance(outcome, Won):
            break
        if isinstance(outcome, Unknown):
            raise StoreUnavailable(str(outcome.error)) from outcome.error
        epoch += 1
    if epoch > 0 and f"{prefix}{epoch - 1:06d}.closed" not in keys:
        log.warning(
            "worker %s of run %s was in use before and did not close; this process writes as its epoch %d",
            meta.worker_id,
            meta.run_id,
            epoch,
        )
    return epoch


def close_epoch(store: ObjectStore, folder: SpoolFolder) -> None:
    """Mark the epoch as ended in order. Only a courtesy to the next process, so a failure is only logged."""
    meta = folder.meta
    try:
        store.put_if_absent(f"{EPOCHS}/{meta.run_id}/{meta.worker_id}/{meta.epoch:06d}.closed", b"{}")
    except StoreError as error:
        log.info("the epoch could not be marked as closed: %s", error)


@dataclass(frozen=True)
class Recovery:
    """What was found in the spool of writers that are gone: segments uploaded, and those that stay with a reason."""

    segments: int
    events_bytes: int
    unreadable: tuple[str, ...]


def recover(store: ObjectStore, spool: Path) -> Recovery:
    """Upload what writers of this lake left in `spool` when they died. Stops quietly where the store is down:
    the files stay for the next start."""
    segments = size = 0
    unreadable: list[str] = []
    for folder in abandoned(spool, store.uri):
        try:
            for number, path in list(folder.segments()):
                try:
                    size += upload(store, folder, number, path)
                    segments += 1
                except SegmentUnreadable as error:
                    unreadable.append(str(error))
                    log.error("the spool segment %s cannot be read and stays there: %s", path, error)
        except StoreError as error:
            log.warning("the spool of a writer that is gone could not be uploaded yet: %s", error)
            return Recovery(segments, size, tuple(unreadable))
        finally:
            folder.release(remove=True)
    if segments:
        log.info("uploaded %d segments that writers left in %s when they died", segments, spool)
    return Recovery(segments, size, tuple(unreadable))

"""The thread that uploads closed segments, in order, for as long as it takes; and then what dead writers left."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trajlake.errors import AccessRefused, BucketMissing, NotDurable, StoreError
from trajlake.ingest.epochs import close_epoch
from trajlake.ingest.recovery import recover_each
from trajlake.ingest.spool import NoSpool, SpoolFolder
from trajlake.ingest.upload import ClosedSegment, Sent, forget_file, put_closed, set_aside
from trajlake.storage import ObjectStore

log = logging.getLogger("trajlake")

_LONGEST_PAUSE = 15.0
_RECOVER_AGAIN = 300.0  # seconds until the spool is searched again for writers that died meanwhile


class Uploader:
    """The thread behind one writer that owns its closed segments, on disk and in memory."""

    def __init__(
        self,
        store: ObjectStore,
        folder: SpoolFolder | NoSpool,
        spool: Path | None,
        on_uploaded: Callable[[ClosedSegment], None] = lambda segment: None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._spool = spool
        self._on_uploaded = on_uploaded
        self._changed = threading.Condition()
        self._waiting: deque[ClosedSegment] = deque()
        self._sent = -1  # the number of the last segment that the store has
        self._stopping = False
        self._finished = False
        self._done = False
        self._releases = False
        self._refusal: StoreError | None = None
        self._failure: Exception | None = None  # of the last try; None after one that succeeded
        self._tries_since: float | None = None  # when the try began that is going on
        self._damaged = ""
        self._hurry = False
        self._recover_at = 0.0
        self._recovery: Iterator[Sent] | None = None
        self.durable_events = 0
        self.lost_events = 0  # of these: the disk lost them before they were uploaded
        self.damaged_segments = 0  # of this writer and of others
        self.uploaded_events = 0
        self.segments = 0
        self.bytes = 0
        self.retries = 0
        self.recovered_segments = 0  # of writers that are gone
        self._landed = 0  # segments of this writer
        self.durable_at: float | None = None
        self._thread = threading.Thread(target=self._loop, name="trajlake-uploader", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def add(self, segment: ClosedSegment) -> None:
        """A segment is closed and ready."""
        with self._changed:
            self._waiting.append(segment)
            self._changed.notify_all()

    def in_memory(self) -> list[ClosedSegment]:
        """Closed segments that the store does not have yet, and the disk neither."""
        with self._changed:
            return [segment for segment in self._waiting if segment.table is not None]

    def moved(self, segment: ClosedSegment, path: Path) -> bool:
        """A segment of `in_memory` is on the disk now. False where the store has it meanwhile."""
        with self._changed:
            if segment.number == self._sent or segment not in self._waiting:
                return False
            self._waiting[self._waiting.index(segment)] = replace(segment, path=path, table=None)
            return True

    @property
    def waiting(self) -> int:
        """Closed segments that the store does not have yet."""
        return len(self._waiting)

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
                    raise NotDurable(self._what_waits(up_to))
                self._changed.wait(left)

    def _what_waits(self, up_to: int) -> str:
        text = f"{up_to - self.durable_events} events are not in {self._store.uri} yet{self._why()}; "
        in_memory = sum(segment.events for segment in self._waiting if segment.table is not None)
        if in_memory or self._folder.path is None:
            return text + f"{in_memory} of them are in memory only and die with this process"
        return text + f"they are safe in {self._folder.path} and are uploaded later"

    def _why(self) -> str:
        if self._failure is not None:
            return f" ({self._failure})"
        tried = time.monotonic() - (self._tries_since or time.monotonic())
        return f" (the store has not answered for {tried:.0f} s)" if tried >= 1 else ""

    def stop(self, timeout: float, *, finished: bool) -> list[ClosedSegment]:
        """End the thread; with `finished` everything was uploaded, and the epoch is marked as closed. Returns the
        segments that are still in memory."""
        with self._changed:
            self._stopping = True
            self._finished = finished
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            return [segment for segment in self._waiting if segment.table is not None]

    def release_when_done(self) -> None:
        """Give up the spool folder: now, or when the thread has had the store's answer that it still waits for."""
        with self._changed:
            self._releases = True
            is_done = self._done
        if is_done:
            self._folder.release(remove=True)

    def _loop(self) -> None:
        pause = 0.0
        while True:
            with self._changed:
                if pause:
                    self._changed.wait_for(lambda: self._stopping or self._hurry, pause)
                self._hurry = False
                if self._stopping and pause:
                    break
                segment = self._waiting[0] if self._waiting else None
            if segment is None:
                if not self._recover_one() and not self._wait_for_work():
                    break
                continue
            try:
                self._tries_since = time.monotonic()
                self._upload(segment)
                self._failure, pause = None, 0.0
            except Exception as error:  # noqa: BLE001  (whatever it is: the thread must live, and the segment stays)
                self.retries += 1
                self._failure = error
                pause = min(_LONGEST_PAUSE, max(0.2, pause * 2)) * random.uniform(0.5, 1.0)  # noqa: S311
                self._note(error)
            finally:
                self._tries_since = None
        if self._recovery is not None:
            del self._recovery
        if self._finished:
            close_epoch(self._store, self._folder, self._landed)
        with self._changed:
            self._done = True
            releases = self._releases
        if releases:
            self._folder.release(remove=True)

    def _wait_for_work(self) -> bool:
        """False where there will be none."""
        with self._changed:
            wait = max(0.0, self._recover_at - time.monotonic())
            self._changed.wait_for(lambda: bool(self._waiting) or self._stopping, wait)
            return bool(self._waiting) or not self._stopping

    def _upload(self, segment: ClosedSegment) -> None:
        sent = put_closed(self._store, self._folder, segment)
        with self._changed:
            self._sent = segment.number
            self._landed += sent.bytes > 0  # of a damaged one nothing may be left
            segment = self._waiting[0]  # which may have been brought from memory to the disk meanwhile
        if segment.path is not None and sent.damage:
            set_aside(segment.path, sent)
        elif segment.path is not None:
            forget_file(segment.path)
        with self._changed:
            self._waiting.popleft()
            self._refusal = None
            self.durable_events = max(self.durable_events, segment.up_to)
            self.uploaded_events += sent.events
            self.segments += 1
            self.bytes += sent.bytes
            if sent.damage:
                self._damaged = sent.damage
                self.damaged_segments += 1
                self.lost_events += segment.events - sent.events
            self.durable_at = time.monotonic()
            self._changed.notify_all()
        self._on_uploaded(segment)

    def _recover_one(self) -> bool:
        """One segment of a writer that is gone. False where there is none, or the store is down: then later."""
        if self._spool is None or (self._recovery is None and time.monotonic() < self._recover_at):
            return False
        try:
            if self._recovery is None:
                self._recovery = recover_each(self._store, self._spool, self._folder.meta.lake_id)
            if (found := next(self._recovery, None)) is not None:
                self.recovered_segments += bool(found.events)
                self.damaged_segments += bool(found.damage)
                return True
            if self.recovered_segments:
                log.info("uploaded %d segments that other writers left in %s", self.recovered_segments, self._spool)
            self._recover_at = time.monotonic() + _RECOVER_AGAIN
        except Exception as error:  # noqa: BLE001  (what others left must not end this writer)
            log.warning("the spool of a writer that is gone could not be uploaded yet: %s", error)
            self._recover_at = time.monotonic() + _LONGEST_PAUSE
        self._recovery = None
        return False

    def _note(self, error: Exception) -> None:
        if self.retries in {1, 10} or self.retries % 100 == 0:
            log.warning("upload to %s failed (try %d), trying again: %s", self._store.uri, self.retries, error)
        if isinstance(error, (AccessRefused, BucketMissing)):
            with self._changed:
                self._refusal = error
                self._changed.notify_all()

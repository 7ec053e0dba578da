"""The Writer: what a rollout worker uses. The rollout's threads only queue; two threads behind do the rest.

record() ─ queue (bounded) ─▶ encoder: batches into the spool ─▶ uploader: segments into landing
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack, get_args

import numpy as np
import pyarrow as pa

from trajlake.errors import NotDurable, TrajlakeError, UsageError, WriterClosed
from trajlake.ingest.episode import Episode, EpisodeFields
from trajlake.ingest.segment import Event, encode_batch
from trajlake.ingest.spool import SpoolFolder, SpoolMeta, SpoolSegment, default_spool
from trajlake.ingest.uploader import Uploader, check_name
from trajlake.ingest.values import Row, rewards
from trajlake.storage import ObjectStore

log = logging.getLogger("trajlake")

Durability = Literal["remote", "spool"]

_BATCH_BYTES = 1 << 20  # encode when this much waits …
_BATCH_SECONDS = 0.2  # … or when the oldest event has waited this long
_RETRY_SECONDS = 1.0  # between tries to write to a disk that refuses


@dataclass(frozen=True)
class WriterStats:
    """Counts since the writer was made. `durable_events` are in the store, `spooled_events` on local disk only."""

    episodes: int
    events: int
    durable_events: int
    spooled_events: int
    queued_events: int
    segments: int
    bytes: int
    retries: int
    open_episodes: int


@dataclass(frozen=True)
class CloseReport:
    """What close() left behind: nothing where `complete`, else events that wait in `spool` for the next start."""

    complete: bool
    durable_events: int
    remaining_events: int
    spool: Path | None
    reason: str = ""


class Writer:
    """Streams episodes into a lake. Made by `lake.writer(…)`; safe to use from many threads.

    `durability` says what `flush()` waits for: `remote` (the object store has it) or `spool` (it is on the local
    disk, fsynced, and reaches the store later even if this process dies). `segment_bytes` and `segment_seconds`
    bound how much and how long events wait before they are uploaded; `memory_bytes` bounds the queue, and a rollout
    that outruns the disk waits there.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        worker: str | None = None,
        *,
        spool: str | os.PathLike[str] | None = None,
        durability: Durability = "remote",
        segment_bytes: int = 4 << 20,
        segment_seconds: float = 5.0,
        memory_bytes: int = 64 << 20,
    ) -> None:
        if durability not in get_args(Durability):
            raise UsageError(f"durability must be one of {', '.join(get_args(Durability))}, not {durability!r}")
        self.run = check_name("run", run)
        self.worker = check_name("worker", worker or f"{socket.gethostname().split('.')[0]}-{os.getpid()}")
        self._durability = durability
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._memory_bytes = memory_bytes
        self._spool = Path(spool) if spool is not None else default_spool()
        meta = SpoolMeta(store.uri, self.run, self.worker, socket.gethostname(), os.getpid())
        self._folder = SpoolFolder.create(self._spool, meta)
        self._uploader = Uploader(store, self._folder, self._spool)

        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Event] = deque()
        self._queued_bytes = 0
        self._sizes: deque[int] = deque()
        self._sequence = 0
        self._spooled = 0  # events with a lower sequence are in the spool
        self._closed_up_to = 0  # … are in a closed segment
        self._segment: SpoolSegment | None = None
        self._segment_opened = 0.0
        self._segment_number = 0
        self._close_wanted_up_to = 0
        self._disk_error: OSError | None = None
        self._refused: list[str] = []  # events that Arrow did not take, and why
        self._accepting = True
        self._stopping = False
        self._episodes = 0
        self._open: dict[str, Episode] = {}
        self._encoder = threading.Thread(target=self._encode_loop, name="trajlake-encoder", daemon=True)
        self._encoder.start()
        self._uploader.start()
        atexit.register(self._close_at_exit)

    # -- recording -------------------------------------------------------------------------------------------

    def episode(
        self,
        *,
        episode_id: str | None = None,
        attempt: int = 0,
        started_at: Any = None,
        **fields: Unpack[EpisodeFields],
    ) -> Episode:
        """Begin an episode. `episode_id` is made up where it is not given; to send an episode again give its id and
        a higher `attempt`: the complete attempt wins, then the later one. Raises UsageError that names the field."""
        if episode_id is None:
            episode_id = new_episode_id()
        elif not isinstance(episode_id, str) or not episode_id or _has_surrogates(episode_id):
            raise UsageError(f"episode_id must be text that is not empty, not {episode_id!r}")
        if not isinstance(attempt, int) or not 0 <= attempt < 2**31:
            raise UsageError(f"attempt must be 0, 1, 2, …, not {attempt!r}")
        episode = Episode(self, episode_id, attempt, fields, started_at)
        with self._lock:
            self._open[episode_id] = episode
            self._episodes += 1
        return episode

    def score(
        self, episode_id: str, name: str, value: float, *, weight: float | None = None, kind: str | None = None
    ) -> None:
        """Add a reward component to an episode of any worker, before or after its end."""
        (row,) = rewards([{"name": name, "value": value, "weight": weight, "kind": kind}])
        self.record("score", episode_id, 0, row)

    def retract(self, episode_id: str, reason: str) -> None:
        """Mark an episode of any worker as not to be used."""
        self.record("retract", episode_id, 0, {"reason": str(reason)})

    def record(self, kind: str, episode_id: str, attempt: int, row: Row) -> None:
        """Queue one event; waits only while the queue is full. Episode and the calls above use it."""
        size = _approximate_bytes(row)
        now = time.time_ns() // 1000
        with self._changed:
            while self._queued_bytes > self._memory_bytes and self._accepting:
                self._changed.wait(0.1)
            if not self._accepting:
                raise WriterClosed(f"writer of run {self.run} is closed: nothing can be recorded")
            self._queue.append(Event(kind, episode_id, attempt, self._sequence, now, row))
            self._sizes.append(size)
            self._sequence += 1
            self._queued_bytes += size
            if self._queued_bytes >= _BATCH_BYTES:
                self._changed.notify_all()

    def forget(self, episode: Episode) -> None:
        """An episode has ended; it no longer counts as open."""
        with self._lock:
            self._open.pop(episode.episode_id, None)

    # -- durability ------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Return when every event recorded before this call is durable.

        Raises NotDurable after `timeout` seconds, and the StoreError at once where the store refuses for good (a
        bucket that does not exist, wrong credentials). Nothing is lost by that: the events are in the spool.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            wanted = self._sequence
            self._close_wanted_up_to = max(self._close_wanted_up_to, wanted)
            self._changed.notify_all()
        remote = self._durability == "remote"
        if not self._wait(lambda: (self._closed_up_to if remote else self._spooled) >= wanted, deadline):
            raise NotDurable(
                f"{wanted - self._spooled} events could not be written to the spool {self._spool} in {timeout} s"
                + (f": {self._disk_error}" if self._disk_error else "")
            )
        if remote:
            self._uploader.wait(wanted, deadline)
        if self._refused:
            raise NotDurable(f"{len(self._refused)} events could not be stored, first {self._refused[0]}")

    def close(self, timeout: float = 60.0) -> CloseReport:
        """Stop recording, make everything durable, and return within about `timeout` seconds with what remains.

        Episodes without an end stay open in the lake and are sealed as aborted by a later compaction.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if not self._accepting:
                return self._report("")
            self._accepting = False
            self._changed.notify_all()
        if self._open:
            log.warning("run %s: %d episodes were open when the writer was closed", self.run, len(self._open))
        reason = ""
        try:
            self.flush(max(0.0, deadline - time.monotonic()))
        except TrajlakeError as error:
            reason = str(error)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._encoder.join(max(0.1, deadline - time.monotonic()))
        self._uploader.stop(max(0.1, deadline - time.monotonic()), finished=not reason)
        atexit.unregister(self._close_at_exit)
        report = self._report(reason)
        if not report.complete:
            log.warning("run %s: %d events wait in %s: %s", self.run, report.remaining_events, report.spool, reason)
        return report

    def _report(self, reason: str) -> CloseReport:
        durable = self._uploader.durable_events - len(self._refused)
        remaining = self._sequence - durable
        return CloseReport(remaining == 0, durable, remaining, self._folder.path if remaining else None, reason)

    def _close_at_exit(self) -> None:
        self.close(timeout=30.0)

    @property
    def stats(self) -> WriterStats:
        """What was recorded so far and how far it got."""
        with self._lock:
            uploader = self._uploader
            return WriterStats(
                episodes=self._episodes,
                events=self._sequence,
                durable_events=uploader.durable_events,
                spooled_events=self._spooled - uploader.durable_events,
                queued_events=self._sequence - self._spooled,
                segments=uploader.segments,
                bytes=uploader.bytes,
                retries=uploader.retries,
                open_episodes=len(self._open),
            )

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the encoder thread ----------------------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        with self._changed:
            while not condition():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def _encode_loop(self) -> None:
        while True:
            events, size = self._take()
            if events:
                self._write(events)
                with self._changed:
                    self._queued_bytes -= size
                    self._spooled = events[-1].sequence + 1
                    self._changed.notify_all()
            self._close_segment_if_due()
            with self._lock:
                if self._stopping and not self._queue:
                    break
        if self._segment is not None:
            self._close_segment()

    def _take(self) -> tuple[list[Event], int]:
        """Up to a batch of events, after at most `_BATCH_SECONDS`."""
        deadline = time.monotonic() + _BATCH_SECONDS
        with self._changed:
            while (
                self._queued_bytes < _BATCH_BYTES
                and not self._stopping
                and self._close_wanted_up_to <= self._closed_up_to
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            events: list[Event] = []
            size = 0
            while self._queue and size < 4 * _BATCH_BYTES:
                events.append(self._queue.popleft())
                size += self._sizes.popleft()
            return events, size

    def _write(self, events: list[Event]) -> None:
        """Into the spool, however often the disk refuses: until then the events stay in memory."""
        batch = self._encode(events)
        while batch.num_rows:
            try:
                if self._segment is None:
                    self._segment = SpoolSegment(self._folder, self._segment_number)
                    self._segment_opened = time.monotonic()
                    self._segment_number += 1
                self._segment.write(batch, sync=self._durability == "spool")
                self._disk_error = None
                return
            except OSError as error:
                if self._disk_error is None:
                    log.error("run %s: the spool %s refuses: %s; trying again", self.run, self._folder.path, error)
                self._disk_error = error
                if self._segment is not None:
                    # Its whole batches stay good; this batch goes into the next file, and the compactor drops
                    # whatever it then sees twice by epoch and sequence.
                    segment, self._segment = self._segment, None
                    segment.abandon()
                    self._uploader.add_torn(segment)
                time.sleep(_RETRY_SECONDS)

    def _encode(self, events: list[Event]) -> pa.RecordBatch:
        """The batch; an event that Arrow does not take, which the checks at the call should have refused, is left
        out, and flush() and close() say so."""
        try:
            return encode_batch(events)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            good = [event for event in events if self._encodes(event)]
            return encode_batch(good)

    def _encodes(self, event: Event) -> bool:
        try:
            encode_batch([event])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            self._refused.append(f"event {event.sequence} ({event.kind} of {event.episode_id}): {error}")
            log.error("run %s: cannot be stored: %s", self.run, self._refused[-1])
            return False
        return True

    def _close_segment_if_due(self) -> None:
        with self._lock:
            wanted = self._close_wanted_up_to > self._closed_up_to and self._spooled >= self._close_wanted_up_to
        segment = self._segment
        if segment is None:
            if wanted:
                with self._changed:
                    self._closed_up_to = self._spooled
                    self._changed.notify_all()
            return
        old = time.monotonic() - self._segment_opened >= self._segment_seconds
        if wanted or old or segment.bytes >= self._segment_bytes:
            self._close_segment()

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        try:
            path = segment.close()
        except OSError as error:
            log.error("run %s: closing a spool segment failed: %s", self.run, error)
            segment.abandon()
            self._uploader.add_torn(segment)
        else:
            self._uploader.add(segment.number, path, self._spooled)
        with self._changed:
            self._closed_up_to = self._spooled
            self._changed.notify_all()


def new_episode_id() -> str:
    """A UUID of version 7 in hex: unique anywhere, and sorts by the time it was made."""
    milliseconds = time.time_ns() // 1_000_000
    random = uuid.uuid4().int & ((1 << 74) - 1)
    value = (milliseconds & ((1 << 48) - 1)) << 80 | 7 << 76 | (random >> 62) << 64 | 2 << 62 | random & ((1 << 62) - 1)
    return f"{value:032x}"


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _approximate_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) + 16
    if isinstance(value, np.ndarray):
        return value.nbytes + 16
    if isinstance(value, (bytes, bytearray)):
        return len(value) + 16
    if isinstance(value, dict):
        return 64 + sum(map(_approximate_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return 64 + sum(map(_approximate_bytes, value))
    return 16

"""The thread that makes Arrow of events and puts them into segments, on disk or in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from trajlake.errors import NotDurable
from trajlake.ingest.event_queue import EventQueue, Queued
from trajlake.ingest.options import WriterOptions
from trajlake.ingest.segment import encode_batch, encode_segment
from trajlake.ingest.spool import MemorySegment, NoSpool, SpoolFolder, SpoolSegment, keep
from trajlake.ingest.upload import ClosedSegment, forget_file
from trajlake.ingest.uploader import Uploader

log = logging.getLogger("trajlake")

_BATCH_SECONDS = 0.2  # the longest that an event waits to be encoded
_AWAITED = frozenset(("end", "score", "retract"))  # what trainers wait for
_RETRY_SECONDS = 1.0  # between tries to write to a disk that refuses
_MOST_COMPRESSED = 16  # times: whoever reads a segment holds all of it, however small frames of a game become
_LOG_AGAIN = 60.0  # seconds between two lines about the same trouble


class Encoder:
    """Takes events from the queue, batch by batch, and hands closed segments to the uploader.

    Its counters are guarded by `queue.changed`. Events below `written` are in a segment, those below `closed` in a
    closed one. `memory_events` are in segments in memory, the last of which ends at `in_memory`: the disk does not
    have them.
    """

    def __init__(
        self,
        queue: EventQueue,
        folder: SpoolFolder | NoSpool,
        options: WriterOptions,
        run: str,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._folder = folder
        self._options = options
        self._run = run
        self._on_tick = on_tick
        self.uploader: Uploader | None = None
        self.written = 0
        self.closed = 0
        self.in_memory = 0
        self.memory_events = 0
        self.on_disk_bytes = 0
        self.disk_error: OSError | None = None
        self.refused: list[str] = []  # events that Arrow did not take, and why
        self.spilled_segments = 0
        self._segment: SpoolSegment | MemorySegment | None = None
        self._segment_due = 0.0
        self._steps: dict[tuple[str, int], int] = {}  # of the episodes that have not ended
        self._number = 0
        self._disk_again = 0.0
        self._logged_at = -_LOG_AGAIN
        self._write_wanted = 0
        self._close_wanted = 0
        self._stopping = False
        self._giving_up = False
        self._thread = threading.Thread(target=self._run_loop, name="trajlake-encoder", daemon=True)

    def start(self) -> None:
        """Begin."""
        # The first array ever makes Arrow look for pandas, under a lock: a process forked meanwhile, off another
        # thread, would find it locked for ever.
        encode_batch([])
        self._thread.start()

    # -- what flush and close ask for ------------------------------------------------------------------------

    def write_up_to(self, wanted: int, deadline: float | None) -> None:
        """Return when every event below `wanted` is in a segment; on disk it is then fsynced if the durability says
        so. Raises NotDurable."""
        with self._queue.changed:
            self._write_wanted = max(self._write_wanted, wanted)
            self._queue.changed.notify_all()
            self._wait(lambda: self.written >= wanted, wanted, deadline)

    def close_up_to(self, wanted: int, deadline: float | None) -> None:
        """Return when every event below `wanted` is with the uploader. Raises NotDurable."""
        with self._queue.changed:
            self._write_wanted = max(self._write_wanted, wanted)
            self._close_wanted = max(self._close_wanted, wanted)
            self._queue.changed.notify_all()
            self._wait(lambda: self.closed >= wanted, wanted, deadline)

    def _wait(self, condition: Callable[[], bool], wanted: int, deadline: float | None) -> None:
        while not condition():
            self._queue.check()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise NotDurable(
                    f"{wanted - self.written} events are in memory only and die with this process: they could not be "
                    f"written to {self._folder.path or 'a segment'} yet"
                    + (f": {self.disk_error}" if self.disk_error else "")
                )
            self._queue.changed.wait(left)

    def stop(self, timeout: float) -> None:
        """Write what is queued, close the last segment, end the thread; after `timeout` seconds whatever is left."""
        with self._queue.changed:
            self._stopping = True
            self._queue.changed.notify_all()
        self._thread.join(timeout)
        with self._queue.changed:
            self._giving_up = True
            self._queue.changed.notify_all()
        self._thread.join(1.0)

    def uploaded(self, segment: ClosedSegment) -> None:
        """A segment has reached the store: its room is free."""
        with self._queue.changed:
            if segment.table is not None:
                self._queue.held -= segment.bytes
                self.memory_events -= segment.events
            else:
                self.on_disk_bytes -= segment.bytes
            self._queue.changed.notify_all()

    def disown(self) -> None:
        """In a forked child: the segment is the parent's."""
        if isinstance(self._segment, SpoolSegment):
            self._segment.disown()

    # -- the thread ------------------------------------------------------------------------------------------

    def _run_loop(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # the rollout must not wait for a thread that is dead
            log.exception("run %s: the encoder has failed", self._run)
            self._queue.fail(error)

    def _loop(self) -> None:
        while True:
            for events in _batches(self._counted(self._take()), self._queue.batch_bytes):
                if not self._write(events):
                    return
                if not _AWAITED.isdisjoint(event[0] for event in events):
                    self._segment_due = min(self._segment_due, time.monotonic() + self._options.linger_seconds)
                size = sum(event[-1] for event in events)
                with self._queue.changed:
                    self._queue.queued -= size
                    self.written = events[-1][3] + 1
                    if isinstance(self._segment, MemorySegment):
                        self.in_memory = self.written
                    self._queue.changed.notify_all()
                self._close_if_due()
            self._close_if_due()
            self._on_tick()
            with self._queue.changed:
                if self._stopping and not len(self._queue):
                    break
        if self._segment is not None:
            self._close()

    def _take(self) -> list[Queued]:
        """What is queued when it is worth it, wanted, or `_BATCH_SECONDS` old."""
        queue = self._queue
        deadline = time.monotonic() + _BATCH_SECONDS
        with queue.changed:
            while (
                queue.queued < queue.batch_bytes
                and not self._stopping
                and self._write_wanted <= self.written
                and self._close_wanted <= self.closed
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                queue.changed.wait(left)
            return queue.take()

    def _counted(self, events: list[Queued]) -> list[Queued]:
        """The events; each end says how many steps there are.

        They are counted here, where every event passes once and in order: in a rollout's thread a signal may come
        between an event and its count, and what the queue dropped must not be counted.
        """
        steps = self._steps
        for place, (kind, episode_id, attempt, sequence, recorded_at, row, size) in enumerate(events):
            key = episode_id, attempt
            if kind == "step":
                steps[key] = steps.get(key, 0) + 1
            elif kind == "end":
                row = row | {"n_steps": steps.pop(key, 0)}
                events[place] = (kind, episode_id, attempt, sequence, recorded_at, row, size)
        return events

    def _write(self, events: list[Queued]) -> bool:
        """Into a segment, however often disk and store refuse: until then the events stay in memory. False where
        the writer is closed meanwhile."""
        batch = self._encode(events)
        while batch.num_rows:
            place = self._place(batch.nbytes)
            if self._segment is not None and place is not type(self._segment):
                self._close()
            if place is not None and self._try(place, batch, events[0][3]):
                return True
            with self._queue.changed:
                if self._giving_up:
                    return False
                if place is None:
                    self._queue.changed.wait(0.05)
            self._on_tick()
        return True

    def _place(self, size: int) -> type[SpoolSegment] | type[MemorySegment] | None:
        """Where a batch of `size` bytes may go now: the place of the durability, or the other where that is full."""
        options = self._options
        with self._queue.changed:
            disk = (
                self._folder.path is not None
                and time.monotonic() >= self._disk_again
                and (self.on_disk_bytes + self._queue.held + size <= options.spool_bytes or self.on_disk_bytes == 0)
            )
            # Half of memory for what waits for the store, so that the rollout's queue keeps the other half. A batch
            # that is larger goes there too where nothing else does, and the disk does not take it.
            memory = self._queue.held + size <= options.memory_bytes // 2
            memory_at_last = memory or self._queue.held == 0
        # At the end nobody waits for a place any more, and what has none dies with the process.
        spills = options.on_full == "spill" or not self._queue.accepting
        if options.durability == "memory":
            if memory or not (disk and spills):
                return MemorySegment if memory_at_last else None
            return SpoolSegment
        return SpoolSegment if disk else MemorySegment if memory_at_last and spills else None

    def _try(self, place: type[SpoolSegment] | type[MemorySegment], batch: pa.RecordBatch, first_sequence: int) -> bool:
        """Write the batch there. False where the disk refused: the segment then ends before it."""
        try:
            if self._segment is None:
                self._open(place)
            segment = self._segment
            assert segment is not None
            before = segment.bytes
            if isinstance(segment, MemorySegment):
                segment.write(batch)
            else:
                segment.write(batch, sync=self._options.durability == "spool")
        except OSError as error:
            self._disk_refused(error, first_sequence)
            return False
        with self._queue.changed:
            if isinstance(segment, MemorySegment):
                self._queue.held += segment.bytes - before
                self.memory_events += batch.num_rows
            else:
                self.on_disk_bytes += segment.bytes - before
                self.disk_error = None
        return True

    def _open(self, place: type[SpoolSegment] | type[MemorySegment]) -> None:
        number, self._number = self._number, self._number + 1
        if place is MemorySegment:
            if self._options.durability != "memory":
                self.spilled_segments += 1
                self._say("the spool %s takes no more: segments go from memory straight to the store")
            self._segment = MemorySegment(number)
        else:
            if self._options.durability == "memory":
                self.spilled_segments += 1
                self._say("memory is full: segments go to the spool %s")
            assert isinstance(self._folder, SpoolFolder)
            self._bring_to_disk(self._folder)
            self._segment = SpoolSegment(self._folder, number)
        self._segment_due = time.monotonic() + self._options.segment_seconds

    def _bring_to_disk(self, folder: SpoolFolder) -> None:
        """What waits in memory goes first: were it lost with this process, there would be a hole before what comes.
        Raises OSError."""
        assert self.uploader is not None
        for segment in self.uploader.in_memory():
            assert segment.table is not None
            path = keep(folder, segment.number, encode_segment(segment.table))
            if not self.uploader.moved(segment, path):
                forget_file(path)
                continue
            with self._queue.changed:
                self._queue.held -= segment.bytes
                self.memory_events -= segment.events
                self.on_disk_bytes += segment.bytes
                self._queue.changed.notify_all()

    def _disk_refused(self, error: OSError, first_sequence: int) -> None:
        if self.disk_error is None:
            log.error("run %s: the spool %s refuses: %s; trying again", self._run, self._folder.path, error)
        self.disk_error = error
        self._disk_again = time.monotonic() + _RETRY_SECONDS
        segment, self._segment = self._segment, None
        if isinstance(segment, SpoolSegment) and not segment.events:
            forget_file(segment.abandon())
        elif isinstance(segment, SpoolSegment):
            # Its whole batches stay good; this batch goes into another segment, and should the disk have it
            # after all, the compactor drops what it sees twice by epoch and sequence.
            self._hand_over(segment, path=segment.abandon(), up_to=first_sequence)

    def _say(self, text: str) -> None:
        if time.monotonic() - self._logged_at >= _LOG_AGAIN:
            self._logged_at = time.monotonic()
            log.warning("run %s: " + text, self._run, self._folder.path)

    def _encode(self, events: list[Queued]) -> pa.RecordBatch:
        """The batch; an event that Arrow does not take, which the checks at the call should have refused, is left
        out, and flush() and close() say so."""
        try:
            return encode_batch(events)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return encode_batch([event for event in events if self._encodes(event)])

    def _encodes(self, event: Queued) -> bool:
        try:
            encode_batch([event])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            kind, episode_id, _, sequence, *_ = event
            self.refused.append(f"event {sequence} ({kind} of {episode_id}): {error}")
            log.error("run %s: cannot be stored: %s", self._run, self.refused[-1])
            return False
        return True

    # -- closing segments ------------------------------------------------------------------------------------

    def _close_if_due(self) -> None:
        with self._queue.changed:
            wanted = self._close_wanted > self.closed and self.written >= self._close_wanted
            if self._segment is None:
                if wanted:
                    self.closed = self.written
                    self._queue.changed.notify_all()
                return
        most = self._options.segment_bytes
        is_large = self._segment.bytes >= most or self._segment.arrow_bytes >= most * _MOST_COMPRESSED
        if wanted or is_large or time.monotonic() >= self._segment_due:
            self._close()

    def _close(self) -> None:
        segment, self._segment = self._segment, None
        assert segment is not None
        if isinstance(segment, MemorySegment):
            self._hand_over(segment, table=segment.close(), up_to=self.written)
            return
        try:
            path = segment.close()
        except OSError as error:
            log.error("run %s: closing a spool segment failed: %s", self._run, error)
            self._disk_again = time.monotonic() + _RETRY_SECONDS
            path = segment.abandon()
        self._hand_over(segment, path=path, up_to=self.written)

    def _hand_over(
        self,
        segment: SpoolSegment | MemorySegment,
        *,
        up_to: int,
        path: Path | None = None,
        table: pa.Table | None = None,
    ) -> None:
        assert self.uploader is not None
        self.uploader.add(ClosedSegment(segment.number, segment.events, up_to, segment.bytes, path, table))
        with self._queue.changed:
            self.closed = up_to
            self._queue.changed.notify_all()


def _batches(events: list[Queued], size: int) -> Iterator[list[Queued]]:
    """The events in parts that reach `size` bytes each, but for the last."""
    start = gathered = 0
    for end, event in enumerate(events, 1):
        gathered += event[-1]
        if gathered >= size or end == len(events):
            yield events[start:end]
            start, gathered = end, 0

"""What is behind a Writer in one process: a queue and two threads.

put() ─ queue (bounded) ─▶ encoder: batches into segments, on disk or in memory ─▶ uploader: segments into landing
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from trajlake.errors import NotDurable, TrajlakeError
from trajlake.ingest.encoder import Encoder
from trajlake.ingest.event_queue import EventQueue
from trajlake.ingest.metrics import CloseReport, WriterStats
from trajlake.ingest.options import WriterOptions
from trajlake.ingest.segment import encode_segment
from trajlake.ingest.spool import NoSpool, SpoolFolder, SpoolMeta, keep
from trajlake.ingest.upload import ClosedSegment
from trajlake.ingest.uploader import Uploader
from trajlake.storage import ObjectStore

log = logging.getLogger("trajlake")


class Recorder:
    """The queue, the encoder and the uploader of one writer. Belongs to one process; a forked child makes its own."""

    def __init__(self, store: ObjectStore, meta: SpoolMeta, options: WriterOptions) -> None:
        self._meta = meta
        self._options = options
        self._folder = SpoolFolder.create(options.spool, meta) if options.needs_disk else NoSpool(meta)
        self._queue = EventQueue(
            meta.run_id, options.memory_bytes, options.batch_bytes, drops=options.on_full == "drop_and_count"
        )
        self._encoder = Encoder(self._queue, self._folder, options, meta.run_id, self._tick)
        self._uploader = Uploader(
            store, self._folder, options.spool if options.needs_disk else None, self._encoder.uploaded
        )
        self._encoder.uploader = self._uploader
        self._all_durable_at = time.monotonic()
        self._logged_at = time.monotonic()
        self._logged_line = ""
        self.episodes = 0
        self.open_episodes = 0
        self.put = self._queue.put
        self.put_all = self._queue.put_all
        self._encoder.start()
        self._uploader.start()

    def flush(self, deadline: float | None) -> None:
        """Return when what was recorded before is as durable as was chosen. Raises NotDurable or a StoreError."""
        with self._queue.changed:
            wanted = self._queue.sequence
        if self._options.durability == "memory":
            self._queue.check()
        elif self._options.durability == "spool":
            self._encoder.write_up_to(wanted, deadline)
            if self._encoder.in_memory > self._uploader.durable_events:
                # Some went past the disk, so that only the store can make them durable.
                self._flush_remote(min(wanted, self._encoder.in_memory), deadline)
        else:
            self._flush_remote(wanted, deadline)
        if self._encoder.refused:
            raise NotDurable(
                f"{len(self._encoder.refused)} events could not be stored, first {self._encoder.refused[0]}"
            )

    def _flush_remote(self, wanted: int, deadline: float | None) -> None:
        self._encoder.close_up_to(wanted, deadline)
        self._uploader.wait(wanted, deadline)

    def close(self, deadline: float) -> CloseReport:
        """Take no more, bring everything to the store, and end the threads, all until about `deadline`."""
        with self._queue.changed:
            self._queue.accepting = False
            self._queue.changed.notify_all()
            wanted = self._queue.sequence
        reason = ""
        try:
            self._flush_remote(wanted, deadline)
        except TrajlakeError as error:
            reason = str(error)
        self._encoder.stop(max(0.1, deadline - time.monotonic()))
        in_memory = self._uploader.stop(max(0.1, deadline - time.monotonic()), finished=not reason)
        kept = self._keep(in_memory)
        self._uploader.release_when_done()
        memory_events = wanted - self._encoder.written + sum(segment.events for segment in in_memory) - kept
        return self.report(reason, wanted, memory_events)

    def _keep(self, in_memory: list[ClosedSegment]) -> int:
        """Bring segments that waited in memory to the disk, for the next start. Returns how many events that saved."""
        kept = 0
        for segment in in_memory if isinstance(self._folder, SpoolFolder) else ():
            assert isinstance(self._folder, SpoolFolder)
            assert segment.table is not None
            try:
                keep(self._folder, segment.number, encode_segment(segment.table))
                kept += segment.events
            except OSError as error:
                log.error("a segment that waited in memory could not be written to %s: %s", self._folder.path, error)
        return kept

    def report(self, reason: str, events: int, memory_events: int) -> CloseReport:
        """How far all of the events got."""
        refused = len(self._encoder.refused)
        durable = min(self._uploader.durable_events, events) - refused - self._uploader.lost_events
        remaining = events - durable
        if refused and not reason:
            reason = f"{refused} events could not be stored, first {self._encoder.refused[0]}"
        return CloseReport(
            complete=remaining == 0,
            durable_events=durable,
            remaining_events=remaining,
            spool=self._folder.path if remaining - refused - memory_events > 0 else None,
            reason=reason,
            memory_events=memory_events,
            dropped_events=self._queue.dropped_events,
        )

    def stats(self) -> WriterStats:
        """A consistent picture, as far as the store's answers are known."""
        queue, encoder, uploader = self._queue, self._encoder, self._uploader
        with queue.changed:
            durable = uploader.durable_events
            now = time.monotonic()
            if durable >= queue.sequence:
                self._all_durable_at = now
            in_memory = encoder.memory_events
            return WriterStats(
                run=self._meta.run_id,
                worker=self._meta.worker_id,
                episodes=self.episodes,
                open_episodes=self.open_episodes,
                events=queue.sequence,
                durable_events=durable - uploader.lost_events,
                spooled_events=max(0, encoder.written - durable - in_memory),
                queued_events=queue.sequence - encoder.written + in_memory,
                dropped_events=queue.dropped_events,
                dropped_episodes=queue.dropped_episodes,
                segments=uploader.segments,
                bytes=uploader.bytes,
                retries=uploader.retries,
                waits=queue.waits,
                wait_seconds=queue.wait_seconds,
                waiting_segments=uploader.waiting,
                spool_bytes=encoder.on_disk_bytes,
                memory_bytes=queue.queued + queue.held,
                spilled_segments=encoder.spilled_segments,
                recovered_segments=uploader.recovered_segments,
                damaged_segments=uploader.damaged_segments,
                lag_seconds=now - self._all_durable_at,
            )

    def _tick(self) -> None:
        """Called by the encoder a few times a second."""
        stats = self.stats()
        seconds = self._options.log_seconds
        if seconds and time.monotonic() - self._logged_at >= seconds:
            self._logged_at = time.monotonic()
            if (line := stats.line()) != self._logged_line:
                self._logged_line = line
                log.info("%s", line)

    def disown(self) -> None:
        """In a forked child: let go of the parent's files, whose threads are not here."""
        self._queue.disown()
        self._encoder.disown()
        self._folder.disown()

    @property
    def spool(self) -> Path | None:
        """The folder of this writer, or None where it never goes to the disk."""
        return self._folder.path

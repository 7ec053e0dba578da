"""What a Writer says about itself: an object, a line in the log, and metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WriterStats:
    """Counts since the writer was made, in this process. Bytes are those sent to the store.

    Of `events` that were recorded, `durable_events` are in the store, `spooled_events` wait on local disk,
    `queued_events` are in memory only. `dropped_events` of `dropped_episodes` were refused with `drop_and_count`.
    `retries` are uploads that failed and were tried again. `waits` and `wait_seconds` say how often and how long
    rollouts waited for room. `waiting_segments` and `spool_bytes` lie in the spool or in memory until the store takes
    them. `damaged_segments` were damaged on the disk, of this writer or of one that is gone: what could be read of them
    was uploaded. `lag_seconds` is the time since everything was durable: 0.0 while nothing waits.
    """

    run: str
    worker: str
    episodes: int
    open_episodes: int
    events: int
    durable_events: int
    spooled_events: int
    queued_events: int
    dropped_events: int
    dropped_episodes: int
    segments: int
    bytes: int
    retries: int
    waits: int
    wait_seconds: float
    waiting_segments: int
    spool_bytes: int
    memory_bytes: int
    spilled_segments: int
    recovered_segments: int
    damaged_segments: int
    lag_seconds: float

    def line(self) -> str:
        """One line for a log."""
        text = (
            f"run {self.run} worker {self.worker}: {self.events:,} events of {self.episodes:,} episodes "
            f"({self.open_episodes:,} open), {self.durable_events:,} durable in {self.segments:,} segments "
            f"({self.bytes / 1e6:,.1f} MB); waiting: {self.spooled_events:,} in the spool, "
            f"{self.queued_events:,} in memory, for {self.lag_seconds:,.1f} s; {self.retries:,} retries"
        )
        if self.dropped_events:
            text += f"; {self.dropped_events:,} events DROPPED"
        if self.damaged_segments:
            text += f"; {self.damaged_segments:,} segments DAMAGED on disk"
        return text


@dataclass(frozen=True)
class CloseReport:
    """What close() left behind: nothing where `complete`.

    Of `remaining_events`, those on disk wait in `spool` for the next start; `memory_events` are in this process
    only and are lost when it ends. `dropped_events` were refused with `drop_and_count`, and are not among them.
    """

    complete: bool
    durable_events: int
    remaining_events: int
    spool: Path | None
    reason: str = ""
    memory_events: int = 0
    dropped_events: int = 0

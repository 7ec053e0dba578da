"""The bounded queue between the rollout's threads and the encoder, and what happens when it is full."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from trajlake.errors import TrajlakeError, UsageError, WriterClosed
from trajlake.ingest.arrays import Row
from trajlake.ingest.values import row_bytes

log = logging.getLogger("trajlake")

OWN_EPISODE = (
    "was begun in the process that this one was forked from, and only that one can add to it: begin an episode of its "
    "own in each process"
)

Queued = tuple[str, str, int, int, int, Row, int]  # an Event and about how many bytes it takes


class Put(Protocol):
    """`EventQueue.put`."""

    def __call__(self, kind: str, episode_id: str, attempt: int, row: Row, size: int, /, wait: bool = True) -> bool: ...


STEPS_DROPPED = "steps were dropped"
"""The stop_reason of an episode of which the queue did not take all steps."""
_LOG_AGAIN = 10.0  # seconds between two lines about dropped events

# Durations must be right even when the machine's clock is set anew in the middle of an episode.
_clock = time.clock_gettime_ns
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class EventQueue:
    """Events in the order of their sequence. `changed` guards everything here, and the encoder's counters too.

    `queued` bytes wait for the encoder and `held` bytes are encoded and wait in memory for the store; together they
    are bounded by `limit`, give or take one event.
    """

    def __init__(self, run: str, limit: int, batch_bytes: int, *, drops: bool) -> None:
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.queued = 0
        self.held = 0
        self.accepting = True
        self.is_full = False  # whether a rollout is waiting at this moment
        self.waits = 0
        self.wait_seconds = 0.0
        self.dropped_events = 0
        self.dropped_episodes = 0
        self.batch_bytes = min(batch_bytes, limit // 8)  # worth to be encoded
        self._run = run
        self._limit = limit
        self._drops = drops
        self._events: list[Queued] = []
        self._first = 0  # the number of the first of them
        self._torn: dict[tuple[str, int], int] = {}  # steps that were dropped; -1: the begin was
        self._logged_at = -_LOG_AGAIN
        self._failure: BaseException | None = None
        self._is_inherited = False
        self._epoch_start = time.time_ns() - time.clock_gettime_ns(_CLOCK)

    def put(self, kind: str, episode_id: str, attempt: int, row: Row, size: int, wait: bool = True) -> bool:
        """Queue one event of about `size` bytes. Where memory is full it waits, or drops and counts; False where it
        would have to wait and may not. Raises WriterClosed."""
        # A signal's handler may raise between any two lines here: `with` gives the lock back even then, and only the
        # append makes an event, its number included.
        with self._lock:  # of `changed` itself, which is entered in C
            if not self.accepting or self.queued + self.held > self._limit or self._torn:
                if not self.accepting:
                    raise self._reason(episode_id)
                if self._drops:
                    admitted = self._admit(kind, episode_id, attempt, row)
                    if admitted is None:
                        return True
                    row = admitted
                elif not self._has_room(wait):
                    return False
            now = (self._epoch_start + _clock(_CLOCK)) // 1000
            before = self.queued
            self.queued = before + size
            events = self._events
            # No Event: making one takes five times as long as making a tuple, and it is read as one anyway.
            events.append((kind, episode_id, attempt, self._first + len(events), now, row, size))
            if before < self.batch_bytes <= self.queued:
                self.changed.notify_all()
        return True

    def put_all(self, episode_id: str, attempt: int, events: Sequence[tuple[str, Row]]) -> None:
        """Queue many events of one episode, as `(kind, row)`. Raises WriterClosed."""
        sizes = [row_bytes(row) for _, row in events]
        total = sum(sizes)
        with self._lock:
            if self.accepting and self.queued + self.held + total <= self._limit and not self._torn:
                now = (self._epoch_start + _clock(_CLOCK)) // 1000
                numbered = enumerate(zip(events, sizes, strict=True), self.sequence)
                self._events += [
                    (kind, episode_id, attempt, at, now, row, size) for at, ((kind, row), size) in numbered
                ]
                before, self.queued = self.queued, self.queued + total
                if before < self.batch_bytes <= self.queued:
                    self.changed.notify_all()
                return
        for (kind, row), size in zip(events, sizes, strict=True):  # memory is short: each as there is room for it
            self.put(kind, episode_id, attempt, row, size)

    @property
    def sequence(self) -> int:
        """How many events there were so far, which is the number of the next one. Read it with `changed` held."""
        return self._first + len(self._events)

    def take(self) -> list[Queued]:
        """All that is queued. Call it with `changed` held."""
        events, self._events = self._events, []
        self._first += len(events)
        if not events:
            self.queued = 0  # what a signal in `put` may have left of an event that it stopped
        return events

    def __len__(self) -> int:
        return len(self._events)

    def fail(self, error: BaseException) -> None:
        """The encoder has died: nobody must wait for it."""
        with self.changed:
            self._failure = error
            self.accepting = False
            self.changed.notify_all()

    def check(self) -> None:
        """Raises TrajlakeError where the encoder has died."""
        if self._failure is not None:
            raise self._reason("")

    def disown(self) -> None:
        """In a forked child: what is here is the parent's, and another thread of it may hold the lock for ever."""
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.accepting = False
        self._is_inherited = True

    def _reason(self, episode_id: str) -> TrajlakeError:
        if self._is_inherited:
            return UsageError(f"episode {episode_id} {OWN_EPISODE}")
        if self._failure is not None:
            return TrajlakeError(f"the writer of run {self._run} has failed: {self._failure!r}; please report this")
        return WriterClosed(f"writer of run {self._run} is closed: nothing can be recorded")

    def _has_room(self, wait: bool) -> bool:
        """True as soon as there is room; the rollout waits here."""
        if self.queued + self.held <= self._limit:
            return True
        if not wait:
            return False
        began = time.monotonic()
        self.waits += 1
        try:
            while self.queued + self.held > self._limit:
                self.is_full = True
                self.changed.notify_all()
                self.changed.wait(0.5)
                if not self.accepting:
                    raise self._reason("")
        finally:
            self.is_full = False
            self.wait_seconds += time.monotonic() - began
        return True

    def _admit(self, kind: str, episode_id: str, attempt: int, row: Row) -> Row | None:
        """The event, or None where it is dropped.

        An episode keeps its first steps without a hole: after the first step that is dropped all others are, and its
        end, which is always admitted, says so. An episode whose begin is dropped leaves nothing.
        """
        key = (episode_id, attempt)
        is_full = self.queued + self.held > self._limit
        dropped = self._torn.get(key)
        if dropped is None and not is_full:
            return row
        if kind == "end" and dropped != -1:
            if dropped is None:
                return row
            del self._torn[key]
            told = {name: row[name] for name in ("terminated", "truncated", "reward", "success") if name in row}
            return told | {
                "status": "aborted",
                "stop_reason": STEPS_DROPPED,
                "failure_stage": "other",
                "failure_detail": f"{dropped} steps were not recorded: the writer's memory was full",
            }
        self.dropped_events += 1
        if kind == "begin":
            self._torn[key] = -1
            self.dropped_episodes += 1
        elif kind == "step" and dropped != -1:
            self._torn[key] = (dropped or 0) + 1
            self.dropped_episodes += dropped is None
        elif kind == "end":
            del self._torn[key]
        if time.monotonic() - self._logged_at >= _LOG_AGAIN:
            self._logged_at = time.monotonic()
            log.error(
                "run %s: memory is full: %d events of %d episodes were dropped so far",
                self._run,
                self.dropped_events,
                self.dropped_episodes,
            )
        return None

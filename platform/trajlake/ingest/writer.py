"""The Writer: what a rollout worker uses. The rollout's threads only queue; two threads behind do the rest."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypedDict, Unpack

import numpy as np

from trajlake.errors import UsageError, WriterClosed
from trajlake.ingest import exits
from trajlake.ingest.arrays import Row, plain
from trajlake.ingest.episode import Episode, EpisodeFields
from trajlake.ingest.epochs import check_name
from trajlake.ingest.event_queue import OWN_EPISODE, Put
from trajlake.ingest.lists import rewards
from trajlake.ingest.metrics import CloseReport, WriterStats
from trajlake.ingest.options import Durability, OnFull, WriterOptions
from trajlake.ingest.recorder import Recorder
from trajlake.ingest.scalars import is_whole_number
from trajlake.ingest.spool import SpoolMeta
from trajlake.ingest.values import row_bytes
from trajlake.storage import ObjectStore
from trajlake_schemas.episodes import SCORED_SUCCESS

log = logging.getLogger("trajlake")


class WriterChoices(TypedDict, total=False):
    """The options of a Writer; docs/writer.md says what each one promises. Sizes in bytes, times in seconds."""

    spool: str | os.PathLike[str] | None
    durability: Durability
    on_full: OnFull
    segment_bytes: int
    segment_seconds: float
    linger_seconds: float
    batch_bytes: int
    memory_bytes: int
    spool_bytes: int
    log_seconds: float
    exit_seconds: float
    exit_on_sigterm: bool


class Writer:
    """Streams episodes into a lake. Made by `lake.writer(…)`; safe to use from many threads.

    `durability` says what `flush()` waits for: `remote` (the object store has it), `spool` (it is on the local
    disk, fsynced, and reaches the store later even if this process dies) or `memory` (nothing). `segment_bytes` and
    `segment_seconds` bound how much and how long events wait before they are uploaded, `linger_seconds` how long the
    end of an episode, a score or a retraction does. `memory_bytes` and `spool_bytes` bound what waits, and `on_full`
    says what happens then: `spill`, `block` or `drop_and_count`.

    A forked child may go on with a writer that it inherits: it then records under an epoch and in a spool folder of
    its own, and what the parent recorded stays the parent's. A pickled writer is a new one with the same options.
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        worker: str | None = None,
        *,
        lake_id: str | None = None,
        **choices: Unpack[WriterChoices],
    ) -> None:
        self.run = check_name("run", run)
        self.worker = check_name("worker", worker or f"{socket.gethostname().split('.')[0]}-{os.getpid()}")
        self._store = store
        self._lake_id = lake_id
        self._choices = choices
        given: dict[str, Any] = dict(choices)
        names = [field.name for field in fields(WriterOptions)]
        if unknown := given.keys() - set(names):
            raise TypeError(f"a writer has no option {', '.join(sorted(unknown))}; it has {', '.join(names)}")
        spool = given.pop("spool", None)
        self._options = WriterOptions(**given) if spool is None else WriterOptions(spool=Path(spool), **given)
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._open: set[tuple[str, int]] = set()
        self._inherited: frozenset[tuple[str, int]] = frozenset()
        self._report: CloseReport | None = None
        self._recorder: Recorder | None = self._start(is_fork=False)
        if self._options.exit_on_sigterm and not exits.exit_on_sigterm():
            log.debug("SIGTERM is handled elsewhere: close the writer there")

    def _start(self, *, is_fork: bool) -> Recorder:
        host = socket.gethostname()
        meta = SpoolMeta(self._store.uri, self.run, self.worker, host, os.getpid(), is_fork, self._lake_id)
        recorder = Recorder(self._store, meta, self._options)
        exits.watch(self)
        return recorder

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
        _check_id(episode_id)
        if not is_whole_number(attempt) or not 0 <= attempt < 2**31:
            raise UsageError(f"attempt must be 0, 1, 2, …, not {attempt!r}")
        attempt = int(attempt)
        if (episode_id, attempt) in self._inherited:
            raise UsageError(f"episode {episode_id} {OWN_EPISODE}")
        if (episode_id, attempt) in self._open:
            raise UsageError(f"episode {episode_id} has not ended: give another id, or a higher attempt")
        episode = Episode(self, episode_id, attempt, fields, started_at)
        with self._lock:
            self._open.add((episode_id, attempt))
            if self._recorder is not None:
                self._recorder.episodes += 1
                self._recorder.open_episodes = len(self._open)
        return episode

    def score(
        self, episode_id: str, name: str, value: float | bool, *, weight: float | None = None, kind: str | None = None
    ) -> None:
        """Add a reward component to an episode of any worker, before or after its end. Raises UsageError."""
        _check_id(episode_id)
        if value is None:
            raise UsageError(f"score {name!r} has no value: give a number, or no score")
        value = plain(value)
        if isinstance(value, (bool, np.bool_)):  # what a verifier finds
            value = float(value)
        try:
            (row,) = rewards([{"name": name, "value": value, "weight": weight, "kind": kind}])
        except UsageError as error:
            raise UsageError(f"score {name!r}: {error}") from error
        if row["name"] == SCORED_SUCCESS and row["value"] not in (0, 1):
            raise UsageError(f"score {name!r} is the verdict: 1 or 0, True or False, not {value!r}")
        self.record("score", episode_id, 0, row)

    def retract(self, episode_id: str, reason: str) -> None:
        """Mark an episode of any worker as not to be used. Raises UsageError."""
        _check_id(episode_id)
        if not isinstance(reason, str) or not reason.strip():
            raise UsageError(f"say why it is retracted, as text, not {reason!r}")
        self.record("retract", episode_id, 0, {"reason": reason})

    def record(self, kind: str, episode_id: str, attempt: int, row: Row) -> None:
        """Queue one event; waits only while memory is full."""
        self.put(kind, episode_id, attempt, row, row_bytes(row))

    @property
    def put(self) -> Put:
        """The queue's own `put` in this process, which an episode keeps. Raises WriterClosed."""
        return (self._recorder or self._begin_again()).put

    def record_all(self, episode_id: str, attempt: int, events: Sequence[tuple[str, Row]]) -> None:
        """Queue a whole episode that is there at once, as `(kind, row)`: as `record` of each, in a third of the time.
        What is imported comes this way."""
        recorder = self._recorder or self._begin_again()
        with self._lock:
            recorder.episodes += 1
        recorder.put_all(episode_id, attempt, events)

    def forget(self, episode: Episode) -> None:
        """An episode has ended; it no longer counts as open."""
        with self._lock:
            self._open.discard((episode.episode_id, episode.attempt))
            if self._recorder is not None:
                self._recorder.open_episodes = len(self._open)

    # -- durability ------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Return when every event recorded before this call is durable, as `durability` means it.

        Raises NotDurable after `timeout` seconds, and the StoreError at once where the store refuses for good (a
        bucket that does not exist, wrong credentials). Nothing is lost by that: the events stay where they are, and
        the error says where.
        """
        if self._recorder is not None:
            self._recorder.flush(None if timeout is None else time.monotonic() + timeout)

    async def aflush(self, timeout: float | None = None) -> None:
        """`flush`, while the event loop goes on."""
        import asyncio  # takes a while, and few need it

        await asyncio.to_thread(self.flush, timeout)

    def close(self, timeout: float = 60.0) -> CloseReport:
        """Stop recording, bring everything to the store, and return within about `timeout` seconds with what remains.

        Episodes without an end stay open in the lake and are sealed as aborted by a later compaction. A second call
        gives the first one's report.
        """
        with self._closing:
            if self._report is None:
                self._report = self._close(time.monotonic() + timeout)
            return self._report

    async def aclose(self, timeout: float = 60.0) -> CloseReport:
        """`close`, while the event loop goes on."""
        import asyncio  # takes a while, and few need it

        return await asyncio.to_thread(self.close, timeout)

    def _close(self, deadline: float) -> CloseReport:
        recorder = self._recorder
        if recorder is None:  # in a forked child that recorded nothing
            exits.unwatch(self)
            return CloseReport(True, 0, 0, None)
        if self._open:
            log.warning("run %s: %d episodes were open when the writer was closed", self.run, len(self._open))
        report = recorder.close(deadline)
        exits.unwatch(self)
        if not report.complete:
            log.warning(
                "run %s: %d events wait in %s, %d are in memory only and die with this process: %s",
                self.run,
                report.remaining_events - report.memory_events,
                report.spool,
                report.memory_events,
                report.reason,
            )
        if report.dropped_events:
            log.error("run %s: %d events were dropped because memory was full", self.run, report.dropped_events)
        return report

    @property
    def stats(self) -> WriterStats:
        """What was recorded in this process so far and how far it got."""
        return (self._recorder or self._begin_again()).stats()

    @property
    def spool(self) -> Path | None:
        """The folder in which this writer's events wait; None for one that never goes to the disk."""
        return None if self._recorder is None else self._recorder.spool

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(self._patience(kind))

    async def __aenter__(self) -> Writer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(self._patience(kind))

    def _patience(self, kind: type[BaseException] | None) -> float:
        """Who ends a process gives it seconds, not minutes, before it is killed."""
        is_end = kind is not None and issubclass(kind, (SystemExit, KeyboardInterrupt))
        return self._options.exit_seconds if is_end else 60.0

    # -- processes -------------------------------------------------------------------------------------------

    def close_at_exit(self) -> None:
        """The interpreter ends."""
        self.close(self._options.exit_seconds)

    def after_fork(self) -> None:
        """This is a forked child: the threads are not here, and locks may be held for ever."""
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._inherited = frozenset(self._open) | self._inherited
        self._open = set()
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.disown()

    def _begin_again(self) -> Recorder:
        with self._lock:
            if self._report is not None:
                raise WriterClosed(f"writer of run {self.run} is closed: nothing can be recorded")
            if self._recorder is None:
                self._recorder = self._start(is_fork=True)
            return self._recorder

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._store, self.run, self.worker, self._lake_id, self._choices)


def _unpickle(store: ObjectStore, run: str, worker: str, lake_id: str | None, choices: WriterChoices) -> Writer:
    return Writer(store, run, worker, lake_id=lake_id, **choices)


def _check_id(episode_id: object) -> None:
    if not isinstance(episode_id, str) or not episode_id or _has_surrogates(episode_id):
        raise UsageError(f"episode_id must be text that is not empty, not {episode_id!r}")


def new_episode_id() -> str:
    """A UUID of version 7 in hex: unique anywhere, and sorts by the time it was made (to a quarter microsecond)."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = (rest << 12) // 1_000_000
    random = uuid.uuid4().int & ((1 << 62) - 1)
    return f"{(milliseconds & ((1 << 48) - 1)) << 80 | 7 << 76 | fraction << 64 | 2 << 62 | random:032x}"


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

"""A lake: the object that everything else is reached from."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trajlake.errors import StoreUnavailable, UsageError
from trajlake.storage import ObjectStore, open_store
from trajlake.storage.check import ensure_safe

if TYPE_CHECKING:
    import polars as pl

    from trajlake.ingest.scores import Scores
    from trajlake.ingest.writer import Writer, WriterChoices
    from trajlake.read.flow import RateLimiter
    from trajlake.read.live import LiveSampler
    from trajlake.read.sampler import Sampler
    from trajlake.read.snapshot import Snapshot
    from trajlake.read.strategies import Strategy
    from trajlake.table.tables import LakeInfo


class Lake:
    """Where trajectories are: a store, and what lies in it. Made by `connect` and `create`; holds no connection open.

    `uri` is as people write it; `store` is the object store below it.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    @property
    def uri(self) -> str:
        return self.store.uri

    def __repr__(self) -> str:
        return f"Lake({self.uri!r})"

    def check(self) -> LakeInfo:
        """What the lake's marker says. Raises LakeMissing, LakeTooNew, or a StoreError."""
        from trajlake.table.tables import read_marker

        return read_marker(self.store)

    def writer(self, run: str, worker: str | None = None, **choices: Unpack[WriterChoices]) -> Writer:
        """A Writer for one worker of a run: see trajlake.Writer, and docs/writer.md for the choices.

        Raises LakeMissing where there is no lake. A store that does not answer is no reason to stop a rollout: the
        writer then begins on the spool alone and uploads when the store is back.
        """
        from trajlake.ingest.writer import Writer, log

        lake_id = None
        try:
            lake_id = self.check().lake_id
        except StoreUnavailable as error:
            log.warning("%s; recording into the spool until it answers", error)
        return Writer(self.store, run, worker, lake_id=lake_id, **choices)

    def scores(self, run: str, **choices: Unpack[WriterChoices]) -> Scores:
        """Adds late rewards to episodes: `with lake.scores(run) as scores: scores.add(episode_id, "judge", 0.7)`."""
        from trajlake.ingest.scores import Scores

        return Scores(self.writer(run, f"scores-{socket.gethostname().split('.')[0]}-{os.getpid()}", **choices))

    def retract(self, episode_ids: Iterable[str], reason: str, *, run: str = "retractions") -> None:
        """Mark episodes of any run as not to be used, from the next compaction on: they stay in the tables, and no
        sample and no export has them; `trajlake retract --for-good` removes them. Returns when that is durable. Raises
        what `Writer.flush` raises."""
        with self.writer(run) as writer:
            for episode_id in [episode_ids] if isinstance(episode_ids, str) else episode_ids:
                writer.retract(episode_id, reason)
            writer.flush()

    def snapshot(self, token: str | None = None) -> Snapshot:
        """The tables as they are now, pinned; or as they were, by the token of an earlier snapshot.

        Raises LakeMissing, UsageError for a token that is none, SnapshotExpired.
        """
        from trajlake.read.snapshot import open_snapshot

        return open_snapshot(self, token, self.check().lake_id)

    def sampler(
        self,
        strategy: str | Strategy = "uniform",
        *,
        live: bool = False,
        limiter: RateLimiter | None = None,
        **choices: Any,
    ) -> Sampler | LiveSampler:
        """A sampler over the newest snapshot (`choices`: see Snapshot.sampler); or, where `live`, one over what is
        there at each draw, episodes of the last seconds included, held back by `limiter`: see trajlake.read.live."""
        if live:
            from trajlake.read.live import live_sampler

            return live_sampler(self, strategy, limiter=limiter, **choices)
        if limiter is not None:
            raise UsageError("a limiter is for live sampling: nothing is inserted into a snapshot")
        return self.snapshot().sampler(strategy, **choices)

    def segments(self) -> pl.LazyFrame:
        """The ledger: every landing segment that was consumed, waits for the end of an episode, or is quarantined."""
        import polars as pl

        from trajlake.table.tables import open_table

        return pl.scan_delta(open_table(self.store, "segments"))


def connect(uri: str | Path) -> Lake:
    """The lake at `uri`: a folder, `s3://bucket/prefix` (endpoint and credentials from the environment), or
    `s3+http://host:port/bucket/prefix`. Nothing is read yet. Raises UsageError for any other address."""
    return Lake(open_store(str(uri)))


def create(uri: str | Path) -> Lake:
    """Make a lake at `uri` and connect to it. The bucket must exist.

    Raises LakeExists, StoreUnsafe where the server ignores If-None-Match, or a StoreError.
    """
    from trajlake.table.tables import create_lake

    store = open_store(str(uri))
    ensure_safe(store)
    create_lake(store)
    return Lake(store)

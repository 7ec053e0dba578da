"""After compaction: is everything there that was acknowledged? The workers' notes are compared with the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from trajlake.demo.acks import Acknowledged, EpisodeAck
from trajlake.demo.workers import VICTIM, DemoIngest, Kill
from trajlake.ingest.spool import abandoned
from trajlake.lake import Lake
from trajlake.read.snapshot import Snapshot
from trajlake.table.sealed import NO_END

_COLUMNS = ("episode_id", "worker_id", "epoch", "status", "stop_reason", "n_steps", "ended_at")


@dataclass(frozen=True)
class Check:
    """One claim, whether it holds, and the numbers that say so."""

    claim: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Findings:
    """The checks, and what came in. `lost_events` were recorded by the killed worker and never acknowledged, and
    died with it; `saved_events` were never acknowledged either, and came out of its spool."""

    checks: tuple[Check, ...]
    episodes: int
    steps: int
    events: int
    bytes: int
    segments: int
    lost_events: int
    saved_events: int
    interrupted: str | None  # the episode that was cut off

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)


def check(lake: Lake, snapshot: Snapshot, ingest: DemoIngest) -> Findings:
    """Compare what `ingest` was promised with the tables of `snapshot` and with the ledger."""
    of_run = pl.col("run_id") == ingest.run_id
    rows = snapshot.collect(snapshot.episodes.filter(of_run).select(_COLUMNS))
    ledger = lake.segments().filter(of_run).select("worker_id", "epoch", "events", "bytes", "state").collect()
    steps = snapshot.collect(
        snapshot.steps.join(rows.lazy().select("episode_id"), on="episode_id", how="semi").select(pl.len())
    ).item()
    arrived = int(ledger["events"].sum())
    killed = int(ledger.filter((pl.col("worker_id") == VICTIM) & (pl.col("epoch") == 0))["events"].sum())
    kill = ingest.victim.kill
    saved = killed - kill.progress.acknowledged if kill else 0
    interrupted = _interrupted(rows)
    return Findings(
        (
            _episodes_are_there(ingest, rows),
            _events_arrived(ingest, ledger),
            _events_are_rows(rows, int(steps), arrived),
            _interrupted_is_kept(kill, interrupted, killed),
            _spool_is_empty(ingest.spool, lake),
        ),
        episodes=len(rows),
        steps=int(steps),
        events=arrived,
        bytes=int(ledger["bytes"].sum()),
        segments=len(ledger),
        lost_events=kill.unacknowledged - saved if kill else 0,
        saved_events=saved,
        interrupted=interrupted["episode_id"] if interrupted else None,
    )


def _episodes_are_there(ingest: DemoIngest, rows: pl.DataFrame) -> Check:
    """Ended ones with exactly the steps and the status that were promised, open ones with at least these steps."""
    promised = [ack for process in _processes(ingest.promises) for ack in process.episodes.values()]
    table = {
        episode: (steps, status) for episode, steps, status in rows.select("episode_id", "n_steps", "status").rows()
    }
    missing = [ack.episode_id for ack in promised if not _kept(ack, table)]
    detail = f"{len(promised) - len(missing):,} of {len(promised):,} episodes"
    if missing:
        detail += f"; missing or short: {', '.join(missing[:3])}"
    return Check("every acknowledged episode is in the tables, with all its steps", not missing, detail)


def _kept(ack: EpisodeAck, table: Mapping[str, tuple[int, str]]) -> bool:
    steps, status = table.get(ack.episode_id, (-1, ""))
    return steps >= ack.steps if ack.status is None else (steps, status) == (ack.steps, ack.status)


def _events_arrived(ingest: DemoIngest, ledger: pl.DataFrame) -> Check:
    promised = arrived = 0
    holds = True
    for worker in ingest.workers:
        wanted = sum(process.events for process in ingest.promises[worker.name])
        found = int(ledger.filter(pl.col("worker_id") == worker.name)["events"].sum())
        promised, arrived, holds = promised + wanted, arrived + found, holds and found >= wanted
    return Check(
        "every acknowledged event has arrived", holds, f"{promised:,} events acknowledged, {arrived:,} arrived"
    )


def _events_are_rows(rows: pl.DataFrame, steps: int, arrived: int) -> Check:
    """Each event is a begin, a step or an end, and each of those is seen in the tables once."""
    ends = int(rows["ended_at"].is_not_null().sum())
    found = len(rows) + steps + ends
    claim = "every event that arrived is in the tables once"
    return Check(claim, found == arrived, f"{len(rows):,} begins + {steps:,} steps + {ends:,} ends = {found:,}")


def _interrupted(rows: pl.DataFrame) -> dict[str, Any] | None:
    """What the tables have of the episode that the killed process was in."""
    of_victim = (pl.col("worker_id") == VICTIM) & (pl.col("epoch") == 0) & (pl.col("stop_reason") == NO_END)
    return next(iter(rows.filter(of_victim).rows(named=True)), None)


def _interrupted_is_kept(kill: Kill | None, row: dict[str, Any] | None, arrived: int) -> Check:
    """As aborted, and with every step that arrived: the steps are what the process recorded last."""
    claim = "the interrupted episode is kept, as aborted"
    if kill is None:
        return Check(claim, False, "no worker was killed in mid-episode")
    if row is None:
        return Check(claim, False, f"worker {VICTIM} left no episode without an end")
    steps = arrived - kill.progress.begun_at
    holds = row["status"] == "aborted" and row["n_steps"] == steps
    return Check(claim, holds, f"episode {row['episode_id']} with {row['n_steps']} steps")


def _spool_is_empty(spool: Path, lake: Lake) -> Check:
    left = 0
    for folder in abandoned(spool, lake.uri, lake.check().lake_id):
        left += sum(1 for _ in folder.segments())
        folder.release(remove=False)
    return Check("nothing is left in the spool", left == 0, f"{left} segments on this machine's disk")


def _processes(promises: Mapping[str, list[Acknowledged]]) -> list[Acknowledged]:
    return [process for processes in promises.values() for process in processes]

"""One unit's work without any storage: events in, step rows and episode rows out, and a sum that adds up.

All events of an episode are in one unit. A *take* is what one writer epoch recorded of one attempt at an episode; it is
complete with its begin, its end and as many steps as the end says. Where there are several takes, the complete one
wins, then the later attempt, then of takes that are not complete the longest, then the later epoch. Nothing is ordered
by clocks.

A take that has ended and is not complete, because a segment was lost, waits like one that is still being recorded: the
segment may come after all. When it is sealed, its status is `aborted` and its stop_reason says what is missing, so that
it never looks whole. Reward, success and what failed stay as its end gave them: they are facts of the rollout, which
was whole, and without them the rates of a policy would depend on what was lost. Who needs whole episodes leaves out
those that were aborted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.ingest.segment import EVENT_SCHEMA, SegmentName
from trajlake.table.rewrite import APPLIED, NO_REASON
from trajlake.table.rows import merged_objects
from trajlake.table.sealed import NO_END, what_is_missing
from trajlake.table.sizes import whole
from trajlake_pipelines.unit_steps import UnitSteps, of_steps, taken
from trajlake_pipelines.units import KnownEpisode, PlannedSegment
from trajlake_schemas import EPISODES
from trajlake_schemas.episodes import BEGIN, OUTCOME


@dataclass
class Sums:
    """Where every event went: `events` is the sum of all the others but `quarantined_segments`."""

    events: int = 0
    steps: int = 0
    begins_and_ends: int = 0
    scores: int = 0
    retractions: int = 0
    duplicate_events: int = 0
    pending_events: int = 0

    def add(self, other: Sums) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def explained(self) -> int:
        return sum(value for name, value in vars(self).items() if name != "events")


@dataclass
class Decisions:
    """What became of the episodes that are not simply new; an id may stand in several lists. Of those that are
    `incomplete` more was recorded than has arrived, and their segments wait for it; of those that are `unknown`, which
    are pending too, only scores and retractions have come."""

    replaced: list[str] = field(default_factory=list)
    sealed: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass
class Merged:
    """What a unit found: `steps` in table order, and `episodes` without places yet; by the
    key of each segment how many events were this unit's, and those of its episodes that wait."""

    steps: UnitSteps
    episodes: pa.Table
    sums: Sums
    decisions: Decisions
    events_by_segment: dict[str, int] = field(default_factory=dict)
    pending_by_segment: dict[str, list[str]] = field(default_factory=dict)
    late_scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    late_retractions: dict[str, str] = field(default_factory=dict)


def merge(
    segments: Sequence[tuple[PlannedSegment, pa.Table]],
    known: Mapping[str, KnownEpisode],
    seal: frozenset[str],
) -> Merged:
    """Merge the events of one unit: of each segment all, or those of the episodes that the plan names.

    `known` has the episodes of this unit that the table holds already; `seal` those that are to be sealed as
    aborted where they are not complete.
    """
    events = pa.concat_tables([table for _, table in segments]) if segments else EVENT_SCHEMA.empty_table()
    keys = _keys(segments, events)
    sums = Sums(events=len(keys))

    unique = keys.unique(["writer", "sequence"], keep="first", maintain_order=True)
    sums.duplicate_events = len(keys) - len(unique)
    recorded = unique.filter(pl.col("kind").is_in(["begin", "step", "end"]))
    takes, decisions = _choose(recorded, known, seal)

    verdicts = recorded.join(takes, on=["episode_id", "attempt", "writer"], how="left")
    counts = dict(verdicts.group_by("verdict").len().iter_rows())
    sums.duplicate_events += counts.get("duplicate", 0)
    sums.pending_events += counts.get("pending", 0)
    kept = verdicts.filter(pl.col("verdict") == "keep")
    sums.steps = int((kept["kind"] == "step").sum())
    sums.begins_and_ends = len(kept) - sums.steps

    names = [SegmentName.parse(segment.key) for segment, _ in segments]
    episodes, steps = _rows(events, names, kept)
    merged = Merged(steps, episodes, sums, decisions)
    _apply_late(events, unique, merged, known)
    _say_by_segment([segment.key for segment, _ in segments], keys, merged)
    if sums.explained != sums.events:
        raise AssertionError(f"{sums.events} events came in, {sums.explained} are accounted for: {sums}")
    return merged


def _keys(segments: Sequence[tuple[PlannedSegment, pa.Table]], events: pa.Table) -> pl.DataFrame:
    """The light columns of this unit's events, with their row in `events`, their segment (its place in `segments`),
    their writer (numbered in the order of epochs), and how many steps an end says that there are (`said`). What other
    units take stays in `events`: to leave it out there would copy the rest."""
    names = [SegmentName.parse(segment.key) for segment, _ in segments]
    writers = sorted({(name.run_id, name.worker_id, name.epoch) for name in names})
    numbers = {writer: number for number, writer in enumerate(writers)}
    lengths = [len(table) for _, table in segments]
    mine = [
        np.ones(len(table), bool)
        if segment.episodes is None
        else pc.is_in(table["episode_id"], pa.array(segment.episodes, pa.string())).to_numpy()
        for segment, table in segments
    ]
    keys = pl.from_arrow(events.select(["kind", "episode_id", "attempt", "sequence"]))
    said = pl.from_arrow(pc.struct_field(events["end"], "n_steps"))
    assert isinstance(keys, pl.DataFrame)
    assert isinstance(said, pl.Series)
    of_segment = pl.DataFrame(
        {
            "segment": range(len(names)),
            "writer": [numbers[name.run_id, name.worker_id, name.epoch] for name in names],
            "epoch": [name.epoch for name in names],
            "landed_at": [segment.modified_at for segment, _ in segments],
            "again": [segment.again for segment, _ in segments],
        },
        schema={
            "segment": pl.Int32,
            "writer": pl.Int32,
            "epoch": pl.Int32,
            "landed_at": pl.Int64,
            "again": pl.Boolean,
        },
    )
    return (
        keys.with_columns(said=said, segment=pl.Series(np.repeat(np.arange(len(names)), lengths), dtype=pl.Int32))
        .with_row_index("row")
        .filter(pl.Series(np.concatenate([np.empty(0, bool), *mine])))
        .join(of_segment, on="segment", how="left", maintain_order="left")
    )


def _choose(
    recorded: pl.DataFrame, known: Mapping[str, KnownEpisode], seal: frozenset[str]
) -> tuple[pl.DataFrame, Decisions]:
    """The verdict on each take (`keep`, `duplicate` or `pending`) with what is `missing` of it (null: nothing), and the
    episodes by what became of them."""
    is_end = pl.col("kind") == "end"
    takes = (
        recorded.group_by(["episode_id", "attempt", "writer"])
        .agg(
            begun=(pl.col("kind") == "begin").any(),
            ended=is_end.any(),
            steps=(pl.col("kind") == "step").sum(),
            said=pl.when(~(is_end & pl.col("said").is_null()).any()).then(pl.col("said").sum()),
            epoch=pl.col("epoch").first(),
            length=pl.len(),
        )
        .with_columns(complete=pl.col("begun") & pl.col("ended") & (pl.col("said") == pl.col("steps")).fill_null(True))
        .with_columns(length=pl.when("complete").then(0).otherwise("length"))
        .sort(
            ["episode_id", "complete", "attempt", "length", "epoch", "writer"],
            descending=[False, True, True, True, True, True],
        )
        .with_columns(first=pl.int_range(pl.len()).over("episode_id") == 0)
    )
    verdicts: list[str] = []
    lacks: list[str | None] = []
    found = Decisions()
    best: tuple[bool, int] = (False, 0)  # of this episode's first take: whether more may come of it, and its attempt
    columns = ("episode_id", "attempt", "complete", "begun", "ended", "steps", "said", "first")
    for episode_id, attempt, complete, begun, ended, steps, said, first in takes.select(columns).iter_rows():
        before = known.get(episode_id)
        missing = None if complete else what_is_missing(begun=begun, ended=ended, steps=steps, said=said)
        # A take of which only the rest came, after its episode was settled, must not replace what is there.
        replaces = begun or before is None or (not before.begun and steps >= before.steps)
        waits = not complete and (episode_id not in seal or not replaces)
        if first:
            # What comes of an episode that was sealed is added at once: nobody would look for it later.
            grows = (
                before is not None
                and not before.complete
                and replaces
                and attempt == before.attempt
                and steps >= before.steps
            )
            settled = before is not None and before.complete and attempt <= before.attempt
            if settled or (before is not None and before.complete and not complete and not waits):
                verdict = "duplicate"
            else:
                verdict = "pending" if waits and not grows else "keep"
            best = (waits and verdict != "duplicate", attempt)
        else:
            # A take that is still being recorded may win when it ends, so it waits too.
            verdict = "pending" if waits and (best[0] or attempt > best[1]) else "duplicate"
        verdicts.append(verdict)
        lacks.append(missing)
        if verdict == "duplicate":
            found.duplicates.append(episode_id)
        elif verdict == "keep" and before is not None:
            found.replaced.append(episode_id)
        if verdict != "duplicate" and not complete:
            # A sealed episode stays in the ledger as pending: should its writer go on after all, its earlier
            # events are read again and the whole replaces what was sealed.
            found.pending.append(episode_id)
            if verdict == "keep":
                found.sealed.append(episode_id)
            if missing != NO_END:
                found.incomplete.append(episode_id)
    takes = takes.with_columns(verdict=pl.Series(verdicts, dtype=pl.String), missing=pl.Series(lacks, dtype=pl.String))
    return takes.select(["episode_id", "attempt", "writer", "verdict", "missing"]), found


def _rows(events: pa.Table, names: Sequence[SegmentName], kept: pl.DataFrame) -> tuple[pa.Table, UnitSteps]:
    """Episode rows (ordered so that rollouts of one task are neighbours), their steps in the same order."""
    begins = kept.filter(pl.col("kind") == "begin").unique(["episode_id"], keep="first", maintain_order=True)
    ends = kept.filter(pl.col("kind") == "end").unique(["episode_id"], keep="last", maintain_order=True)
    one = kept.group_by("episode_id").agg(
        attempt=pl.col("attempt").first(),
        row=pl.col("row").min(),
        segment=pl.col("segment").min(),
        n_steps=(pl.col("kind") == "step").sum(),
        missing=pl.col("missing").first(),
    )
    one = one.join(begins.select("episode_id", begin="row"), on="episode_id", how="left")
    one = one.join(ends.select("episode_id", end="row"), on="episode_id", how="left")

    tasks = taken(events, "begin", one["begin"], ["task_family", "task_id"])
    one = one.with_columns(**{name: pl.Series(column) for name, column in tasks.items()})
    one = one.sort(["task_family", "task_id", "episode_id"])

    order = one.select("episode_id").with_row_index("place")
    step_keys = kept.filter(pl.col("kind") == "step").join(order, on="episode_id", how="left")
    step_keys = step_keys.sort(["place", "sequence"]).with_columns(
        step_index=pl.int_range(pl.len(), dtype=pl.Int32).over("episode_id")
    )
    steps = UnitSteps(events, step_keys, one["n_steps"].to_list())
    return _episodes(events, names, one, steps), steps


def _episodes(
    events: pa.Table,
    names: Sequence[SegmentName],
    one: pl.DataFrame,
    steps: UnitSteps,
) -> pa.Table:
    begin, end = taken(events, "begin", one["begin"]), taken(events, "end", one["end"])
    missing = one["missing"].to_arrow().cast(pa.string())
    recorded = whole(events["recorded_at"])
    writers = [names[segment] for segment in one["segment"]]

    def when(what: dict[str, pa.Array], rows: str) -> pa.Array:
        """The source's own time, else the writer's; an import without times leaves it open."""
        own = recorded.take(one[rows].to_arrow())
        imported = pc.is_valid(begin["source_format"])
        return pc.if_else(
            pc.is_valid(what["occurred_at"]), what["occurred_at"], pc.if_else(imported, pa.scalar(None, own.type), own)
        )

    started, finished = when(begin, "begin"), when(end, "end")
    # Not safe: centuries of microseconds are more than a float holds to the last one.
    took = pc.cast(pc.subtract(finished.cast(pa.int64()), started.cast(pa.int64())), pa.float64(), safe=False)
    wall = pc.divide(took, 1000.0)
    columns: dict[str, Any] = {
        "episode_id": one["episode_id"].to_arrow().cast(pa.string()),
        "attempt": one["attempt"].to_arrow(),
        "run_id": pa.array([writer.run_id for writer in writers], pa.string()),
        "worker_id": pa.array([writer.worker_id for writer in writers], pa.string()),
        "epoch": pa.array([writer.epoch for writer in writers], pa.int32()),
        **{column.name: begin[column.name] for column in BEGIN},
        **{column.name: end[column.name] for column in OUTCOME},
        "started_at": started,
        "ended_at": finished,
        "wall_ms": wall,
        "extra": _merge_json(begin["extra"], end["extra"]),
        "restore": _merge_json(begin["restore"], end["restore"]),
        **of_steps(steps),
    }
    columns["status"] = pc.if_else(pc.is_valid(missing), "aborted", columns["status"])
    columns["stop_reason"] = pc.coalesce(missing, columns["stop_reason"])
    arrays = [
        columns[column.name].cast(column.type) if column.name in columns else pa.nulls(len(one), column.type)
        for column in EPISODES
    ]
    return pa.Table.from_arrays(arrays, schema=EPISODES.arrow)


def _merge_json(first: pa.Array, second: pa.Array) -> pa.Array:
    """JSON objects of both, the second's keys winning."""
    if second.null_count == len(second):
        return first
    pairs = zip(first.to_pylist(), second.to_pylist(), strict=True)
    return pa.array(
        [merged_objects(one, two) for one, two in pairs],
        pa.string(),
    )


def _apply_late(events: pa.Table, unique: pl.DataFrame, merged: Merged, known: Mapping[str, KnownEpisode]) -> None:
    """Scores and retractions: onto rows of this unit, or left for rows that the table has, or pending. Of several the
    last that landed counts, by the clock of the store."""
    late = unique.filter(pl.col("kind").is_in(["score", "retract"])).sort(["landed_at", "writer", "sequence"])
    if late.is_empty():
        return
    here = set(merged.episodes["episode_id"].to_pylist())
    begun = set(merged.decisions.pending)
    for kind, episode_id, row, again in late.select(["kind", "episode_id", "row", "again"]).iter_rows():
        if episode_id not in here and episode_id not in known:
            merged.sums.pending_events += 1
            merged.decisions.pending.append(episode_id)
            if episode_id not in begun:
                merged.decisions.unknown.append(episode_id)
        elif kind == "score":
            merged.sums.scores += 1
            # With a segment that is read again come scores that the table's row has, or has others for by now.
            applied = {APPLIED: True} if again and episode_id in known else {}
            merged.late_scores.setdefault(episode_id, []).append(events["score"][row].as_py() | applied)
        else:
            merged.sums.retractions += 1
            merged.late_retractions[episode_id] = events["retract"][row].as_py()["reason"] or NO_REASON


def _say_by_segment(segments: Sequence[str], keys: pl.DataFrame, merged: Merged) -> None:
    merged.events_by_segment = dict.fromkeys(segments, 0)
    for segment, count in keys.group_by("segment").len().iter_rows():
        merged.events_by_segment[segments[segment]] = count
    pending = pl.Series(merged.decisions.pending, dtype=pl.String)
    waiting = keys.filter(pl.col("episode_id").is_in(pending.implode()))
    for segment, episodes in waiting.group_by("segment").agg(pl.col("episode_id").unique().sort()).iter_rows():
        merged.pending_by_segment[segments[segment]] = episodes

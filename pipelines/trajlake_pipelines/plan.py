"""The planner: which segments are new, which episodes they touch, and who shall merge what.

Compactions are numbered. The plan of number n is one object, `jobs/compact/<n>/plan.json`, put if absent: whoever
comes second, or comes back after a crash, works on the same plan. So at any time all compactors of a lake share one
compaction, and number n + 1 is planned only when n is committed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl

from trajlake.errors import SegmentUnreadable, StoreUnavailable
from trajlake.ingest.segment import (
    LANDING,
    TAIL_BYTES,
    Descriptor,
    SegmentName,
    decode_segment,
    describe,
    read_descriptor,
)
from trajlake.storage import ByteRange, ObjectInfo, ObjectStore, Unknown
from trajlake.table.tables import open_table
from trajlake_pipelines.merge import NO_END

APPLICATION = "compact"
UNIT_BYTES = 64 << 20  # of segments (compressed) that one unit reads
_THREADS = 16


@dataclass(frozen=True)
class PlannedSegment:
    """One segment of the plan. `modified_at` in microseconds since 1970, by the server's clock."""

    key: str
    size: int
    modified_at: int
    again: bool = False  # it was consumed before, and some of its episodes had not ended


@dataclass(frozen=True)
class Unit:
    """What one worker merges: the events of `episodes` in `segments` (of all their episodes, where it is None)."""

    number: int
    segments: tuple[PlannedSegment, ...]
    episodes: tuple[str, ...] | None
    known: dict[str, tuple[int, bool]]  # episode to (attempt, complete), as the table has it
    seal: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One compaction. `quarantined` maps keys of segments that cannot be planned to the reason."""

    number: int
    created_at: float
    units: tuple[Unit, ...]
    quarantined: dict[str, str] = field(default_factory=dict)
    quarantined_segments: tuple[PlannedSegment, ...] = ()

    @property
    def folder(self) -> str:
        return job_folder(self.number)


def job_folder(number: int) -> str:
    """Where the objects of one compaction lie."""
    return f"jobs/{APPLICATION}/{number:08d}"


def load_or_make_plan(store: ObjectStore, *, stale_after: float | None, unit_bytes: int = UNIT_BYTES) -> Plan | None:
    """The plan that is to be carried out now, or None where nothing is to be done.

    `stale_after` is in seconds: an episode whose last event is older by the server's clock, and has no end, is
    sealed; None seals nothing.
    """
    ledger = open_table(store, "segments")
    number = (ledger.transaction_version(APPLICATION) or 0) + 1
    key = f"{job_folder(number)}/plan.json"
    if store.stat(key) is not None:
        return _from_json(store.get(key))
    plan = _make_plan(store, number, stale_after, unit_bytes)
    if plan is None:
        return None
    outcome = store.put_if_absent(key, json.dumps(asdict(plan), separators=(",", ":")).encode())
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return _from_json(store.get(key))  # ours, or that of the compactor that was faster


def _from_json(data: bytes) -> Plan:
    body: dict[str, Any] = json.loads(data)
    units = tuple(unit_from_json(unit) for unit in body["units"])
    broken = tuple(PlannedSegment(**segment) for segment in body["quarantined_segments"])
    return Plan(body["number"], body["created_at"], units, body["quarantined"], broken)


def unit_from_json(body: dict[str, Any]) -> Unit:
    """A unit as it crosses a shuffle."""
    return Unit(
        body["number"],
        tuple(PlannedSegment(**segment) for segment in body["segments"]),
        None if body["episodes"] is None else tuple(body["episodes"]),
        {episode: (attempt, complete) for episode, (attempt, complete) in body["known"].items()},
        tuple(body["seal"]),
    )


def _make_plan(store: ObjectStore, number: int, stale_after: float | None, unit_bytes: int) -> Plan | None:
    waiting = _ledger(store, "pending").select("path", "bytes", "modified_at", "pending_episodes").collect()
    new, broken, descriptors = _new_segments(store)
    if not new and not broken and (stale_after is None or waiting.is_empty()):
        return None
    parts = _episode_parts(new, descriptors, waiting)
    known = _known_episodes(store, parts)
    now = time.time()
    parts, seal = _involved(parts, known, stale_after, now)
    segments = {info.key: PlannedSegment(info.key, info.size, _microseconds(info)) for info in new}
    for path, size, modified_at in waiting.select("path", "bytes", pl.col("modified_at").dt.epoch("us")).iter_rows():
        segments[path] = PlannedSegment(path, size, modified_at, again=True)
    units = assign_units(parts, segments, known, seal, unit_bytes)
    empty = [key for key, descriptor in descriptors.items() if not descriptor.episodes]
    if empty:  # a segment without events belongs to no episode, but must be consumed
        units.append(Unit(len(units), tuple(segments[key] for key in empty), None, {}, ()))
    if not units and not broken:
        return None
    broken_segments = tuple(PlannedSegment(info.key, info.size, _microseconds(info)) for info, _ in broken)
    return Plan(number, now, tuple(units), {info.key: reason for info, reason in broken}, broken_segments)


def _microseconds(info: ObjectInfo) -> int:
    return int(info.modified_at.timestamp() * 1_000_000)


def _ledger(store: ObjectStore, state: str | None = None) -> pl.LazyFrame:
    table = open_table(store, "segments")
    frame = pl.scan_delta(table)
    return frame if state is None else frame.filter(pl.col("state") == state)


def _new_segments(
    store: ObjectStore,
) -> tuple[list[ObjectInfo], list[tuple[ObjectInfo, str]], dict[str, Descriptor]]:
    """Segments that the ledger does not have: those with a descriptor, and those that cannot be read and why."""
    listed = [info for info in store.list(f"{LANDING}/") if info.key.endswith(".arrow")]
    if not listed:
        return [], [], {}
    consumed = set(_ledger(store).select("path").collect()["path"])
    fresh = [info for info in listed if info.key not in consumed]
    good: list[ObjectInfo] = []
    broken: list[tuple[ObjectInfo, str]] = []
    descriptors: dict[str, Descriptor] = {}
    with ThreadPoolExecutor(_THREADS) as pool:
        for info, found in zip(fresh, pool.map(lambda info: _descriptor(store, info), fresh), strict=True):
            if isinstance(found, str):
                broken.append((info, found))
            else:
                good.append(info)
                descriptors[info.key] = found
    return good, broken, descriptors


def _descriptor(store: ObjectStore, info: ObjectInfo) -> Descriptor | str:
    """The segment's descriptor, from its tail where it has one, or the reason why the segment is unreadable."""
    try:
        SegmentName.parse(info.key)
        if info.size == 0:
            return "the object is empty"
        length = min(info.size, TAIL_BYTES)
        tail = store.get_ranges(info.key, [ByteRange(info.size - length, length)])[0]
        found = read_descriptor(tail, info.key)
        if found is None:
            data = store.get(info.key)
            found = read_descriptor(data, info.key) or describe(decode_segment(data, info.key))
        return found
    except SegmentUnreadable as error:
        return str(error)


def _episode_parts(new: list[ObjectInfo], descriptors: dict[str, Descriptor], waiting: pl.DataFrame) -> pl.DataFrame:
    """One row an episode and segment: episode_id, path, bytes (the episode's share), ends, new, modified_at."""
    rows = [
        (part.episode_id, info.key, info.size * part.events / max(1, descriptors[info.key].events), part.ends)
        for info in new
        for part in descriptors[info.key].episodes
    ]
    fresh = pl.DataFrame(
        rows,
        schema={"episode_id": pl.String, "path": pl.String, "bytes": pl.Float64, "ends": pl.Boolean},
        orient="row",
    )
    times = pl.DataFrame(
        {"path": [info.key for info in new], "modified_at": [_microseconds(info) for info in new]},
        schema={"path": pl.String, "modified_at": pl.Int64},
    )
    fresh = fresh.join(times, on="path", how="left").with_columns(new=pl.lit(True))
    old = waiting.select(
        episode_id="pending_episodes",
        path="path",
        bytes=pl.col("bytes") / pl.col("pending_episodes").list.len(),
        ends=pl.lit(False),
        modified_at=pl.col("modified_at").dt.epoch("us"),
        new=pl.lit(False),
    ).explode("episode_id")
    return pl.concat([fresh, old], how="vertical_relaxed")


def _known_episodes(store: ObjectStore, parts: pl.DataFrame) -> dict[str, tuple[int, bool]]:
    """Which of these episodes the table has: attempt, and whether it is complete (not sealed)."""
    table = open_table(store, "episodes")
    touched = parts.lazy().select("episode_id").unique()
    rows = (
        pl.scan_delta(table)
        .select("episode_id", "attempt", sealed=(pl.col("stop_reason") == NO_END).fill_null(False))
        .join(touched, on="episode_id", how="semi")
        .collect(engine="streaming")
    )
    return {episode: (attempt, not sealed) for episode, attempt, sealed in rows.iter_rows()}


def _involved(
    parts: pl.DataFrame, known: dict[str, tuple[int, bool]], stale_after: float | None, now: float
) -> tuple[pl.DataFrame, set[str]]:
    """The parts that this compaction reads, and the episodes that it seals.

    Read is what new segments touch, and what is to be sealed; an episode that only waits is left alone.
    """
    by_episode = parts.group_by("episode_id").agg(
        last=pl.col("modified_at").max(), new=pl.col("new").any(), ends=pl.col("ends").any()
    )
    seal: set[str] = set()
    if stale_after is not None:
        limit = int((now - stale_after) * 1_000_000)
        # The sealed ones that nothing was added to stay as they are.
        candidates = by_episode.filter(~pl.col("ends") & (pl.col("last") <= limit))
        seal = {
            episode
            for episode, fresh in candidates.select("episode_id", "new").iter_rows()
            if fresh or episode not in known
        }
    wanted = by_episode.filter(pl.col("new") | pl.col("episode_id").is_in(list(seal)))
    return parts.join(wanted.select("episode_id"), on="episode_id", how="semi"), seal


def assign_units(
    parts: pl.DataFrame,
    segments: dict[str, PlannedSegment],
    known: dict[str, tuple[int, bool]],
    seal: Iterable[str],
    unit_bytes: int,
) -> list[Unit]:
    """Bins of whole episodes, each of about `unit_bytes`, in the order in which segments were written.

    Neighbouring episodes share segments, so bins of neighbours read few segments twice.
    """
    if parts.is_empty():
        return []
    whole = parts.group_by("episode_id").agg(first=pl.col("path").min(), bytes=pl.col("bytes").sum())
    whole = whole.sort(["first", "episode_id"]).with_columns(
        unit=((pl.col("bytes").cum_sum() - pl.col("bytes") / 2) / unit_bytes).floor().cast(pl.Int64)
    )
    whole = whole.with_columns(unit=pl.col("unit").rank("dense").cast(pl.Int64) - 1)
    placed = parts.join(whole.select("episode_id", "unit"), on="episode_id", how="left")
    readers = placed.group_by("path").agg(readers=pl.col("unit").n_unique())
    shared = set(readers.filter(pl.col("readers") > 1)["path"])
    sealed = set(seal)
    units = []
    grouped = placed.group_by("unit").agg(pl.col("path").unique(), pl.col("episode_id").unique()).sort("unit")
    for number, paths, episodes in grouped.iter_rows():
        taken = tuple(segments[path] for path in sorted(paths))
        # A segment that others read too, or that was consumed before, holds events that are not this unit's.
        partly = any(segment.again or segment.key in shared for segment in taken)
        units.append(
            Unit(
                number,
                taken,
                tuple(sorted(episodes)) if partly else None,
                {episode: known[episode] for episode in episodes if episode in known},
                tuple(episode for episode in episodes if episode in sealed),
            )
        )
    return units


Progress = Callable[[int, int], None]

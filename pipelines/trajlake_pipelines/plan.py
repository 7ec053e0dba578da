"""The plan of one numbered change of the tables, and the planner of compactions.

Changes are numbered. The plan of number n is one object, `jobs/compact/<n>/plan.json`, put if absent: whoever
comes second, or comes back after a crash, works on the same plan. So at any time all processes that change a lake
share one plan, and number n + 1 is planned only when n is committed. A compaction, an optimize, a retract and a
dedupe are all such changes, so that they are safe beside each other and finish what one of them began.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import polars as pl

from trajlake.errors import ObjectMissing, SegmentUnreadable, StoreError, StoreUnavailable
from trajlake.ingest.segment import (
    TAIL_BYTES,
    Descriptor,
    EpisodePart,
    SegmentName,
    decode_segment,
    describe,
    read_descriptor,
)
from trajlake.storage import ByteRange, ObjectInfo, ObjectStore, Unknown
from trajlake.table.tables import RETENTION_HOURS, open_table
from trajlake_pipelines.frontier import Frontier, list_new, load_frontier
from trajlake_pipelines.lookup import known_episodes
from trajlake_pipelines.tombstones import tombstones_among
from trajlake_pipelines.units import KnownEpisode, Parts, PlannedSegment, Unit, assign_units, involved, unit_from_json
from trajlake_schemas import TABLES

APPLICATION = "compact"
UNIT_BYTES = 32 << 20  # of segments (compressed) that one unit reads; it takes about 0.4 GB of memory
PLAN_BYTES = 4 << 30  # of new segments in one plan: it bounds the driver, which holds its episode rows
_THREADS = 16
_NEVER_AGAIN = 2**31 - 1  # no attempt is later
KEEP_SEALED_SECONDS = RETENTION_HOURS * 3600  # how long events of a sealed episode wait for its writer to go on
_DESCRIPTORS_AT_ONCE = 1_024  # in memory before they become columns

Progress = Callable[[int, int], None]
"""Called with units done and units planned."""


@dataclass(frozen=True)
class Plan:
    """One change of the tables. `quarantined` maps keys of segments that cannot be planned to the reason; `gone` are
    epochs of which landing holds nothing any more; `details` is what the kinds other than `compact` need; `more` where
    a compaction left new segments for the next; `released` are episodes for which segments no longer wait."""

    number: int
    created_at: float
    units: tuple[Unit, ...] = ()
    quarantined: dict[str, str] = field(default_factory=dict)
    quarantined_segments: tuple[PlannedSegment, ...] = ()
    gone: tuple[str, ...] = ()
    kind: str = "compact"
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return job_folder(self.number)

    def frontier_after(self, before: Frontier) -> Frontier:
        """How far landing is consumed once this is committed."""
        keys = [segment.key for unit in self.units for segment in unit.segments if not segment.again]
        return before.without_epochs(self.gone).with_keys([*keys, *self.quarantined])


def job_folder(number: int) -> str:
    """Where the objects of one change lie."""
    return f"jobs/{APPLICATION}/{number:08d}"


def plan_key(number: int) -> str:
    """Where the plan of a number lies."""
    return f"{job_folder(number)}/plan.json"


def result_key(number: int, unit: int) -> str:
    """Where the result of a unit lies."""
    return f"{job_folder(number)}/units/{unit:06d}.json"


def put_result(store: ObjectStore, number: int, unit: int, result: Mapping[str, Any]) -> None:
    """Say what a unit did; the first who says so is believed. Raises StoreUnavailable."""
    data = json.dumps(result, separators=(",", ":")).encode()
    outcome = store.put_if_absent(result_key(number, unit), data)
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error


def next_number(store: ObjectStore) -> int:
    """The number that is planned or carried out now: one more than what the ledger has."""
    return (open_table(store, "segments").transaction_version(APPLICATION) or 0) + 1


def load_plan(store: ObjectStore, number: int) -> Plan | None:
    """The plan of a number, where there is one."""
    try:
        return _read_plan(store, number)
    except ObjectMissing:
        return None


def propose(store: ObjectStore, plan: Plan) -> Plan:
    """Put the plan if there is none of its number; the one that holds, ours or that of who was faster."""
    outcome = store.put_if_absent(plan_key(plan.number), json.dumps(asdict(plan), separators=(",", ":")).encode())
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return _read_plan(store, plan.number)


def _read_plan(store: ObjectStore, number: int) -> Plan:
    """Raises ObjectMissing, StoreError where it is no plan."""
    data = store.get(plan_key(number))
    try:
        return _plan_of(json.loads(data))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        remedy = (
            f"end what works on this lake, remove what is below {job_folder(number)}/, and compact plans anew"
            if all((open_table(store, name).transaction_version(APPLICATION) or 0) < number for name in TABLES)
            else "a part of it is committed: restore the object from a backup or from the bucket's older versions"
        )
        raise StoreError(f"{plan_key(number)}, the change that is going on, is damaged ({error}): {remedy}") from error


def _plan_of(body: dict[str, Any]) -> Plan:
    units = tuple(unit_from_json(unit) for unit in body["units"])
    broken = tuple(PlannedSegment(**segment) for segment in body["quarantined_segments"])
    return Plan(
        body["number"],
        body["created_at"],
        units,
        body["quarantined"],
        broken,
        tuple(body.get("gone", ())),
        body.get("kind", "compact"),
        body.get("details", {}),
    )


def load_or_make_plan(store: ObjectStore, *, stale_after: float | None, unit_bytes: int = UNIT_BYTES) -> Plan | None:
    """The plan that is to be carried out now, or None where nothing is to be done.

    `stale_after` is in seconds: an episode whose last event is older by the server's clock, and has no end, is
    sealed; None seals nothing.
    """
    number = next_number(store)
    plan = load_plan(store, number)
    if plan is not None:
        return plan
    made = _make_plan(store, number, stale_after, unit_bytes)
    return None if made is None else propose(store, made)


def _make_plan(store: ObjectStore, number: int, stale_after: float | None, unit_bytes: int) -> Plan | None:
    frontier = load_frontier(store, job_folder(number - 1))
    listing = list_new(store, frontier)
    if not listing.new and stale_after is None:
        return None
    parts = Parts()
    for path, size, modified_at, pending in _waiting(store).iter_rows():
        parts.add_waiting(PlannedSegment(path, size, modified_at, again=True), pending)
    if not listing.new and not parts.segments:
        return None
    new = _at_most(listing.new, PLAN_BYTES)
    broken = _describe(store, new, parts)
    frame = parts.frame()
    known = known_episodes(store, frame["episode_id"], frontier.runs)
    known |= dict.fromkeys(tombstones_among(store, frame["episode_id"]), KnownEpisode(_NEVER_AGAIN, True))
    now = time.time()
    tried = _tried_to_seal(store, number - 1) if stale_after is not None else set()
    released = _released(store, frame, parts.segments, known, tried, now)
    frame = frame.filter(~pl.col("episode_id").is_in(list(released)))
    frame, seal = involved(frame, parts.segments, known, stale_after, now)
    if not new and not released and seal <= tried:
        return None
    units = assign_units(frame, parts.segments, known, seal, unit_bytes)
    if parts.empty:  # a segment without events belongs to no episode, but must be consumed
        units.append(Unit(len(units), tuple(parts.segments[place] for place in parts.empty), {}, ()))
    if not units and not broken and not released:
        return None
    broken_segments = tuple(planned(info) for info, _ in broken)
    reasons = {info.key: reason for info, reason in broken}
    details: dict[str, Any] = {"more": True} if len(new) < len(listing.new) else {}
    details |= {"released": sorted(released)} if released else {}
    return Plan(number, now, tuple(units), reasons, broken_segments, tuple(listing.gone), details=details)


def _tried_to_seal(store: ObjectStore, number: int) -> set[str]:
    """Episodes that this plan sealed, or could not: of some only a score or a retraction has come."""
    plan = load_plan(store, number)
    return set() if plan is None else {episode for unit in plan.units for episode in unit.seal}


def _released(
    store: ObjectStore,
    frame: pl.DataFrame,
    segments: Sequence[PlannedSegment],
    known: Mapping[str, KnownEpisode],
    tried: Collection[str],
    now: float,
) -> set[str]:
    """Episodes for which nothing waits any longer: sealed ones of which the last event is older than
    KEEP_SEALED_SECONDS, complete ones of which a later attempt has come no further for as long, and equally old scores
    of episodes that never came.

    What came of a sealed episode after that waits for ever: no row has it. It is told by the beginning, which is not
    among it, or, where the episode was sealed without one, by being less than was sealed.
    """
    limit = int((now - KEEP_SEALED_SECONDS) * 1_000_000)
    times = pl.Series("last", [segment.modified_at for segment in segments], dtype=pl.Int64)
    waiting = (
        frame.with_columns(last=times.gather(frame["segment"]))
        .group_by("episode_id")
        .agg(pl.col("segment"), last=pl.col("last").max(), new=pl.col("new").any())
        .filter(~pl.col("new") & (pl.col("last") <= limit))
    )
    sealed: dict[str, list[int]] = {}
    given_up: set[str] = set()
    for episode, places in waiting.select("episode_id", "segment").iter_rows():
        if episode in known and not known[episode].complete:
            sealed[episode] = places
        elif episode in known or episode in tried:
            given_up.add(episode)
    places = sorted({place for some in sealed.values() for place in some})
    with ThreadPoolExecutor(_THREADS) as pool:
        read = dict(zip(places, pool.map(lambda place: _parts_of(store, segments[place]), places), strict=True))

    def has_its_row(episode: str, places: list[int]) -> bool:
        parts = [part for place in places for part in read[place].get(episode, ())]
        row = known[episode]
        return any(part.begins for part in parts) or (not row.begun and sum(part.events for part in parts) >= row.steps)

    return given_up | {episode for episode, places in sealed.items() if has_its_row(episode, places)}


def _parts_of(store: ObjectStore, segment: PlannedSegment) -> dict[str, list[EpisodePart]]:
    """What a segment holds of each episode."""
    modified = datetime.fromtimestamp(segment.modified_at / 1e6, UTC)
    found = read_one(store, ObjectInfo(segment.key, segment.size, modified))
    parts: dict[str, list[EpisodePart]] = {}
    for part in () if isinstance(found, str) else found.episodes:
        parts.setdefault(part.episode_id, []).append(part)
    return parts


def _at_most(segments: list[ObjectInfo], limit: int) -> list[ObjectInfo]:
    """The first segments, of at most about `limit` bytes and as much as each of the plans that follow: those of one
    writer stand together, so few episodes are cut."""
    ends = list(accumulate(info.size for info in segments))
    if not ends or ends[-1] <= limit:
        return segments
    share = ends[-1] / math.ceil(ends[-1] / limit)
    return segments[: 1 + bisect_left(ends, share)]


def planned(info: ObjectInfo) -> PlannedSegment:
    """A segment as it was listed."""
    return PlannedSegment(info.key, info.size, int(info.modified_at.timestamp() * 1_000_000))


def _waiting(store: ObjectStore) -> pl.DataFrame:
    """The segments that hold episodes that have not ended: the partition `pending` alone is read."""
    return (
        pl.scan_delta(open_table(store, "segments"))
        .filter(pl.col("state") == "pending")
        .select("path", "bytes", pl.col("modified_at").dt.epoch("us"), "pending_episodes")
        .collect()
        .sort("path")
    )


def _describe(store: ObjectStore, new: list[ObjectInfo], parts: Parts) -> list[tuple[ObjectInfo, str]]:
    """Add the new segments to `parts`; those that cannot be read, and why."""
    broken: list[tuple[ObjectInfo, str]] = []
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(new), _DESCRIPTORS_AT_ONCE):
            some = new[start : start + _DESCRIPTORS_AT_ONCE]
            for info, found in zip(some, pool.map(lambda info: read_one(store, info), some), strict=True):
                if isinstance(found, str):
                    broken.append((info, found))
                else:
                    parts.add(planned(info), found)
    return broken


def read_one(store: ObjectStore, info: ObjectInfo) -> Descriptor | str:
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
    except ObjectMissing:
        return f"{info.key}: it was removed from the store before it was consumed"

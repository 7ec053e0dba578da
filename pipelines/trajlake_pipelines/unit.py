"""What one unit does, wherever a runner puts it: read, merge, write, and say so in one small object.

    jobs/compact/<n>/units/<unit>.json            what was done: files, sums, decisions
    jobs/compact/<n>/units/<unit>-<hash>.parquet  the episode rows, for the driver to commit

A unit that is repeated, by a retry or by another compactor, writes files with the same names or finds the object.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import ObjectMissing, SegmentUnreadable, StoreUnavailable
from trajlake.ingest.segment import decode_segment
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.layout import Place, content_name, encode_rows, put_steps, with_schema
from trajlake_pipelines.merge import Merged, merge
from trajlake_pipelines.plan import job_folder, put_result, result_key
from trajlake_pipelines.units import PlannedSegment, Unit

_THREADS = 8


@dataclass(frozen=True)
class UnitResult:
    """What a unit did. Everything that the driver needs to commit, and nothing large."""

    number: int
    steps_file: dict[str, Any] | None  # path, size, statistics
    episodes_key: str | None
    sums: dict[str, int]
    events_by_segment: dict[str, int]
    pending_by_segment: dict[str, list[str]]
    quarantined: dict[str, str]
    episodes: int = 0
    replaced: list[str] = field(default_factory=list)
    sealed: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    late_scores: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    late_retractions: dict[str, str] = field(default_factory=dict)


def run_unit(store: ObjectStore, compaction: int, unit: Unit) -> None:
    """Do the unit, unless its result is there already."""
    key = result_key(compaction, unit.number)
    if store.stat(key) is not None:
        return
    events, quarantined = _read(store, unit)
    merged = merge(events, unit.known, frozenset(unit.seal))
    events.clear()  # the memory is for what is encoded now
    result = _write(store, compaction, unit, merged, quarantined)
    put_result(store, compaction, unit.number, asdict(result))


def _read(store: ObjectStore, unit: Unit) -> tuple[list[tuple[PlannedSegment, pa.Table]], dict[str, str]]:
    """The segments that this unit takes events of, and those that cannot be read with the reason."""

    def decoded(segment: PlannedSegment, data: Future[bytes]) -> pa.Table | str:
        try:
            return decode_segment(data.result(), segment.key)
        except SegmentUnreadable as error:
            return str(error)
        except ObjectMissing:
            return f"{segment.key}: it was removed from the store before it was consumed"

    tables: list[tuple[PlannedSegment, pa.Table]] = []
    quarantined: dict[str, str] = {}
    pool = ThreadPoolExecutor(_THREADS)
    try:
        fetched = [pool.submit(store.get, segment.key) for segment in unit.segments]
        decoding = _decoder.thread.map(decoded, unit.segments, fetched)
        del fetched  # each is let go when it is decoded
        for segment, found in zip(unit.segments, decoding, strict=True):
            if isinstance(found, str):
                quarantined[segment.key] = found
            else:
                tables.append((segment, found))
    finally:
        pool.shutdown(cancel_futures=True)  # where one failed, the others are not waited for
    return tables, quarantined


class _Decoder(threading.local):
    """Of each thread that does units a second one, which decodes for it and lives as long. What was decoded is thus
    of another arena of the allocator than what is made of it, and each finds the memory that the last unit gave back:
    with both in one, or with new threads a unit, twice as much is asked of the system."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "trajlake-decode")


_decoder = _Decoder()


def _write(
    store: ObjectStore,
    compaction: int,
    unit: Unit,
    merged: Merged,
    quarantined: dict[str, str],
) -> UnitResult:
    steps_file = episodes_key = None
    episodes = merged.episodes
    if merged.sums.steps:
        parts, schema = with_schema(iter(merged.steps), lambda: merged.steps.columns)
        file, places = put_steps(store, f"{compaction:08d}-{unit.number:06d}", parts, schema)
        steps_file = {"path": file.path, "size": file.size, "statistics": dict(file.statistics)}
        episodes = with_places(episodes, file.path, places)
    if len(episodes):
        data = encode_rows(episodes)
        episodes_key = content_name(f"{job_folder(compaction)}/units/{unit.number:06d}", data)
        outcome = store.put_if_absent(episodes_key, data)
        if isinstance(outcome, Unknown):
            raise StoreUnavailable(str(outcome.error)) from outcome.error
    decisions = merged.decisions
    return UnitResult(
        number=unit.number,
        steps_file=steps_file,
        episodes_key=episodes_key,
        sums=vars(merged.sums),
        events_by_segment=merged.events_by_segment,
        pending_by_segment=merged.pending_by_segment,
        quarantined=quarantined,
        episodes=len(episodes),
        replaced=decisions.replaced,
        sealed=decisions.sealed,
        duplicates=decisions.duplicates,
        pending=sorted(set(decisions.pending)),
        incomplete=sorted(set(decisions.incomplete)),
        unknown=sorted(set(decisions.unknown)),
        late_scores=merged.late_scores,
        late_retractions=merged.late_retractions,
    )


def with_places(episodes: pa.Table, path: str, places: Sequence[Place]) -> pa.Table:
    """`episodes` with the place of their steps; `places` are those of the episodes that have steps, in order."""
    remaining = iter(places)
    found = [next(remaining) if count else None for count in episodes["n_steps"].to_pylist()]
    columns: dict[str, pa.Array] = {
        "steps_path": pa.array([None if place is None else path for place in found], pa.string()),
        "row_group": pa.array([place and place.row_group for place in found], pa.int32()),
        "row_offset": pa.array([place and place.row_offset for place in found], pa.int32()),
        "row_count": pa.array([place and place.row_count for place in found], pa.int32()),
    }
    for name, column in columns.items():
        episodes = episodes.set_column(episodes.schema.get_field_index(name), episodes.schema.field(name), column)
    return episodes


def load_episodes(store: ObjectStore, results: Sequence[UnitResult]) -> list[pa.Table]:
    """The episode rows of these units."""
    keys = [result.episodes_key for result in results if result.episodes_key]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [pq.read_table(pa.BufferReader(data)) for data in pool.map(store.get, keys)]

"""Changing rows that are committed: copy the files that hold them, without or with other values.

Delta files are immutable, so a change is a new file that comes and an old one that goes, in one commit. Only files
that can hold a touched episode are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from trajlake.storage import ObjectStore
from trajlake.table.commit import Change, NewFile, active_files
from trajlake.table.id_index import Runs, files_that_may_hold
from trajlake.table.layout import Part, Place, put_episodes, put_steps, with_nulls, with_schema
from trajlake.table.sizes import cut
from trajlake_schemas import EPISODES, STEPS
from trajlake_schemas.episodes import SCORED_REWARD, SCORED_SUCCESS

_VERDICTS = {1.0: True, 0.0: False}
NO_REASON = "no reason given"  # of a retraction
_PART_BYTES = 256 << 20  # of steps as Arrow that are copied at a time


def read_file(store: ObjectStore, table: str, path: str, columns: list[str] | None = None) -> pa.Table:
    """A whole file of `episodes` or `segments`."""
    return pq.read_table(pa.BufferReader(store.get(f"{table}/{path}")), columns=columns)


def run_lengths(episode_ids: pa.ChunkedArray) -> list[int]:
    """Lengths of the runs of equal neighbours."""
    encoded = pc.run_end_encode(pa.concat_arrays(episode_ids.chunks or [pa.array([], pa.string())]))
    return [int(length) for length in np.diff(encoded.run_ends.to_numpy(zero_copy_only=False), prepend=0)]


def moved_name(prefix: str) -> str:
    """How the names of files begin that hold what was left of others."""
    return f"{prefix}-moved"


def steps_without(
    store: ObjectStore, episodes_table: DeltaTable, episodes: Collection[str], runs: Runs | None, prefix: str
) -> Change:
    """Remove the steps of `episodes`. The other episodes of a touched file move to a new one, which
    begins with `moved_name(prefix)`, so that whoever commits `episodes` finds them. `runs`: of the index."""
    wanted = pa.array(sorted(episodes), pa.string())
    add: list[NewFile] = []
    remove: list[str] = []
    holders: set[str] = set()
    for path in files_that_may_hold(store, episodes_table, episodes, runs):
        rows = read_file(store, EPISODES.name, path, ["episode_id", "steps_path"])
        holders.update(rows.filter(pc.is_in(rows["episode_id"], wanted))["steps_path"].drop_null().to_pylist())
    for path in sorted(holders):
        file = pq.ParquetFile(pa.BufferReader(store.get(f"{STEPS.name}/{path}")))
        is_gone = pc.is_in(file.read(columns=["episode_id"])["episode_id"], wanted)
        if not pc.any(is_gone).as_py():
            continue
        remove.append(path)
        if not pc.all(is_gone).as_py():
            parts, schema = with_schema(_without(file, wanted), partial(list, file.schema_arrow.names))
            add.append(put_steps(store, moved_name(prefix), parts, schema)[0])
    return Change(add, remove)


def _without(file: pq.ParquetFile, episodes: pa.Array) -> Iterator[Part]:
    """The steps of the others, in parts of about _PART_BYTES."""
    sizes = np.cumsum([0, *map(_decoded_bytes, map(file.metadata.row_group, range(file.num_row_groups)))])
    waiting: list[pa.Table] = []
    for start, end in cut(sizes, _PART_BYTES):
        rows = file.read_row_groups(range(start, end))
        if waiting and rows["episode_id"][0] != waiting[-1]["episode_id"][-1]:
            yield _others(waiting, episodes)
            waiting = []
        waiting.append(rows)  # an episode that is so large that it has several row groups stays together
    yield _others(waiting, episodes)


def _others(tables: list[pa.Table], episodes: pa.Array) -> Part:
    rows = with_nulls(pa.concat_tables(tables), STEPS.arrow)
    keep = rows.filter(pc.invert(pc.is_in(rows["episode_id"], episodes)))
    return keep, run_lengths(keep["episode_id"])


def _decoded_bytes(group: pq.RowGroupMetaData) -> int:
    return sum(int(group.column(index).total_uncompressed_size) for index in range(group.num_columns))


def places_in(store: ObjectStore, paths: Iterable[str]) -> dict[str, tuple[str, Place]]:
    """Where the steps of every episode in these files of `steps` are."""
    found: dict[str, tuple[str, Place]] = {}
    for path in paths:
        file = pq.ParquetFile(pa.BufferReader(store.get(f"{STEPS.name}/{path}")))
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["episode_id"])["episode_id"]
            offset = 0
            for length in run_lengths(ids):
                episode = ids[offset].as_py()
                before = found.get(episode)
                if before is not None and before[0] == path:  # it goes on from the row group before
                    place = replace(before[1], row_count=before[1].row_count + length)
                else:
                    place = Place(group, offset, length)
                found[episode] = path, place
                offset += length
    return found


def episodes_changed(
    store: ObjectStore,
    episodes_table: DeltaTable,
    steps_table: DeltaTable,
    *,
    new: list[pa.Table],
    replaced: Collection[str],
    scores: dict[str, list[dict[str, Any]]],
    retractions: dict[str, str],
    runs: Runs | None,
    prefix: str,
) -> Change:
    """Add `new` rows, in the place of those that are `replaced`, and put late scores and retractions on any row.

    What late scores had put on a row that is replaced moves to its successor; where that is another attempt, which has
    been judged anew, only what it lacks. `runs`: of the index.
    """
    # Files of `steps` were copied, so rows of other episodes move along with those that were in them.
    copies = [path for path in active_files(steps_table)["path"].to_pylist() if path.startswith(moved_name(prefix))]
    moved = places_in(store, copies) if replaced else {}
    candidates = files_that_may_hold(store, episodes_table, {*replaced, *scores, *retractions, *moved}, runs)
    carried: dict[str, dict[str, Any]] = {}
    add: list[NewFile] = []
    remove: list[str] = []
    for path in candidates:
        rows = read_file(store, EPISODES.name, path)
        gone = pc.is_in(rows["episode_id"], pa.array(sorted(replaced), pa.string()))
        for old in rows.filter(gone).select(["episode_id", "attempt", "rewards", "retracted"]).to_pylist():
            carried[old["episode_id"]] = old
        after = rows.filter(pc.invert(gone))
        after = with_new_places(after, moved)
        after = _patched(after, scores, retractions)
        if after.equals(rows):
            continue
        remove.append(path)
        if len(after):
            add.append(put_episodes(store, prefix, after))
    if new:
        rows = pa.concat_tables(new).cast(EPISODES.arrow)
        rows = _patched(_carry(rows, carried), scores, retractions)
        add.append(put_episodes(store, prefix, rows))
    return Change(add, remove, {STEPS.name: steps_table.version()})


def with_new_places(rows: pa.Table, moved: Mapping[str, tuple[str, Place]]) -> pa.Table:
    """`rows` with the places of those episodes that are in `moved`."""
    ids = rows["episode_id"].to_pylist()
    if not any(episode in moved for episode in ids):
        return rows
    columns = {name: rows[name].to_pylist() for name in ("steps_path", "row_group", "row_offset", "row_count")}
    for index, episode in enumerate(ids):
        if episode in moved:
            path, place = moved[episode]
            columns["steps_path"][index], columns["row_group"][index] = path, place.row_group
            columns["row_offset"][index], columns["row_count"][index] = place.row_offset, place.row_count
    return with_columns(rows, columns)


def _carry(rows: pa.Table, carried: dict[str, dict[str, Any]]) -> pa.Table:
    attempts = dict(zip(rows["episode_id"].to_pylist(), rows["attempt"].to_pylist(), strict=True))
    scores = {
        episode: [{**component, APPLIED: old["attempt"] != attempts[episode]} for component in old["rewards"]]
        for episode, old in carried.items()
        if old["rewards"]
    }
    retractions = {episode: old["retracted"] for episode, old in carried.items() if old["retracted"]}
    return _patched(rows, scores, retractions)


def _patched(rows: pa.Table, scores: dict[str, list[dict[str, Any]]], retractions: dict[str, str]) -> pa.Table:
    """`rows` with reward components added and retractions set."""
    ids = rows["episode_id"].to_pylist()
    if not any(episode in scores or episode in retractions for episode in ids):
        return rows
    values = {name: rows[name].to_pylist() for name in LATE}
    add_late(ids, values, scores, retractions)
    return with_columns(rows, values)


APPLIED = "applied"
"""Whether a score, beside what it says, is none that has come since: it then changes no score that is there."""

LATE = ("rewards", "reward", "success", "retracted")
"""The columns of `episodes` that scores and retractions change."""


def add_late(
    ids: Sequence[str],
    values: dict[str, list[Any]],
    scores: Mapping[str, list[dict[str, Any]]],
    retractions: Mapping[str, str],
) -> None:
    """Add reward components and retractions to the columns LATE of these episodes, in place."""
    for index, episode in enumerate(ids):
        if components := scores.get(episode):
            has = {component["name"] for component in values["rewards"][index] or ()}
            has |= {name for name in (SCORED_REWARD, SCORED_SUCCESS) if values[name][index] is not None}
            late = [
                {name: value for name, value in component.items() if name != APPLIED}
                for component in components
                if not (component.get(APPLIED) and component["name"] in has)
            ]
            values["rewards"][index] = _merged_components(values["rewards"][index] or [], late)
            for component in late:
                if component["name"] == SCORED_REWARD:
                    values["reward"][index] = component["value"]
                if component["name"] == SCORED_SUCCESS and component["value"] in _VERDICTS:
                    values["success"][index] = _VERDICTS[component["value"]]
        if episode in retractions:
            values["retracted"][index] = retractions[episode]


def _merged_components(before: list[dict[str, Any]], late: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One component a name: a verifier that scores again corrects itself."""
    by_name = {component["name"]: component for component in [*before, *late]}
    return list(by_name.values())


def with_columns(rows: pa.Table, columns: Mapping[str, list[Any]]) -> pa.Table:
    """`rows` of `episodes` with other values in some columns."""
    for name, values in columns.items():
        field = EPISODES.arrow.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array(values, field.type))
    return rows

"""`optimize` as a plan: small files of `steps` into large ones in which the rollouts of a task are neighbours.

The planner orders the episodes of the files that are merged by task and cuts the order into units of about the
target's bytes; the rows of a unit lie beside the plan. A unit reads the steps of its rows, wherever they are, and
writes one file. Then `steps` is committed, then `episodes` with the places moved, then the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from trajlake.errors import AccessRefused, BucketMissing, StoreError, StoreUnavailable
from trajlake.read.steps_reader import StepsReader
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.commit import Change, NewFile, active_files, commit, partitions_by_path
from trajlake.table.id_index import plan_of
from trajlake.table.layout import (
    Part,
    content_name,
    encode_rows,
    put_episodes,
    put_segments,
    put_steps,
    with_schema,
)
from trajlake.table.rewrite import read_file
from trajlake.table.tables import open_table
from trajlake_pipelines.lookup import scan_files
from trajlake_pipelines.plan import APPLICATION, Plan, job_folder, put_result, result_key
from trajlake_pipelines.publish import commit_ledger
from trajlake_pipelines.unit import with_places
from trajlake_schemas import EPISODES, SEGMENTS, STEPS

TARGET_BYTES = 64 << 20  # of one file, encoded: a unit holds its rows several times as Arrow
MOST_BYTES = 8 << 30  # of files that one plan merges; what is more is for the next
EPISODES_A_FILE = 100_000
SMALL_EPISODES_FILE = 4 << 20  # bytes
_ORDER = ["task_family", "task_id", "group_id", "episode_id"]
_PLACE = ["episode_id", "steps_path", "row_group", "row_offset", "row_count"]
_BATCH = 256  # episodes whose steps are read at a time
_PART_BYTES = 256 << 20  # of steps as Arrow that are held at a time


def make_plan(store: ObjectStore, number: int, *, target_bytes: int, everything: bool) -> Plan | None:
    """What is to be merged, or None where the files are large already. `everything`: large ones, too."""
    steps_files = _chosen_steps(open_table(store, "steps"), target_bytes, everything)
    episodes_table = open_table(store, "episodes")
    rows, episode_files = _rows_in(store, episodes_table, steps_files)
    small = _small_files(episodes_table, SMALL_EPISODES_FILE)
    if len(small) > 1:
        episode_files = sorted({*episode_files, *small})
    ledger_files = _consumed_files(open_table(store, "segments"))
    if not steps_files and len(small) < 2 and len(ledger_files) < 2:
        return None
    units = _units(store, number, rows, steps_files, target_bytes)
    details = {
        "steps_files": sorted(steps_files),
        "episode_files": episode_files,
        "ledger_files": ledger_files if len(ledger_files) > 1 else [],
        "units": units,
    }
    return Plan(number, time.time(), kind="optimize", details=details)


def _sizes(table: DeltaTable) -> dict[str, int]:
    files = active_files(table)
    return dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True)) if len(files) else {}


def _chosen_steps(table: DeltaTable, target_bytes: int, everything: bool) -> dict[str, int]:
    """Files below half the target (two such fit into one), with their bytes; none where there are not two."""
    chosen: dict[str, int] = {}
    total = 0
    for path, size in sorted(_sizes(table).items()):
        if (everything or size < target_bytes / 2) and total + size <= MOST_BYTES:
            chosen[path] = size
            total += size
    return chosen if len(chosen) > 1 or everything else {}


def _small_files(table: DeltaTable, limit: int) -> list[str]:
    return sorted(path for path, size in _sizes(table).items() if size < limit)


def _consumed_files(table: DeltaTable) -> list[str]:
    if not len(active_files(table)):
        return []
    return sorted(path for path, values in partitions_by_path(table).items() if values["state"] == "consumed")


def _rows_in(store: ObjectStore, table: DeltaTable, steps_files: dict[str, int]) -> tuple[pa.Table, list[str]]:
    """The rows of `episodes` whose steps are in these files, and the files of the table that hold them."""
    found: list[pa.Table] = []
    holders: list[str] = []
    wanted = pa.array(sorted(steps_files), pa.string())
    # The plan that wrote a file of steps wrote the rows that point at it, and a later one may have written them again.
    oldest = min((plan_of(path) or 0 for path in steps_files), default=0)
    paths = [path for path in sorted(_sizes(table)) if (number := plan_of(path)) is None or number >= oldest]
    for path in paths if steps_files else []:
        places = scan_files(store, EPISODES.name, [path]).select("steps_path").collect()["steps_path"]
        if not places.is_in(list(steps_files)).any():
            continue
        rows = read_file(store, EPISODES.name, path).cast(EPISODES.arrow)
        holders.append(path)
        found.append(rows.filter(pc.is_in(rows["steps_path"], wanted)))
    return (pa.concat_tables(found) if found else EPISODES.arrow.empty_table()), holders


def _units(
    store: ObjectStore, number: int, rows: pa.Table, steps_files: dict[str, int], target_bytes: int
) -> list[dict[str, Any]]:
    """Runs of the order by task of about the target's bytes; the rows of each are put beside the plan."""
    if not len(rows):
        return []
    light = pl.from_arrow(rows.select([*_ORDER, "steps_path", "row_count"]))
    assert isinstance(light, pl.DataFrame)
    sizes = pl.DataFrame({"steps_path": list(steps_files), "size": list(steps_files.values())})
    light = light.with_row_index("row").join(sizes, on="steps_path", how="left", maintain_order="left")
    share = pl.col("row_count") / pl.col("row_count").sum().over("steps_path")
    light = light.with_columns(bytes=share * pl.col("size")).sort(_ORDER)
    light = light.with_columns(unit=((pl.col("bytes").cum_sum() - pl.col("bytes") / 2) / target_bytes).floor())
    units: list[dict[str, Any]] = []
    for part in light.partition_by("unit", maintain_order=True):
        data = encode_rows(rows.take(pa.array(part["row"].to_numpy())))
        key = content_name(f"{job_folder(number)}/inputs/{len(units):06d}", data)
        _put(store, key, data)
        units.append({"number": len(units), "rows": key, "bytes": int(part["bytes"].sum())})
    return units


def _put(store: ObjectStore, key: str, data: bytes) -> None:
    outcome = store.put_if_absent(key, data)
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error


def run(store: ObjectStore, number: int, unit: dict[str, Any]) -> None:
    """Write the file of one unit, unless that was done."""
    if store.stat(result_key(number, unit["number"])) is not None:
        return
    rows = pq.read_table(pa.BufferReader(store.get(unit["rows"]))).cast(EPISODES.arrow)
    places = pl.from_arrow(rows.select(_PLACE))
    assert isinstance(places, pl.DataFrame)
    reader = StepsReader(store)
    try:
        parts, schema = with_schema(_steps_at(reader, places), lambda: reader.columns(places["steps_path"]))
        file, found = put_steps(store, f"{number:08d}-{unit['number']:06d}", parts, schema)
    except (StoreUnavailable, AccessRefused, BucketMissing):
        raise
    except (StoreError, FileNotFoundError) as error:
        # Nothing may wait for this plan for ever: it ends without a change, and what can be read stays as it is.
        put_result(store, number, unit["number"], {"unreadable": str(error), "rows": 0})
        return
    data = encode_rows(with_places(rows, file.path, found))
    key = content_name(f"{job_folder(number)}/units/{unit['number']:06d}", data)
    _put(store, key, data)
    steps_file = {"path": file.path, "size": file.size, "statistics": dict(file.statistics)}
    put_result(store, number, unit["number"], {"steps_file": steps_file, "episodes": key, "rows": len(rows)})


def _steps_at(reader: StepsReader, places: pl.DataFrame) -> Iterator[Part]:
    """The steps in parts of about _PART_BYTES. Raises StoreError where they are not there."""
    waiting: list[pa.Table] = []
    lengths: list[int] = []
    size = 0
    for batch in reader.batches(places, _BATCH):
        tables = reader.read(batch)
        for table, path, count in zip(tables, batch["steps_path"], batch["row_count"], strict=True):
            if len(table) != count:
                raise StoreError(f"{STEPS.name}/{path} is damaged: it has not the steps that episodes say")
        # In one piece: a table with a chunk an episode takes more memory than what it holds, and is slow to cut.
        waiting.append(tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks())
        lengths += map(len, tables)
        size += waiting[-1].nbytes
        if size >= _PART_BYTES:
            yield pa.concat_tables(waiting), lengths
            waiting, lengths, size = [], [], 0
    if waiting:
        yield pa.concat_tables(waiting), lengths


def publish(store: ObjectStore, plan: Plan, results: Sequence[dict[str, Any]]) -> None:
    """Commit what the units wrote in the place of what they read; nothing where one could not read."""
    if any("unreadable" in result for result in results):
        commit_ledger(store, plan, lambda _: Change())
        return
    details = plan.details
    prefix = f"{plan.number:08d}"
    new = [NewFile(**result["steps_file"]) for result in results]

    def episodes_change(table: DeltaTable) -> Change:
        moved = [pq.read_table(pa.BufferReader(store.get(result["episodes"]))) for result in results]
        rows = pa.concat_tables([table.cast(EPISODES.arrow) for table in moved] or [EPISODES.arrow.empty_table()])
        left = [_others(store, path, rows["episode_id"]) for path in details["episode_files"]]
        ordered = pa.concat_tables([rows, *left]).sort_by("episode_id")
        files = [
            put_episodes(store, prefix, ordered.slice(start, EPISODES_A_FILE))
            for start in range(0, len(ordered), EPISODES_A_FILE)
        ]
        version = open_table(store, "steps").version()
        kept = {file.path for file in files}
        add = [file for file in files if file.path not in details["episode_files"]]
        remove = [path for path in details["episode_files"] if path not in kept]
        return Change(add, remove, {STEPS.name: version})

    if new:
        commit(store, "steps", APPLICATION, plan.number, lambda _: Change(new, details["steps_files"]))
    commit(store, "episodes", APPLICATION, plan.number, episodes_change)
    commit_ledger(store, plan, lambda _: _ledger_change(store, plan))


def _others(store: ObjectStore, path: str, moved: pa.ChunkedArray) -> pa.Table:
    rows = read_file(store, EPISODES.name, path).cast(EPISODES.arrow)
    return rows.filter(
        pc.invert(pc.is_in(rows["episode_id"], pa.concat_arrays(moved.chunks or [pa.array([], pa.string())])))
    )


def _ledger_change(store: ObjectStore, plan: Plan) -> Change:
    paths: list[str] = plan.details["ledger_files"]
    if not paths:
        return Change()
    rows = pa.concat_tables([read_file(store, SEGMENTS.name, path) for path in paths]).sort_by("path")
    rows = rows.append_column("state", pa.repeat(pa.scalar("consumed"), len(rows)))
    file = put_segments(store, f"{plan.number:08d}", rows.select(SEGMENTS.names()).cast(SEGMENTS.arrow), "consumed")
    return Change([file], paths)

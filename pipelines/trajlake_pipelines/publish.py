"""The driver's last act: what the units wrote becomes part of the tables, in the order steps ▸ episodes ▸ segments.

Each of the three commits carries the application transaction (compact, number), so whoever repeats it, after a crash
or beside another compactor, finds it done. A number is finished when the ledger has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from trajlake.errors import SegmentUnreadable
from trajlake.ingest.segment import SegmentName
from trajlake.storage import ObjectStore
from trajlake.table import id_index
from trajlake.table.commit import Change, NewFile, active_files, commit, partitions_by_path
from trajlake.table.layout import put_segments
from trajlake.table.rewrite import episodes_changed, read_file, steps_without
from trajlake.table.tables import open_table
from trajlake_pipelines.frontier import Frontier, load_frontier, put_frontier
from trajlake_pipelines.plan import APPLICATION, Plan, job_folder
from trajlake_pipelines.unit import UnitResult, load_episodes
from trajlake_pipelines.units import PlannedSegment
from trajlake_schemas import SEGMENTS


def publish(store: ObjectStore, plan: Plan, results: list[UnitResult]) -> bool:
    """Commit the compaction. False where another process had finished it before."""
    replaced = sorted({episode for result in results for episode in result.replaced})
    prefix = f"{plan.number:08d}"
    runs = load_frontier(store, job_folder(plan.number - 1)).runs

    def steps_change(_: DeltaTable) -> Change:
        files = [NewFile(**result.steps_file) for result in results if result.steps_file]
        if not replaced:
            return Change(files)
        without = steps_without(store, open_table(store, "episodes"), replaced, runs, prefix)
        return Change([*files, *without.add], without.remove)

    def episodes_change(table: DeltaTable) -> Change:
        scores: dict[str, list[dict[str, Any]]] = {}
        retractions: dict[str, str] = {}
        for result in results:
            for episode, components in result.late_scores.items():
                scores.setdefault(episode, []).extend(components)
            retractions.update(result.late_retractions)
        return episodes_changed(
            store,
            table,
            open_table(store, "steps"),
            new=load_episodes(store, results),
            replaced=replaced,
            scores=scores,
            retractions=retractions,
            runs=runs,
            prefix=prefix,
        )

    commit(store, "steps", APPLICATION, plan.number, steps_change)
    commit(store, "episodes", APPLICATION, plan.number, episodes_change)
    return commit_ledger(store, plan, lambda table: ledger_change(store, table, plan, results))


def commit_ledger(
    store: ObjectStore,
    plan: Plan,
    change_for: Callable[[DeltaTable], Change],
    move: Callable[[Frontier], Frontier] = lambda frontier: frontier,
) -> bool:
    """The last commit of every plan: with it the number is finished. False where another process had done it.

    `move` changes the frontier beside what the plan consumes.
    """

    def change(table: DeltaTable) -> Change:
        before = load_frontier(store, job_folder(plan.number - 1))
        episodes = active_files(open_table(store, "episodes"))
        paths: list[str] = episodes["path"].to_pylist() if len(episodes) else []
        runs = id_index.after(store, before.runs, paths, plan.number)
        put_frontier(store, plan.folder, replace(move(plan.frontier_after(before)), runs=runs))
        return change_for(table)

    return commit(store, "segments", APPLICATION, plan.number, change)


def ledger_change(store: ObjectStore, table: DeltaTable, plan: Plan, results: list[UnitResult]) -> Change:
    """The new segments in their states; and the rows that were pending, in the state that they have now."""
    rows = {segment.key: _row(plan, segment) for unit in plan.units for segment in unit.segments}
    rows |= {segment.key: _row(plan, segment) for segment in plan.quarantined_segments}
    remove, before = _pending_rows(store, table)
    treated: dict[str, set[str]] = {}
    for unit in plan.units:
        for segment in unit.segments:
            treated.setdefault(segment.key, set()).update(segment.episodes or ())
    released = set(plan.details.get("released", ()))
    for path, row in before.items():
        done = treated.get(path, set()) | released
        left = [episode for episode in row["pending_episodes"] or [] if episode not in done]
        rows[path] = row | {"pending_episodes": left}
    for result in results:
        for path, count in result.events_by_segment.items():
            if path not in before:
                rows[path]["events"] = (rows[path]["events"] or 0) + count
        for path, episodes in result.pending_by_segment.items():
            rows[path]["pending_episodes"] = sorted({*(rows[path]["pending_episodes"] or []), *episodes})
    broken = dict(plan.quarantined)
    for result in results:
        broken |= result.quarantined
    for path, row in rows.items():
        row["reason"] = broken.get(path)
        row["state"] = "quarantined" if path in broken else "pending" if row["pending_episodes"] else "consumed"
        row["pending_episodes"] = row["pending_episodes"] or None
    add: list[NewFile] = []
    for state in sorted({row["state"] for row in rows.values()}):
        chosen = [row for path, row in sorted(rows.items()) if row["state"] == state]
        add.append(put_segments(store, f"{plan.number:08d}", pa.Table.from_pylist(chosen, SEGMENTS.arrow), state))
    kept = {file.path for file in add}  # nothing about the waiting ones changed: the same file again
    return Change([file for file in add if file.path not in remove], [path for path in remove if path not in kept])


def _row(plan: Plan, segment: PlannedSegment) -> dict[str, Any]:
    try:
        name = SegmentName.parse(segment.key)
    except SegmentUnreadable:
        name = SegmentName("", "", 0, 0)
    return {
        "path": segment.key,
        "run_id": name.run_id,
        "worker_id": name.worker_id,
        "epoch": name.epoch,
        "number": name.number,
        "bytes": segment.size,
        "modified_at": datetime.fromtimestamp(segment.modified_at / 1e6, UTC),
        "events": None,
        "pending_episodes": None,
        "compaction": plan.number,
    }


def _pending_rows(store: ObjectStore, table: DeltaTable) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The files of the pending partition and their rows by path; each compaction writes them anew."""
    if not len(active_files(table)):
        return [], {}
    files = [path for path, partition in partitions_by_path(table).items() if partition["state"] == "pending"]
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for row in read_file(store, "segments", file).to_pylist():
            rows[row["path"]] = row
    return files, rows


def ledger(store: ObjectStore) -> pl.LazyFrame:
    """The ledger as a frame."""
    return pl.scan_delta(open_table(store, "segments"))

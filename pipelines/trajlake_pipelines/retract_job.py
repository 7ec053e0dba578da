"""`retract --for-good` as a plan: episodes leave the tables, and then the files go that held them, old versions too.

What remains of an episode is its tombstone, `retracted/<SHA-256 of its id>.json`, so that it stays away when a worker
or an import sends it again. The objects are removed after the commits, and again by whoever repeats that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from trajlake.errors import ObjectMissing, StoreUnavailable
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.commit import Change, NewFile, active_files, commit
from trajlake.table.id_index import files_that_may_hold
from trajlake.table.layout import put_episodes
from trajlake.table.rewrite import (
    moved_name,
    places_in,
    read_file,
    steps_without,
    with_new_places,
)
from trajlake.table.tables import open_table
from trajlake_pipelines.frontier import load_frontier
from trajlake_pipelines.plan import APPLICATION, Plan, job_folder, read_one
from trajlake_pipelines.publish import commit_ledger
from trajlake_pipelines.tombstones import tombstone_key
from trajlake_schemas import EPISODES, STEPS


def make_plan(store: ObjectStore, number: int, episodes: Collection[str], reason: str) -> Plan:
    """The plan, after the tombstones were put: from then on nothing brings the episodes back."""
    now = time.time()
    for episode in sorted(episodes):
        body = json.dumps({"reason": reason, "number": number}).encode()
        if isinstance(outcome := store.put_if_absent(tombstone_key(episode), body), Unknown):
            raise StoreUnavailable(str(outcome.error)) from outcome.error
    return Plan(number, now, kind="retract", details={"episodes": sorted(episodes)})


def publish(store: ObjectStore, plan: Plan) -> None:
    """Commit the tables without the episodes."""
    gone: list[str] = plan.details["episodes"]
    prefix = f"{plan.number:08d}"
    runs = load_frontier(store, job_folder(plan.number - 1)).runs

    def steps_change(_: DeltaTable) -> Change:
        return steps_without(store, open_table(store, EPISODES.name), gone, runs, prefix)

    def episodes_change(table: DeltaTable) -> Change:
        steps = open_table(store, STEPS.name)
        copies = [path for path in _paths(steps) if path.startswith(moved_name(prefix))]
        moved = places_in(store, copies)
        add: list[NewFile] = []
        remove: list[str] = []
        for path in files_that_may_hold(store, table, {*gone, *moved}, runs):
            rows = read_file(store, EPISODES.name, path).cast(EPISODES.arrow)
            kept = rows.filter(pc.invert(pc.is_in(rows["episode_id"], pa.array(gone, pa.string()))))
            after = with_new_places(kept, moved)
            if after.equals(rows):
                continue
            remove.append(path)
            if len(after):
                add.append(put_episodes(store, prefix, after))
        return Change(add, remove, {STEPS.name: steps.version()})

    commit(store, STEPS.name, APPLICATION, plan.number, steps_change)
    commit(store, EPISODES.name, APPLICATION, plan.number, episodes_change)
    commit_ledger(store, plan, lambda _: Change())


def _paths(table: DeltaTable) -> list[str]:
    files = active_files(table)
    return [str(path) for path in files["path"].to_pylist()] if len(files) else []


@dataclass(frozen=True)
class Holder:
    """An object that holds some of the episodes: its size in bytes, and what it is in words."""

    key: str
    bytes: int
    what: str


def objects_that_hold(
    store: ObjectStore, episodes: Collection[str], *, also_active: bool = False
) -> tuple[list[Holder], list[str]]:
    """Objects that hold any of these episodes and that no current table needs: files of old versions, what units
    left behind, consumed segments. And keys of segments that are needed, because others in them have not ended.

    `also_active`: files of the tables as they are now, too, which a retract for good is going to replace."""
    wanted = set(episodes)
    doomed: list[Holder] = []
    for name in (STEPS.name, EPISODES.name):
        active = set(_paths(open_table(store, name)))
        for info in store.list(f"{name}/"):
            path = info.key.removeprefix(f"{name}/")
            if not path.endswith(".parquet") or (path in active and not also_active):
                continue
            if _file_holds(store, info.key, wanted):
                version = "the newest version" if path in active else "an older version"
                doomed.append(Holder(info.key, info.size, f"{version} of {name}"))
    doomed += [
        Holder(info.key, info.size, "the record of a change")
        for info in store.list(job_folder(0).rpartition("/")[0] + "/")
        if info.key.endswith(".parquet") and _file_holds(store, info.key, wanted)
    ]
    ledger = pl.scan_delta(open_table(store, "segments")).select("path", "state").collect()
    states = dict(ledger.iter_rows())
    needed: list[str] = []
    for info in store.list("landing/"):
        found = read_one(store, info)
        if isinstance(found, str) or not wanted.intersection(part.episode_id for part in found.episodes):
            continue
        if states.get(info.key) == "consumed":
            doomed.append(Holder(info.key, info.size, "a segment as a worker sent it"))
        else:
            needed.append(info.key)
    return doomed, needed


def _file_holds(store: ObjectStore, key: str, wanted: set[str]) -> bool:
    try:
        file = pq.ParquetFile(pa.BufferReader(store.get(key)))
    except (ObjectMissing, pa.ArrowInvalid):
        return False
    if "episode_id" not in file.schema_arrow.names:
        return False
    ids = file.read(columns=["episode_id"])["episode_id"]
    return not wanted.isdisjoint(ids.to_pylist())

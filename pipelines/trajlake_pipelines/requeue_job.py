"""`segments --retry` as a plan: quarantined segments leave the ledger and are new for the next compaction."""

from __future__ import annotations

import time

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from trajlake.lake import Lake
from trajlake.storage import ObjectStore
from trajlake.table.commit import Change, NewFile, active_files, partitions_by_path
from trajlake.table.layout import put_segments
from trajlake.table.rewrite import read_file
from trajlake_pipelines.plan import Plan
from trajlake_pipelines.publish import commit_ledger
from trajlake_schemas import SEGMENTS

QUARANTINED = "quarantined"


def make_plan(store: ObjectStore, number: int, keys: list[str]) -> Plan | None:
    """The plan, or None where none of these segments is in quarantine (any more)."""
    quarantined = Lake(store).segments().filter(pl.col("state") == QUARANTINED).select("path").collect()["path"]
    chosen = sorted(set(quarantined).intersection(keys))
    return Plan(number, time.time(), kind="requeue", details={"keys": chosen}) if chosen else None


def publish(store: ObjectStore, plan: Plan) -> None:
    """Take the segments out of the ledger and of the frontier."""
    keys: list[str] = plan.details["keys"]

    def change(table: DeltaTable) -> Change:
        add: list[NewFile] = []
        remove: list[str] = []
        paths = partitions_by_path(table) if len(active_files(table)) else {}
        for path, partition in paths.items():
            if partition["state"] != QUARANTINED:
                continue
            rows = read_file(store, SEGMENTS.name, path)
            left = rows.filter(pc.invert(pc.is_in(rows["path"], pa.array(keys, pa.string()))))
            if len(left) == len(rows):
                continue
            remove.append(path)
            if len(left):
                left = left.append_column("state", pa.repeat(pa.scalar(QUARANTINED), len(left)))
                add.append(
                    put_segments(
                        store,
                        f"{plan.number:08d}",
                        left.select(SEGMENTS.names()).cast(SEGMENTS.arrow),
                        QUARANTINED,
                    )
                )
        return Change(add, remove)

    commit_ledger(store, plan, change, lambda frontier: frontier.without_keys(keys))

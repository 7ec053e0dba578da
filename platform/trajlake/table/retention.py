"""`vacuum`: remove what nobody can need any more, and spare readers and work that is going on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
from deltalake import PostCommitHookProperties

from trajlake.errors import ObjectMissing, UsageError
from trajlake.lake import Lake
from trajlake.storage import ObjectInfo
from trajlake.table.id_index import IDS, plan_of
from trajlake.table.log import Log
from trajlake.table.tables import RETENTION_HOURS, delta_errors, open_table
from trajlake_schemas import TABLES

Objects = Mapping[str, Sequence[ObjectInfo]]
"""What lies in the folder of each table."""


@dataclass(frozen=True)
class VacuumedFile:
    """One object that was removed (or would be): its key, its size in bytes, and why nobody needs it."""

    key: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class VacuumReport:
    """What a vacuum removed, or would remove where `dry_run`."""

    files: list[VacuumedFile]
    dry_run: bool

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def vacuum(
    lake: Lake, *, older_than_hours: float = RETENTION_HOURS, dry_run: bool = False, force: bool = False
) -> VacuumReport:
    """Remove files that left the tables, segments that were consumed, and the records of finished compactions, all
    of them only where they are older than `older_than_hours`; and of the tables' logs what is older than that, and
    than the retention period.

    Snapshots older than that can then no longer be read (SnapshotExpired). Raises UsageError for less than the
    retention period unless `force`: that may take files from under readers, and what is less than an hour also from
    under a compaction that is going on.
    """
    if older_than_hours < RETENTION_HOURS and not force:
        raise UsageError(
            f"{_in_words(older_than_hours)} is less than the retention period of {_in_words(RETENTION_HOURS)}, and "
            "would take files from under readers and running compactions; give at least that, or force it "
            "(vacuum --force) while nothing else uses the lake"
        )
    lake.check()
    finished = open_table(lake.store, "segments").transaction_version("compact") or 0
    objects = {name: list(lake.store.list(f"{name}/")) for name in TABLES}
    files = [*_left_tables(lake, objects, older_than_hours, finished), *_consumed(lake, older_than_hours)]
    files += [*_signatures(lake, {file.key for file in files}), *_index(lake, older_than_hours, finished)]
    files += _logs(lake, objects, older_than_hours)
    if not dry_run:
        for file in files:
            lake.store.delete(file.key)
    return VacuumReport(files, dry_run)


def _versions_since(lake: Lake, objects: Objects, hours: float) -> dict[str, int]:
    """Of each table the oldest version that a snapshot needs which was the newest within these hours."""
    moment = datetime.now(UTC) - timedelta(hours=hours)
    logs = {name: Log.of(objects[name]) for name in TABLES}
    versions = {name: log.version_at(moment) for name, log in logs.items()}
    # Between the commits of a plan the snapshot still has the version of `steps` before, however long that lasts.
    pinned = open_table(lake.store, "episodes", versions["episodes"]).transaction_version("steps") or 0
    versions["steps"] = max(logs["steps"].oldest, min(pinned, versions["steps"]))
    return versions


def _in_words(hours: float) -> str:
    for seconds, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if hours * 3600 >= seconds:
            return f"{hours * 3600 / seconds:.4g} {unit}"
    return f"{hours * 3600:.4g} s"


def _logs(lake: Lake, objects: Objects, hours: float) -> Iterator[VacuumedFile]:
    """Records of the logs that only versions need which are older than these hours and than the retention period:
    a shorter time is for what takes room."""
    for name, version in _versions_since(lake, objects, max(hours, RETENTION_HOURS)).items():
        for info in Log.of(objects[name]).not_needed_from(version):
            yield VacuumedFile(info.key, info.size, "it is the log of versions that have expired")


def _left_tables(lake: Lake, objects: Objects, hours: float, finished: int) -> list[VacuumedFile]:
    """Files that no version within the retention needs. Those of a plan that is not finished are no part of a table
    yet, but whoever goes on with it commits them, even a month after it was left: they are spared."""
    found = []
    versions = _versions_since(lake, objects, hours)
    for name in TABLES:
        sizes = {info.key: info.size for info in objects[name]}
        root = lake.store.location(name).rstrip("/") + "/"
        with delta_errors(lake.store, name):
            paths = open_table(lake.store, name).vacuum(
                retention_hours=math.ceil(hours),
                dry_run=True,  # deltalake could not spare any
                enforce_retention_duration=False,
                full=True,
                # Delta's checkpoints forget what was removed before the retention period, however long `hours` is.
                keep_versions=[versions[name]],
                post_commithook_properties=PostCommitHookProperties(create_checkpoint=False),
            )
        # deltalake gives paths below the table, but the whole path of some files that an old version removed.
        keys = [f"{name}/{path.removeprefix(root)}" for path in paths]
        found += [
            VacuumedFile(key, sizes[key], "it was replaced in its table")
            for key in keys
            if key in sizes and (plan_of(key) or 0) <= finished  # the log still names what an earlier vacuum took
        ]
    return found


def _signatures(lake: Lake, going: set[str]) -> Iterator[VacuumedFile]:
    """Signatures (of `dedupe`) of files of `steps` that are gone, or are `going`."""
    there = {info.key for info in lake.store.list("steps/")} - going
    for info in lake.store.list("signatures/"):
        if "steps/" + info.key.split("/", 2)[2] not in there:
            yield VacuumedFile(info.key, info.size, "it has the signatures of a file that is gone")


def _index(lake: Lake, hours: float, finished: int) -> Iterator[VacuumedFile]:
    """Runs of the index of episodes that were merged into others since: the newest frontier does not name them."""
    limit = datetime.now(UTC) - timedelta(hours=hours)
    try:
        frontier = lake.store.get(f"jobs/compact/{finished:08d}/frontier.json")
    except ObjectMissing:
        return
    named = {key for key, _ in json.loads(frontier).get("ids") or ()}
    for info in lake.store.list(f"{IDS}/"):
        if (plan_of(info.key) or 0) <= finished and info.key not in named and info.modified_at <= limit:
            yield VacuumedFile(info.key, info.size, "it is a part of the index that was merged into another")


def _consumed(lake: Lake, hours: float) -> Iterator[VacuumedFile]:
    """Segments in the ledger as consumed, and the folders of compactions that are committed."""
    limit = datetime.now(UTC) - timedelta(hours=hours)
    ledger = open_table(lake.store, "segments")
    done = set(pl.scan_delta(ledger).filter(pl.col("state") == "consumed").select("path").collect()["path"])
    for info in lake.store.list("landing/"):
        if info.key in done and info.modified_at <= limit:
            yield VacuumedFile(info.key, info.size, "its events are in the tables")
    finished = ledger.transaction_version("compact") or 0
    # The newest one stays: its frontier says how far landing is consumed.
    for info in lake.store.list("jobs/compact/"):
        number = info.key.split("/")[2]
        if number.isdigit() and int(number) < finished and info.modified_at <= limit:
            yield VacuumedFile(info.key, info.size, "it is the record of a finished change")

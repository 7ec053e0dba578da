"""`dedupe` as a plan: units compute signatures of the files of `steps` that have none yet, then rows are marked.

A signature file, `signatures/<version>/<steps file>`, is kept for as long as its file, so a pass costs what is new.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from trajlake.errors import ObjectMissing, StoreUnavailable
from trajlake.read.tasks import TASK
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.commit import Change, NewFile, active_files, commit
from trajlake.table.layout import encode_rows, put_episodes, with_nulls
from trajlake.table.rewrite import read_file, with_columns
from trajlake.table.tables import open_table
from trajlake_pipelines import near
from trajlake_pipelines.lookup import scan_files
from trajlake_pipelines.plan import APPLICATION, Plan, put_result, result_key
from trajlake_pipelines.publish import commit_ledger
from trajlake_schemas import EPISODES, STEPS

# What was asked need not be among the steps, so equal answers are only repeats where they answer the same.
_SAME_TASK = (*TASK, "seed")
# Without steps there is nothing to compare but how it ended; and of trials that broke off before their first step
# several end alike. Of imported ones `extra` has the row of their file: they repeat the same row, of a file that grew.
_NO_OUTCOME = {
    *("episode_id", "attempt", "run_id", "worker_id", "epoch", "source_hash", "content_hash", "duplicate_of"),
    *("retracted", "steps_path", "row_group", "row_offset", "row_count"),
}
_OUTCOME = pl.when(pl.col("source_hash").is_not_null()).then(
    pl.struct(name for name in EPISODES.names() if name not in _NO_OUTCOME).struct.json_encode()
)

SIGNATURES = "signatures"
DEPTHS = ("content", "near")


def signature_key(path: str) -> str:
    """Where the signatures of a file of `steps` lie."""
    return f"{SIGNATURES}/{near.signature_version()}/{path}"


def _steps_files(store: ObjectStore) -> dict[str, int]:
    files = active_files(open_table(store, STEPS.name))
    return dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True)) if len(files) else {}


def make_plan(store: ObjectStore, number: int, *, depth: str, threshold: float) -> Plan:
    """The plan: for `near` a unit for each file without signatures."""
    units: list[dict[str, Any]] = []
    if depth == "near":
        have = {info.key for info in store.list(f"{SIGNATURES}/{near.signature_version()}/")}
        sizes = _steps_files(store)
        missing = sorted(path for path in sizes if signature_key(path) not in have)
        units = [{"number": unit, "path": path, "bytes": sizes[path]} for unit, path in enumerate(missing)]
    details = {"depth": depth, "threshold": threshold, "units": units}
    return Plan(number, time.time(), kind="dedupe", details=details)


def run(store: ObjectStore, number: int, unit: dict[str, Any]) -> None:
    """Write the signatures of one file, a row group at a time."""
    if store.stat(result_key(number, unit["number"])) is not None:
        return
    try:
        file = pq.ParquetFile(pa.BufferReader(store.get(f"{STEPS.name}/{unit['path']}")))
    except (
        ObjectMissing,
        pa.ArrowInvalid,
    ) as error:  # its episodes have no signature; nothing may wait for it for ever
        put_result(store, number, unit["number"], {"episodes": 0, "unreadable": str(error)})
        return
    found: dict[str, near.Signature] = {}
    for group in range(file.num_row_groups):
        ids, texts = near.documents(with_nulls(file.read_row_group(group), STEPS.arrow))
        for episode, signature in zip(ids, near.signatures(texts), strict=True):
            # A very large episode has several row groups: the least values are those of all of its shingles.
            found[episode] = np.minimum(signature, found.get(episode, signature))
    rows = pa.table(
        {
            "episode_id": pa.array(list(found), pa.string()),
            "signature": pa.array([signature.tobytes() for signature in found.values()], pa.binary()),
        }
    )
    outcome = store.put_if_absent(signature_key(unit["path"]), encode_rows(rows))
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    put_result(store, number, unit["number"], {"episodes": len(found)})


def publish(store: ObjectStore, plan: Plan, results: Sequence[dict[str, Any]]) -> None:
    """Commit the marks; those of an earlier dedupe are replaced."""

    def change(table: DeltaTable) -> Change:
        files = active_files(table)
        paths = sorted(files["path"].to_pylist()) if len(files) else []
        marks = duplicates(store, paths, plan.details["depth"], plan.details["threshold"]) if paths else {}
        add: list[NewFile] = []
        remove: list[str] = []
        for path in paths:
            old = scan_files(store, EPISODES.name, [path]).select("episode_id", "duplicate_of").collect()
            after = [marks.get(episode) for episode in old["episode_id"]]
            if after != old["duplicate_of"].to_list():
                rows = read_file(store, EPISODES.name, path).cast(EPISODES.arrow)
                add.append(put_episodes(store, f"{plan.number:08d}", with_columns(rows, {"duplicate_of": after})))
                remove.append(path)
        pinned = table.transaction_version(STEPS.name)
        return Change(add, remove, {} if pinned is None else {STEPS.name: pinned})

    commit(store, EPISODES.name, APPLICATION, plan.number, change)
    commit_ledger(store, plan, lambda _: Change())


def duplicates(store: ObjectStore, paths: list[str], depth: str, threshold: float) -> dict[str, str]:
    """Episode to the one that it repeats: of each group, among those that are not retracted, one that was recorded and
    not imported if there is one, and of these the one with the least id, which for ids of a Writer is the earliest.
    Episodes of different tasks do not repeat each other's content."""
    frame = scan_files(store, EPISODES.name, paths)
    rows = frame.select(
        "episode_id",
        *_SAME_TASK,
        content=pl.when(pl.col("n_steps") > 0).then("content_hash").otherwise(_OUTCOME),
        retracted=pl.col("retracted").is_not_null(),
        imported=pl.col("source_hash").is_not_null(),
    ).collect()
    rows = rows.sort("retracted", "imported", "episode_id")
    same = rows.filter(pl.col("content").is_not_null()).with_columns(
        first=pl.col("episode_id").first().over(*_SAME_TASK, "content")
    )
    marks = dict(same.filter(pl.col("first") != pl.col("episode_id")).select("episode_id", "first").iter_rows())
    if depth == "content":
        return marks
    order = {episode: place for place, episode in enumerate(rows["episode_id"])}
    found = [(order[episode], signature) for episode, signature in _signatures(store) if episode in order]
    found.sort()
    matrix = np.frombuffer(b"".join(signature for _, signature in found), np.uint32).reshape(-1, near.PERMUTATIONS)
    ids = rows["episode_id"].to_list()
    places = [place for place, _ in found]
    for row, first in enumerate(near.similar_groups(matrix, threshold)):
        if row != first:
            original = ids[places[first]]
            marks[ids[places[row]]] = marks.get(original, original)
    return marks


def _signatures(store: ObjectStore) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for path in sorted(_steps_files(store)):
        try:
            rows = pq.read_table(pa.BufferReader(store.get(signature_key(path))))
        except ObjectMissing:  # the file is younger than the plan
            continue
        found += zip(rows["episode_id"].to_pylist(), rows["signature"].to_pylist(), strict=True)
    return found

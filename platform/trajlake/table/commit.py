"""Commits to the Delta tables: once and only once, whatever happens to the acknowledgement.

Every commit carries an application transaction (application, version). Delta lets two commits with the same
application that race conflict, and a repeated one is found by reading the version back. So after any doubt the
question is always the same: does the table hold our version?
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from trajlake.errors import CommitStateUnknown, StoreUnavailable
from trajlake.storage import ObjectStore
from trajlake.table.tables import PARTITIONS, open_table
from trajlake_schemas import TABLES

_TRIES = 30
_DOUBTS = 5  # answers that say neither yes nor no
_LONGEST_STATISTIC = 64  # characters; a longer text is no use for pruning


@dataclass(frozen=True)
class NewFile:
    """A Parquet file that is in the store and becomes part of a table: its path below the table's folder."""

    path: str
    size: int
    statistics: Mapping[str, Any]
    partition: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What a commit does to a table: files that come and files that go."""

    add: Sequence[NewFile] = ()
    remove: Sequence[str] = ()
    transactions: Mapping[str, int] = field(default_factory=dict)


def commit(
    store: ObjectStore,
    name: str,
    application: str,
    version: int,
    change_for: Callable[[DeltaTable], Change],
) -> bool:
    """Commit what `change_for` says for the table as it is now, at most once for (application, version). False where
    that version is there already.

    `change_for` is called again with a newer table after each conflict. Raises CommitStateUnknown where neither
    success nor failure can be found out; calling again with the same version settles it.
    """
    doubt: Exception | None = None
    doubts = 0
    for attempt in range(_TRIES):
        if doubts > _DOUBTS:
            break
        if attempt:
            time.sleep(min(2.0, 0.02 * 2**attempt) * random.uniform(0.5, 1.0))  # noqa: S311
        try:
            table = open_table(store, name)
        except StoreUnavailable as error:
            doubt, doubts = error, doubts + 1
            continue
        done = table.transaction_version(application)
        if done is not None and done >= version:
            return False
        change = change_for(table)
        try:
            _write(table, name, change, application, version)
        except CommitFailedError:
            continue  # someone else was first: look again
        except (OSError, DeltaError) as error:
            doubt, doubts = error, doubts + 1
            continue
        return True
    if doubt is None:
        raise CommitStateUnknown(
            f"table {name} of {store.uri}: {_TRIES} commits in a row met a faster one; run it again"
        )
    raise CommitStateUnknown(f"table {name} of {store.uri}: whether the commit landed is not known: {doubt}") from doubt


def _write(table: DeltaTable, name: str, change: Change, application: str, version: int) -> None:
    now = int(time.time() * 1000)
    partitions = partitions_by_path(table) if change.remove else {}
    actions: list[AddAction | RemoveAction] = [
        AddAction(file.path, file.size, dict(file.partition), now, True, _as_json(file.statistics))
        for file in change.add
    ]
    actions += [RemoveAction(path, True, now, partition_values=partitions.get(path)) for path in change.remove]
    transactions = [Transaction(application, version)]
    transactions += [Transaction(other, value) for other, value in change.transactions.items()]
    table.create_write_transaction(
        actions,
        "append",
        TABLES[name].arrow,
        partition_by=PARTITIONS.get(name),
        commit_properties=CommitProperties(app_transactions=transactions, max_commit_retries=0),
        # That lists the whole log, so it is left to vacuum.
        post_commithook_properties=PostCommitHookProperties(cleanup_expired_logs=False),
    )


def _as_json(statistics: Mapping[str, Any]) -> str:
    """Statistics as the log has them: not in ASCII, of which delta-rs reads characters from U+20000 up as others."""
    return json.dumps(dict(statistics), ensure_ascii=False, allow_nan=False)


def active_files(table: DeltaTable) -> pa.Table:
    """The files of the table: path, num_records, and min./max. columns of their statistics."""
    return pa.table(table.get_add_actions(flatten=True))


def missing_files(store: ObjectStore) -> list[str]:
    """Keys of the files that the tables name now, and the store does not have, or has in another size."""
    missing: list[str] = []
    for name in TABLES:
        files = active_files(open_table(store, name))
        there = {info.key: info.size for info in store.list(f"{name}/")}
        sizes = zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True) if len(files) else ()
        missing += [f"{name}/{path}" for path, size in sizes if there.get(f"{name}/{path}") != size]
    return sorted(missing)


def partitions_by_path(table: DeltaTable) -> dict[str, dict[str, str | None]]:
    """The partition values of each file, for a table that has partitions."""
    names = table.metadata().partition_columns
    files = active_files(table)
    columns = {name: files[f"partition.{name}"].to_pylist() for name in names}
    return {
        path: {name: values[row] for name, values in columns.items()}
        for row, path in enumerate(files["path"].to_pylist())
    }


def statistics(rows: pa.Table, columns: Iterable[str]) -> dict[str, Any]:
    """Delta's file statistics: the number of rows, and least and greatest value and nulls of `columns`."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in columns:
        column = rows[name]
        nulls[name] = column.null_count
        if column.null_count == len(column):
            continue
        # JSON knows neither NaN nor infinities, and a bound that leaves them out would prune rows that have them.
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
            continue
        try:
            bounds = pc.min_max(column).as_py()
        except (OverflowError, ValueError):  # a time that Python has none for, which writers let through once
            continue
        if isinstance(bounds["min"], str) and max(map(len, bounds.values())) > _LONGEST_STATISTIC:
            continue
        least[name], greatest[name] = bounds["min"], bounds["max"]
    return {"numRecords": len(rows), "minValues": least, "maxValues": greatest, "nullCount": nulls}

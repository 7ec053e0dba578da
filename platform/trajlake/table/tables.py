"""The lake's three Delta tables and its marker object: where they lie, how they are made and opened."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from trajlake.errors import LakeExists, LakeMissing, LakeTooNew, StoreError, StoreUnavailable, UsageError
from trajlake.storage import ObjectStore, Unknown
from trajlake_schemas import TABLES

MARKER = "lake.json"
LAYOUT = 1  # of the folders and objects below the root; a reader refuses a higher one
PARTITIONS = {"segments": ["state"]}  # so that a planner reads the few pending rows without the long history
RETENTION_HOURS = 168
_MISTAKEN = frozenset("#?%=*[]\\")  # for what a URL ends with, escapes, partitions, patterns


@dataclass(frozen=True)
class LakeInfo:
    """What the marker says."""

    lake_id: str
    layout: int
    created_at: str


def create_lake(store: ObjectStore) -> LakeInfo:
    """Make the tables, then the marker; a creation that was cut off is simply repeated. Raises LakeExists, UsageError
    for an address that libraries would take for another one."""
    place = store.location(MARKER).removesuffix(MARKER)
    if wrong := sorted({sign for sign in place if sign in _MISTAKEN or not sign.isprintable()}):
        signs = " ".join(map(ascii, wrong))
        raise UsageError(f"{store.uri} cannot be a lake: Delta and Polars mistake {signs} in its address ({place})")
    if store.stat(MARKER) is not None:
        read_marker(store)
        raise LakeExists(f"{store.uri} is a lake already; use it as it is")
    retention = f"interval {RETENTION_HOURS} hours"
    for name, table in TABLES.items():
        with delta_errors(store, name):
            DeltaTable.create(
                store.location(name),
                table.arrow,
                mode="ignore",
                partition_by=PARTITIONS.get(name),
                name=f"trajlake.{name}",
                description=f"version {table.version}: {table.row}",
                configuration={
                    "delta.deletedFileRetentionDuration": retention,
                    "delta.logRetentionDuration": retention,
                    "delta.checkpointInterval": "10",  # whoever opens a table reads each later commit by itself
                },
                storage_options=store.storage_options(),
            )
    info = LakeInfo(uuid.uuid4().hex, LAYOUT, datetime.now(UTC).isoformat(timespec="seconds"))
    outcome = store.put_if_absent(MARKER, json.dumps(info.__dict__, indent=2).encode())
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return read_marker(store)


def read_marker(store: ObjectStore) -> LakeInfo:
    """Raises LakeMissing, also where the marker is damaged, and LakeTooNew."""
    if store.stat(MARKER) is None:
        raise LakeMissing(
            f"there is no lake at {store.uri}: run `trajlake --lake {quote(store.uri)} init`, or correct the address"
        )
    try:
        info = LakeInfo(**json.loads(store.get(MARKER)))
    except (ValueError, TypeError) as error:
        raise LakeMissing(
            f"{store.uri}/{MARKER} is not the marker of a lake ({error}): restore it from a backup, or remove it and "
            f"run `trajlake --lake {quote(store.uri)} init`, which leaves tables that are there as they are "
            "(the lake has another id then: what waits in spools is not taken for its own)"
        ) from error
    if info.layout > LAYOUT:
        raise LakeTooNew(f"{store.uri} has layout {info.layout}, this version knows {LAYOUT}: upgrade trajlake")
    return info


def open_table(store: ObjectStore, name: str, version: int | None = None) -> DeltaTable:
    """One of `episodes`, `steps`, `segments`, at `version` or at its newest. Raises LakeMissing, and StoreError where
    the lake has lost the table, or this version of it."""
    with delta_errors(store, name):
        return _Table(store.location(name), version=version, storage_options=store.storage_options())


class _Table(DeltaTable):
    """Polars takes the addresses that it gets of a table as they are, and deltalake gives them escaped."""

    @property
    def table_uri(self) -> str:
        return unquote(super().table_uri)

    def file_uris(self, *arguments: Any, **choices: Any) -> list[str]:
        return [unquote(uri) for uri in super().file_uris(*arguments, **choices)]


@contextmanager
def delta_errors(store: ObjectStore, name: str) -> Iterator[None]:
    """deltalake reports the store's errors in several lines; make them one line of ours."""
    try:
        yield
    except TableNotFoundError as error:
        if store.stat(MARKER) is not None:  # `init` would refuse
            raise StoreError(
                f"{store.uri} is damaged: objects of {name}/_delta_log/ are gone; restore them from a backup or from "
                "the bucket's versions"
            ) from error
        raise LakeMissing(f"{store.uri} has no table {name}: run `trajlake --lake {quote(store.uri)} init`") from error
    except OSError as error:
        raise StoreUnavailable(f"table {name} of {store.uri}: {_last_line(error)}") from error
    except DeltaError as error:
        raise StoreError(f"table {name} of {store.uri} cannot be read: {str(error).splitlines()[0]}") from error


def _last_line(error: BaseException) -> str:
    lines = [line.strip(" ↳\x1b[0m31") for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

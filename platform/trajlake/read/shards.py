"""Shards: one file of episodes, written and then read back by a reader that did not write it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import fastparquet
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import ExportError
from trajlake.read.record import EPISODE_COLUMNS, json_line, messages, record
from trajlake.read.trajectory import Trajectory, restored


@dataclass(frozen=True)
class ShardFile:
    """One file of an export: its place in the folder, `rows` (episodes), and `sha256` of its bytes."""

    name: str
    rows: int
    steps: int
    bytes: int
    sha256: str


PORTABLE: pa.Schema = pa.schema(
    [pa.field(column.name, column.type if column.flat else pa.string()) for column in EPISODE_COLUMNS]
    + [pa.field("messages", pa.string())]
)
"""The portable profile: flat columns only, so that every Parquet reader can read it. `rewards`, `tags` and `messages`
are JSON text."""


Batch = tuple[pl.DataFrame, list[pa.Table]]
"""Episode rows, and the steps of each."""


def _trajectories(batch: Batch) -> Iterator[Trajectory]:
    rows, tables = batch
    for row, steps in zip(rows.iter_rows(named=True), tables, strict=True):
        yield Trajectory(row, [restored(step) for step in steps.to_pylist()])


def write_parquet(batches: Iterable[Batch], path: Path) -> ShardFile:
    """A shard of the portable profile; each batch is a row group. Raises ExportError where fastparquet reads other
    values than were written."""
    rows = steps = 0
    digests: list[dict[str, str]] = []
    with pq.ParquetWriter(path, PORTABLE, compression="zstd", store_schema=False) as writer:
        for batch in batches:
            trajectories = list(_trajectories(batch))
            table = _portable(trajectories)
            writer.write_table(table, row_group_size=max(1, len(table)))
            digests.append({name: _digest(table[name].to_pylist()) for name in table.schema.names})
            rows += len(table)
            steps += sum(len(trajectory.steps) for trajectory in trajectories)
    _verify_parquet(path, digests)
    return shard_file(path, path.name, rows, steps)


def _portable(trajectories: list[Trajectory]) -> pa.Table:
    columns: dict[str, list[Any]] = {name: [] for name in PORTABLE.names}
    for trajectory in trajectories:
        for column in EPISODE_COLUMNS:
            value = trajectory.episode[column.name]
            if value is not None and not column.flat:
                value = json_line(dict(value) if column.name == "tags" else value)
            columns[column.name].append(value)
        columns["messages"].append(json_line(messages(trajectory)))
    try:
        return pa.table(columns, schema=PORTABLE)
    except pa.ArrowCapacityError as error:
        _, longest = max(zip(map(len, columns["messages"]), columns["episode_id"], strict=True))
        raise ExportError(
            f"episode {longest} is as JSON more than a value of a Parquet file can be ({error}): leave it out by a "
            "condition, or export jsonl"
        ) from error


def _verify_parquet(path: Path, digests: list[dict[str, str]]) -> None:
    """Read the file with fastparquet, which shares no code with the writer, and compare every value."""
    with path.open("rb") as opened:  # fastparquet leaves files open that it opens itself
        file = fastparquet.ParquetFile(opened)
        if len(file.row_groups) != len(digests):
            raise ExportError(f"{path.name}: {len(file.row_groups)} row groups read back, {len(digests)} were written")
        for number, (frame, expected) in enumerate(zip(file.iter_row_groups(), digests, strict=True)):
            for name, digest in expected.items():
                if _digest(frame[name].tolist()) != digest:
                    raise ExportError(f"{path.name}: column {name} of row group {number} does not read back as written")


def _digest(values: Iterable[Any]) -> str:
    """A hash of values that does not see what pandas cannot tell apart: null and NaN; integers and whole floats."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(_canonical(value))
        digest.update(b"\x1e")
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    if isinstance(value, str):
        return b"s" + value.encode("utf-8")
    if value is None or type(value).__name__ in {"NAType", "NaTType"} or value != value:
        return b"n"
    if isinstance(value, datetime):
        return b"t" + str(round(value.timestamp() * 1_000_000)).encode()
    if isinstance(value, bool):
        return b"f" + repr(float(value)).encode()
    if isinstance(value, (int, float)):
        # A float64 holds every integer below 2**53; beyond that both sides lose the same digits.
        return b"f" + (repr(float(value)) if math.isfinite(value) else str(value)).encode()
    return b"s" + bytes(value) if isinstance(value, bytes) else b"?" + repr(value).encode()


def write_jsonl(batches: Iterable[Batch], path: Path) -> ShardFile:
    """A shard of JSON lines, one record an episode. Raises ExportError where a line does not read back."""
    ids: list[str] = []
    steps = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for batch in batches:
            for trajectory in _trajectories(batch):
                original = Trajectory(restored(trajectory.episode), trajectory.steps)
                file.write(json_line(record(original)) + "\n")
                ids.append(trajectory.episode_id)
                steps += len(trajectory.steps)
        file.flush()
        os.fsync(file.fileno())
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number >= len(ids) or json.loads(line)["episode_id"] != ids[number]:
                raise ExportError(f"{path.name}: line {number + 1} does not read back as written")
    return shard_file(path, path.name, len(ids), steps)


def shard_file(path: Path, name: str, rows: int, steps: int) -> ShardFile:
    """What the manifest says of a file that was written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ShardFile(name, rows, steps, path.stat().st_size, digest)


SHARD_WRITERS: dict[str, Callable[[Iterable[Batch], Path], ShardFile]] = {
    "parquet": write_parquet,
    "jsonl": write_jsonl,
}

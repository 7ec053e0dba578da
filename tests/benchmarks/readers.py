"""The contenders of the reading benchmarks: each opens the same episodes and gives an Arrow table of their steps.

Lance reads its own copy, DuckDB and Polars read the Parquet files of our lake. A reader that is kept is warm: what it
knows of indexes and footers stays. `open_readers` makes cold ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb
import lance
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs

import trajlake
from tests.benchmarks.corpus import Corpus, step_files, upload
from tests.benchmarks.harness import OURS, Options
from trajlake.lake import Lake
from trajlake.storage import open_store
from trajlake_schemas import STEPS

Rows = list[dict[str, Any]]
_SCHEMA = pl.DataFrame(STEPS.arrow.empty_table()).schema


@dataclass(frozen=True)
class Place:
    """Where the contenders' data are: a lake, a Lance dataset, and the row range of each episode in that."""

    name: str
    lake_uri: str
    lance_uri: str
    lance_options: dict[str, str] | None
    lance_rows: dict[str, tuple[int, int]]


def local_place(corpus: Corpus) -> Place:
    """The corpus as it lies on the local disk."""
    return Place("local", corpus.compacted.uri, str(corpus.lance.path), None, corpus.lance.rows)


def s3_place(corpus: Corpus, options: Options) -> Place:
    """The same objects on the S3 server."""
    uri = options.s3_scratch(corpus.name)
    upload(corpus.path, f"{uri}/lake")
    upload(corpus.lance.path, f"{uri}/steps.lance")
    store = open_store(uri)
    return Place("S3", f"{uri}/lake", store.location("steps.lance"), store.storage_options(), corpus.lance.rows)


class Ours:
    def __init__(self, place: Place) -> None:
        self.snapshot = trajlake.connect(place.lake_uri).snapshot()

    def episode(self, episode_id: str) -> Rows:
        return self.snapshot.episode(episode_id).steps

    def batch(self, episode_ids: Sequence[str]) -> pa.Table:
        return pa.concat_tables(self.snapshot.steps_of(self.snapshot.rows_of(episode_ids)))

    def batch_of_objects(self, episode_ids: Sequence[str]) -> list[Rows]:
        return [each.steps for each in self.snapshot.trajectories(episode_ids)]


class LanceByIndex:
    """Filters by the scalar index on `episode_id`."""

    def __init__(self, place: Place) -> None:
        self._dataset = lance.dataset(place.lance_uri, storage_options=place.lance_options)

    def episode(self, episode_id: str) -> Rows:
        return self.batch([episode_id]).to_pylist()

    def batch(self, episode_ids: Sequence[str]) -> pa.Table:
        wanted = ", ".join(f"'{episode_id}'" for episode_id in episode_ids)
        return self._dataset.to_table(filter=f"episode_id IN ({wanted})")


class LanceByRow:
    """`take` by row numbers, which are known from elsewhere: Lance's fastest way, and the least that it does."""

    def __init__(self, place: Place) -> None:
        self._dataset = lance.dataset(place.lance_uri, storage_options=place.lance_options)
        self._rows = place.lance_rows

    def episode(self, episode_id: str) -> Rows:
        return self.batch([episode_id]).to_pylist()

    def batch(self, episode_ids: Sequence[str]) -> pa.Table:
        ranges = (self._rows[episode_id] for episode_id in episode_ids)
        return self._dataset.take([row for first, count in ranges for row in range(first, first + count)])

    def batch_of_objects(self, episode_ids: Sequence[str]) -> list[Rows]:
        rows = iter(self.batch(episode_ids).to_pylist())
        return [[next(rows) for _ in range(self._rows[episode_id][1])] for episode_id in episode_ids]


class DuckDB:
    """SQL on our Parquet files. Its own S3 reader has to be downloaded, so there it goes through pyarrow."""

    def __init__(self, place: Place) -> None:
        self._connection = duckdb.connect(config={"threads": 2})
        self._connection.execute("LOAD parquet; SET parquet_metadata_cache = true")
        files = step_files(trajlake.connect(place.lake_uri))
        if place.name == "local":
            names = ", ".join(f"'{file}'" for file in files)
            self._connection.execute(f"CREATE VIEW steps AS FROM read_parquet([{names}], union_by_name = true)")
        else:
            dataset = pyarrow.dataset.dataset(
                [file.removeprefix("s3://") for file in files],
                filesystem=_arrow_filesystem(place.lance_options or {}),
                schema=STEPS.arrow,
            )
            self._connection.register("steps", dataset)

    def episode(self, episode_id: str) -> Rows:
        return self.batch([episode_id]).to_pylist()

    def batch(self, episode_ids: Sequence[str]) -> pa.Table:
        wanted = ", ".join(f"'{episode_id}'" for episode_id in episode_ids)
        condition = f"episode_id = {wanted}" if len(episode_ids) == 1 else f"episode_id IN ({wanted})"
        return self._connection.sql(f"FROM steps WHERE {condition} ORDER BY episode_id, step_index").to_arrow_table()


class Polars:
    """A scan of our Parquet files with a predicate."""

    def __init__(self, place: Place) -> None:
        files = step_files(trajlake.connect(place.lake_uri))
        self._frame = pl.scan_parquet(
            files, schema=_SCHEMA, missing_columns="insert", storage_options=place.lance_options
        )

    def _scan(self, condition: pl.Expr) -> pl.DataFrame:
        return self._frame.filter(condition).sort("episode_id", "step_index").collect()

    def episode(self, episode_id: str) -> Rows:
        return self._scan(pl.col("episode_id") == episode_id).to_dicts()

    def batch(self, episode_ids: Sequence[str]) -> pa.Table:
        return self._scan(pl.col("episode_id").is_in(list(episode_ids))).to_arrow()


READERS: dict[str, Callable[[Place], Any]] = {
    OURS: Ours,
    "Lance, scalar index": LanceByIndex,
    "Lance, take by row": LanceByRow,
    "DuckDB, our Parquet": DuckDB,
    "Polars, our Parquet": Polars,
}


@dataclass(frozen=True)
class Sizes:
    """What each contender's data take on disk."""

    corpus: Corpus

    @cached_property
    def lance(self) -> int:
        from tests.benchmarks.harness import folder_bytes

        return folder_bytes(self.corpus.lance.path)

    def of(self, contender: str) -> int | None:
        if contender == OURS:
            return self.corpus.table_bytes
        return self.lance if contender.startswith("Lance") else None


def same_rows(rows: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows in a form in which those of all contenders are equal: sorted, without the column that only we know."""
    names = [name for name in STEPS.arrow.names if name != "restore"]
    found = [tuple(row.get(name) for name in names) for row in rows]  # Parquet files do not have columns of nulls
    return sorted(found, key=lambda row: row[:2])


def same_table(table: pa.Table) -> list[tuple[Any, ...]]:
    return same_rows(table.to_pylist())


def warmed(readers: dict[str, Any], episode_ids: Sequence[str]) -> None:
    """Let each reader open its index and its footers."""
    for reader in readers.values():
        reader.batch(episode_ids)


def _arrow_filesystem(settings: dict[str, str]) -> pyarrow.fs.FileSystem:
    scheme, _, host = settings["AWS_ENDPOINT_URL"].partition("://")
    return pyarrow.fs.S3FileSystem(
        access_key=settings["AWS_ACCESS_KEY_ID"],
        secret_key=settings["AWS_SECRET_ACCESS_KEY"],
        region=settings["AWS_REGION"],
        endpoint_override=host,
        scheme=scheme,
    )


def counted(place: Place, action: Callable[[Any], object]) -> str:
    """The requests to the store behind `action`, beside those that Polars makes for the index."""
    from trajlake.storage.wrappers import CountingStore

    store = CountingStore(open_store(place.lake_uri))
    reader = Ours(place)
    reader.snapshot = Lake(store).snapshot()
    action(reader)
    store.reset()
    action(reader)
    calls = ", ".join(f"{count} {name}" for name, count in sorted(store.calls.items()))
    return f"warm, steps: {calls or 'no call'} ({sum(store.bytes.values()) / 1e6:.2f} MB)"

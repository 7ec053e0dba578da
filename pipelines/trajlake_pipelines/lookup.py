"""What the `episodes` table says of the episodes that new segments touch.

Ids made by a Writer begin with the time, so the least and greatest id of a file (they stand in the table's log) rule
out nearly all of history. Of the files that remain only the column of ids is read, and of that only row groups that
can hold one; the row itself only for ids that are there.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl
import pyarrow as pa

from trajlake.storage import ObjectStore
from trajlake.table.commit import active_files
from trajlake.table.tables import open_table
from trajlake_pipelines.merge import NO_END

_BOUNDS = ("path", "low", "high")
_BOUND_COLUMNS = ("path", "min.episode_id", "max.episode_id")

Known = dict[str, tuple[int, bool]]
"""Episode to its attempt and whether it is complete (not sealed)."""


def known_episodes(store: ObjectStore, episode_ids: pl.Series) -> Known:
    """Those of `episode_ids` that the table holds."""
    table = open_table(store, "episodes")
    wanted = episode_ids.unique().sort()
    paths = _admitting(active_files(table), wanted)
    if not paths:
        return {}
    frame = scan_files(store, "episodes", paths)
    rows = (
        frame.select("episode_id", "attempt", sealed=(pl.col("stop_reason") == NO_END).fill_null(False))
        .filter(pl.col("episode_id").is_between(pl.lit(wanted[0]), pl.lit(wanted[-1])))
        .join(wanted.to_frame("episode_id").lazy(), on="episode_id", how="semi")
        .collect(engine="streaming")
    )
    return {episode: (attempt, not sealed) for episode, attempt, sealed in rows.iter_rows()}


def _admitting(files: pa.Table, wanted: pl.Series) -> list[str]:
    """Files whose least and greatest id leave room for one of `wanted`, which is sorted."""
    if not len(files) or wanted.is_empty():
        return []
    if "min.episode_id" not in files.schema.names or "max.episode_id" not in files.schema.names:
        return sorted(files["path"].to_pylist())
    bounds = pl.DataFrame(
        {name: pl.from_arrow(files[column]) for name, column in zip(_BOUNDS, _BOUND_COLUMNS, strict=True)}
    )
    place = wanted.search_sorted(bounds["low"].fill_null(""), side="left")
    following = wanted.extend_constant(None, 1).gather(place)
    bounds = bounds.with_columns(following=following)
    admits = pl.col("low").is_null() | pl.col("high").is_null() | (pl.col("following") <= pl.col("high"))
    return bounds.filter(admits)["path"].sort().to_list()


def scan_files(store: ObjectStore, table: str, paths: Collection[str]) -> pl.LazyFrame:
    """Some files of a table (not of one with partitions)."""
    return pl.scan_parquet(
        [store.location(f"{table}/{path}") for path in paths],
        storage_options=store.storage_options(),
        hive_partitioning=False,
        missing_columns="insert",
        extra_columns="ignore",
    )

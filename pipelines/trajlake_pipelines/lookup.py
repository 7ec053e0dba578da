"""What the `episodes` table says of the episodes that new segments touch.

Of the files that can hold one only the column of ids is read, and of that only row groups that can hold one; the row
itself only for ids that are there.
"""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from trajlake.storage import ObjectStore
from trajlake.table.id_index import Runs, files_that_may_hold
from trajlake.table.sealed import is_sealed, lacks_its_beginning
from trajlake.table.tables import open_table
from trajlake_pipelines.units import KnownEpisode


def known_episodes(store: ObjectStore, episode_ids: pl.Series, runs: Runs | None) -> dict[str, KnownEpisode]:
    """Those of `episode_ids` that the table holds; `runs` of the index of episodes."""
    wanted = episode_ids.unique().sort()
    paths = files_that_may_hold(store, open_table(store, "episodes"), wanted, runs)
    if not paths:
        return {}
    frame = scan_files(store, "episodes", paths)
    rows = (
        frame.select(
            "episode_id",
            "attempt",
            complete=~is_sealed(),
            begun=~lacks_its_beginning(),
            steps="n_steps",
        )
        .filter(pl.col("episode_id").is_between(pl.lit(wanted[0]), pl.lit(wanted[-1])))
        .join(wanted.to_frame("episode_id").lazy(), on="episode_id", how="semi")
        .collect(engine="streaming")
    )
    return {episode: KnownEpisode(*values) for episode, *values in rows.iter_rows()}


def scan_files(store: ObjectStore, table: str, paths: Collection[str]) -> pl.LazyFrame:
    """Some files of a table (not of one with partitions)."""
    return pl.scan_parquet(
        [store.location(f"{table}/{path}") for path in paths],
        storage_options=store.storage_options(),
        hive_partitioning=False,
        missing_columns="insert",
        extra_columns="ignore",
    )

"""The warm index: the rows of `episodes` in memory, for whoever looks up more than one episode of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import polars as pl

MOST_BYTES = 64 << 20  # of Parquet: about half a million episodes, read in a second or two


def sorted_by_id(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows.sort("episode_id")` in a third of the time: for most ids the first 16 bytes, as two numbers, decide, and
    rows in one piece are gathered faster than rows in many."""
    padded = pl.col("episode_id").str.pad_end(16, "\0").cast(pl.Binary)
    numbers = [padded.bin.slice(start, 8).bin.reinterpret(dtype=pl.UInt64, endianness="big") for start in (0, 8)]
    rows = rows.rechunk()
    return rows[rows.select(pl.arg_sort_by(*numbers, "episode_id")).to_series()]


class EpisodeIndex:
    """Finds rows by id without another request. Safe from several threads."""

    def __init__(self, rows: pl.DataFrame) -> None:
        self._rows = sorted_by_id(rows)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {episode_id: place for place, episode_id in enumerate(self._rows["episode_id"])}

    def rows_of(self, episode_ids: Sequence[str]) -> pl.DataFrame:
        """The rows of those that are there, in this order."""
        places = [place for each in episode_ids if (place := self._places.get(each)) is not None]
        return self._rows[np.array(places, np.int64)]

    def beginning_with(self, text: str, most: int) -> pl.DataFrame:
        """At most so many rows whose ids begin with `text`."""
        return self._rows.filter(pl.col("episode_id").str.starts_with(text)).head(most)

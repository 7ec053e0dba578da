"""Where the episodes of a sampler come from: a snapshot, or the live view of a lake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import polars as pl


class Source(Protocol):
    """Finds episodes and their steps."""

    @property
    def token(self) -> str: ...

    @property
    def lake_id(self) -> str: ...

    def rows_of(self, episode_ids: Sequence[str]) -> pl.DataFrame:
        """Their rows with all columns of `episodes`, in this order. Raises EpisodeMissing."""
        ...

    def steps_of(self, rows: pl.DataFrame, *, keep: bool = False) -> list[Any]:
        """For each row (with `episode_id` and the columns of its place) an Arrow table of its steps; `keep` what was
        read beside them."""
        ...

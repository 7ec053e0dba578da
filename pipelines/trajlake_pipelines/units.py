"""Who merges what: whole episodes into bins of about equal bytes, in columns, so that millions of them are quick."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import polars as pl

from trajlake.ingest.segment import Descriptor

_CHUNK = 100_000  # parts that are kept as Python lists before they become columns
_COMPRESSED = 8  # times: what is smaller than that counts as much, for a unit holds it as Arrow
_LAST = 2  # so much of the work, in units, is cut into halves: so workers end together, and not one a unit later
_WORTH_HALVES = 6.0  # units from which on that is done; few small files rather than little waiting


@dataclass(frozen=True)
class PlannedSegment:
    """One segment as a unit reads it. `modified_at` in microseconds since 1970, by the server's clock.

    `episodes` are those whose events the unit takes, or None for all: others are another unit's, or were consumed.
    """

    key: str
    size: int
    modified_at: int
    again: bool = False  # it was consumed before, and some of its episodes had not ended
    episodes: tuple[str, ...] | None = None


class KnownEpisode(NamedTuple):
    """What the `episodes` table says of an episode before a compaction. Not `complete`: it was sealed, with so many
    `steps`; not `begun`: without its beginning."""

    attempt: int
    complete: bool
    begun: bool = True
    steps: int = 0


@dataclass(frozen=True)
class Unit:
    """What one worker merges: `known` are the episodes that the table has; `seal` what is sealed."""

    number: int
    segments: tuple[PlannedSegment, ...]
    known: dict[str, KnownEpisode]
    seal: tuple[str, ...]


def unit_from_json(body: dict[str, Any]) -> Unit:
    """A unit as it crosses a shuffle."""
    segments = [
        PlannedSegment(**{**segment, "episodes": None if segment["episodes"] is None else tuple(segment["episodes"])})
        for segment in body["segments"]
    ]
    known = {episode: KnownEpisode(*values) for episode, values in body["known"].items()}
    return Unit(body["number"], tuple(segments), known, tuple(body["seal"]))


_PARTS = {
    "episode_id": pl.String,
    "segment": pl.Int32,
    "bytes": pl.Float32,
    "ends": pl.Boolean,
    "new": pl.Boolean,
}


@dataclass
class Parts:
    """One row an episode and segment, gathered in columns: episode_id, segment (its place in `segments`), bytes (the
    episode's share of it), ends, new. Segments must be added in the order in which units shall read them."""

    segments: list[PlannedSegment] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    _frames: list[pl.DataFrame] = field(default_factory=list)
    _rows: list[tuple[str, int, float, bool, bool]] = field(default_factory=list)

    def add(self, segment: PlannedSegment, descriptor: Descriptor) -> None:
        """A new segment."""
        place = len(self.segments)
        self.segments.append(segment)
        if not descriptor.episodes:
            self.empty.append(place)
        share = max(segment.size, descriptor.arrow_bytes / _COMPRESSED) / max(1, descriptor.events)
        self._rows += [(part.episode_id, place, share * part.events, part.ends, True) for part in descriptor.episodes]
        if len(self._rows) >= _CHUNK:
            self._flush()

    def add_waiting(self, segment: PlannedSegment, pending: Sequence[str]) -> None:
        """A segment of an earlier compaction, of which these episodes had not ended."""
        place = len(self.segments)
        self.segments.append(segment)
        share = segment.size / max(1, len(pending))
        self._rows += [(episode, place, share, False, False) for episode in pending]

    def _flush(self) -> None:
        self._frames.append(pl.DataFrame(self._rows, schema=_PARTS, orient="row"))
        self._rows = []

    def frame(self) -> pl.DataFrame:
        """All rows."""
        self._flush()
        return pl.concat(self._frames)


def involved(
    parts: pl.DataFrame,
    segments: Sequence[PlannedSegment],
    known: dict[str, KnownEpisode],
    stale_after: float | None,
    now: float,
) -> tuple[pl.DataFrame, set[str]]:
    """The parts that this compaction reads, and the episodes that it seals.

    Read is what new segments touch, and what is to be sealed; an episode that only waits is left alone.
    """
    if stale_after is None and parts["new"].all():
        return parts, set()
    times = pl.Series("modified_at", [segment.modified_at for segment in segments], dtype=pl.Int64)
    by_episode = (
        parts.with_columns(modified_at=times.gather(parts["segment"]))
        .group_by("episode_id")
        .agg(last=pl.col("modified_at").max(), new=pl.col("new").any(), ends=pl.col("ends").any())
    )
    seal: set[str] = set()
    if stale_after is not None:
        limit = int((now - stale_after) * 1_000_000)
        # The sealed ones that nothing was added to stay as they are.
        candidates = by_episode.filter(~pl.col("ends") & (pl.col("last") <= limit))
        seal = {
            episode
            for episode, fresh in candidates.select("episode_id", "new").iter_rows()
            if fresh or episode not in known
        }
    wanted = by_episode.filter(pl.col("new") | pl.col("episode_id").is_in(list(seal)))
    return parts.join(wanted.select("episode_id"), on="episode_id", how="semi"), seal


def assign_units(
    parts: pl.DataFrame,
    segments: Sequence[PlannedSegment],
    known: dict[str, KnownEpisode],
    seal: Iterable[str],
    unit_bytes: int,
) -> list[Unit]:
    """Bins of whole episodes, each of about `unit_bytes`, in the order of the segments in which they begin.

    Neighbouring episodes share segments, so bins of neighbours read few segments twice. Of many bins the last are
    half as large.
    """
    if parts.is_empty():
        return []
    # Episodes are told apart by hash: two that collide merely come into the same unit.
    keys = parts.select("segment", "bytes", key=pl.col("episode_id").hash(seed=0))
    whole = keys.group_by("key").agg(first=pl.col("segment").min(), bytes=pl.col("bytes").sum())
    position = (pl.col("bytes").cast(pl.Float64).cum_sum() - pl.col("bytes") / 2) / unit_bytes
    total = float(whole["bytes"].cast(pl.Float64).sum()) / unit_bytes
    if total >= _WORTH_HALVES:
        position = pl.max_horizontal(position, 2 * position - math.floor(total - _LAST))
    whole = whole.sort(["first", "key"]).select("key", unit=position.floor().rank("dense").cast(pl.Int32) - 1)
    placed = keys.select("key", "segment").join(whole, on="key", how="left", maintain_order="left")
    pairs = placed.select("unit", "segment").unique().sort("unit", "segment")
    # A segment that others read too, or that was consumed before, holds events that are not this unit's.
    again = [place for place, segment in enumerate(segments) if segment.again]
    counts = pairs.group_by("segment").len()
    partly = pl.concat(
        [counts.filter(pl.col("len") > 1)["segment"], pl.Series("segment", again, dtype=pl.Int32)]
    ).unique()
    chosen = (
        parts.select("episode_id", "segment")
        .with_columns(placed["unit"])
        .filter(pl.col("segment").is_in(partly.implode()))
        .group_by("unit", "segment")
        .agg(pl.col("episode_id").unique().sort())
    )
    only = {(unit, segment): tuple(episodes) for unit, segment, episodes in chosen.iter_rows()}
    known_by_unit = _by_unit(whole, known)
    seal_by_unit = _by_unit(whole, seal)
    units = []
    for number, places in pairs.group_by("unit", maintain_order=True).agg("segment").iter_rows():
        taken = tuple(
            PlannedSegment(each.key, each.size, each.modified_at, each.again, only.get((number, place)))
            for place, each in ((place, segments[place]) for place in places)
        )
        units.append(
            Unit(
                number,
                taken,
                {episode: known[episode] for episode in known_by_unit.get(number, ())},
                tuple(seal_by_unit.get(number, ())),
            )
        )
    return units


def _by_unit(whole: pl.DataFrame, episodes: Iterable[str]) -> dict[int, list[str]]:
    some = pl.DataFrame({"episode_id": sorted(episodes)}, schema={"episode_id": pl.String})
    some = some.with_columns(key=pl.col("episode_id").hash(seed=0))
    found = some.join(whole, on="key", how="inner", maintain_order="left").group_by("unit").agg("episode_id")
    return dict(found.iter_rows())

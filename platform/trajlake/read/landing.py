"""The landing tail: complete episodes that are not in the tables yet, read from their segments.

This is the one reader that lists landing. What it makes of an episode is what a compaction would make of it, but for
what needs the whole lake: duplicates by content, and which of several attempts wins. Scores and retractions are kept
apart, for they may be of any episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.errors import ObjectMissing, SegmentUnreadable
from trajlake.ingest.segment import LANDING, SegmentName, decode_segment
from trajlake.storage import ObjectStore
from trajlake.table.rewrite import NO_REASON
from trajlake.table.rows import content_hashes, merged_objects, token_audits
from trajlake.table.sealed import what_is_missing
from trajlake.table.tables import open_table
from trajlake_schemas import EPISODES, STEPS
from trajlake_schemas.episodes import BEGIN, OUTCOME
from trajlake_schemas.steps import STEP_CONTENT

_THREADS = 8
_IN_ONE_PIECE = 512 << 20  # bytes of events: an array holds less than 2 GiB
_SUMS = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
Writer = tuple[str, str, int]


@dataclass(frozen=True)
class Landed:
    """An episode that has ended: its row as in `episodes` (without a place), and its steps."""

    row: dict[str, Any]
    steps: pa.Table


@dataclass(frozen=True)
class News:
    """What a poll found: episodes that have ended, in the order in which they were recorded, and the ids of those that
    got a score or a retraction."""

    ended: list[Landed]
    late: list[str]


class LandingTail:
    """Remembers what it has read: each poll costs a listing and what is new.

    `scores` (reward components by episode) and `retractions` (the reason by episode) are those of segments that are not
    consumed yet; what a writer said last comes last.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._known: set[str] = set()
        self._broken: set[str] = set()
        self._next: dict[Writer, int] = {}  # the lowest segment number that is not read yet
        self._early: dict[Writer, dict[int, pa.Table]] = {}
        self._open: dict[tuple[Writer, str, int], list[pa.Table]] = {}
        self._ended: list[tuple[Writer, pa.Table]] = []  # episodes that no poll has given yet
        self._late: dict[str, list[dict[str, Any]]] = {}  # by segment
        self._waiting: dict[str, frozenset[str]] = {}  # of segments in the ledger: what the tables do not have of them
        self.scores: dict[str, list[dict[str, Any]]] = {}
        self.retractions: dict[str, str] = {}

    def skip_consumed(self) -> None:
        """Leave out what the ledger has consumed: to be called before a snapshot is opened, which then has all of it.
        Segments of which an episode still waits are read again."""
        ledger = (
            pl.scan_delta(open_table(self._store, "segments")).select("path", "state", "pending_episodes").collect()
        )
        self._waiting = {}
        for path, state, pending in ledger.iter_rows():
            if state != "quarantined":
                self._waiting[path] = frozenset(pending or ())
            if state == "pending" or path in self._known:
                continue
            self._known.add(path)
            if state == "consumed":
                self._ended += self._pass(SegmentName.parse(path), None)
        before, self._late = self._late, {}
        self.scores, self.retractions = {}, {}
        for key, events in before.items():
            self._take_late(key, events)

    def poll(self) -> News:
        """What has come since the last poll."""
        fresh = [
            info.key
            for info in self._store.list(f"{LANDING}/")
            if info.key.endswith(".arrow") and info.key not in self._known
        ]
        ended, self._ended = self._ended, []
        before = set(self._late)
        with ThreadPoolExecutor(_THREADS) as pool:
            for key, events in zip(fresh, pool.map(self._read, fresh), strict=True):
                self._known.add(key)
                if events is not None:
                    ended += self._pass(SegmentName.parse(key), events)
        late = [event["episode_id"] for key, events in self._late.items() if key not in before for event in events]
        return News(landed(ended) if ended else [], late)

    def _take_late(self, key: str, events: list[dict[str, Any]]) -> None:
        """Scores and retractions of a segment, but for those that the tables have already."""
        waiting = self._waiting.get(key)
        left = [event for event in events if waiting is None or event["episode_id"] in waiting]
        if left:
            self._late[key] = left
        for event in left:
            if event["kind"] == "score":
                self.scores.setdefault(event["episode_id"], []).append(event["score"])
            else:
                self.retractions[event["episode_id"]] = event["retract"]["reason"] or NO_REASON

    def _read(self, key: str) -> pa.Table | None:
        """The events, or None for what a compaction will quarantine."""
        try:
            SegmentName.parse(key)
            return decode_segment(self._store.get(key), key)
        except (SegmentUnreadable, ObjectMissing):
            return None

    def _pass(self, name: SegmentName, events: pa.Table | None) -> list[tuple[Writer, pa.Table]]:
        """Take a writer's segments in their order, however they arrive: an end must not overtake its steps. Gives the
        events of each episode that has ended."""
        writer = (name.run_id, name.worker_id, name.epoch)
        waiting = self._early.setdefault(writer, {})
        waiting[name.number] = events
        ended: list[tuple[Writer, pa.Table]] = []
        while (number := self._next.get(writer, 0)) in waiting:
            self._next[writer] = number + 1
            segment = waiting.pop(number)
            if segment is not None:
                is_late = pc.is_in(segment["kind"], pa.array(["score", "retract"]))
                late = segment.filter(is_late).select(["kind", "episode_id", "score", "retract"]).to_pylist()
                self._take_late(replace(name, number=number).key, late)
                ended += [(writer, each) for each in self._sort(writer, segment)]
        return ended

    def _sort(self, writer: Writer, events: pa.Table) -> Iterator[pa.Table]:
        frame = pl.from_arrow(events.select(["episode_id", "attempt", "kind"]))
        assert isinstance(frame, pl.DataFrame)
        recorded = frame.with_row_index("row").filter(pl.col("kind").is_in(["begin", "step", "end"]))
        for (episode_id, attempt), part in recorded.group_by(["episode_id", "attempt"], maintain_order=True):
            key = (writer, str(episode_id), int(str(attempt)))
            self._open.setdefault(key, []).append(_rows(events, part["row"].to_numpy().astype(np.int64)))
            if (part["kind"] == "end").any():
                whole = pa.concat_tables(self._open.pop(key))
                if _is_complete(whole):  # else a segment of it was lost: should it come after all, the tables tell
                    yield whole


def landed(ended: Sequence[tuple[Writer, pa.Table]]) -> list[Landed]:
    """Episodes from their events: each all of one attempt by one writer, its end included."""
    tables = [_in_order(events) for _, events in ended]
    events = pa.concat_tables(tables)
    if events.nbytes <= _IN_ONE_PIECE:
        events = events.combine_chunks()
    steps, lengths = _steps(events, tables)
    derived = _derived(steps, lengths)
    rows, first_step = [], 0
    for (writer, _), table, length, more in zip(ended, tables, lengths, derived, strict=True):
        rows.append(Landed(_row(table, writer) | more, steps.slice(first_step, length)))
        first_step += length
    return rows


def _is_complete(events: pa.Table) -> bool:
    """As in a compaction: what ended has its begin, and as many steps as its ends say."""
    found = _in_order(events)
    kinds = found["kind"].to_pylist()
    ends = found["end"].filter(pc.equal(found["kind"], "end"))
    said = pc.struct_field(ends, "n_steps")
    return not what_is_missing(
        begun="begin" in kinds,
        ended=True,
        steps=kinds.count("step"),
        said=None if said.null_count else pc.sum(said).as_py(),
    )


def _in_order(events: pa.Table) -> pa.Table:
    """By sequence; what a repeated upload holds twice only once."""
    sequence = events["sequence"].to_numpy()
    if (np.diff(sequence) > 0).all():
        return events
    _, first = np.unique(sequence, return_index=True)
    return events.take(pa.array(first))


def _rows(events: pa.Table, rows: np.ndarray[Any, Any]) -> pa.Table:
    """These rows, rising; a slice, which costs nothing, where they stand side by side."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return events.slice(int(rows[0]), len(rows))
    return events.take(pa.array(rows))


def _row(events: pa.Table, writer: Writer) -> dict[str, Any]:
    kinds = events["kind"].to_pylist()
    begin = events["begin"][kinds.index("begin")].as_py() if "begin" in kinds else {}
    end_at = len(kinds) - 1 - kinds[::-1].index("end")
    end = events["end"][end_at].as_py()
    row: dict[str, Any] = {column.name: None for column in EPISODES}
    row |= {column.name: begin.get(column.name) for column in BEGIN}
    row |= {column.name: end.get(column.name) for column in OUTCOME}
    imported = begin.get("source_format") is not None
    recorded = events["recorded_at"]
    row["started_at"] = begin.get("occurred_at") or (None if imported else recorded[0].as_py())
    row["ended_at"] = end.get("occurred_at") or (None if imported else recorded[end_at].as_py())
    if row["started_at"] is not None and row["ended_at"] is not None:
        row["wall_ms"] = (row["ended_at"] - row["started_at"]) // timedelta(microseconds=1) / 1000
    for name in ("extra", "restore"):
        row[name] = merged_objects(begin.get(name), end.get(name))
    row |= {"episode_id": events["episode_id"][0].as_py(), "attempt": events["attempt"][0].as_py()}
    return row | dict(zip(("run_id", "worker_id", "epoch"), writer, strict=True))


def _steps(events: pa.Table, tables: Sequence[pa.Table]) -> tuple[pa.Table, list[int]]:
    """The steps of all of them in table order, and how many each has."""
    is_step = pc.equal(events["kind"], "step")
    episode = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    lengths = np.bincount(episode[is_step.to_numpy()], minlength=len(tables)).tolist()
    chosen = events.filter(is_step)
    pieces = [chunk.flatten() for chunk in chosen["step"].chunks]
    columns = {
        field.name: pa.chunked_array([piece[place] for piece in pieces], field.type)
        for place, field in enumerate(_STEP)
    }
    index = np.concatenate([np.arange(length) for length in lengths])
    arrays = [
        chosen["episode_id"],
        pa.array(index, pa.int32()),
        *(columns[column.name] for column in STEP_CONTENT),
    ]
    return pa.Table.from_arrays(arrays, schema=STEPS.arrow), lengths


_STEP: pa.StructType = pa.struct([pa.field(column.name, column.type) for column in STEP_CONTENT])


def _derived(steps: pa.Table, lengths: list[int]) -> list[dict[str, Any]]:
    """What is computed from the steps of each episode."""
    frame = pl.from_arrow(steps.select(["tool_calls", "tool_results", *_SUMS]))
    assert isinstance(frame, pl.DataFrame)
    errors = pl.col("tool_results").list.eval(pl.element().struct.field("is_error").cast(pl.Int32)).list.sum()
    sums = (
        frame.with_columns(episode=np.repeat(np.arange(len(lengths)), lengths))
        .group_by("episode")
        .agg(
            pl.col("tool_calls").list.len().sum().cast(pl.Int64).alias("n_tool_calls"),
            errors.sum().cast(pl.Int64).alias("n_tool_errors"),
            *(pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name) for name in _SUMS),
        )
    )
    every = pl.DataFrame({"episode": np.arange(len(lengths)), "n_steps": lengths})
    every = every.join(sums, on="episode", how="left").sort("episode").drop("episode")
    every = every.with_columns(
        pl.col("n_tool_calls", "n_tool_errors").fill_null(0),
        content_hash=pl.Series(content_hashes(steps, lengths), dtype=pl.String),
        token_audit=pl.Series(token_audits(steps, lengths), dtype=pl.String),
    )
    return every.to_dicts()

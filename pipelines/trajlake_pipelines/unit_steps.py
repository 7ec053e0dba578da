"""The steps of one unit, and what is computed of them: at once, or in parts where they are large.

A unit reads few bytes, but what compresses well may be many times as much in memory, and more than an Arrow array can
hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.ingest.segment import EVENT_SCHEMA
from trajlake.table.layout import Part
from trajlake.table.rows import content_hashes, token_audits
from trajlake.table.sizes import cut, sizes
from trajlake_schemas import STEPS
from trajlake_schemas.steps import STEP_CONTENT

_LARGE = 512 << 20  # bytes of steps as Arrow from which on a unit takes them in parts
_PART_BYTES = 256 << 20


class UnitSteps:
    """The steps of a unit in table order, in parts of whole episodes; may be gone through again. `columns` are those
    that may have a value."""

    def __init__(self, events: pa.Table, keys: pl.DataFrame, lengths: Sequence[int]) -> None:
        """`keys` has a row a step, in table order: episode_id, step_index, and its row in `events`; `lengths` are the
        steps of each episode."""
        chunks = events["step"].chunks
        empty = {
            name.name
            for index, name in enumerate(STEP_CONTENT)
            if all(piece.null_count == len(piece) for piece in (chunk.field(index) for chunk in chunks))
        }
        self.columns = [name for name in STEPS.names() if name not in empty]
        self._whole: list[Part] = []
        if events["step"].nbytes <= _LARGE:  # the events themselves are let go
            columns = taken(events, "step", keys["row"])
            self._whole = [(_table(keys, [columns[column.name] for column in STEP_CONTENT]), lengths)]
        else:
            self._events, self._keys, self._lengths = events, keys, lengths

    def __iter__(self) -> Iterator[Part]:
        if self._whole:
            yield from self._whole
            return
        rows = self._keys["row"].to_numpy().astype(np.int64)
        ends = np.cumsum([0.0, *np.diff(sizes(self._events["step"]))[rows]])
        firsts = np.cumsum([0, *self._lengths])
        for first, last in cut(ends[firsts], _PART_BYTES):
            start, end = firsts[first], firsts[last]
            found = [STEPS.arrow.empty_table()]
            for begin, stop in cut(ends[start : end + 1], _PART_BYTES):  # of an episode that is larger than a part
                some = slice(start + begin, start + stop)
                found.append(_table(self._keys[some], _taken_each(self._events["step"], rows[some])))
            yield pa.concat_tables(found[1:] or found), self._lengths[first:last]


def _table(keys: pl.DataFrame, content: Sequence[pa.Array]) -> pa.Table:
    arrays = [keys["episode_id"].to_arrow().cast(pa.string()), keys["step_index"].to_arrow(), *content]
    return pa.Table.from_arrays(arrays, schema=STEPS.arrow)


def _taken_each(column: pa.ChunkedArray, rows: np.ndarray[Any, np.dtype[np.int64]]) -> list[pa.Array]:
    """The fields of these rows of a column of structs; only these are put together, and not the column."""
    bounds = np.cumsum([0, *map(len, column.chunks)])
    chunk = np.searchsorted(bounds, rows, side="right") - 1
    order = np.argsort(chunk, kind="stable")
    pieces = [
        column.chunk(int(number)).take(pa.array(rows[chunk == number] - bounds[number])) for number in np.unique(chunk)
    ]
    return list(pa.concat_arrays(pieces).take(pa.array(np.argsort(order))).flatten())


def taken(events: pa.Table, name: str, rows: pl.Series, fields: Sequence[str] | None = None) -> dict[str, pa.Array]:
    """The fields of the struct `name` in these rows of `events`; where the row is null, so are they.

    A field at a time: so only one is in memory twice, and those without a value cost nothing.
    """
    kind = EVENT_SCHEMA.field(name).type
    wanted = rows.to_arrow()
    taken: dict[str, pa.Array] = {}
    for field_name in fields or [each.name for each in kind]:
        index = kind.get_field_index(field_name)
        pieces = [chunk.field(index) for chunk in events[name].chunks]
        if all(piece.null_count == len(piece) for piece in pieces):
            taken[field_name] = pa.nulls(len(wanted), kind.field(index).type)
        else:
            taken[field_name] = pa.concat_arrays(pieces).take(wanted)
    return taken


def of_steps(steps: UnitSteps) -> dict[str, pa.Array]:
    """The columns of `episodes` that are computed of the steps of each."""
    parts = [
        {
            "n_steps": pa.array(lengths, pa.int32()),
            **_sums_of_steps(rows, lengths),
            "content_hash": pa.array(content_hashes(rows, lengths), pa.string()),
            "token_audit": pa.array(token_audits(rows, lengths), pa.string()),
        }
        for rows, lengths in steps
    ]
    return {name: pa.concat_arrays([part[name] for part in parts]) for name in parts[0]}


def _sums_of_steps(steps: pa.Table, lengths: Sequence[int]) -> dict[str, pa.Array]:
    """Counts and sums over the steps of each episode; null where no step has a value."""
    episode = np.repeat(np.arange(len(lengths)), lengths)
    errors = pc.list_flatten(steps["tool_results"])
    frame = pl.DataFrame(
        {
            "episode": episode,
            "n_tool_calls": pl.from_arrow(pc.fill_null(pc.list_value_length(steps["tool_calls"]), 0)),
            "n_tool_errors": _errors_by_step(steps, errors),
            **{
                name: pl.from_arrow(steps[name])
                for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
            },
        }
    )
    said = {name: pl.col(name).count() for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")}
    summed = frame.group_by("episode").agg(
        pl.col("n_tool_calls").sum().cast(pl.Int32),
        pl.col("n_tool_errors").sum().cast(pl.Int32),
        *(pl.when(count > 0).then(pl.col(name).sum()).alias(name) for name, count in said.items()),
    )
    every = pl.DataFrame({"episode": np.arange(len(lengths))}).join(summed, on="episode", how="left").sort("episode")
    every = every.with_columns(pl.col("n_tool_calls", "n_tool_errors").fill_null(0))
    return {name: every[name].to_arrow() for name in every.columns if name != "episode"}


def _errors_by_step(steps: pa.Table, results: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    counts = pc.fill_null(pc.list_value_length(steps["tool_results"]), 0).to_numpy()
    if len(results) == 0:
        return np.zeros(len(steps), dtype=np.int32)
    flags = pc.fill_null(pc.struct_field(results, "is_error"), False).to_numpy(zero_copy_only=False)
    step = np.repeat(np.arange(len(steps)), counts)
    return np.bincount(step[flags], minlength=len(steps)).astype(np.int32)

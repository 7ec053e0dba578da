"""The Parquet layout of the tables.

`steps`: the rows of one episode are contiguous and in order, and a row group never splits an episode. Row groups
aim at ~100 KiB encoded and at most 1 MiB of Arrow, so that one episode costs one small read and little decoding.
Token ids and what runs beside them are most of what there is to decode, and hold little that repeats in other
episodes: these columns have pages of few episodes, of which `trajlake.read.stitch` decodes those that are wanted.
A column that is all null in a file is not in it: readers of Delta tables fill it in, and `with_nulls` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import StoreUnavailable
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.commit import NewFile, statistics
from trajlake.table.rows import whole
from trajlake_schemas import EPISODES, SEGMENTS, STEPS

ROW_GROUP_BYTES = 128 * 1024  # encoded
ROW_GROUP_ARROW_BYTES = 1 << 20  # and decoded: text that repeats much is small on disk, and still has to be decoded
_FIRST_RATIO = 4.0  # Arrow bytes to encoded bytes, before the file itself has shown its own
_LARGE = (  # what zstd makes smaller by enough: a page of it costs 12 µs to open, one of lz4 costs 1
    "message", "reasoning", "tool_calls.list.element.arguments", "tool_results.list.element.content",
    "token_ids.list.element", "logprobs.list.element", "tensors.list.element.data",
    "content_parts.list.element.text", "content_parts.list.element.data", "content_parts.list.element.extra",
    "error", "extra", "restore",
)  # fmt: skip
_ENCODINGS = {
    "logprobs.list.element": "BYTE_STREAM_SPLIT",
    **dict.fromkeys(
        ("step_index", "parent_step", "timestamp", "prompt_tokens", "completion_tokens", "cached_tokens"),
        "DELTA_BINARY_PACKED",
    ),
}
PAGED = ("token_ids", "logprobs", "loss_mask")
_PAGE_VALUES = 2_048  # at least, in a page of these: smaller ones repeat too much of what tokens have in common
_PRUNED = ("episode_id", "step_index", "source", "timestamp", "reward", "policy_version", "model")


@dataclass(frozen=True)
class Place:
    """Where the steps of one episode are: row group, first row in it, number of rows."""

    row_group: int
    row_offset: int
    row_count: int


def encode_steps(steps: pa.Table, lengths: Sequence[int]) -> tuple[memoryview, list[Place]]:
    """`steps`, whose consecutive runs of `lengths` rows are one episode each, as one Parquet file; and the places."""
    sink = pa.BufferOutputStream()
    places: list[Place] = []
    steps = steps.select([field.name for field in steps.schema if not _is_absent(field, steps)])
    with _steps_writer(sink, steps.schema) as writer:
        bytes_by_row = _row_bytes(steps)
        ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
        start_row = group = encoded = 0
        arrow_bytes = 0.0
        first = 0  # the first episode of the row group
        while first < len(lengths):
            ratio = arrow_bytes / encoded if encoded else _FIRST_RATIO
            limit = bytes_by_row[start_row] + min(ROW_GROUP_BYTES * ratio, ROW_GROUP_ARROW_BYTES)
            last = first + 1
            while last < len(lengths) and bytes_by_row[ends[last]] <= limit:
                last += 1
            end_row = int(ends[last - 1])
            offset = 0
            for episode in range(first, last):
                places.append(Place(group, offset, int(lengths[episode])))
                offset += int(lengths[episode])
            before = sink.tell()
            rows = _in_pages(steps.slice(start_row, end_row - start_row), lengths[first:last])
            writer.write_table(rows, row_group_size=max(1, end_row - start_row))
            encoded += sink.tell() - before
            arrow_bytes += float(bytes_by_row[end_row] - bytes_by_row[start_row])
            start_row, first, group = end_row, last, group + 1
    return memoryview(sink.getvalue()), places


def _in_pages(rows: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """The rows of a row group, each column with a chunk for every page that it is to have."""
    columns = []
    for name in rows.schema.names:
        array = whole(rows[name])
        pages = [(0, len(array))]
        if name in PAGED:
            pages = _pages(lengths, np.diff(_offsets(array)[np.cumsum([0, *lengths])]))
        columns.append(pa.chunked_array([array.slice(*page) for page in pages], array.type))
    return pa.Table.from_arrays(columns, schema=rows.schema)


def _pages(lengths: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First row and rows of each page: whole episodes that together have at least _PAGE_VALUES values."""
    pages = []
    start = rows = values = 0
    for length, size in zip(lengths, sizes, strict=True):
        rows, values = rows + length, values + size
        if values >= _PAGE_VALUES:
            pages.append((start, rows))
            start, rows, values = start + rows, 0, 0
    return [*pages, (start, rows)] if rows or not pages else pages


def _is_absent(field: pa.Field, rows: pa.Table) -> bool:
    return bool(field.nullable) and rows[field.name].null_count == len(rows)


def _steps_writer(sink: pa.NativeFile, schema: pa.Schema) -> pq.ParquetWriter:
    """A chunk of a column is a page, because every page is full with a byte. There is no page index: the headers of
    pages of version 2 say how many rows they have. There are no dictionaries, so that pages of several row groups can
    be decoded together (trajlake.read.stitch); zstd makes as much of what repeats."""
    leaves = _leaves(schema)
    return pq.ParquetWriter(
        sink,
        schema,
        compression={leaf: "zstd" if leaf in _LARGE else "lz4" for leaf in leaves},
        compression_level={leaf: 3 for leaf in leaves if leaf in _LARGE},
        use_dictionary=False,
        # Booleans would be RLE in pages of version 2, of which Arrow cannot read those without a value.
        column_encoding={leaf: _ENCODINGS.get(leaf, "PLAIN") for leaf in leaves},
        data_page_version="2.0",
        data_page_size=1,
        write_batch_size=1 << 16,
        write_page_index=False,
        write_statistics=[leaf for leaf in _PRUNED if leaf in leaves],
        store_schema=False,
    )


def with_nulls(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """`rows` of a file in the table's schema: columns that the file does not have are null."""
    names = set(rows.schema.names)
    arrays = [rows[field.name] if field.name in names else pa.nulls(len(rows), field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _leaves(schema: pa.Schema) -> list[str]:
    """The dotted names of the Parquet leaf columns."""
    leaves: list[str] = []

    def walk(name: str, kind: pa.DataType) -> None:
        if pa.types.is_list(kind):
            walk(f"{name}.list.element", kind.value_type)
        elif pa.types.is_map(kind):
            walk(f"{name}.key_value.key", kind.key_type)
            walk(f"{name}.key_value.value", kind.item_type)
        elif pa.types.is_struct(kind):
            for child in kind:
                walk(f"{name}.{child.name}", child.type)
        else:
            leaves.append(name)

    for field in schema:
        walk(field.name, field.type)
    return leaves


def _row_bytes(table: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Cumulative Arrow bytes before each row (length rows + 1), from the offsets of the nested and text columns."""
    total = np.zeros(len(table) + 1)
    for column in table.columns:
        total += _cumulative(whole(column))
    return total


def _cumulative(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rows = len(array)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets = _offsets(array)
        return np.asarray(offsets - offsets[0] + np.arange(rows + 1), dtype=np.float64)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(array)
        if pa.types.is_map(kind):
            inner = _cumulative(array.keys) + _cumulative(array.items)
        else:
            inner = _cumulative(array.values)
        return np.asarray(inner[offsets] - inner[offsets[0]] + np.arange(rows + 1), dtype=np.float64)
    if pa.types.is_struct(kind):
        total = np.arange(rows + 1, dtype=np.float64)
        for child in array.flatten():
            total += _cumulative(child)
        return total
    width = max(1, kind.bit_width // 8)
    return np.arange(rows + 1, dtype=np.float64) * float(width)


def _offsets(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array) + 1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)


def encode_rows(rows: pa.Table) -> bytes:
    """Rows of `episodes` or `segments` as one Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", write_page_index=True, row_group_size=64 * 1024, store_schema=False)
    return bytes(sink.getvalue())


def content_name(prefix: str, data: bytes | memoryview) -> str:
    """`<prefix>-<hash of data>.parquet`: the same work gives the same name, other bytes never meet it."""
    return f"{prefix}-{hashlib.sha256(data).hexdigest()[:16]}.parquet"


def put_file(store: ObjectStore, table: str, prefix: str, data: bytes | memoryview) -> str:
    """Put a file into a table's folder under its content's name; it is no part of the table until a commit says so.
    Returns the path below the folder."""
    path = content_name(prefix, data)
    outcome = store.put_if_absent(f"{table}/{path}", data)
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return path


def put_steps(store: ObjectStore, prefix: str, steps: pa.Table, lengths: Sequence[int]) -> tuple[NewFile, list[Place]]:
    """Write one `steps` file; see encode_steps."""
    data, places = encode_steps(steps, lengths)
    path = put_file(store, STEPS.name, prefix, data)
    return NewFile(path, len(data), statistics(steps, ["episode_id"])), places


_EPISODE_STATISTICS = [
    column.name for column in EPISODES if column.flat and column.name not in {"extra", "restore", "failure_detail"}
]


def put_episodes(store: ObjectStore, prefix: str, episodes: pa.Table) -> NewFile:
    """Write one `episodes` file."""
    data = encode_rows(episodes)
    return NewFile(
        put_file(store, EPISODES.name, prefix, data), len(data), _plain(statistics(episodes, _EPISODE_STATISTICS))
    )


def put_segments(store: ObjectStore, prefix: str, segments: pa.Table, state: str) -> NewFile:
    """Write one file of the ledger, in the partition of `state`."""
    rows = segments.drop_columns(["state"])
    data = encode_rows(rows)
    # Polars takes partition values from the path, not from the log.
    path = put_file(store, SEGMENTS.name, f"state={state}/{prefix}", data)
    return NewFile(path, len(data), statistics(rows, ["path"]), {"state": state})


def _plain(values: dict[str, object]) -> dict[str, object]:
    """Statistics with times as Delta writes them (ISO 8601)."""
    result: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result[name] = _plain(value)
        elif hasattr(value, "isoformat"):
            result[name] = value.isoformat(timespec="microseconds").replace("+00:00", "Z")
        else:
            result[name] = value
    return result

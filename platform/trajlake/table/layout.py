"""The Parquet layout of the tables.

`steps`: the rows of one episode are contiguous and in order, and a row group never splits an episode. Row groups
aim at ~100 KiB encoded and at most 1 MiB of Arrow, so that one episode costs one small read and little decoding.
Only an episode of more than LARGEST_GROUP has several row groups, which are its own.
Token ids and what runs beside them are most of what there is to decode, and hold little that repeats in other
episodes: these columns have pages of few episodes, of which `trajlake.read.stitch` decodes those that are wanted.
A column that is all null in a file is not in it: readers of Delta tables fill it in, and `with_nulls` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import StoreUnavailable
from trajlake.storage import ObjectStore, Unknown
from trajlake.table.commit import NewFile, statistics
from trajlake.table.sizes import cut, offsets, row_bytes, whole
from trajlake_schemas import EPISODES, SEGMENTS, STEPS

ROW_GROUP_BYTES = 128 * 1024  # encoded
ROW_GROUP_ARROW_BYTES = 1 << 20  # and decoded: text that repeats much is small on disk, and still has to be decoded
LARGEST_GROUP = 512 << 20  # of Arrow: readers give up on nested columns of 2 GiB, and hold several times a row group
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
    """Where the steps of one episode are: row group, first row in it, number of rows; those that the row group does not
    have are in the next ones."""

    row_group: int
    row_offset: int
    row_count: int


Part = tuple[pa.Table, Sequence[int]]
"""Steps of whole episodes, and how many each has: consecutive runs of rows."""


def encode_steps(parts: Iterable[Part], schema: pa.Schema) -> tuple[memoryview, list[Place]]:
    """The parts as one Parquet file with the columns of `schema` (see schema_of), and the places of the episodes; those
    without steps have none. One part is in memory at a time. A row group ends with its part."""
    sink = pa.BufferOutputStream()
    places: list[Place] = []
    encoded, arrow_bytes = 0, 0.0  # so far
    with _steps_writer(sink, schema) as writer:

        def write(rows: pa.Table, lengths: Sequence[int]) -> None:
            writer.write_table(_in_pages(rows, lengths), row_group_size=max(1, len(rows)))

        group = 0
        for part, all_lengths in parts:
            steps, lengths = part.select(schema.names), [length for length in all_lengths if length]
            sizes = row_bytes(steps)
            ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
            start_row = first = 0  # the first episode of the row group
            while first < len(lengths):
                ratio = arrow_bytes / encoded if encoded else _FIRST_RATIO
                limit = sizes[start_row] + min(ROW_GROUP_BYTES * ratio, ROW_GROUP_ARROW_BYTES)
                last = first + 1
                while last < len(lengths) and sizes[ends[last]] <= limit:
                    last += 1
                end_row = int(ends[last - 1])
                before = sink.tell()
                if last == first + 1 and sizes[end_row] - sizes[start_row] > LARGEST_GROUP:
                    places.append(Place(group, 0, int(lengths[first])))
                    for start, end in cut(sizes[start_row : end_row + 1], LARGEST_GROUP):
                        write(steps.slice(start_row + start, end - start), [end - start])
                        group += 1
                else:
                    offset = 0
                    for length in lengths[first:last]:
                        places.append(Place(group, offset, int(length)))
                        offset += int(length)
                    write(steps.slice(start_row, end_row - start_row), lengths[first:last])
                    group += 1
                encoded += sink.tell() - before
                arrow_bytes += float(sizes[end_row] - sizes[start_row])
                start_row, first = end_row, last
    return memoryview(sink.getvalue()), places


def schema_of(parts: Iterable[Part]) -> pa.Schema:
    """The columns that a file of these has: without those that are all null."""
    present = {field.name for steps, _ in parts for field in steps.schema if not _is_absent(field, steps)}
    return _columns(present)


def _columns(names: Collection[str]) -> pa.Schema:
    return pa.schema([field for field in STEPS.arrow if field.name in names])


def with_schema(
    parts: Iterator[Part], columns_of_all: Callable[[], Collection[str]]
) -> tuple[Iterable[Part], pa.Schema]:
    """The parts, and the columns that their file has. Several parts are not looked at beforehand: of these it has
    `columns_of_all`."""
    first = list(islice(parts, 2))
    if len(first) < 2:
        return first, schema_of(first)
    return chain(first, parts), _columns(columns_of_all())


def _in_pages(rows: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """The rows of a row group, each column with a chunk for every page that it is to have."""
    columns = []
    for name in rows.schema.names:
        array = whole(rows[name])
        pages = [(0, len(array))]
        if name in PAGED:
            pages = _pages(lengths, np.diff(offsets(array)[np.cumsum([0, *lengths])]))
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


def put_steps(store: ObjectStore, prefix: str, parts: Iterable[Part], schema: pa.Schema) -> tuple[NewFile, list[Place]]:
    """Write one `steps` file; see encode_steps."""
    ids: list[pa.Table] = []

    def seen() -> Iterator[Part]:
        for steps, lengths in parts:
            ids.append(steps.select(["episode_id"]))
            yield steps, lengths

    data, places = encode_steps(seen(), schema)
    path = put_file(store, STEPS.name, prefix, data)
    return NewFile(path, len(data), statistics(pa.concat_tables(ids), ["episode_id"])), places


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

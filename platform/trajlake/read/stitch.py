"""Decodes row groups of several files as if they were one: small ones cost more to set up than to decode.

The pages of a column chunk depend on nothing but a dictionary, so chunks without one may be put behind each other. Of
the row groups that are wanted a file in memory is made: the chunks of the first column, then those of the second, …,
and a footer that calls all of that a single row group (Thrift's compact protocol, as in parquet.thrift). Arrow then
sets up each column once, instead of once a row group. Row groups with dictionaries are decoded one by one.

Columns of `layout.PAGED` have pages of few episodes. Of a row group of which some rows are wanted, pages without any
of them are not decoded: pages that say "null, so many times" take their place.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import StoreError
from trajlake.storage import ByteRange
from trajlake.table.layout import PAGED, with_nulls
from trajlake.table.sizes import cut
from trajlake_schemas import STEPS

_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_CODECS = {"UNCOMPRESSED": 0, "SNAPPY": 1, "GZIP": 2, "BROTLI": 4, "ZSTD": 6, "LZ4": 7}
_GROUPS_KEPT = 1_024  # of a file, less than a kilobyte each
_MOST_DECODED = 256 << 20  # bytes of Arrow at once: a nested column of 2 GiB cannot be decoded, and all is held twice
_WORTH_THREADS = 512 * 1024  # encoded bytes from which on Arrow's threads are worth waking: one a column
_MAGIC = b"PAR1"

Rows = Sequence[tuple[int, int]]
"""Of a row group: pairs of a first row and how many follow each other."""


@dataclass(frozen=True)
class Leaf:
    """What all chunks of a Parquet column have in common."""

    path: str
    kind: str
    codec: str
    has_dictionary: bool

    @property
    def is_paged(self) -> bool:
        return self.path.endswith(".list.element") and self.path.split(".")[0] in PAGED


@dataclass(frozen=True, eq=False)
class Shape:
    """What row groups must have in common to be decoded together; equal ones are the same object: see `shape_of`."""

    schema: bytes  # as in the footer
    leaves: tuple[Leaf, ...]

    @cached_property
    def has_dictionary(self) -> bool:
        return any(leaf.has_dictionary for leaf in self.leaves)


@lru_cache(maxsize=1_024)
def shape_of(schema: bytes, leaves: tuple[Leaf, ...]) -> Shape:
    """The shape with these."""
    return Shape(schema, leaves)


class Page(NamedTuple):
    """A data page: where it begins and ends in its column chunk, its first row in the row group, how many rows and
    values it has."""

    start: int
    end: int
    first: int
    rows: int
    values: int


@dataclass(frozen=True)
class RowGroup:
    """Where a row group is in its file; and of each column where its pages begin and end, counted from there, where its
    data pages begin (behind the dictionary's, where there is one), and how many values it has; shape (columns, 4).
    `decoded` are its bytes without compression."""

    extent: ByteRange
    rows: int
    decoded: int
    chunks: np.ndarray[Any, np.dtype[np.int64]]
    shape: Shape
    pages: dict[int, list[Page]] = field(default_factory=dict)
    """By the number of the column; filled as they are first looked at."""


class Footer:
    """The footer of one file. Row groups are described when they are first asked for."""

    def __init__(self, data: bytes) -> None:
        """`data` is the end of a file, from the footer on. Raises pa.ArrowInvalid."""
        self._metadata = pq.read_metadata(pa.BufferReader(data))
        self._schema = _schema(data[-8 - struct.unpack("<I", data[-8:-4])[0] : -8])
        columns = [self._metadata.schema.column(index) for index in range(self._metadata.num_columns)]
        self._columns = [(column.path, column.physical_type) for column in columns]
        self._shapes: dict[tuple[tuple[str, bool], ...], Shape] = {}
        self._groups: OrderedDict[int, RowGroup] = OrderedDict()

    @property
    def row_groups(self) -> int:
        """How many there are."""
        return int(self._metadata.num_row_groups)

    @property
    def columns(self) -> list[str]:
        """Their names."""
        return list(self._metadata.schema.to_arrow_schema().names)

    def row_group(self, number: int) -> RowGroup:
        """Where it is and what it is made of."""
        known = self._groups.get(number)
        if known is not None:
            return known
        group = self._metadata.row_group(number)
        chunks, storage, decoded = [], [], 0
        for column in map(group.column, range(group.num_columns)):
            page, dictionary = column.data_page_offset, column.has_dictionary_page
            start = min(page, column.dictionary_page_offset or page) if dictionary else page
            chunks.append((start, start + column.total_compressed_size, page, column.num_values))
            storage.append((column.compression, dictionary))
            decoded += column.total_uncompressed_size
        first, last = min(chunk[0] for chunk in chunks), max(chunk[1] for chunk in chunks)
        found = RowGroup(
            ByteRange(first, last - first),
            group.num_rows,
            decoded,
            np.array(chunks, np.int64) - [first, first, first, 0],
            self._shape(tuple(storage)),
        )
        self._groups[number] = found
        if len(self._groups) > _GROUPS_KEPT:
            self._groups.popitem(last=False)
        return found

    def _shape(self, storage: tuple[tuple[str, bool], ...]) -> Shape:
        if storage not in self._shapes:
            leaves = [
                Leaf(path, kind, codec, dictionary)
                for (path, kind), (codec, dictionary) in zip(self._columns, storage, strict=True)
            ]
            self._shapes[storage] = shape_of(self._schema, tuple(leaves))
        return self._shapes[storage]


def decode(groups: Sequence[tuple[RowGroup, bytes]], wanted: Sequence[Rows] | None = None) -> list[pa.Table]:
    """The steps of each row group, given its bytes, as a table of all columns of `steps`; slices of what was decoded
    together. With `wanted`, the rows that are wanted of each, columns of PAGED may be null in all others. Raises
    StoreError where the bytes are no row groups."""
    found: dict[int, pa.Table] = {}
    together: dict[Shape, list[int]] = {}
    for place, (group, _) in enumerate(groups):
        together.setdefault(group.shape, []).append(place)
    for shape, places in together.items():
        sizes = np.cumsum([0, *(groups[place][0].decoded for place in places)])
        runs = cut(sizes, 0 if shape.has_dictionary else _MOST_DECODED)
        for part in [places[start:end] for start, end in runs]:
            mine = [groups[place] for place in part]
            try:
                rows = None if wanted is None else [wanted[place] for place in part]
                table = with_nulls(_decoded(shape, mine, rows), STEPS.arrow)
            except (pa.ArrowException, OSError) as error:
                raise StoreError(f"row groups of steps are damaged: {error}") from error
            start = 0
            for place, (group, _) in zip(part, mine, strict=True):
                found[place] = table.slice(start, group.rows)
                start += group.rows
    return [found[place] for place in range(len(groups))]


def _decoded(shape: Shape, groups: list[tuple[RowGroup, bytes]], wanted: Sequence[Rows] | None) -> pa.Table:
    """The columns of these row groups that are in the file, one row group behind the other."""
    views = [(group.chunks.tolist(), memoryview(data)) for group, data in groups]
    rows = sum(group.rows for group, _ in groups)
    pieces: list[bytes | memoryview] = [_MAGIC]
    columns = []
    position = len(_MAGIC)
    for index, leaf in enumerate(shape.leaves):
        size = values = 0
        for place, (chunks, data) in enumerate(views):
            start, end, _, count = chunks[index]
            chunk = data[start:end]
            if wanted is not None and leaf.is_paged:
                parts, count = _picked(groups[place][0], index, chunk, count, wanted[place])
                pieces += parts
                size += sum(map(len, parts))
            else:
                pieces.append(chunk)
                size += end - start
            values += count
        start, _, page, _ = views[0][0][index]
        columns.append(_column(leaf, values, size, position + page - start, position if page > start else None))
        position += size
    footer = _footer(shape.schema, rows, columns, position - len(_MAGIC))
    pieces += [footer, struct.pack("<I", len(footer)), _MAGIC]
    file = pq.ParquetFile(pa.BufferReader(b"".join(pieces)), pre_buffer=False)
    return file.read(use_threads=position > _WORTH_THREADS)


# -- Pages ---------------------------------------------------------------------------------------------------------

_VARINT = rb"([\x80-\xff]*[\x00-\x7f])"
# PageHeader: type (1) of DATA_PAGE_V2, uncompressed_page_size (2), compressed_page_size (3), data_page_header_v2 (8)
# of num_values (1), num_nulls (2), num_rows (3), encoding (4), definition_levels_byte_length (5),
# repetition_levels_byte_length (6), is_compressed (7), and no statistics (8).
_PAGE = re.compile(
    rb"\x15\x06\x15%b\x15%b\x5c\x15%b\x15%b\x15%b\x15%b\x15%b\x15%b[\x11\x12](?:\x1c\x00)?\x00\x00" % ((_VARINT,) * 8),
    re.DOTALL,
)


def _picked(
    group: RowGroup, index: int, chunk: memoryview, values: int, wanted: Rows
) -> tuple[list[bytes | memoryview], int]:
    """The pages of a column chunk that have wanted rows, with nulls between them; and the number of values now."""
    if index not in group.pages:
        group.pages[index] = _pages(chunk, group.rows)
    pages = group.pages[index]
    if len(pages) < 2:
        return [chunk], values
    parts: list[bytes | memoryview] = []
    values = nulls = 0
    for page in pages:
        if any(start < page.first + page.rows and page.first < start + count for start, count in wanted):
            if nulls:
                parts.append(_null_page(nulls))
                values, nulls = values + nulls, 0
            parts.append(chunk[page.start : page.end])
            values += page.values
        else:
            nulls += page.rows
    if nulls:
        parts.append(_null_page(nulls))
    return parts, values + nulls


def _pages(chunk: memoryview, rows: int) -> list[Page]:
    """The data pages of a column chunk; none where they are not of version 2, of which alone rows can be counted."""
    pages: list[Page] = []
    start = first = 0
    while start < len(chunk):
        head = _PAGE.match(chunk, start)
        if head is None:
            return []
        _, size, values, _, count, *_ = (_unsigned(number) for number in head.groups())
        pages.append(Page(start, head.end() + size, first, count, values))
        start, first = pages[-1].end, first + count
    return pages if start == len(chunk) and first == rows else []


def _unsigned(varint: bytes) -> int:
    return _number(varint, 0)[0] >> 1


@lru_cache(maxsize=4_096)
def _null_page(rows: int) -> bytes:
    """A page in which a list is null `rows` times: a run of level 0 of either kind, and no values."""
    run = _varint(rows << 1) + b"\0"
    levels, count = _integer(len(run)), _integer(rows)
    sizes = _integer(2 * len(run))
    return b"\x15\x06\x15%b\x15%b\x5c\x15%b\x15%b\x15%b\x15\0\x15%b\x15%b\x12\0\0%b%b" % (
        sizes, sizes, count, count, count, levels, levels, run, run,
    )  # fmt: skip


# -- Thrift's compact protocol -------------------------------------------------------------------------------------
#
# A field is a byte, (difference to the number of the field before) << 4 | type, then its value; a struct ends with 0.

_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # bytes of: true, false, byte, double


def _footer(schema: bytes, rows: int, columns: list[bytes], size: int) -> bytes:
    """FileMetaData: version (1), schema (2), num_rows (3), row_groups (4)."""
    group = b"\x19%b\x16%b\x16%b\0" % (_list(columns, _STRUCT), _integer(size), _integer(rows))
    return b"\x15%b\x19%b\x16%b\x19%b\0" % (_integer(1), schema, _integer(rows), _list([group], _STRUCT))


def _column(leaf: Leaf, values: int, size: int, data_page: int, dictionary_page: int | None) -> bytes:
    """ColumnChunk: file_offset (2), meta_data (3) of type (1), encodings (2), path_in_schema (3), codec (4),
    num_values (5), total_uncompressed_size (6), total_compressed_size (7), data_page_offset (9),
    dictionary_page_offset (11). Readers need no encodings (pages have theirs), and no uncompressed size."""
    path = [_varint(len(name)) + name for name in leaf.path.encode().split(b".")]
    dictionary = b"" if dictionary_page is None else b"\x26" + _integer(dictionary_page)
    return b"\x26%b\x1c\x15%b\x19%b\x19%b\x15%b\x16%b\x16%b\x16%b\x26%b%b\0\0" % (
        _integer(0),
        _integer(_TYPES.index(leaf.kind)),
        _list([], _I32),
        _list(path, _BINARY),
        _integer(_CODECS[leaf.codec]),
        _integer(values),
        _integer(size),
        _integer(size),
        _integer(data_page),
        dictionary,
    )


def _list(items: Sequence[bytes], kind: int) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _varint(len(items))
    return head + b"".join(items)


def _integer(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _schema(footer: bytes) -> bytes:
    """The schema of a footer as it is there: field 2, a list of SchemaElement."""
    number = position = 0
    while number != 2:
        number += footer[position] >> 4
        begin = position + 1
        position = _end(footer, begin, footer[position] & 15)
    return footer[begin:position]


def _end(data: bytes, position: int, kind: int) -> int:
    """Where the value that begins at `position` ends."""
    if kind in _FIXED:
        return position + _FIXED[kind]
    if kind == _STRUCT:
        while head := data[position]:
            position += 1
            position = _end(data, position, head & 15)
        return position + 1
    if kind == _LIST:
        head = data[position]
        count, position = (head >> 4, position + 1) if head < 0xF0 else _number(data, position + 1)
        for _ in range(count):
            position = _end(data, position, head & 15)
        return position
    value, position = _number(data, position)
    return position + value if kind == _BINARY else position


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A varint and where it ends."""
    value = shift = 0
    while True:
        value |= (data[position] & 127) << shift
        position += 1
        shift += 7
        if data[position - 1] < 128:
            return value, position

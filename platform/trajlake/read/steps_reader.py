"""Reads the steps of single episodes: one request for the row group of each, once a file's footer is known."""

from __future__ import annotations

import json
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trajlake.errors import StoreError
from trajlake.storage import ByteRange, ObjectStore
from trajlake.table.layout import NULL_COLUMNS
from trajlake_schemas import STEPS

_FOOTER_GUESS = 256 * 1024
_FOOTERS_KEPT = 512
_THREADS = 8
_GROUPS_AT_ONCE = 16


Group = tuple[str, int]  # path of the file, number of the row group


class GroupCache:
    """The row groups that were used last, up to so many bytes of Arrow; safe from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._groups: OrderedDict[Group, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, wanted: Iterable[Group]) -> dict[Group, pa.Table]:
        """Those of them that are here."""
        with self._lock:
            found = {group: self._groups[group] for group in wanted if group in self._groups}
            for group in found:
                self._groups.move_to_end(group)
            return found

    def put(self, groups: Mapping[Group, pa.Table]) -> None:
        """Keep these, and let go of those that were not used for longest."""
        if not self._most:
            return
        with self._lock:
            for group, table in groups.items():
                if group not in self._groups:
                    self._groups[group] = table
                    self._bytes += table.nbytes
            while self._bytes > self._most:
                _, gone = self._groups.popitem(last=False)
                self._bytes -= gone.nbytes


class StepsReader:
    """Keeps the footers of the files that it has read; safe from several threads."""

    def __init__(self, store: ObjectStore, sizes: Mapping[str, int] | None = None, cache_bytes: int = 0) -> None:
        """`sizes` in bytes of the files below the table's folder, where they are known: each saves a request.
        `cache_bytes` of decoded row groups are kept for episodes that are their neighbours or are drawn again."""
        self._store = store
        self._cache = GroupCache(cache_bytes)
        self._sizes = sizes or {}
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()

    def read(self, places: pl.DataFrame, *, keep: bool = False) -> list[pa.Table]:
        """For each row of `places` (steps_path, row_group, row_offset, row_count) a table of its steps. With `keep` row
        groups are taken from the cache and left there."""
        rows = places.rows(named=True)
        wanted = {(row["steps_path"], row["row_group"]) for row in rows if row["steps_path"] is not None}
        groups = self._cache.get(wanted) if keep else {}
        by_file: dict[str, list[int]] = {}
        for path, group in sorted(wanted - groups.keys()):
            by_file.setdefault(path, []).append(group)
        parts = [
            (path, numbers[start : start + _GROUPS_AT_ONCE])
            for path, numbers in by_file.items()
            for start in range(0, len(numbers), _GROUPS_AT_ONCE)
        ]
        if len(parts) == 1:
            results = [self._groups(*parts[0])]
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self._footer, [f"{STEPS.name}/{path}" for path in by_file]))
                results = list(pool.map(lambda part: self._groups(*part), parts))
        for result in results:
            groups.update(result)
            if keep:
                self._cache.put(result)
        empty = STEPS.arrow.empty_table()
        return [
            empty
            if row["steps_path"] is None
            else groups[row["steps_path"], row["row_group"]].slice(row["row_offset"], row["row_count"])
            for row in rows
        ]

    def _groups(self, path: str, numbers: list[int]) -> dict[tuple[str, int], pa.Table]:
        """Row groups of one file, in one call of the store."""
        key = f"{STEPS.name}/{path}"
        footer = self._footer(key)
        ranges = [_row_group_range(footer, number) for number in numbers]
        found = self._store.get_ranges(key, ranges)
        pieces = _Pieces([(extent.start, data) for extent, data in zip(ranges, found, strict=True)])
        null = set(json.loads((footer.metadata or {}).get(NULL_COLUMNS, b"[]")))
        columns = [name for name in STEPS.arrow.names if name not in null]
        # Without pre_buffer Arrow reads each column's own bytes, and never across the holes between the pieces.
        file = pq.ParquetFile(pieces, metadata=footer, pre_buffer=False)
        table = _with_nulls(file.read_row_groups(numbers, columns=columns, use_threads=False))
        ends = np.cumsum([footer.row_group(number).num_rows for number in numbers]).tolist()
        starts = [0, *ends[:-1]]
        return {
            (path, number): table.slice(start, end - start)
            for number, start, end in zip(numbers, starts, ends, strict=True)
        }

    def _size(self, key: str) -> int:
        known = self._sizes.get(key.removeprefix(f"{STEPS.name}/"))
        if known is not None:
            return known
        info = self._store.stat(key)
        if info is None:
            raise FileNotFoundError(key)
        return info.size

    def _footer(self, key: str) -> pq.FileMetaData:
        known = self._footers.get(key)
        if known is not None:
            return known
        whole = self._size(key)
        length = min(whole, _FOOTER_GUESS)
        tail = self._store.get_ranges(key, [ByteRange(whole - length, length)])[0]
        (size,) = struct.unpack("<I", tail[-8:-4])
        if size + 8 > len(tail):
            tail = self._store.get_ranges(key, [ByteRange(whole - size - 8, size + 8)])[0]
        try:
            footer = pq.read_metadata(pa.BufferReader(tail[-(size + 8) :]))
        except pa.ArrowInvalid as error:
            raise StoreError(f"{key} is damaged: {error}") from error
        self._footers[key] = footer
        while len(self._footers) > _FOOTERS_KEPT:
            self._footers.popitem(last=False)
        return footer


def _row_group_range(footer: pq.FileMetaData, number: int) -> ByteRange:
    """The bytes of all column chunks of a row group, which the writer put side by side."""
    group = footer.row_group(number)
    starts, ends = [], []
    for index in range(group.num_columns):
        column = group.column(index)
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            start = min(start, column.dictionary_page_offset)
        starts.append(start)
        ends.append(start + column.total_compressed_size)
    return ByteRange(min(starts), max(ends) - min(starts))


def _with_nulls(table: pa.Table) -> pa.Table:
    """`table` with all columns of the schema; those that were not read are null."""
    names = set(table.schema.names)
    return pa.Table.from_arrays(
        [
            table[field.name] if field.name in names else pa.chunked_array([pa.nulls(len(table), field.type)])
            for field in STEPS.arrow
        ],
        schema=STEPS.arrow,
    )


class _Pieces(RawIOBase):
    """Pieces of a file, in order, that answer reads inside one of them as if the whole file were there."""

    def __init__(self, pieces: list[tuple[int, bytes]]) -> None:
        super().__init__()
        self._starts = [start for start, _ in pieces]
        self._data = [data for _, data in pieces]
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        end = self._starts[-1] + len(self._data[-1])
        self._position = offset + (0, self._position, end)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        index = bisect_right(self._starts, self._position) - 1
        data = self._data[index] if index >= 0 else b""
        begin = self._position - self._starts[index]
        if begin >= len(data):
            raise OSError(f"byte {self._position} was not fetched")
        data = data[begin:] if size < 0 else data[begin : begin + size]
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

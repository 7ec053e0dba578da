"""Reads the steps of single episodes: one request for the row group of each, once a file's footer is known."""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from trajlake.errors import StoreError
from trajlake.read.stitch import Footer, RowGroup, decode
from trajlake.storage import ByteRange, ObjectStore
from trajlake.table.sizes import cut
from trajlake_schemas import STEPS

_FOOTER_GUESS = 256 * 1024
_FOOTERS_KEPT = 512
_THREADS = 8
_GROUPS_AT_ONCE = 16  # row groups of a file that are asked for together
_DECODED_AT_ONCE = 4 << 20  # encoded bytes that are decoded together: enough to be worth it, and work for every core
_ARROW_RATIO = 3  # bytes of Arrow to encoded ones, about
BATCH = 256  # episodes of which the steps are Python objects at a time
_WINDOW = 1 << 15  # episodes of which the steps are read at a time, where they are small
_BATCH_BYTES = 256 << 20  # of Arrow: where steps become Python objects or JSON, that is several times as much
_WORTH_KEEPING = 0.5  # of what is drawn from: where less fits, decoding what is wanted alone costs less

Group = tuple[str, int]  # path of the file, number of the row group
Fetched = tuple[Group, RowGroup, bytes]


class GroupCache:
    """The row groups that were used last, up to so many bytes of Arrow; safe from several threads.

    What was decoded together shares its memory, so it is kept and let go together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._blocks: OrderedDict[int, tuple[int, Mapping[Group, pa.Table]]] = OrderedDict()
        self._block_of: dict[Group, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def get(self, wanted: Iterable[Group]) -> dict[Group, pa.Table]:
        """Those of them that are here."""
        with self._lock:
            blocks = {group: self._block_of[group] for group in wanted if group in self._block_of}
            for block in dict.fromkeys(blocks.values()):
                self._blocks.move_to_end(block)
            return {group: self._blocks[block][1][group] for group, block in blocks.items()}

    def put(self, groups: Mapping[Group, pa.Table]) -> None:
        """Keep these, which were decoded together, and let go of those that were not used for longest."""
        if not self._most:
            return
        # The groups are slices: of each of the few tables that they are of, all is kept.
        whole = {_first_address(table): table for table in groups.values()}
        size = sum(table.get_total_buffer_size() for table in whole.values())
        with self._lock:
            block, self._next = self._next, self._next + 1
            self._blocks[block] = (size, groups)
            self._bytes += size
            self._block_of.update(dict.fromkeys(groups, block))
            while self._bytes > self._most:
                gone, (size, groups) = self._blocks.popitem(last=False)
                self._bytes -= size
                for group in groups:
                    if self._block_of.get(group) == gone:
                        del self._block_of[group]


class StepsReader:
    """Keeps the footers of the files that it has read; safe from several threads."""

    def __init__(self, store: ObjectStore, sizes: Mapping[str, int] | None = None, cache_bytes: int = 0) -> None:
        """`sizes` in bytes of the files below the table's folder, where they are known: each saves a request.
        `cache_bytes` of decoded row groups are kept for episodes that are their neighbours or are drawn again."""
        self._store = store
        self._cache = GroupCache(cache_bytes)
        self._is_kept = _ARROW_RATIO * sum((sizes or {}).values()) <= cache_bytes / _WORTH_KEEPING
        self._sizes = sizes or {}
        self._footers: OrderedDict[str, Footer] = OrderedDict()

    def read(self, places: pl.DataFrame, *, keep: bool = False) -> list[pa.Table]:
        """For each row of `places` (steps_path, row_group, row_offset, row_count) a table of its steps. With `keep` row
        groups are decoded whole, taken from the cache and left there, if enough of the table fits into it."""
        rows = places.rows(named=True)
        wanted: dict[Group, list[tuple[int, int]]] = {}
        for row in rows:
            if row["steps_path"] is not None:
                group = row["steps_path"], row["row_group"]
                wanted.setdefault(group, []).append((row["row_offset"], row["row_count"]))
        keep = keep and self._is_kept
        groups = self._cache.get(wanted) if keep else {}
        for fetched in self._read(sorted(wanted.keys() - groups.keys())):
            names = [name for name, _, _ in fetched]
            tables = decode([part[1:] for part in fetched], None if keep else [wanted[name] for name in names])
            part = dict(zip(names, tables, strict=True))
            groups.update(part)
            if keep:
                self._cache.put(part)
        empty = STEPS.arrow.empty_table()
        return [
            empty
            if row["steps_path"] is None
            else self._with_following(
                groups[row["steps_path"], row["row_group"]].slice(row["row_offset"], row["row_count"]), row
            )
            for row in rows
        ]

    def _with_following(self, first: pa.Table, row: Mapping[str, Any]) -> pa.Table:
        """All steps of an episode of which `first` has those in its first row group."""
        found, path, number, missing = [first], row["steps_path"], row["row_group"] + 1, row["row_count"] - len(first)
        while missing > 0 and number < self._footer(path).row_groups:
            ((_, group, data),) = self._fetched(path, [number])
            found.append(decode([(group, data)])[0].slice(0, missing))
            number, missing = number + 1, missing - len(found[-1])
        return first if len(found) == 1 else pa.concat_tables(found)

    def batches(self, rows: pl.DataFrame, most: int = BATCH) -> Iterator[pl.DataFrame]:
        """`rows`, with columns as in `read`, in batches of at most `most`, of which the steps are at most about
        _BATCH_BYTES as Arrow; an episode that is larger is alone."""
        for batch in rows.iter_slices(most):
            places = batch.select("steps_path", "row_group", "row_count").with_row_index("at")
            files = places.drop_nulls("steps_path").partition_by("steps_path", maintain_order=True)
            sizes = np.zeros(len(batch))
            with ThreadPoolExecutor(_THREADS) as pool:
                for file, found in zip(files, pool.map(self._decoded, files), strict=True):
                    sizes[file["at"].to_numpy()] = found
            for start, end in cut(np.cumsum([0.0, *sizes]), _BATCH_BYTES):
                yield batch[start:end]

    def batches_with_steps(self, rows: pl.DataFrame) -> Iterator[tuple[pl.DataFrame, list[pa.Table]]]:
        """As `batches`, each with a table of steps an episode, as `read` gives them.

        Many batches are read at a time, in the order in which they are stored: of rows that were shuffled each batch
        has a few episodes of every row group, which would be decoded again and again.
        """
        for window in self.batches(rows, _WINDOW):
            tables: dict[int, pa.Table] = {}
            stored = window.with_row_index("at").sort("steps_path", "row_group", "row_offset")
            for batch in self.batches(stored):
                found = self.read(batch)
                if len(batch) < len(window):  # a copy of what is wanted: what was decoded beside it is let go
                    whole = pa.concat_tables(found).combine_chunks() if len(found) > 1 else found[0]
                    ends = np.cumsum([0, *map(len, found)]).tolist()
                    found = [whole.slice(start, end - start) for start, end in pairwise(ends)]
                tables.update(zip(batch["at"], found, strict=True))
            for start in range(0, len(window), BATCH):
                batch = window[start : start + BATCH]
                yield batch, [tables.pop(at) for at in range(start, start + len(batch))]

    def _decoded(self, places: pl.DataFrame) -> list[float]:
        """About how many bytes of Arrow the steps of episodes of one file are."""
        footer = self._footer(places["steps_path"][0])
        groups = {number: footer.row_group(number) for number in places["row_group"].unique()}
        rows = places.select("row_group", "row_count").iter_rows()
        return [groups[number].decoded * count / max(1, groups[number].rows) for number, count in rows]

    def columns(self, paths: Iterable[str]) -> set[str]:
        """The columns that any of these files has."""
        return set().union(*(self._footer(path).columns for path in set(paths)))

    def _read(self, wanted: list[Group]) -> Iterator[list[Fetched]]:
        """These row groups in parts: what is decoded together."""
        by_file: dict[str, list[int]] = {}
        for path, group in wanted:
            by_file.setdefault(path, []).append(group)
        parts = [
            (path, numbers[start : start + _GROUPS_AT_ONCE])
            for path, numbers in by_file.items()
            for start in range(0, len(numbers), _GROUPS_AT_ONCE)
        ]
        if len(parts) <= 1:
            yield from (self._fetched(*part) for part in parts)
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._footer, by_file))
            waiting: list[Fetched] = []
            for part in pool.map(lambda part: self._fetched(*part), parts):
                waiting += part
                if sum(len(data) for _, _, data in waiting) >= _DECODED_AT_ONCE:
                    yield waiting
                    waiting = []
            if waiting:
                yield waiting

    def _fetched(self, path: str, numbers: Sequence[int]) -> list[Fetched]:
        """Row groups of one file, in one call of the store."""
        footer = self._footer(path)
        groups = [footer.row_group(number) for number in numbers]
        found = self._store.get_ranges(_key(path), [group.extent for group in groups])
        return [((path, number), group, data) for number, group, data in zip(numbers, groups, found, strict=True)]

    def _size(self, path: str) -> int:
        known = self._sizes.get(path)
        if known is not None:
            return known
        info = self._store.stat(_key(path))
        if info is None:
            raise FileNotFoundError(_key(path))
        return info.size

    def _footer(self, path: str) -> Footer:
        known = self._footers.get(path)
        if known is not None:
            return known
        key, whole = _key(path), self._size(path)
        length = min(whole, _FOOTER_GUESS)
        tail = self._store.get_ranges(key, [ByteRange(whole - length, length)])[0]
        (size,) = struct.unpack("<I", tail[-8:-4])
        if size + 8 > len(tail):
            tail = self._store.get_ranges(key, [ByteRange(whole - size - 8, size + 8)])[0]
        try:
            footer = Footer(tail[-(size + 8) :])
        except pa.ArrowInvalid as error:
            raise StoreError(f"{key} is damaged: {error}") from error
        self._footers[path] = footer
        while len(self._footers) > _FOOTERS_KEPT:
            self._footers.popitem(last=False)
        return footer


def _first_address(table: pa.Table) -> int:
    """What slices of one table have in common, and slices of others not."""
    return int(table[0].chunk(0).buffers()[1].address)


def _key(path: str) -> str:
    return f"{STEPS.name}/{path}"

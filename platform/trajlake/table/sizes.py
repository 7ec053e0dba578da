"""How many bytes rows take as Arrow, and how to cut them so that no column is more than Arrow can hold in one piece.

Offsets of texts and lists are of 32 bits, so that an array of them holds less than 2 GiB, and what compresses well
(frames of a game, a log that repeats itself) gets there with few bytes on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

_IN_ONE_PIECE = 512 << 20  # bytes of many chunks: to look at each takes longer than to copy them

Offsets = np.ndarray[tuple[int], np.dtype[np.int64]]
Sizes = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Bytes before each row, and of all of them at the end: length rows + 1."""


def whole(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array; one that is in one piece is not copied."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def row_bytes(table: pa.Table) -> Sizes:
    """The sizes of a table's rows, from the offsets of the nested and text columns."""
    total = np.zeros(len(table) + 1)
    for column in table.columns:
        total += sizes(column)
    return total


def sizes(column: pa.ChunkedArray) -> Sizes:
    """The sizes of a column's values."""
    chunks = [whole(column)] if column.num_chunks > 1 and column.nbytes < _IN_ONE_PIECE else column.chunks
    found = np.zeros(len(column) + 1)
    row = 0
    for chunk in chunks:
        found[row : row + len(chunk) + 1] = found[row] + _cumulative(chunk)
        row += len(chunk)
    return found


def cut(sizes: Sizes, most: float) -> Iterator[tuple[int, int]]:
    """First row and the row behind the last one of each run of rows of at most `most` bytes; a row that is larger
    stands alone."""
    start = 0
    while start < len(sizes) - 1:
        end = int(np.searchsorted(sizes, sizes[start] + most, side="right")) - 1
        end = min(max(end, start + 1), len(sizes) - 1)
        yield start, end
        start = end


def offsets(array: pa.Array) -> Offsets:
    """Where each value of a text or a list begins, and where the last one ends."""
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.zeros(len(array) + 1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _cumulative(array: pa.Array) -> Sizes:
    rows = len(array)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        ends = offsets(array)
        return np.asarray(ends - ends[0] + np.arange(rows + 1), dtype=np.float64)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        ends = offsets(array)
        first, count = ends[0], ends[-1] - ends[0]  # of a slice, what is in its lists
        if pa.types.is_map(kind):
            inner = _cumulative(array.keys.slice(first, count)) + _cumulative(array.items.slice(first, count))
        else:
            inner = _cumulative(array.values.slice(first, count))
        return np.asarray(inner[ends - first] + np.arange(rows + 1), dtype=np.float64)
    if pa.types.is_struct(kind):
        total = np.arange(rows + 1, dtype=np.float64)
        for child in array.flatten():
            total += _cumulative(child)
        return total
    width = max(1, kind.bit_width // 8)
    return np.arange(rows + 1, dtype=np.float64) * float(width)

"""Which files of `episodes` can hold an episode: an index by hash, so that asking costs the same after any history.

Names of files begin with the number of the plan that wrote them. The index holds a record (hash of an id, number) for
every row of every file, in runs: sorted, immutable objects `ids/<number>-<hash of content>.run`. A plan adds one run of
the rows that it wrote, merged with the runs before it that are no more than twice as large, so there are about as
many runs as the number of rows has binary digits. Which runs there are stands in the frontier of the plan (see
trajlake_pipelines.frontier). The index only rules files out: where it is missing it is made anew, and every answer is
checked against the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from trajlake.errors import ObjectMissing, StoreUnavailable
from trajlake.storage import ByteRange, ObjectStore, Unknown
from trajlake.table.commit import active_files

IDS = "ids"
FEW_FILES = 4  # are looked into without asking the index
LARGEST_RUN = 8 << 20  # records; larger ones are left as they are, so that a merge takes bounded memory
WHOLE_BELOW = 1 << 16  # records: such a run is read by one request
BUCKET = 1 << 10  # records that are read for one id of a larger run
_RECORD = np.dtype([("hash", "<u8"), ("number", "<u4")])
_OFFSET = np.dtype("<u4")
_THREADS = 8
_BOUNDS = ("path", "low", "high")
_BOUND_COLUMNS = ("path", "min.episode_id", "max.episode_id")

Records = np.ndarray[tuple[int], Any]


@dataclass(frozen=True)
class Run:
    """One object of the index, and how many records it has."""

    key: str
    count: int


Runs = tuple[Run, ...]


def plan_of(path: str) -> int | None:
    """The number of the plan that wrote a file of a table, None where its name does not say."""
    number = path.rpartition("/")[2].partition("-")[0]
    return int(number) if number.isdigit() and len(number) == 8 else None


def files_that_may_hold(store: ObjectStore, table: DeltaTable, episodes: Iterable[str], runs: Runs | None) -> list[str]:
    """Files of `episodes` (the `table`) that can hold one of `episodes`.

    Ids made by a Writer begin with the time, so the least and greatest id of a file, which stand in the table's log,
    rule out nearly all of history; for others the index does.
    """
    wanted = pl.Series("episode_id", list(episodes), dtype=pl.String).unique().sort()
    paths = _admitting(active_files(table), wanted)
    if runs is None or len(paths) <= FEW_FILES:
        return paths
    try:
        numbers = numbers_of(store, runs, wanted)
    except ObjectMissing:  # it is made anew by the next plan
        return paths
    return [path for path in paths if (number := plan_of(path)) is None or number in numbers]


def _admitting(files: pa.Table, wanted: pl.Series) -> list[str]:
    """Files whose least and greatest id leave room for one of `wanted`, which is sorted."""
    if not len(files) or wanted.is_empty():
        return []
    if "min.episode_id" not in files.schema.names or "max.episode_id" not in files.schema.names:
        return sorted(files["path"].to_pylist())
    bounds = pl.DataFrame(
        {name: pl.from_arrow(files[column]) for name, column in zip(_BOUNDS, _BOUND_COLUMNS, strict=True)}
    )
    place = wanted.search_sorted(bounds["low"].fill_null(""), side="left")
    following = wanted.extend_constant(None, 1).gather(place)
    bounds = bounds.with_columns(following=following)
    admits = pl.col("low").is_null() | pl.col("high").is_null() | (pl.col("following") <= pl.col("high"))
    return bounds.filter(admits)["path"].sort().to_list()


def numbers_of(store: ObjectStore, runs: Runs, episodes: Iterable[str]) -> set[int]:
    """The plans whose files can hold one of `episodes`. Raises ObjectMissing where a run is gone."""
    wanted = _hashes(episodes)
    if not len(wanted):
        return set()
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda run: _numbers_in(store, run, wanted), runs)
        return {number for numbers in found for number in numbers}


def after(store: ObjectStore, runs: Runs | None, paths: Sequence[str], number: int) -> Runs:
    """The runs when plan `number` has been committed and `paths` are the files of `episodes`; None: make them anew.

    Whoever repeats it writes the same objects. Raises StoreUnavailable.
    """
    try:
        return _anew(store, paths, number) if runs is None else _with_new(store, runs, paths, number)
    except ObjectMissing:
        return _anew(store, paths, number)


def _with_new(store: ObjectStore, runs: Runs, paths: Sequence[str], number: int) -> Runs:
    new = _records_of(store, [path for path in paths if plan_of(path) == number])
    if not len(new):
        return runs
    left = list(runs)
    parts = [new]
    size = len(new)
    while left and left[-1].count <= 2 * size and left[-1].count + size <= LARGEST_RUN:
        run = left.pop()
        parts.append(_records(store.get(run.key), run.count))
        size += run.count
    merged = np.concatenate(parts)
    if len(parts) > 1:  # files of other numbers are no part of the table any more
        live = [each for each in map(plan_of, paths) if each is not None]
        merged = merged[np.isin(merged["number"], np.unique(np.asarray(live, dtype=np.uint32)))]
    return (*left, _put(store, number, merged))


def _anew(store: ObjectStore, paths: Sequence[str], number: int) -> Runs:
    runs: list[Run] = []
    parts: list[Records] = []
    for path in sorted(paths):
        parts.append(_records_of(store, [path]))
        if sum(map(len, parts)) >= LARGEST_RUN // 2:
            runs.append(_put(store, number, np.concatenate(parts)))
            parts = []
    if sum(map(len, parts)):
        runs.append(_put(store, number, np.concatenate(parts)))
    return tuple(sorted(runs, key=lambda run: -run.count))


def _hashes(episodes: Iterable[str]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    digests = b"".join(hashlib.blake2b(episode.encode(), digest_size=8).digest() for episode in episodes)
    return np.unique(np.frombuffer(digests, dtype="<u8"))


def _records_of(store: ObjectStore, paths: Collection[str]) -> Records:
    """A record for each row of these files of `episodes`."""
    parts = [np.empty(0, dtype=_RECORD)]
    for path in sorted(paths):
        ids = pq.read_table(pa.BufferReader(store.get(f"episodes/{path}")), columns=["episode_id"])["episode_id"]
        hashes = _hashes(ids.to_pylist())
        records = np.empty(len(hashes), dtype=_RECORD)
        records["hash"], records["number"] = hashes, plan_of(path) or 0
        parts.append(records)
    return np.concatenate(parts)


def _buckets(count: int) -> int:
    """How many buckets a run has; they go by the first bits of the hash."""
    return 1 << max(0, (count // BUCKET).bit_length() - 1)


def _bucket_of(hashes: Any, buckets: int) -> Any:
    return (hashes >> np.uint64(64 - (buckets.bit_length() - 1))).astype(np.int64) if buckets > 1 else hashes * 0


def _put(store: ObjectStore, number: int, records: Records) -> Run:
    """One run: where its buckets begin (one offset more than there are buckets), then the sorted records."""
    records = np.unique(records)
    buckets = _buckets(len(records))
    starts = np.searchsorted(_bucket_of(records["hash"], buckets).astype(np.int64), np.arange(buckets + 1))
    data = starts.astype(_OFFSET).tobytes() + records.tobytes()
    run = Run(f"{IDS}/{number:08d}-{hashlib.sha256(data).hexdigest()[:16]}.run", len(records))
    if isinstance(outcome := store.put_if_absent(run.key, data), Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    return run


def _head(count: int) -> int:
    return (_buckets(count) + 1) * _OFFSET.itemsize


def _records(data: bytes, count: int) -> Records:
    return np.frombuffer(data, dtype=_RECORD, offset=_head(count))


def _numbers_in(store: ObjectStore, run: Run, wanted: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> set[int]:
    if run.count <= WHOLE_BELOW:
        parts = [_records(store.get(run.key), run.count)]
    else:
        head = _head(run.count)
        starts = np.frombuffer(store.get_ranges(run.key, [ByteRange(0, head)])[0], dtype=_OFFSET).astype(np.int64)
        buckets = np.unique(_bucket_of(wanted, _buckets(run.count)))
        width = _RECORD.itemsize
        ranges = [
            ByteRange(head + int(starts[each]) * width, int(starts[each + 1] - starts[each]) * width)
            for each in buckets
            if starts[each + 1] > starts[each]
        ]
        parts = [np.frombuffer(data, dtype=_RECORD) for data in store.get_ranges(run.key, ranges)]
    return {int(number) for part in parts for number in np.unique(part["number"][np.isin(part["hash"], wanted)])}

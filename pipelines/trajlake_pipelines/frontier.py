"""How far landing has been consumed: for each writer epoch the last segment, so that a pass lists what is new.

The frontier of compaction n is one object, `jobs/compact/<n>/frontier.json`, put before the ledger is committed and
made of the frontier before, the plan and what it committed, so that whoever repeats it writes the same bytes. Where it
is missing it is made anew from the ledger. It also names the runs of the index of episodes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import polars as pl

from trajlake.errors import ObjectMissing, SegmentUnreadable, StoreUnavailable
from trajlake.ingest.epochs import EPOCHS
from trajlake.ingest.segment import LANDING, SegmentName
from trajlake.storage import ObjectInfo, ObjectStore, Unknown
from trajlake.table.id_index import Run, Runs
from trajlake.table.tables import open_table

SKIP_FROM = 100  # consumed segments of an epoch: fewer are read past, since a page of a listing holds a thousand

_THREADS = 16

Range = tuple[int, int]  # from and to, both included


@dataclass(frozen=True)
class Mark:
    """`last` segment of an epoch that was consumed, and the ranges below it that had not arrived by then."""

    last: int
    gaps: tuple[Range, ...] = ()

    def has(self, number: int) -> bool:
        """Whether this segment was consumed."""
        return number <= self.last and not any(low <= number <= high for low, high in self.gaps)

    def next_open(self, number: int) -> int:
        """The first segment from `number` on that was not consumed."""
        for low, high in self.gaps:
            if number <= high:
                return max(number, low)
        return max(number, self.last + 1)

    def with_number(self, number: int) -> Mark:
        """The mark after this segment was consumed, too."""
        if self.has(number):
            return self
        if number > self.last:
            between = ((self.last + 1, number - 1),) if number > self.last + 1 else ()
            return Mark(number, (*self.gaps, *between))
        gaps: list[Range] = []
        for low, high in self.gaps:
            if low <= number <= high:
                gaps += [part for part in ((low, number - 1), (number + 1, high)) if part[0] <= part[1]]
            else:
                gaps.append((low, high))
        return Mark(self.last, tuple(gaps))


NOTHING = Mark(-1)


@dataclass(frozen=True)
class Frontier:
    """`marks` by the epoch's folder; `odd` are consumed keys that are not the name of a segment; `runs` of the index of
    episodes, None where it is to be made anew."""

    marks: dict[str, Mark] = field(default_factory=dict)
    odd: frozenset[str] = frozenset()
    runs: Runs | None = None

    def has(self, key: str) -> bool:
        """Whether the segment at `key` was consumed (or is pending, or quarantined)."""
        place = _place(key)
        if place is None:
            return key in self.odd
        return self.marks.get(place[0], NOTHING).has(place[1])

    def with_keys(self, keys: Iterable[str]) -> Frontier:
        """The frontier after these segments were consumed, too."""
        marks, odd = dict(self.marks), set(self.odd)
        for key in sorted(keys):
            place = _place(key)
            if place is None:
                odd.add(key)
            else:
                marks[place[0]] = marks.get(place[0], NOTHING).with_number(place[1])
        return replace(self, marks=marks, odd=frozenset(odd))

    def without_epochs(self, folders: Iterable[str]) -> Frontier:
        """The frontier without the marks of epochs of which landing holds nothing any more."""
        gone = set(folders)
        return replace(self, marks={folder: mark for folder, mark in self.marks.items() if folder not in gone})

    def without_keys(self, keys: Iterable[str]) -> Frontier:
        """The frontier under which these segments are new again."""
        marks, odd = dict(self.marks), set(self.odd)
        for key in keys:
            place = _place(key)
            if place is None:
                odd.discard(key)
            elif (mark := marks.get(place[0])) is not None and mark.has(place[1]):
                number = place[1]
                marks[place[0]] = Mark(mark.last, tuple(sorted((*mark.gaps, (number, number)))))
        return replace(self, marks=marks, odd=frozenset(odd))

    def to_json(self) -> bytes:
        """The same frontier gives the same bytes."""
        marks = {folder: [mark.last, mark.gaps] for folder, mark in sorted(self.marks.items())}
        runs = self.runs if self.runs is None else [[run.key, run.count] for run in self.runs]
        return json.dumps({"marks": marks, "odd": sorted(self.odd), "ids": runs}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Frontier:
        body = json.loads(data)
        marks = {
            folder: Mark(last, tuple((low, high) for low, high in gaps))
            for folder, (last, gaps) in body["marks"].items()
        }
        runs = body.get("ids")
        return cls(marks, frozenset(body["odd"]), None if runs is None else tuple(Run(*run) for run in runs))


def _place(key: str) -> tuple[str, int] | None:
    """The epoch's folder and the number, or None where no writer made this key."""
    try:
        name = SegmentName.parse(key)
    except SegmentUnreadable:
        return None
    return key.rpartition("/")[0], name.number


@dataclass(frozen=True)
class Listing:
    """What a listing of landing found: `new` segments in the order of their keys, and epochs that are `gone`."""

    new: list[ObjectInfo]
    gone: list[str]


def list_new(store: ObjectStore, frontier: Frontier) -> Listing:
    """Segments beyond the frontier, and epochs with a mark of which landing holds nothing any more.

    Where many consumed segments of an epoch lie ahead the listing begins again behind them, so that it costs what is
    new and one request a writer epoch. What vacuum removed costs nothing at all.
    """
    new: list[ObjectInfo] = []
    seen: set[str] = set()
    after: str | None = ""
    while after is not None:
        begin, after = after, None
        for info in store.list(f"{LANDING}/", start_after=begin):
            if not info.key.endswith(".arrow"):
                continue
            place = _place(info.key)
            seen.add(place[0] if place else info.key)
            if not frontier.has(info.key):
                new.append(info)
            elif place is not None:
                folder, number = place
                ahead = frontier.marks[folder].next_open(number + 1)
                if ahead - number > SKIP_FROM:
                    after = f"{folder}/{ahead - 1:08d}.arrow"
                    break
    return Listing(new, sorted(set(frontier.marks) - seen))


def lost_segments(store: ObjectStore) -> dict[str, int]:
    """Of how many segments nothing is left, by the epoch's folder in landing: the writer closed in order and said how
    many it had brought in, and they are neither in the ledger nor in landing."""
    keys = [info.key for info in store.list(f"{EPOCHS}/") if info.key.endswith(".closed")]
    with ThreadPoolExecutor(_THREADS) as threads:
        said = [json.loads(body).get("segments", 0) for body in threads.map(store.get, keys)]  # older writers do not
    folders = [f"{LANDING}/{key.removeprefix(f'{EPOCHS}/').removesuffix('.closed')}" for key in keys]
    paths = pl.scan_delta(open_table(store, "segments")).select(pl.col("path").unique()).collect()["path"]
    known = Counter(path.rpartition("/")[0] for path in paths)
    lost = {}
    for folder, count in zip(folders, said, strict=True):
        if known[folder] < count:
            there = {info.key for info in store.list(f"{folder}/")} | {
                path for path in paths if path.startswith(f"{folder}/")
            }
            if len(there) < count:
                lost[folder] = count - len(there)
    return lost


def frontier_key(job_folder: str) -> str:
    """Where the frontier of a compaction lies."""
    return f"{job_folder}/frontier.json"


def load_frontier(store: ObjectStore, job_folder: str) -> Frontier:
    """The frontier after the compaction in `job_folder`, from its object or else from the whole ledger."""
    try:
        return Frontier.from_json(store.get(frontier_key(job_folder)))
    except (ObjectMissing, ValueError, TypeError, LookupError):  # a damaged one says no more than one that is gone
        paths = pl.scan_delta(open_table(store, "segments")).select("path").collect()["path"]
        return Frontier().with_keys(paths)


def put_frontier(store: ObjectStore, job_folder: str, frontier: Frontier) -> None:
    """Write the frontier of a compaction that is about to be committed. Raises StoreUnavailable."""
    outcome = store.put_if_absent(frontier_key(job_folder), frontier.to_json())
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error

"""What a foreign format is: how its files are told apart, and how their rows become episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any

from trajlake.errors import FormatError, UsageError
from trajlake.formats.json_rows import Layout, Refused, Row
from trajlake.formats.rebuild import Rows, laid_out, missing, rebuilt, rows_of, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.scalars import microseconds
from trajlake.ingest.values import fits
from trajlake.read.trajectory import Trajectory

__all__ = [
    "Format",
    "Record",
    "Refused",
    "Row",
    "Write",
    "any_row",
    "fits_begin",
    "fits_end",
    "fits_step",
    "fits_time",
    "from_row",
    "per_row",
    "traced",
    "write_groups",
    "write_rows",
]

Rebuild = Callable[[Trajectory], Any]
"""One row of a file, made again of the episode that was imported from it."""

_NOTHING: Mapping[str, Any] = {}

Write = Callable[[Iterable[Trajectory]], Iterator[bytes]]
"""A file's bytes, of episodes in the order of its rows."""


@dataclass(frozen=True)
class Record:
    """One episode as a file holds it. `key` names its row in the file (`row 12`, `line 3`), once and for ever:
    the episode's id is made from it. `source` is kept for the way back (see trajlake.formats.rebuild); `notes` say
    where the file contradicts itself."""

    key: str
    begin: EpisodeFields
    steps: Sequence[StepFields]
    end: EndFields = field(default_factory=EndFields)
    started_at: Any = None
    ended_at: Any = None
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @cached_property
    def rows(self) -> Rows:
        """It as it is stored. Raises UsageError that names the step and the field which does not take its value."""
        return rows_of(self)


@dataclass(frozen=True)
class Format:
    """One foreign format.

    `detect` looks at a file's content, never at its name, and says whether it is of this format. `read` gives one
    Record or Refused a row, in the order of the file; it raises FormatError only where no row can be told apart.
    `write` is the way back, where there is one: of episodes that were imported from one file it makes JSON that is
    equal to the file's. Where the file is no JSON (an archive of JSON), `values` gives the rows that `write` makes.

    For exports: `takes_any` says that `write` makes valid rows also of episodes from elsewhere; `one_file_each` that
    what stood in one file must stand in one file again; `suffix` is what its files' names usually end in.
    """

    name: str
    description: str
    detect: Callable[[Source], bool]
    read: Callable[[Source], Iterator[Record | Refused]]
    write: Write | None = None
    values: Callable[[Source], Iterator[Row | Refused]] | None = None
    takes_any: bool = False
    one_file_each: bool = True
    suffix: str = ".json"


def any_row(is_row: Callable[[Any], bool]) -> Callable[[Source], bool]:
    """A `detect` for files of JSON rows: one of the first rows is of the format (others may be broken)."""
    return lambda source: any(is_row(value) for value in source.first_values)


def per_row(
    record: Callable[[Any, str], Record], rebuild: Rebuild | None = None
) -> Callable[[Source], Iterator[Record | Refused]]:
    """A `read` for files of JSON rows, one episode a row. `record(value, key)` raises FormatError to refuse.

    With `rebuild`, what it does not make again of a row is kept, so that `write_rows(rebuild)` gives the file again.
    """

    def read(source: Source) -> Iterator[Record | Refused]:
        file = {"layout": source.layout}
        for row in source.rows():
            item = row if isinstance(row, Refused) else from_row(record, row, rebuild, file)
            if isinstance(item, Record):
                file = {}  # it is said once
            yield item

    return read


def write_rows(rebuild: Rebuild, layout: Layout = "array", build: Rebuild | None = None) -> Write:
    """A `write` for files of JSON rows; `layout` is for episodes of which none says how its file was laid out, and
    `build` makes the rows of those that were not imported from the format."""

    def row(episode: Trajectory) -> Any:
        if build is not None and not source_row(episode.episode):
            return build(episode)
        return rebuilt(episode, rebuild)

    def write(episodes: Iterable[Trajectory]) -> Iterator[bytes]:
        episodes = iter(episodes)
        first = list(islice(episodes, 1))
        file = source_row(first[0].episode).get("file") if first else None
        found = file.get("layout") if isinstance(file, dict) else None
        yield from laid_out(map(row, chain(first, episodes)), found or layout)

    return write


def write_groups(join: Callable[[Mapping[str, Any], Sequence[Trajectory]], Any], layout: Layout = "values") -> Write:
    """A `write` for files of which one value holds several episodes. `join(file, episodes)` makes the value of what
    was given to `traced` as `file` with its first episode, and of its episodes."""

    def write(episodes: Iterable[Trajectory]) -> Iterator[bytes]:
        groups = _groups(episodes)
        first = list(islice(groups, 1))
        found = first[0][0].get("layout") if first else None
        yield from laid_out((join(file, members) for file, members in chain(first, groups)), found or layout)

    return write


def _groups(episodes: Iterable[Trajectory]) -> Iterator[tuple[Mapping[str, Any], Sequence[Trajectory]]]:
    file: Mapping[str, Any] = {}
    members: list[Trajectory] = []
    for episode in episodes:
        found = source_row(episode.episode).get("file")
        if isinstance(found, dict):
            if members:
                yield file, members
            file, members = found, []
        members.append(episode)
    if members:
        yield file, members


def from_row(
    record: Callable[[Any, str], Record], row: Row, rebuild: Rebuild | None = None, file: Mapping[str, Any] = _NOTHING
) -> Record | Refused:
    """The record, or why the row is refused. `rebuild` and `file` as in `traced`."""
    try:
        found = record(row.value, row.key)
        return found if rebuild is None else traced(found, row.value, rebuild, file)
    except (FormatError, UsageError) as error:
        return Refused(row.key, str(error))


def traced(record: Record, value: Any, rebuild: Rebuild, file: Mapping[str, Any] = _NOTHING) -> Record:
    """The record with what `rebuild` does not make again of `value`, the source's row. `file` is what is said once of
    all rows: give it with the first record. Raises UsageError where a column does not take its value."""
    source = dict(record.source)
    if patch := missing(value, record, rebuild):
        source["patch"] = patch
    if file:
        source["file"] = dict(file)
    found = object.__new__(Record)
    # With its `rows`, which are made once, for the proof and for the lake.
    found.__dict__.update(record.__dict__, source=source)
    return found


def fits_begin(name: str, value: Any) -> bool:
    """Whether the begin of an episode has this field and it takes this value."""
    return value is None or fits("begin", name, value)


def fits_step(name: str, value: Any) -> bool:
    """Whether a step has this field and it takes this value."""
    return value is None or fits("step", name, value)


def fits_end(name: str, value: Any) -> bool:
    """Whether the end of an episode has this field and it takes this value."""
    return value is None or fits("end", name, value)


def fits_time(value: Any) -> bool:
    """Whether this is a time that `started_at` and `ended_at` take."""
    try:
        microseconds(value)
    except UsageError:
        return False
    return True

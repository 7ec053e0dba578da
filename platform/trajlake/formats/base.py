"""What a foreign format is: how its files are told apart, and how their rows become episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trajlake.errors import FormatError, UsageError
from trajlake.formats.json_rows import Refused, Row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.values import begin_row, end_row, microseconds, step_row

__all__ = [
    "Format",
    "Record",
    "Refused",
    "Row",
    "any_row",
    "fits_begin",
    "fits_end",
    "fits_step",
    "fits_time",
    "from_row",
    "per_row",
]


@dataclass(frozen=True)
class Record:
    """One episode as a file holds it. `key` names its row in the file (`row 12`, `line 3`), once and for ever:
    the episode's id is made from it."""

    key: str
    begin: EpisodeFields
    steps: Sequence[StepFields]
    end: EndFields = field(default_factory=EndFields)
    started_at: Any = None
    ended_at: Any = None


@dataclass(frozen=True)
class Format:
    """One foreign format.

    `detect` looks at a file's content, never at its name, and says whether it is of this format. `read` gives one
    Record or Refused a row, in the order of the file; it raises FormatError only where no row can be told apart.
    """

    name: str
    description: str
    detect: Callable[[Source], bool]
    read: Callable[[Source], Iterator[Record | Refused]]


def any_row(is_row: Callable[[Any], bool]) -> Callable[[Source], bool]:
    """A `detect` for files of JSON rows: one of the first rows is of the format (others may be broken)."""
    return lambda source: any(is_row(value) for value in source.first_values)


def per_row(record: Callable[[Any, str], Record]) -> Callable[[Source], Iterator[Record | Refused]]:
    """A `read` for files of JSON rows, one episode a row. `record(value, key)` raises FormatError to refuse."""

    def read(source: Source) -> Iterator[Record | Refused]:
        for row in source.rows():
            yield row if isinstance(row, Refused) else from_row(record, row)

    return read


def from_row(record: Callable[[Any, str], Record], row: Row) -> Record | Refused:
    """The record, or why the row is refused."""
    try:
        return record(row.value, row.key)
    except FormatError as error:
        return Refused(row.key, str(error))


def fits_begin(name: str, value: Any) -> bool:
    """Whether the begin of an episode has this field and it takes this value."""
    return _fits(begin_row, name, value)


def fits_step(name: str, value: Any) -> bool:
    """Whether a step has this field and it takes this value."""
    return _fits(step_row, name, value)


def fits_end(name: str, value: Any) -> bool:
    """Whether the end of an episode has this field and it takes this value."""
    return _fits(end_row, name, value)


def fits_time(value: Any) -> bool:
    """Whether this is a time that `started_at` and `ended_at` take."""
    try:
        microseconds(value)
    except UsageError:
        return False
    return True


def _fits(convert: Callable[[Mapping[str, Any]], Any], name: str, value: Any) -> bool:
    try:
        convert({name: value})
    except UsageError:
        return False
    return True

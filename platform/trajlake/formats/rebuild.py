"""The way back: what a lake gives back of a record, and how the source's own row is made of it again.

A format rebuilds its row from columns and `extra`. Where that comes out differently (a null where others leave the
key out, a time spelled in its own way, a number that a column rounds), the difference is found at the import and kept
with the episode as a patch, so that every row that comes in can go out as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trajlake.errors import FormatError, UsageError
from trajlake.formats.quick_json import own_loads
from trajlake.ingest.arrays import Row
from trajlake.ingest.episode import StepFields, opening_row, outcome_row, with_tensors
from trajlake.ingest.json_text import json_text
from trajlake.ingest.values import step_row
from trajlake.read.trajectory import Trajectory, restored
from trajlake_schemas import EPISODES, STEPS

if TYPE_CHECKING:
    from trajlake.formats.base import Record

SOURCE_ROW = "source_row"
"""The key in an episode's `extra` under which the import keeps what the way back needs: `row`, the number of the row
in its file; `patch`, what rebuilding does not give; `added`, the columns that the caller of the import filled; and in
one episode of a file `file`, what is said once of all its rows."""

LONG_TEXT = 100_000_000
"""Characters: of longer text no Exact step is made, because the checks must say whether a column takes it."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_EPISODE = dict.fromkeys([*EPISODES.names(), "occurred_at"])
_NO_STEP = dict.fromkeys(STEPS.names())
_NOT_PLAIN = {"timestamp", "token_ids", "loss_mask", "logprobs"}
_MISSING = object()

Patch = list[list[Any]]
"""`[path]` takes away what is there, `[path, value]` puts a value there; a path is a list of keys and positions."""


class Exact(dict[str, Any]):
    """A step that is in the form in which it is stored, and of which the format makes its source again without a
    difference: `source`, which need not be proved then, and which its `rebuild` takes as it is. What it does not hold
    is null."""

    __slots__ = ("source",)
    source: Any

    def __missing__(self, name: str) -> None:
        return None


def exact(step: StepFields, source: Any) -> StepFields:
    """The step as an Exact one, which must be true of it; as it is where a column does not take its value."""
    try:
        row = Exact(step_row(with_tensors(step.copy())))
    except UsageError:
        return step  # `rows_of` says so
    row.source = source
    return cast("StepFields", row)


def given_back(step: StepFields) -> dict[str, Any]:
    """What a lake gives back of this step. Raises UsageError that names the field which does not take its value."""
    return _read_back(step_row(with_tensors(step.copy())), 0)


@dataclass(frozen=True)
class Rows:
    """A record as it is stored: the structs of the events `begin`, `step` and `end`."""

    begin: Row
    steps: Sequence[Row]
    end: Row


def rows_of(record: Record) -> Rows:
    """The record as it is stored: what `Record.rows` keeps."""
    begin = opening_row(record.begin, record.started_at)
    steps: list[Row] = []
    said: dict[str, bool | None] = {"terminated": None, "truncated": None}
    for number, step in enumerate(record.steps, 1):
        if type(step) is Exact:
            row: Row = step
        else:
            try:
                row = step_row(with_tensors(step.copy()))
            except UsageError as error:
                raise UsageError(f"step {number}: {error}") from error
        steps.append(row)
        if "terminated" in row or "truncated" in row:
            said |= {name: row[name] for name in said if row.get(name) is not None}
    return Rows(begin, steps, outcome_row(record.end, record.ended_at, said["terminated"], said["truncated"]))


def stored(record: Record) -> Trajectory:
    """What a lake gives back of this record, without ids. Raises UsageError as `Record.rows`."""
    return _given_back(record, _read_back)


def _given_back(record: Record, read_back: Callable[[Row, int], dict[str, Any]]) -> Trajectory:
    rows = record.rows
    begin, end = rows.begin, rows.end
    extra = begin.get("extra")
    if "extra" in end:  # the end's keys win, as the compaction merges them
        extra = json_text({**own_loads(extra or "{}"), **own_loads(end["extra"])})
    row = {
        **_NO_EPISODE,
        **begin,
        **end,
        "started_at": _time(begin.get("occurred_at")),
        "ended_at": _time(end.get("occurred_at")),
        "extra": extended(extra, SOURCE_ROW, dict(record.source)) if record.source else extra,
        "n_steps": len(rows.steps),
    }
    del row["occurred_at"]
    if "restore" in begin and "restore" in end:
        row["restore"] = json.dumps({**json.loads(begin["restore"]), **json.loads(end["restore"])})
    return Trajectory(restored(row), [read_back(step, index) for index, step in enumerate(rows.steps)])


def extended(text: str | None, name: str, value: Any) -> str:
    """The JSON text of an object with one more key, which wins over one of that name. The text is not read for it."""
    more = json_text({name: value})
    if not text or text == "{}":
        return more
    if json_text(name) in text:
        return json_text({**own_loads(text), name: value})
    return f"{text[:-1]},{more[1:]}"


def _read_back(row: Row, index: int) -> dict[str, Any]:
    """A step as a reader of the tables gets it."""
    step = {**_NO_STEP, **row, "step_index": index}
    for name in _NOT_PLAIN & row.keys():
        value = row[name]
        step[name] = value.tolist() if isinstance(value, np.ndarray) else _time(value)
    return step


def _to_prove(row: Row, index: int) -> dict[str, Any]:
    """As `_read_back`, but for what is proved already."""
    return row if type(row) is Exact else _read_back(row, index)


def _time(value: int | None) -> datetime | None:
    return None if value is None else _EPOCH + timedelta(microseconds=value)


def extra_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of an episode's or step's row as a value of its own; empty where there is none."""
    value = own_loads(row["extra"]) if row.get("extra") else {}
    return value if isinstance(value, dict) else {}


def source_row(episode: Mapping[str, Any]) -> dict[str, Any]:
    """What the import kept for the way back; empty for an episode that was not imported."""
    found = extra_of(episode).get(SOURCE_ROW)
    return found if isinstance(found, dict) else {}


def episode_extra(trajectory: Trajectory) -> dict[str, Any]:
    """The episode's `extra` without what the import added to it."""
    extra = extra_of(trajectory.episode)
    extra.pop(SOURCE_ROW, None)
    return extra


def missing(value: Any, record: Record, rebuild: Callable[[Trajectory], Any]) -> Patch:
    """What `rebuild` does not make again of the source's value. Raises UsageError as `stored` does."""
    return difference(value, rebuild(_given_back(record, _to_prove)))


def rebuilt(trajectory: Trajectory, rebuild: Callable[[Trajectory], Any]) -> Any:
    """The source's value, with the patch that the import found necessary. Raises FormatError where that does not fit,
    because the episode was changed after its import."""
    kept = source_row(trajectory.episode)
    if added := kept.get("added"):
        trajectory = replace(trajectory, episode={**trajectory.episode, **dict.fromkeys(added)})
    try:
        return patched(rebuild(trajectory), kept.get("patch") or [])
    except (LookupError, TypeError) as error:
        name = trajectory.episode["episode_id"]
        raise FormatError(f"episode {name} is not as it was imported, so its source cannot be made again") from error


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: numbers by value, NaN equal to NaN, order of keys ignored."""
    return one is other or not difference(one, other)


def difference(wanted: Any, given: Any) -> Patch:
    """The patch that makes `wanted` of `given`; empty where they are equal."""
    patch: Patch = []
    if not _is_same(wanted, given):
        _compare(wanted, given, [], patch)
    return patch


def _is_same(one: Any, other: Any) -> bool:
    """Whether the values are equal beyond doubt, which most are: this is all that most rows need."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is not dict and kind is not list:
        return bool(one == other)
    if len(one) != len(other):
        return False
    others = [other.get(name, _MISSING) for name in one] if kind is dict else other
    for value, given in zip(one.values() if kind is dict else one, others, strict=True):
        if value is given:
            continue
        kind = type(value)
        if kind is dict or kind is list:  # a call for each text would be most of the time
            if not _is_same(value, given):
                return False
        elif kind is not type(given) or value != given:
            return False
    return True


def _compare(wanted: Any, given: Any, path: list[str | int], patch: Patch) -> None:
    if isinstance(wanted, dict) and isinstance(given, dict):
        for name in given.keys() - wanted.keys():
            patch.append([[*path, name]])
        for name, value in wanted.items():
            if name not in given:
                patch.append([[*path, name], value])
            elif type(value) is not str or value != given[name]:  # most are text, and equal
                _compare(value, given[name], [*path, name], patch)
    elif isinstance(wanted, list) and isinstance(given, list) and len(wanted) == len(given):
        for position, (value, other) in enumerate(zip(wanted, given, strict=True)):
            _compare(value, other, [*path, position], patch)
    elif not _equal(wanted, given):
        patch.append([path, wanted])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other) and (isinstance(one, (int, float)) or type(one) is type(other))


def patched(value: Any, patch: Sequence[Sequence[Any]]) -> Any:
    """The value with a patch applied, in place where it can be. Raises LookupError or TypeError for a patch that
    does not fit."""
    for path, *replacement in patch:
        if not path:
            value = replacement[0]
            continue
        target = value
        for part in path[:-1]:
            target = target[part]
        if replacement:
            target[path[-1]] = replacement[0]
        else:
            del target[path[-1]]
    return value


def laid_out(values: Iterable[Any], layout: str) -> Iterator[bytes]:
    """A file's bytes, chunk by chunk; `layout` is one of those of `Source.layout`."""
    if layout != "array":
        for value in values:
            yield json_bytes(value) + b"\n"
        return
    opening = b"[\n"
    for value in values:
        yield opening + json_bytes(value)
        opening = b",\n"
    yield (b"" if opening == b",\n" else opening) + b"\n]\n"


def standard(value: Any) -> Any:
    """The value with null for NaN and infinities, which many readers of JSON refuse."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: standard(inside) for name, inside in value.items()}
    return [standard(inside) for inside in value] if isinstance(value, list) else value


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8, with `NaN` and `Infinity` as sources have them; ASCII where it holds lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()

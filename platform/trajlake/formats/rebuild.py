"""The way back: what a lake gives back of a record, and how the source's own row is made of it again.

A format rebuilds its row from columns and `extra`. Where that comes out differently (a null where others leave the
key out, a time spelled in its own way, a number that a column rounds), the difference is found at the import and kept
with the episode as a patch, so that every row that comes in can go out as it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from trajlake.errors import FormatError, UsageError
from trajlake.ingest.episode import Episode
from trajlake.read.trajectory import Trajectory, restored
from trajlake_schemas import EPISODES, STEPS

if TYPE_CHECKING:
    from trajlake.formats.base import Record
    from trajlake.ingest.writer import Writer

SOURCE_ROW = "source_row"
"""The key in an episode's `extra` under which the import keeps what the way back needs: `row`, the number of the row
in its file; `patch`, what rebuilding does not give; `added`, the columns that the caller of the import filled; and in
one episode of a file `file`, what is said once of all its rows."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NO_EPISODE = dict.fromkeys(EPISODES.names())
_NO_STEP = dict.fromkeys(STEPS.names())
_NOT_PLAIN = {"timestamp", "occurred_at", "token_ids", "loss_mask", "logprobs"}

Patch = list[list[Any]]
"""`[path]` takes away what is there, `[path, value]` puts a value there; a path is a list of keys and positions."""


def stored(record: Record) -> Trajectory:
    """What a lake gives back of this record, without ids. Raises UsageError that names the step
    and the field which does not take its value."""
    keeping = _Keeping()
    episode = Episode(cast("Writer", keeping), "", 0, record.begin, record.started_at)
    for number, step in enumerate(record.steps, 1):
        try:
            episode.step(**step)
        except UsageError as error:
            raise UsageError(f"step {number}: {error}") from error
    episode.end(ended_at=record.ended_at, **record.end)
    begin, *steps, end = keeping.rows
    times = {"started_at": begin.pop("occurred_at", None), "ended_at": end.pop("occurred_at", None)}
    extra = _merged(begin, end, "extra")
    if record.source:
        extra[SOURCE_ROW] = dict(record.source)
    row = {
        **_NO_EPISODE,
        **begin,
        **end,
        **times,
        "extra": json.dumps(extra) if extra else None,
        "restore": json.dumps(_merged(begin, end, "restore")),
        "n_steps": len(steps),
    }
    return Trajectory(
        restored(row), [_NO_STEP | restored(step) | {"step_index": index} for index, step in enumerate(steps)]
    )


def _merged(begin: Mapping[str, Any], end: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The JSON objects that both have in a column, the end's keys winning, as the compaction merges them."""
    return {key: value for row in (begin, end) if row.get(name) for key, value in json.loads(row[name]).items()}


class _Keeping:
    """In place of a Writer: keeps the rows as a reader of the tables gets them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def put(self, kind: str, identity: str, attempt: int, row: dict[str, Any], size: int, wait: bool = True) -> bool:
        row = dict(row)
        for name in _NOT_PLAIN & row.keys():
            if row[name] is not None:
                row[name] = _read_back(row[name])
        self.rows.append(row)
        return True

    def forget(self, episode: Episode) -> None: ...


def _read_back(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else _EPOCH + timedelta(microseconds=value)


def extra_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of an episode's or step's row as a value of its own; empty where there is none."""
    value = json.loads(row["extra"]) if row.get("extra") else {}
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
    return difference(value, rebuild(stored(record)))


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
    return not difference(one, other)


def difference(wanted: Any, given: Any) -> Patch:
    """The patch that makes `wanted` of `given`; empty where they are equal."""
    patch: Patch = []
    _compare(wanted, given, [], patch)
    return patch


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


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8, with `NaN` and `Infinity` as sources have them; ASCII where it holds lone surrogates."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()

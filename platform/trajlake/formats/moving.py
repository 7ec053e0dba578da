"""Moving values from a source's object to columns: what fits goes there, everything else stays to become `extra`.

A null stays too: that a source wrote it is kept, and it fills no column. A time that a column would spell in another
way, or round, is copied: the column serves readers, and `extra` the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from trajlake.formats.base import fits_time
from trajlake.formats.rebuild import same
from trajlake.ingest.scalars import microseconds

_EPOCH = datetime(1970, 1, 1)
_LATEST = 10**17

Fits = Callable[[str, Any], bool]


def move(rest: dict[str, Any], name: str, into: dict[str, Any], column: str, fits: Fits) -> None:
    """Move `rest[name]` to `into[column]`, where it is there, not null, and the column takes it."""
    if rest.get(name) is not None and fits(column, rest[name]):
        into[column] = rest.pop(name)


def move_time(rest: dict[str, Any], name: str, into: dict[str, Any], column: str) -> None:
    """As `move`, for ISO 8601 text or seconds since 1970; a time that `time_like` does not spell again is copied."""
    value = rest.get(name)
    if usual_time(value) is not None:
        into[column] = rest.pop(name)
        return
    if value is None or not fits_time(value) or not 0 <= (exact := microseconds(value)) < _LATEST:
        return
    into[column] = value
    if (isinstance(value, str) and _text(exact) == value) or (isinstance(value, float) and exact / 1e6 == value):
        del rest[name]


def time_text(time: datetime) -> str:
    """As Python writes a time without a zone."""
    return time.replace(tzinfo=None).isoformat()


def usual_time(value: Any) -> int | None:
    """Microseconds since 1970 of a time that `move_time` moves because `time_text` spells it again; of any other value
    None."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    if time.tzinfo is not None or time < _EPOCH or time.isoformat() != value:
        return None
    since = time - _EPOCH
    exact = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return exact if exact < _LATEST else None


def _text(time: int) -> str:
    return time_text(datetime.fromtimestamp(time // 1_000_000, UTC).replace(microsecond=time % 1_000_000))


def inside(value: Any, *path: str) -> Any:
    """What is at a path of keys, or None."""
    for name in path:
        if type(value) is not dict and not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def text_or_none(value: Any) -> str | None:
    """The value if it is text that says something."""
    return value if isinstance(value, str) and value else None


def without_repeats(value: Any, said: Mapping[str, Any]) -> Any:
    """An object without the keys that repeat what `said` holds under the same name; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if name not in said or not same(item, said[name])}


def with_repeats(value: Any, said: Mapping[str, Any]) -> Any:
    """The way back of `without_repeats`."""
    return {**said, **value} if isinstance(value, dict) else value

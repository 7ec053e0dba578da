"""Single values as callers give them, checked and in the form of the schema. All raise UsageError."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

from trajlake.errors import UsageError
from trajlake.ingest.arrays import plain

_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999  # microseconds since 1970
LONGEST_TEXT = 500_000_000  # at four bytes a character this still fits Arrow's 32-bit offsets


def microseconds(value: Any) -> int:
    """Microseconds since 1970 UTC, from a datetime, ISO 8601 text, or seconds since 1970; of the years that Python and
    ISO 8601 have, 1 to 9999."""
    found = _microseconds(value)
    if not _FIRST <= found <= _LAST:
        raise UsageError(f"not a time of the years 1 to 9999: {value!r}")
    return found


def _microseconds(value: Any) -> int:
    if type(value) is float and -1e11 < value < 1e11:
        return round(value * 1_000_000)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise UsageError(f"not an ISO 8601 time: {value!r}") from error
    if isinstance(value, datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=UTC)
        delta = value - datetime(1970, 1, 1, tzinfo=UTC)
        return int((delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds)
    if is_whole_number(value) and abs(int(value)) < 1e11:
        return int(value) * 1_000_000
    if isinstance(value, float) and abs(value) < 1e11:
        return round(value * 1_000_000)
    raise UsageError(f"not a time (a datetime, ISO 8601 text, or seconds since 1970): {value!r}")


def kind_of(value: Any) -> str:
    """The name of a value's type, as a refusal says it."""
    return "null" if value is None else type(value).__name__


def text(value: Any) -> str:
    """Text, of an Enum that is one its value."""
    if not isinstance(value, str):
        raise UsageError(f"must be text, not {kind_of(value)}")
    if len(value) > LONGEST_TEXT:
        raise UsageError(f"holds {len(value):,} characters, more than the {LONGEST_TEXT:,} that fit into one column")
    return str.__str__(value)  # of an Enum that is a text its value, where str() gives its name


def boolean(value: Any) -> bool:
    """True or False, of Python or numpy."""
    value = plain(value)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(f"must be True or False, not {value!r}")


def real(value: Any) -> float:
    """A number of 64 bits; neither a truth value nor text."""
    if type(value) is float:
        return value
    number = plain(value)
    if isinstance(number, (bool, np.bool_, str)):
        raise UsageError(f"must be a number, not {value!r}")
    try:
        return float(number)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"must be one number, not {value!r}") from error


def integer(value: Any) -> int:
    """A whole number of 64 bits."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    value = plain(value)
    if is_whole_number(value) and -(2**63) <= value < 2**63:
        return int(value)
    raise UsageError(f"must be a whole number of 64 bits, not {value!r}")


def is_whole_number(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def name_text(value: Any) -> str:
    """A name, which may be given as anything, as text."""
    return str.__str__(value) if isinstance(value, str) else str(value)


def one_of(choices: tuple[str, ...]) -> Callable[[Any], str]:
    """What takes one of these texts."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise UsageError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str.__str__(value)

    return check

"""Values of rows as JSON, as CSV fields and as table cells: the one place that says how each type is written."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from trajlake_cli.text import ELLIPSIS, escape_json, one_line

NULL_CELL = "–"
_CELL_CHARACTERS = 1000  # no cell is wider on any terminal; what is behind is not worth looking at


def plain(value: Any) -> Any:
    """`value` as JSON can hold it.

    NaN and the infinities become the texts "NaN", "Infinity" and "-Infinity", because null means not scored.
    Times become ISO 8601 (UTC as Z), durations seconds, bytes base64.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return plain(value.tolist())
    return str(value)


def json_text(value: Any, *, ascii_only: bool = False) -> str:
    """One line of JSON; what could steer a terminal is escaped, which leaves the value the same."""
    encoded = json.dumps(plain(value), ensure_ascii=ascii_only, allow_nan=False)
    return encoded if ascii_only else escape_json(encoded)


def field(value: Any) -> str:
    """A CSV field: null is empty, booleans are true and false, lists and structs are JSON."""
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json_text(value)


def cell(value: Any) -> str:
    """A table cell: one line, neutralised, numbers rounded to four decimals."""
    if value is None:
        return NULL_CELL
    if isinstance(value, float):
        return number(value)
    if isinstance(value, datetime):
        return _moment(value.replace(microsecond=0)).replace("T", " ")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"{len(value):,} bytes"
    text = value if isinstance(value, str) else field(value)
    if len(text) > _CELL_CHARACTERS:
        text = text[:_CELL_CHARACTERS] + ELLIPSIS
    return one_line(text)


def number(value: float) -> str:
    """A float for people: four decimals at most, and exponents where those would hide it."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def is_number(value: Any) -> bool:
    """Whether a table aligns it to the right."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _moment(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat()
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")

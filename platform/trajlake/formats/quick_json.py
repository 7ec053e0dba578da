"""JSON read by orjson, which takes a third of the time, where it is beyond doubt what the standard library reads.

orjson keeps the last of two equal keys and makes floats of large whole numbers, silently. Both are found out here from
the outside; where anything is in doubt, or not JSON, it is left to the slow way.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import orjson

__all__ = ["DOUBTFUL", "own_loads", "quick_loads"]

DOUBTFUL = object()
"""Not read: it may be JSON or not."""

_WRITER_DEPTH = 254
"""Levels that orjson writes; one more is an error."""
_LONG = 19
"""As many digits as the shortest whole number that may not fit 64 bits."""
_DOUBLINGS = (1, 2, 4, 8, 3)
"""How runs of 1, 2, 4, 8 and 16 digits become those of twice as many, and at last of `_LONG`."""
_AT_ONCE = 1 << 17  # bytes, which stay in the processor's cache
_WORTH_NUMPY = 1 << 13  # bytes from which on numpy takes less time
_ZEROS = re.compile(b"0+")
_DIGITS_AS_ZERO = bytes(ord("0") if ord("0") <= byte <= ord("9") else 0 for byte in range(256))


def quick_loads(text: str | bytes, depth: int) -> Any:
    """The JSON value that a text, or its bytes in UTF-8, are; or DOUBTFUL, always where a key is there twice, it is
    nested deeper than `depth` levels (up to 254), or the standard library would read anything else of it."""
    try:
        data = text if isinstance(text, bytes) else text.encode()
        if b"\\u0022" in data or _may_hold_long_integer(data):
            return DOUBTFUL
        value = orjson.loads(data)
        nested = value
        for _ in range(_WRITER_DEPTH - depth):
            nested = [nested]
        written = orjson.dumps(nested)
    except (ValueError, TypeError):  # orjson's errors are of these, and that of lone surrogates
        return DOUBTFUL
    # A quote stands around each text and for each quote in it, here as there. A pair that was dropped had a key, whose
    # quotes would be missing.
    return value if _quotes(data) == _quotes(written) else DOUBTFUL


def own_loads(text: str) -> Any:
    """`json.loads`, in less time: for text that a lake holds, of which a key that is there twice is nobody's mistake.
    Raises ValueError."""
    try:
        data = text.encode()
        if not _may_hold_long_integer(data):
            return orjson.loads(data)
    except ValueError:
        pass
    return json.loads(text)


def _quotes(data: bytes) -> int:
    if len(data) < _WORTH_NUMPY:
        return data.count(b'"')
    codes = np.frombuffer(data, np.uint8)
    parts = (codes[start : start + _AT_ONCE] for start in range(0, len(codes), _AT_ONCE))
    return sum(int(np.count_nonzero(part == ord('"'))) for part in parts)


def _may_hold_long_integer(data: bytes) -> bool:
    """Whether `_LONG` digits stand anywhere but behind a point."""
    if len(data) < _WORTH_NUMPY:
        return _holds_long_integer(data)
    codes = np.frombuffer(data, np.uint8)
    for start in range(0, len(data), _AT_ONCE):
        end = start + _AT_ONCE + _LONG - 1
        runs = codes[start:end] - np.uint8(ord("0")) < 10  # what is less than 0 wraps to more
        for shift in _DOUBLINGS:
            runs = runs[shift:] & runs[:-shift]
        if runs.any() and _holds_long_integer(data[max(0, start - 1) : end]):
            return True
    return False


def _holds_long_integer(data: bytes) -> bool:
    zeros = data.translate(_DIGITS_AS_ZERO)
    start = zeros.find(b"0" * _LONG)
    while start >= 0:
        if data[start - 1 : start] != b".":
            return True
        digits = _ZEROS.match(zeros, start)
        assert digits is not None
        start = zeros.find(b"0" * _LONG, digits.end())
    return False

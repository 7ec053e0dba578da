"""JSON for reading: what fits in a line stays in one, and code in a string is shown as lines of code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_LARGEST = 1_000_000  # characters; parsing more to show some of it is not worth the time


class _Repeated(ValueError):
    """A key stands twice, so parsing would hide a value."""


def pretty_json(text: str, width: int) -> str | None:
    """`text` laid out in lines of about `width`, or None where it is no JSON object or list that can be shown whole."""
    if len(text) > _LARGEST or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return "\n".join(_lines(json.loads(text, object_pairs_hook=_no_repeats), width))
    except (ValueError, RecursionError):
        return None


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Repeated
    return value


def _lines(value: Any, width: int) -> Iterator[str]:
    """The lines of one value; the first is to stand behind its key."""
    flat = json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and "\n" in value and (len(value) > 40 or value.count("\n") > 1):
        yield "|"
        for line in value.rstrip("\n").split("\n"):
            yield "  " + line
    elif not isinstance(value, (dict, list)) or not value or (len(flat) <= width and not _has_block(value)):
        yield flat
    else:
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        items: list[tuple[str, Any]] = (
            [(json.dumps(key, ensure_ascii=False) + ": ", item) for key, item in value.items()]
            if isinstance(value, dict)
            else [("", item) for item in value]
        )
        yield opening
        for at, (key, item) in enumerate(items):
            lines = list(_lines(item, width - 2 - len(key)))
            comma = "," if at < len(items) - 1 and lines[0] != "|" else ""
            yield "  " + key + lines[0] + (comma if len(lines) == 1 else "")
            for number, line in enumerate(lines[1:], start=2):
                yield "  " + line + (comma if number == len(lines) else "")
        yield closing


def _has_block(value: Any) -> bool:
    """Whether a direct member is a text of several lines, which one line would hide."""
    members = value.values() if isinstance(value, dict) else value
    return any(isinstance(member, str) and member.count("\n") > 1 for member in members)

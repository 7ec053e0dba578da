"""JSON rows read one by one: a row that is broken is refused by its number, and the others come in.

A file that was cut off gives its whole rows, and says at which byte it ends. Where a row is no JSON its end is found
by its brackets; only where these do not match either, nothing behind it can be told apart and the reading stops.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from trajlake.formats.quick_json import DOUBTFUL, quick_loads
from trajlake.formats.text import Text

Layout = Literal["array", "lines", "values"]

MAX_DEPTH = 200
"""Deeper nesting is refused: readers of the stored text would run into their own limits."""

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_FIRST_LINE_LIMIT = 64 << 20  # characters that are read to find out whether a file is one value a line
_SPACE = " \t\r\n"
_CONTAINERS = frozenset({dict, list})
_CLOSES = {"{": "}", "[": "]"}
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]', re.DOTALL)
_WORD = re.compile(r'[^\s,\[\]{}"]++')
_TRUNCATED = "the file is truncated; fetch it again"
_LOST = "what follows cannot be told apart, so nothing of it is read"


@dataclass(frozen=True)
class Row:
    """One JSON value of a file, and its place: `row 12` (from 1) or `line 12`."""

    key: str
    value: Any


@dataclass(frozen=True)
class Refused:
    """A row that does not come in, and why. Nothing of it is stored."""

    row: str
    reason: str


class _Duplicate(ValueError):
    pass


class _TooDeep(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Duplicate(
            f"the key {_short(twice)} is there twice in one object, and which one is meant cannot be known"
        )
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def loads(text: str | bytes) -> Any:
    """One JSON value, of a text or its bytes in UTF-8. Raises ValueError, also for nesting deeper than MAX_DEPTH and
    for a key that is there twice; UnicodeDecodeError, which is one, for bytes that are no UTF-8."""
    value = quick_loads(text, MAX_DEPTH + 1)
    if value is not DOUBTFUL:
        return value
    return _slow_loads(text if isinstance(text, str) else text.decode("utf-8-sig"))


def _slow_loads(text: str) -> Any:
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _TooDeep(_TOO_DEEP) from None
    _check_depth(value)
    return value


def layout_of(text: Text) -> Layout:
    """How a file's values stand in it, from its first two lines."""
    if not text.skip_space():
        return "values"
    is_array = text.buffer[text.position] == "["
    first = _next_line(text)
    if first is None or not text.skip_space():
        return "array" if is_array else "values"
    if _is_container(first):
        return "lines"
    if is_array:
        return "array"
    second = _next_line(text)
    # A line of its own that is a whole object: the first line is a broken one, not the start of a long value.
    if second is not None and _is_container(second):
        return "lines"
    return "values" if first.startswith("{") else "lines"


def read_rows(text: Text, layout: Layout, *, whole: bool = False) -> Iterator[Row | Refused]:
    """The rows of a file in their order. With `whole` it is tried to read them at once, which is faster and takes the
    memory of all of them."""
    if whole and text.encoding_name == "UTF-8" and (rows := _read_whole(text, layout)) is not None:
        return iter(rows)
    return {"lines": _read_lines, "array": _read_array, "values": _read_values}[layout](text)


def _read_whole(text: Text, layout: Layout) -> list[Row] | None:
    """The rows of a file that is one JSON value, or one a line, without anything to object to, else None."""
    data = text.all_bytes()
    rows: list[Row] = []
    if layout == "lines":
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip(_SPACE.encode()):
                value = quick_loads(line, MAX_DEPTH + 1)
                if value is DOUBTFUL:
                    break
                rows.append(Row(f"line {number}", value))
        else:
            return rows
    else:
        value = quick_loads(data, MAX_DEPTH + (2 if layout == "array" else 1))
        if value is not DOUBTFUL:
            return [Row(f"row {number}", row) for number, row in enumerate(value if layout == "array" else [value], 1)]
    text.begin_again()
    return None


def _next_line(text: Text) -> str | None:
    place = text.find_line(_FIRST_LINE_LIMIT)
    return None if place is None else text.buffer[slice(*place)].strip(_SPACE)


def _is_container(line: str) -> bool:
    if line[:1] not in {"{", "["} or line[-1:] not in {"}", "]"}:
        return False
    if quick_loads(line, MAX_DEPTH + 1) is not DOUBTFUL:
        return True
    try:
        _DECODER.decode(line)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True
    return True


def _read_lines(text: Text) -> Iterator[Row | Refused]:
    number = 0
    while (place := text.find_line()) is not None:
        start, end = place
        if start == len(text.buffer) and text.ended:
            return
        number += 1
        line = text.buffer[start:end].lstrip(_SPACE)
        start = end - len(line)
        line = line.rstrip(_SPACE)
        if line:
            yield _read_line(text, f"line {number}", line, start)


def _read_line(text: Text, key: str, line: str, start: int) -> Row | Refused:
    value = quick_loads(line, MAX_DEPTH + 1)  # which takes no damaged text
    if value is not DOUBTFUL:
        return Row(key, value)
    if text.is_damaged(start, start + len(line)):
        return Refused(key, _not_text(text, start))
    try:
        return Row(key, _slow_loads(line))
    except ValueError as error:
        is_last = text.ended and text.position == len(text.buffer)
        if is_last and _scan(line, 0) is None and _is_cut(error, line):
            return Refused(key, _ends_inside(text))
        return Refused(key, _problem(error, text, start))


def _read_array(text: Text) -> Iterator[Row | Refused]:
    text.skip_space()
    text.position += 1  # the opening bracket
    number = 0
    while True:
        key = f"row {number + 1}"
        if not text.skip_space():
            yield Refused(key, f"file ends before its array does (byte {text.byte(text.position)}): {_TRUNCATED}")
            return
        if text.buffer[text.position] == "]":
            text.position += 1
            if text.skip_space():
                yield Refused(key, f"there is more behind the end of the array (byte {text.byte(text.position)})")
            return
        row, goes_on = _read_value(text, key)
        yield row
        number += 1
        if not goes_on:
            return
        if text.skip_space() and text.buffer[text.position] == ",":
            text.position += 1
        elif text.position < len(text.buffer) and text.buffer[text.position] != "]":
            where = text.byte(text.position)
            yield Refused(f"row {number + 1}", f"not JSON: no comma before it (byte {where}); {_LOST}")
            return


def _read_values(text: Text) -> Iterator[Row | Refused]:
    number = 0
    while text.skip_space():
        number += 1
        row, goes_on = _read_value(text, f"row {number}")
        yield row
        if not goes_on:
            return


def _read_value(text: Text, key: str) -> tuple[Row | Refused, bool]:
    """The value at the position, and whether what follows can be told apart."""
    while True:
        start = text.position
        problem: ValueError | RecursionError | None = None
        value: Any = None
        try:
            value, end = _DECODER.raw_decode(text.buffer, start)
        except (ValueError, RecursionError) as error:
            problem = error
            found = _scan(text.buffer, start)
            if found is None:
                if text.more():
                    continue
                return _unfinished(text, key, problem), False
            if found < 0:
                return Refused(key, f"{_problem(problem, text)}; {_LOST}"), False
            end = found
        if end == len(text.buffer) and text.buffer[start] not in '{["' and text.more():
            continue  # a number may go on in what was not read yet
        text.position = end
        if text.is_damaged(start, end):
            return Refused(key, _not_text(text, start)), True
        if problem is not None:
            return Refused(key, _problem(problem, text)), True
        try:
            _check_depth(value)
        except ValueError as error:
            return Refused(key, str(error)), True
        return Row(key, value), True


def _unfinished(text: Text, key: str, problem: ValueError | RecursionError) -> Refused:
    if _is_cut(problem, text.buffer):
        return Refused(key, _ends_inside(text))
    return Refused(key, f"{_problem(problem, text)}; {_LOST}")


def _is_cut(problem: Exception, text: str) -> bool:
    """Whether it is the end of the text that the decoder stumbled over (a literal or escape may be cut as well)."""
    if not isinstance(problem, json.JSONDecodeError):
        return True
    return problem.msg.startswith("Unterminated string") or len(text.rstrip()) - problem.pos < len("-Infinity")


def _ends_inside(text: Text) -> str:
    return f"file ends inside a JSON value (byte {text.byte(len(text.buffer))}): {_TRUNCATED}"


def _not_text(text: Text, start: int) -> str:
    return f"holds bytes that are not {text.encoding_name} (it starts at byte {text.byte(start)})"


def _problem(problem: Exception, text: Text, start: int = 0) -> str:
    """The reason in words; `start` is where in the buffer the decoder's positions begin."""
    if isinstance(problem, RecursionError):
        return _TOO_DEEP
    if isinstance(problem, json.JSONDecodeError):
        return f"not JSON: {problem.msg} (byte {text.byte(start + problem.pos)})"
    if isinstance(problem, (_Duplicate, _TooDeep)):
        return str(problem)
    return "a whole number in it has more digits than Python reads (4300)"


def _scan(buffer: str, start: int) -> int | None:
    """Where the value ends by its brackets: None if the buffer ends first, -1 if they do not match."""
    word = _WORD.match(buffer, start)
    if word:
        return word.end()
    if buffer[start] not in '{["':
        return -1
    open_brackets: list[str] = []
    for token in _TOKEN.finditer(buffer, start):
        character = token[0]
        if character in _CLOSES:
            open_brackets.append(_CLOSES[character])
        elif character == '"':
            return None
        elif character[0] != '"' and (not open_brackets or open_brackets.pop() != character):
            return -1
        if not open_brackets:
            return token.end()
    return None


def _check_depth(value: Any) -> None:
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH + 1):
        inside = chain.from_iterable([item.values() if type(item) is dict else item for item in level])
        level = [item for item in inside if type(item) in _CONTAINERS]
        if not level:
            return
    raise _TooDeep(_TOO_DEEP)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")

"""Mapping files: how to read a format that nobody wrote a module for, said in TOML.

    name = "our-rollouts"             # becomes the episodes' source_format
    rows = "results"                  # where the episodes are in each JSON value; left out: the value is one
    messages = "conversation"         # a list of OpenAI-style chat messages; or a table [steps]

    [episode]                         # column = path, of the begin or the end of an episode
    task_id = "task.id"
    reward = "outcome['final score']"
    policy_name = { value = "gpt-4o" }

    [steps]
    each = "trajectory"               # a list, one step each
    source = "who"
    message = "text"
    timestamp = { path = "at", unit = "ms" }                  # numbers since 1970, in s, ms, us or ns
    tool_calls = { name = "tool", arguments = "tool_input" }  # one call, of parts of the step
    tool_results = { each = "outputs", content = "text" }     # one for each object of a list in the step

    [steps.sources]                   # what the file says for `source`, and what it means here
    human = "user"

A path is names and positions: `a.b[0].c`, `['a name']`. What no path takes stays in `extra`.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from trajlake.errors import FormatError, UsageError
from trajlake.formats import FORMATS
from trajlake.formats.base import Format, Record, Refused, from_row
from trajlake.formats.chat import chat_steps
from trajlake.formats.json_rows import Row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake_schemas.steps import SOURCES

_PART = re.compile(r"""\.?([^.\[\]'"]+)|\[(\d+)\]|\['([^']*)'\]|\["([^"]*)"\]""")
_BEGIN = frozenset(EpisodeFields.__annotations__) - {"extra", "source_format", "source_hash"}
_END = frozenset(EndFields.__annotations__) - {"extra"}
_TIMES = frozenset({"started_at", "ended_at"})
_STEP = frozenset(StepFields.__annotations__) - {"extra", "observation", "action"}
_TOP = {"name", "rows", "messages", "episode", "steps"}
_MOMENTS = _TIMES | {"timestamp"}
_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}  # in a second
_OBJECTS = {"tool_calls": {"id", "name", "arguments"}, "tool_results": {"call_id", "content", "is_error"}}

Where = tuple[str | int, ...]


@dataclass(frozen=True)
class _Said:
    """A column's value: at a path, or the same for every row. With `in_second` a number is a time in parts of a second,
    so many of them. With `fields` it is a list of objects with these: one, or one for each object of `each`."""

    where: Where = ()
    value: Any = None
    in_second: int | None = None
    fields: Mapping[str, Where] = field(default_factory=dict)
    each: Where | None = None


@dataclass(frozen=True)
class _Mapping:
    name: str
    rows: Where | None
    messages: Where | None
    each: Where | None
    episode: Mapping[str, _Said]
    steps: Mapping[str, _Said] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


def load_mapping(path: str | Path) -> Format:
    """The format that a mapping file describes. Raises UsageError that says what is wrong in it."""
    try:
        with Path(path).open("rb") as file:
            given = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from error
    try:
        mapping = _mapping(given)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return Format(mapping.name, f"as {path} says", lambda _: True, lambda source: _read(source, mapping))


def _mapping(given: Mapping[str, Any]) -> _Mapping:
    _only(given, _TOP, "the file")
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise UsageError('there is no name = "…" for the format')
    if name in FORMATS:  # exports and certify would take its episodes for those of that format
        raise UsageError(f"name = {name!r} is a format that is built in: give yours another name")
    steps = given.get("steps", {})
    if not isinstance(steps, dict) or not isinstance(given.get("episode", {}), dict):
        raise UsageError("[steps] and [episode] are tables")
    if ("messages" in given) == ("steps" in given):
        raise UsageError('say where the steps are: either messages = "…" or a table [steps] with each = "…"')
    if "steps" in given and "each" not in steps:
        raise UsageError('[steps] needs each = "…", the path of the list of steps')
    sources = steps.get("sources", {})
    if not isinstance(sources, dict) or not set(sources.values()) <= set(SOURCES):
        raise UsageError(f"[steps.sources] maps what the file says to one of {', '.join(SOURCES)}")
    columns = {column: value for column, value in steps.items() if column not in {"each", "sources"}}
    return _Mapping(
        name,
        _path(given["rows"]) if "rows" in given else None,
        _path(given["messages"]) if "messages" in given else None,
        _path(steps["each"]) if "each" in steps else None,
        _columns(given.get("episode", {}), _BEGIN | _END | _TIMES, "[episode]"),
        _columns(columns, _STEP, "[steps]"),
        sources,
    )


def _columns(given: Mapping[str, Any], known: frozenset[str], what: str) -> dict[str, _Said]:
    _only(given, known, what)
    found = {}
    for column, said in given.items():
        if isinstance(said, dict) and set(said) == {"value"}:
            found[column] = _Said(value=said["value"])
        elif isinstance(said, dict) and column in _MOMENTS and set(said) == {"path", "unit"}:
            if said["unit"] not in _UNITS:
                raise UsageError(f"{what} {column}: the unit is one of {', '.join(_UNITS)}, not {said['unit']!r}")
            found[column] = _Said(_path(said["path"]), in_second=_UNITS[said["unit"]])
        elif isinstance(said, dict) and column in _OBJECTS:
            paths = {name: _path(path) for name, path in said.items()}
            _only(paths, _OBJECTS[column] | {"each"}, f"{what} {column}")
            each = paths.pop("each", None)
            found[column] = _Said(fields=paths, each=each)
        elif isinstance(said, str):
            found[column] = _Said(_path(said))
        else:
            raise UsageError(f"{what} {column}: write a path in quotes, or {{ value = … }}{_or(column)}")
    return found


def _or(column: str) -> str:
    if column in _MOMENTS:
        return ', or { path = "…", unit = "ms" }'
    paths = ", ".join(f'{name} = "…"' for name in sorted(_OBJECTS.get(column, ())))
    return f", or {{ {paths} }}" if paths else ""


def _only(given: Mapping[str, Any], known: set[str] | frozenset[str], what: str) -> None:
    if unknown := sorted(set(given) - known):
        raise UsageError(f"{what} has no {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _path(text: Any) -> Where:
    if not isinstance(text, str):
        raise UsageError(f"a path is text, not {text!r}")
    rest, parts = text.removeprefix("$").removesuffix("[*]"), []
    while rest:
        match = _PART.match(rest)
        if match is None:
            raise UsageError(f"{text!r} is no path; one looks like a.b[0].c or a['a name']")
        parts.append(int(match[2]) if match[2] else next(part for part in match.groups() if part is not None))
        rest = rest[match.end() :]
    return tuple(parts)


def _read(source: Source, mapping: _Mapping) -> Iterator[Record | Refused]:
    for row in source.rows():
        if isinstance(row, Refused):
            yield row
        elif mapping.rows is None:
            yield from_row(partial(_record, mapping=mapping), row)
        else:
            yield from _read_inside(row, mapping)


def _read_inside(row: Row, mapping: _Mapping) -> Iterator[Record | Refused]:
    """The episodes in one value; what stands around them goes to the first."""
    around = copy.deepcopy(row.value)
    values = _take(around, mapping.rows or ())
    if isinstance(values, dict):
        named = [(f"{row.key} {name}", value) for name, value in values.items()]
    elif isinstance(values, list):
        named = [(f"{row.key} {number}", value) for number, value in enumerate(values, 1)]
    else:
        yield Refused(row.key, "there is no list or object where the mapping says that the rows are")
        return
    for key, value in named:
        item = from_row(partial(_record, mapping=mapping, around=around), Row(key, value))
        if isinstance(item, Record):
            around = None
        yield item


def _record(value: Any, key: str, mapping: _Mapping, around: Any = None) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object")
    rest = copy.deepcopy(value)
    found = _columns_of(value, mapping.episode, rest)
    steps = _steps(rest, mapping)
    begin = {column: given for column, given in found.items() if column in _BEGIN}
    end = {column: given for column, given in found.items() if column in _END}
    times = {column: given for column, given in found.items() if column in _TIMES}
    extra = {**rest, **({"file": around} if around else {})}
    if extra:
        begin["extra"] = extra
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end), **times)


def _steps(rest: dict[str, Any], mapping: _Mapping) -> list[StepFields]:
    if mapping.messages is not None:
        return chat_steps(_take(rest, mapping.messages))
    values = _take(rest, mapping.each or ())
    if not isinstance(values, list):
        raise FormatError("there is no list where the mapping says that the steps are")
    return [_step(value, number, mapping) for number, value in enumerate(values, 1)]


def _step(value: Any, number: int, mapping: _Mapping) -> StepFields:
    if not isinstance(value, dict):
        raise FormatError(f"step {number} is not an object")
    rest = copy.deepcopy(value)
    step = _columns_of(value, mapping.steps, rest)
    said_source = step.get("source")
    if isinstance(said_source, str) and said_source in mapping.sources:
        step["source"] = mapping.sources[said_source]
    elif said_source is not None and said_source not in SOURCES:
        raise FormatError(
            f"step {number}: its source {str(said_source)[:40]!r} is none of {', '.join(SOURCES)}; "
            "say in [steps.sources] what it means"
        )
    extra = {**rest, **({"source": said_source} if step.get("source") != said_source else {})}
    if extra:
        step["extra"] = extra
    return cast(StepFields, step)


def _columns_of(row: dict[str, Any], columns: Mapping[str, _Said], rest: dict[str, Any]) -> dict[str, Any]:
    """The columns' values in `row`, but nulls. What they are read from is taken out of `rest`, a copy of it: several
    columns may be read from one place."""
    found = {column: given for column, said in columns.items() if (given := _value(row, said)) is not None}
    for said in columns.values():
        for where in said.fields.values() if said.each is None else [said.each]:
            _take(rest, where)
        _take(rest, said.where)
    return found


def _value(row: Any, said: _Said) -> Any:
    if said.fields or said.each is not None:
        return _objects(row, said)
    value = _get(row, said.where) if said.where else said.value
    if said.in_second is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
        return value / said.in_second
    return value


def _objects(row: Any, said: _Said) -> Any:
    items = [row] if said.each is None else _get(row, said.each)
    if not isinstance(items, list):
        return items  # refused by its column, unless it is null
    found = []
    for item in items:
        given = {name: value for name, where in said.fields.items() if (value := _get(item, where)) is not None}
        if said.each is None:
            found += [given] if given else []
        elif isinstance(item, dict):  # what no field takes stays with its object
            rest = copy.deepcopy(item)
            for where in said.fields.values():
                _take(rest, where)
            found.append({**rest, **given})
        else:
            found.append(item)
    return found or None


def _get(value: Any, where: Where) -> Any:
    """The value at a path; None where there is none."""
    for part in where:
        if not (part in value if isinstance(value, dict) else isinstance(value, list) and _is_in(value, part)):
            return None
        value = value[part]
    return value


def _is_in(value: list[Any], part: str | int) -> bool:
    return isinstance(part, int) and part < len(value)


def _take(value: Any, where: Where) -> Any:
    """The value at a path, taken out of its object; None where there is none."""
    found = _get(value, where)
    if where and isinstance(around := _get(value, where[:-1]), dict):
        around.pop(where[-1], None)
    return found

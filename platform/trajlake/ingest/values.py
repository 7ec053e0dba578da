"""From what a rollout holds to what the event schema holds: every value is copied or frozen at the call.

A rollout goes on changing its lists and arrays after `step()` returned, so nothing here keeps a reference to a
mutable argument. Values that Arrow cannot hold as they are (integers in identifier columns, lone surrogates)
are stored in a form that it can, and `restore` keeps the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from trajlake.errors import UsageError
from trajlake.ingest.arrays import Row, numbers, tensor
from trajlake.ingest.json_text import json_text
from trajlake.ingest.lists import (
    ROW_BYTES,
    content_parts,
    rewards,
    tool_calls,
    tool_results,
    usual_calls,
    usual_results,
)
from trajlake.ingest.scalars import (
    LONGEST_TEXT,
    boolean,
    integer,
    is_whole_number,
    kind_of,
    microseconds,
    name_text,
    one_of,
    real,
    text,
)
from trajlake_schemas.column import Column
from trajlake_schemas.episodes import BEGIN, FAILURE_STAGES, OUTCOME, STATUSES
from trajlake_schemas.steps import SOURCES, STEP_CONTENT

_INT32_MAX = 2**31 - 1
_LARGEST_STEP = 2_000_000_000  # bytes: an array of texts or lists holds less than 2 GiB


def _extra(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map names to values, not {kind_of(value)}")
    return json_text(value)


def _tensors(value: Any) -> list[Row]:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map names to arrays, not {kind_of(value)}")
    return [tensor(name_text(name), array) for name, array in value.items()]


def _tags(value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map text to text, not {kind_of(value)}")
    return [(name_text(name), text(label)) for name, label in value.items()]


def _parent_step(value: Any) -> int:
    number = integer(value)
    if not -1 <= number <= _INT32_MAX:
        raise UsageError(f"must be the index of an earlier step, or -1 for none, not {number}")
    return number


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "parent_step": _parent_step,
    "source": one_of(SOURCES),
    "status": one_of(STATUSES),
    "failure_stage": one_of(FAILURE_STAGES),
    "content_parts": content_parts,
    "rewards": rewards,
    "tensors": _tensors,
    "tags": _tags,
    "token_ids": numbers(np.int32),
    "loss_mask": numbers(np.int8),
    "logprobs": numbers(np.float32),
    "extra": _extra,
}


def _converter(column: Column) -> Callable[[Any], Any]:
    if column.name in _SPECIAL:
        return _SPECIAL[column.name]
    if pa.types.is_string(column.type):
        return text
    if pa.types.is_boolean(column.type):
        return boolean
    if pa.types.is_floating(column.type):
        return real
    if pa.types.is_timestamp(column.type):
        return microseconds
    return integer


_STEP_CONVERTERS = {
    column.name: _converter(column)
    for column in STEP_CONTENT
    if column.name not in {"tool_calls", "tool_results", "restore"}
}
_STEP_LISTS = {"tool_calls": (usual_calls, tool_calls), "tool_results": (usual_results, tool_results)}
_BEGIN_CONVERTERS = {column.name: _converter(column) for column in BEGIN}
_END_CONVERTERS = {column.name: _converter(column) for column in OUTCOME} | {"extra": _extra}


_CONVERTERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "begin": _BEGIN_CONVERTERS,
    "step": _STEP_CONVERTERS
    | {"tool_calls": lambda value: tool_calls(value, {}), "tool_results": lambda value: tool_results(value, {})},
    "end": _END_CONVERTERS,
}

# What may stay as it is, by name and exact type: it cannot change, and there is nothing to check. What a call costs is
# the sum of what is asked here for each field.
_SOURCES = frozenset(SOURCES)
_STEP_IDENTIFIER = "policy_version"  # a whole number, too, as everywhere in begin and end
_STEP_TEXTS = frozenset({"source", *(name for name, converter in _STEP_CONVERTERS.items() if converter is text)})
_STEP_SCALARS = {
    name: bool if converter is boolean else float
    for name, converter in _STEP_CONVERTERS.items()
    if converter in (boolean, real)
}
# About what Python takes beside what is held: for an event and its row, for a row in a list, for a value.
_EVENT_BYTES = 320
_VALUE_BYTES = 48


def step_row(given: Mapping[str, Any]) -> Row:
    """The `step` struct of an event. Raises UsageError that names the field."""
    row = dict(given)
    freeze_step(row)
    return row


def freeze_step(row: Row) -> int:
    """Make the `step` struct of an event of what was given for it, in place; None stands for an absent value, and the
    source is the agent where nothing is said. Returns about how many bytes it takes. Raises UsageError that names the
    field."""
    size = _EVENT_BYTES
    leftovers: Row = {}
    original = None
    source = row.get("source")
    if type(source) is not str or source not in _SOURCES:
        if source is not None:
            raise UsageError(f"step field source: must be one of {', '.join(SOURCES)}, not {source!r}")
        row["source"] = "agent"
    for name, value in row.items():
        if type(value) is str and name in _STEP_TEXTS:
            size += len(value)
        elif name in _STEP_LISTS and (usual := _STEP_LISTS[name][0](value)) is not None:
            row[name] = usual[0]
            size += usual[1]
        elif type(value) is not _STEP_SCALARS.get(name) and value is not None and name != "extra":
            if name == _STEP_IDENTIFIER and is_whole_number(value):
                original, value = int(value), str(value)
            row[name] = value = _step_value(name, value, leftovers)
            size += _large_bytes((value,))
    if original is not None:
        row["restore"] = json_text({_STEP_IDENTIFIER: original})
    size += _VALUE_BYTES * len(row)
    if size > LONGEST_TEXT:
        for name in _STEP_TEXTS & row.keys():
            _step_value(name, row[name] or "", leftovers)
    extra = row.get("extra")
    if leftovers or extra is not None:
        if extra is not None and not isinstance(extra, Mapping):
            raise UsageError(f"step field extra: must map names to values, not {kind_of(extra)}")
        try:
            row["extra"] = json_text(_with_leftovers(extra or {}, leftovers) if leftovers else extra)
        except UsageError as error:
            raise UsageError(f"step field extra: {error}") from error
        size += len(row["extra"])
    if size > _LARGEST_STEP:
        raise UsageError(
            f"a step of {size:,} bytes is more than Arrow holds in a row: record its arrays in several steps"
        )
    return size


def _with_leftovers(extra: Mapping[str, Any], leftovers: Row) -> Row:
    """What no field of a call or result holds, beside what the caller calls so."""
    return {**extra, **{f"{name}_rest" if name in extra else name: value for name, value in leftovers.items()}}


def _step_value(name: str, value: Any, leftovers: Row) -> Any:
    if name not in _STEP_CONVERTERS and name not in _STEP_LISTS:
        raise _unknown_field("step", name, (*_STEP_LISTS, *_STEP_CONVERTERS))
    try:
        if name in _STEP_LISTS:
            return _STEP_LISTS[name][1](value, leftovers)
        return _STEP_CONVERTERS[name](value)
    except UsageError as error:
        raise UsageError(f"step field {name}: {error}") from error


def row_bytes(row: Row) -> int:
    """About how much memory a row takes: to the byte for what can be large."""
    return _EVENT_BYTES + _VALUE_BYTES * len(row) + _large_bytes(row.values())


def _large_bytes(values: Iterable[Any]) -> int:
    """The bytes of texts, of arrays, and of the rows of lists with their texts."""
    size = 0
    for value in values:
        kind = type(value)
        if kind is str:
            size += len(value)
        elif kind is list:
            size += ROW_BYTES * len(value)
            for item in value:
                if type(item) is dict:
                    for part in item.values():
                        if type(part) is str or type(part) is bytes:
                            size += len(part)
        elif kind is np.ndarray:
            size += value.nbytes
    return size


def begin_row(given: Mapping[str, Any]) -> Row:
    """The `begin` struct of an event; integers in identifier columns are kept in `restore`."""
    return _row("episode", given, _BEGIN_CONVERTERS)


def end_row(given: Mapping[str, Any]) -> Row:
    """The `end` struct of an event."""
    return _row("end", given, _END_CONVERTERS)


def _row(what: str, given: Mapping[str, Any], converters: Mapping[str, Callable[[Any], Any]]) -> Row:
    row: Row = {}
    originals: Row = {}
    for name, value in given.items():
        if value is None:
            continue
        if name not in converters:
            raise _unknown_field(what, name, tuple(converters))
        if converters[name] is text and is_whole_number(value):
            originals[name] = int(value)
            value = str(value)
        try:
            row[name] = converters[name](value)
        except UsageError as error:
            raise UsageError(f"{what} field {name}: {error}") from error
    if originals:
        row["restore"] = json_text(originals)
    return row


def fits(what: Literal["begin", "step", "end"], name: str, value: Any) -> bool:
    """Whether this struct of an event has the field and it takes the value, which is not null."""
    convert = _CONVERTERS[what].get(name)
    if convert is None:
        return False
    if convert is text and (what != "step" or name == _STEP_IDENTIFIER) and is_whole_number(value):
        return True  # kept in `restore`
    try:
        convert(value)
    except UsageError:
        return False
    return True


def _unknown_field(what: str, name: str, known: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"{what} has no field {name!r}; put it into extra={{…}}, or use one of {', '.join(sorted(known))}"
    )

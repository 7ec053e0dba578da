"""From what a rollout holds to what the event schema holds: every value is copied or frozen at the call.

A rollout goes on changing its lists and arrays after `step()` returned, so nothing here keeps a reference to a
mutable argument. Values that Arrow cannot hold as they are (integers in identifier columns, lone surrogates)
are stored in a form that it can, and `restore` keeps the original.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import numpy as np
import orjson
import pyarrow as pa

from trajlake.errors import UsageError
from trajlake.ingest.arrays import numbers, plain, tensor
from trajlake_schemas.column import Column
from trajlake_schemas.episodes import BEGIN, FAILURE_STAGES, OUTCOME, REWARD_KINDS, STATUSES
from trajlake_schemas.steps import ARGUMENTS_KINDS, SOURCES, STEP_CONTENT

Row = dict[str, Any]

_CALL_KEYS = frozenset({"id", "name", "arguments"})
_RESULT_KEYS = frozenset({"call_id", "content", "is_error"})
_REWARD_KEYS = frozenset({"name", "value", "weight", "kind"})
_INT32_MAX = 2**31 - 1
_LONGEST_TEXT = 500_000_000  # at four bytes a character this still fits Arrow's 32-bit offsets


def json_text(value: Any) -> str:
    """`value` as compact JSON text, with NaN and infinities as Python spells them; where it holds lone surrogates, in
    ASCII only, so that they survive as escapes. Raises UsageError."""
    try:
        data = orjson.dumps(value, option=_AS_JSON_DOES)
        # A null may have been a NaN, which orjson writes so.
        if b"null" not in data or orjson.loads(data) == value:
            return data.decode()
    except (TypeError, ValueError):  # as orjson's own errors are
        pass
    try:
        return _JSON.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot be written as JSON: {error}") from error


def _json_default(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        return value.tolist()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode("ascii")}
    raise TypeError(f"a {type(value).__name__} has no JSON form")


_JSON = json.JSONEncoder(separators=(",", ":"), default=_json_default)
_AS_JSON_DOES = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS


def microseconds(value: Any) -> int:
    """Microseconds since 1970 UTC, from a datetime, ISO 8601 text, or seconds since 1970."""
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
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e11:
        return round(value * 1_000_000)
    raise UsageError(f"not a time (a datetime, ISO 8601 text, or seconds since 1970): {value!r}")


def kind_of(value: Any) -> str:
    """The name of a value's type, as a refusal says it."""
    return "null" if value is None else type(value).__name__


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be text, not {kind_of(value)}")
    if len(value) > _LONGEST_TEXT:
        raise UsageError(f"holds {len(value):,} characters, more than the {_LONGEST_TEXT:,} that fit into one column")
    return str.__str__(value)  # of an Enum that is a text its value, where str() gives its name


def _boolean(value: Any) -> bool:
    value = plain(value)
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise UsageError(f"must be True or False, not {value!r}")


def _real(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (bool, str)):
        raise UsageError(f"must be a number, not {value!r}")
    try:
        return float(plain(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"must be one number, not {value!r}") from error


def _integer(value: Any) -> int:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    value = plain(value)
    if is_whole_number(value) and -(2**63) <= value < 2**63:
        return int(value)
    raise UsageError(f"must be a whole number of 64 bits, not {value!r}")


def is_whole_number(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _json_or_text(value: Any) -> tuple[str, str]:
    return (value, "string") if isinstance(value, str) else (json_text(value), "object")


def tool_calls(value: Any, leftovers: Row) -> list[Row]:
    """Calls in our form or OpenAI's (`{"id", "type", "function": {"name", "arguments"}}`).

    Keys that no field holds are put into `leftovers` under the call's position.
    """
    calls = []
    for position, given in enumerate(_mappings(value)):
        call = dict(given)
        function = call.pop("function", None)
        if isinstance(function, Mapping):
            inner = dict(function)
            name, arguments = inner.pop("name", None), inner.pop("arguments", None)
            if inner:
                call["function"] = inner
            if call.get("type") == "function":
                del call["type"]
        else:
            if function is not None:
                call["function"] = function
            name, arguments = call.pop("name", None), call.pop("arguments", None)
        text, kind = (None, None) if arguments is None else _json_or_text(arguments)
        if call.get("arguments_kind", ...) in (None, *ARGUMENTS_KINDS):
            kind = call.pop("arguments_kind") or kind
        calls.append(
            {
                "id": _identifier_text(call.pop("id", None)),
                "name": None if name is None else _name(name),
                "arguments": text,
                "arguments_kind": kind,
            }
        )
        if call:
            leftovers.setdefault("tool_calls", {})[str(position)] = call
    return calls


def usual_calls(value: Any) -> tuple[list[Row], int] | None:
    """Calls of id, name and arguments, all of them text (an id or name may be absent) and nothing else, in one of the
    two forms, and about how many bytes they take; else None."""
    if type(value) is not list:
        return None
    rows = []
    size = 0
    for given in value:
        if type(given) is not dict:
            return None
        identity = given.get("id")
        inner = given
        if "function" in given:
            inner = given["function"]
            if type(inner) is not dict or len(inner) != 2 or len(given) != 3 or given.get("type") != "function":
                return None
        elif not given.keys() <= _CALL_KEYS:
            return None
        name, arguments = inner.get("name"), inner.get("arguments")
        if type(arguments) is not str or not (type(name) is str or (name is None and inner is given)):
            return None
        if type(identity) is not str and (identity is not None or inner is not given):
            return None
        rows.append({"id": identity, "name": name, "arguments": arguments, "arguments_kind": "string"})
        size += len(arguments) + _ROW_BYTES
    return rows, size


def tool_results(value: Any, leftovers: Row) -> list[Row]:
    """Results as `{"call_id" or "tool_call_id", "content", "is_error"}`; content that is not text becomes JSON."""
    results = []
    for position, given in enumerate(_mappings(value)):
        result = dict(given)
        call_id = result.pop("call_id", None)
        if call_id is None:
            call_id = result.pop("tool_call_id", None)
        content = result.pop("content", None)
        is_error = result.pop("is_error", None)
        results.append(
            {
                "call_id": _identifier_text(call_id),
                "content": None if content is None else _json_or_text(content)[0],
                "is_error": None if is_error is None else _boolean(is_error),
            }
        )
        if result:
            leftovers.setdefault("tool_results", {})[str(position)] = result
    return results


def _usual_results(value: Any) -> tuple[list[Row], int] | None:
    """Results of content that is text, and perhaps call_id and is_error, and about their bytes; else None."""
    if type(value) is not list:
        return None
    rows = []
    size = 0
    for given in value:
        if type(given) is not dict or not given.keys() <= _RESULT_KEYS:
            return None
        call_id, content, is_error = given.get("call_id"), given.get("content"), given.get("is_error")
        if type(content) is not str or not (call_id is None or type(call_id) is str):
            return None
        if is_error is not None and type(is_error) is not bool:
            return None
        rows.append({"call_id": call_id, "content": content, "is_error": is_error})
        size += len(content) + _ROW_BYTES
    return rows, size


def content_parts(value: Any) -> list[Row]:
    """Parts in our form or OpenAI's (`{"type": "image_url", "image_url": {"url": …}}`)."""
    parts = []
    for given in _mappings(value):
        part = dict(given)
        data = part.pop("data", None)
        row: Row = {
            "type": part.pop("type", None),
            "text": part.pop("text", None),
            "media_type": part.pop("media_type", None),
            "uri": part.pop("uri", None),
            "data": bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else None,
        }
        if row["data"] is None and data is not None:
            part["data"] = data
        for name in ("type", "text", "media_type", "uri"):
            if row[name] is not None and not isinstance(row[name], str):
                part[name], row[name] = row[name], None
        row["extra"] = json_text(part) if part else None
        parts.append(row)
    return parts


def rewards(value: Any) -> list[Row]:
    """Components as `{"format": 0.2, …}` or a list of `{"name", "value", "weight", "kind"}`."""
    if isinstance(value, Mapping):
        value = [{"name": name, "value": component} for name, component in value.items()]
    rows = []
    for given in _mappings(value):
        if not given.keys() <= _REWARD_KEYS:
            unknown = given.keys() - _REWARD_KEYS
            raise UsageError(f"has no field {', '.join(sorted(map(str, unknown)))}; name, value, weight, kind are")
        number, weight = given.get("value"), given.get("weight")
        rows.append(
            {
                "name": _text(given.get("name")),
                "value": None if number is None else _real(number),
                "weight": None if weight is None else _real(weight),
                "kind": None if given.get("kind") is None else _reward_kind(given["kind"]),
            }
        )
    return rows


def _mappings(value: Any) -> Sequence[Mapping[str, Any]]:
    if type(value) is not list and (isinstance(value, (Mapping, str, bytes)) or not isinstance(value, Sequence)):
        raise UsageError(f"must be a list of objects, not {kind_of(value)}")
    for item in value:
        if type(item) is not dict and not isinstance(item, Mapping):
            raise UsageError(f"must be a list of objects; it holds {kind_of(item)}")
    return value


def _identifier_text(value: Any) -> str | None:
    return None if value is None else _name(value)


def _name(value: Any) -> str:
    return str.__str__(value) if isinstance(value, str) else str(value)


def _extra(value: Any) -> str:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map names to values, not {kind_of(value)}")
    return json_text(value)


def _one_of(choices: tuple[str, ...]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise UsageError(f"must be one of {', '.join(choices)}, not {value!r}")
        return str.__str__(value)

    return check


_reward_kind = _one_of(REWARD_KINDS)


def _tensors(value: Any) -> list[Row]:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map names to arrays, not {kind_of(value)}")
    return [tensor(_name(name), array) for name, array in value.items()]


def _tags(value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, Mapping):
        raise UsageError(f"must map text to text, not {kind_of(value)}")
    return [(_name(name), _text(label)) for name, label in value.items()]


def _parent_step(value: Any) -> int:
    number = _integer(value)
    if not -1 <= number <= _INT32_MAX:
        raise UsageError(f"must be the index of an earlier step, or -1 for none, not {number}")
    return number


_SPECIAL: dict[str, Callable[[Any], Any]] = {
    "parent_step": _parent_step,
    "source": _one_of(SOURCES),
    "status": _one_of(STATUSES),
    "failure_stage": _one_of(FAILURE_STAGES),
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
        return _text
    if pa.types.is_boolean(column.type):
        return _boolean
    if pa.types.is_floating(column.type):
        return _real
    if pa.types.is_timestamp(column.type):
        return microseconds
    return _integer


_STEP_CONVERTERS = {
    column.name: _converter(column)
    for column in STEP_CONTENT
    if column.name not in {"tool_calls", "tool_results", "restore"}
}
_STEP_LISTS = {"tool_calls": (usual_calls, tool_calls), "tool_results": (_usual_results, tool_results)}
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
_STEP_TEXTS = frozenset({"source", *(name for name, converter in _STEP_CONVERTERS.items() if converter is _text)})
_STEP_SCALARS = {
    name: bool if converter is _boolean else float
    for name, converter in _STEP_CONVERTERS.items()
    if converter in (_boolean, _real)
}
# About what Python takes beside what is held: for an event and its row, for a row in a list, for a value.
_EVENT_BYTES = 320
_ROW_BYTES = 64
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
            size += _value_bytes(value)
    if original is not None:
        row["restore"] = json_text({_STEP_IDENTIFIER: original})
    size += _VALUE_BYTES * len(row)
    if size > _LONGEST_TEXT:
        for name in _STEP_TEXTS & row.keys():
            _step_value(name, row[name] or "", leftovers)
    extra = row.get("extra")
    if leftovers or extra is not None:
        if extra is not None and not isinstance(extra, Mapping):
            raise UsageError(f"step field extra: must map names to values, not {kind_of(extra)}")
        row["extra"] = json_text({**(extra or {}), **leftovers} if leftovers else extra)
        size += len(row["extra"])
    return size


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
    size = _EVENT_BYTES + _VALUE_BYTES * len(row)
    for value in row.values():
        if type(value) is str:
            size += len(value)
        elif type(value) is list or type(value) is np.ndarray:
            size += _value_bytes(value)
    return size


def _value_bytes(value: Any) -> int:
    if type(value) is str:
        return len(value)
    if type(value) is list:
        size = _ROW_BYTES * len(value)
        for item in value:
            if type(item) is dict:
                for part in item.values():
                    if type(part) is str or type(part) is bytes:
                        size += len(part)
        return size
    return value.nbytes if type(value) is np.ndarray else 0


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
        if converters[name] is _text and is_whole_number(value):
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
    if convert is _text and (what != "step" or name == _STEP_IDENTIFIER) and is_whole_number(value):
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

"""Lists of objects as callers give them (tool calls and results, parts of a message, components of a reward), in our
form or OpenAI's, in the form of the schema. All raise UsageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trajlake.errors import UsageError
from trajlake.ingest.arrays import Row
from trajlake.ingest.json_text import json_text
from trajlake.ingest.scalars import boolean, kind_of, name_text, one_of, real, text
from trajlake_schemas.episodes import REWARD_KINDS
from trajlake_schemas.steps import ARGUMENTS_KINDS

_CALL_KEYS = frozenset({"id", "name", "arguments"})
_RESULT_KEYS = frozenset({"call_id", "content", "is_error"})
_REWARD_KEYS = frozenset({"name", "value", "weight", "kind"})
ROW_BYTES = 64  # about what Python takes for a row in a list, beside what it holds


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
        said, kind = (None, None) if arguments is None else _json_or_text(arguments)
        if call.get("arguments_kind", ...) in (None, *ARGUMENTS_KINDS):
            kind = call.pop("arguments_kind") or kind
        calls.append(
            {
                "id": _identifier_text(call.pop("id", None)),
                "name": None if name is None else name_text(name),
                "arguments": said,
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
        size += len(arguments) + ROW_BYTES
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
                "is_error": None if is_error is None else boolean(is_error),
            }
        )
        if result:
            leftovers.setdefault("tool_results", {})[str(position)] = result
    return results


def usual_results(value: Any) -> tuple[list[Row], int] | None:
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
        size += len(content) + ROW_BYTES
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
                "name": text(given.get("name")),
                "value": None if number is None else real(number),
                "weight": None if weight is None else real(weight),
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
    return None if value is None else name_text(value)


_reward_kind = one_of(REWARD_KINDS)

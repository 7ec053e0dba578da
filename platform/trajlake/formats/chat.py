"""From chat messages to steps: shared by every format that holds OpenAI-style messages.

One message is one step. Whatever a message has that no column holds stays in the step's `extra`, under its own name.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any, TypeGuard, cast

import numpy as np

from trajlake.errors import FormatError, UsageError
from trajlake.formats.base import fits_step
from trajlake.formats.json_rows import loads
from trajlake.formats.rebuild import LONG_TEXT, Exact
from trajlake.ingest.episode import StepFields
from trajlake.ingest.json_text import json_text
from trajlake.ingest.lists import tool_calls, tool_results, usual_calls

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "agent",
    "tool": "tool",
    "function": "tool",
    "environment": "environment",
}
"""Role to `source`. Any other role is refused: a guess would put words into the wrong mouth."""

ROLE_OF_SOURCE = {
    "system": "system",
    "user": "user",
    "agent": "assistant",
    "tool": "tool",
    "environment": "environment",
}

_USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})
_BESIDE_RESULT = frozenset({"role", "content", "tool_call_id"})
_BESIDE_CALLS = frozenset({"role", "content", "tool_calls"})
_UNUSUAL = frozenset(
    {"role", "reasoning", "reasoning_content", "extra", "tool_calls", "tool_results", "is_error"}
    | {"tool_calls_as_text", "call_key", "content_key", "content_kind"}
)
"""Keys of a message that mean something, or would where they stand in a step's `extra`."""
_SAYING = frozenset({"content", "tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "audio"})
_CALL_ORDER = ("id", "function", "type")
_DTYPE = re.compile(r"[<|=]?[a-zA-Z]+[0-9]*(\[[a-zA-Z0-9]+\])?")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

COLUMNS = frozenset(StepFields.__annotations__) - {
    "message",
    "reasoning",
    "tool_calls",
    "observation",
    "action",
    "extra",
}
"""The step columns that a message may carry under their own names."""


def is_message(value: Any) -> bool:
    """Whether this looks like a chat message: an object with a role and something said."""
    return isinstance(value, dict) and isinstance(value.get("role"), str) and not _SAYING.isdisjoint(value)


def are_messages(value: Any) -> bool:
    """Whether this looks like a conversation: a list of messages that is not empty."""
    return isinstance(value, list) and bool(value) and all(map(is_message, value))


def chat_steps(
    messages: Any,
    *,
    is_error: Callable[[str], bool] | None = None,
    columns: Set[str] = frozenset(),
    exact: bool = False,
) -> list[StepFields]:
    """The steps of a conversation. `is_error` tells a tool's text that reports an error, where the format has such a
    convention; `columns` are the keys of a message that mean the step's column of that name. With `exact`, for formats
    that make the messages again by `chat_messages` with the same columns (and `tells_errors` only without
    `is_error`), the usual messages become Exact steps, which is several times faster.

    Raises FormatError that names the message (the first is message 1).
    """
    if not isinstance(messages, list):
        raise FormatError(f"its messages are {_kind(messages)}, not a list")
    steps = []
    for number, message in enumerate(messages, 1):
        try:
            usual = _usual(message, is_error, columns) if exact else None
            steps.append(_step(message, is_error, columns) if usual is None else usual)
        except FormatError as error:
            raise FormatError(f"message {number}: {error}") from error
    return steps


def _usual(message: Any, is_error: Callable[[str], bool] | None, columns: Set[str]) -> StepFields | None:
    """The step of a message as nearly all are: text or null, calls in OpenAI's form, and keys that mean nothing."""
    if type(message) is not dict:
        return None
    role, content = message.get("role"), message.get("content", ...)
    if type(role) is not str or role not in _USUAL_ROLES or (type(content) is not str and content is not None):
        return None
    step = Exact()
    step.source = message
    step["source"] = source = ROLES[role]
    read = 2
    if source == "tool":
        call_id = message.get("tool_call_id", ...)
        if type(call_id) is str:
            read = 3
        elif call_id is not ...:
            return None
        failed = None if is_error is None or content is None else is_error(content)
        result = {"call_id": call_id if read == 3 else None, "content": content, "is_error": failed}
        step["tool_results"] = [result]
    else:
        if content is not None:
            step["message"] = content
        calls = message.get("tool_calls", ...)
        if type(calls) is list:
            usual = usual_calls(calls)
            if usual is None or not all("function" in call for call in calls):
                return None
            step["tool_calls"] = usual[0]
            read = 3
        elif calls is not ...:
            return None
    if content is not None and len(content) > LONG_TEXT:
        return None
    if len(message) > read:
        beside = _BESIDE_RESULT if source == "tool" else _BESIDE_CALLS
        extra = {name: value for name, value in message.items() if name not in beside}
        if not _UNUSUAL.isdisjoint(extra) or not columns.isdisjoint(extra) or extra.get("function_call") is not None:
            return None
        if content is None and (type(extra.get("refusal")) is str or type(extra.get("audio")) is dict):
            return None
        step["extra"] = json_text(extra)
    return cast(StepFields, step)


def _step(message: Any, is_error: Callable[[str], bool] | None, columns: Set[str]) -> StepFields:
    if not isinstance(message, dict):
        raise FormatError(f"it is {_kind(message)}, not an object")
    rest = dict(message)
    role = rest.pop("role", None)
    if not isinstance(role, str) or role not in ROLES:
        raise FormatError(f"the role {_short(role)} is none of {', '.join(ROLES)}")
    step: dict[str, Any] = {"source": ROLES[role]}
    extra: dict[str, Any] = {}
    for name in columns & rest.keys():
        value = _DECODERS.get(name, _as_is)(rest[name])
        if value is None:
            del rest[name]  # says what an absent key says
        elif fits_step(name, value):
            step[name] = value
            del rest[name]
    if role != ROLE_OF_SOURCE[step["source"]]:
        extra["role"] = role
    _put_reasoning(rest, step)
    _put_tool_calls(rest, step, extra)
    if ROLES[role] == "tool":
        _put_tool_result(rest, step, extra, is_error)
    else:
        _put_content(rest, step, extra)
    merge_extra(rest, extra, _taken(step) if "extra" in rest else frozenset())
    if extra:
        step["extra"] = extra
    return cast(StepFields, step)


def _put_reasoning(rest: dict[str, Any], step: dict[str, Any]) -> None:
    for name in ("reasoning_content", "reasoning"):
        if isinstance(rest.get(name), str) and "reasoning" not in step:
            step["reasoning"] = rest.pop(name)


def _put_content(rest: dict[str, Any], step: dict[str, Any], extra: dict[str, Any]) -> None:
    content = rest.pop("content", None)
    if isinstance(content, list):
        step["content_parts"] = parts_of(content)
    elif isinstance(content, str):
        step["message"] = content
    elif content is not None:
        raise FormatError(f"its content is {_kind(content)}; it must be text, null or a list of parts")
    elif isinstance(rest.get("refusal"), str):
        step["message"], extra["content_key"] = rest.pop("refusal"), "refusal"
    elif isinstance(rest.get("audio"), dict) and "content_parts" not in step:
        audio = {"text" if name == "transcript" else name: value for name, value in rest["audio"].items()}
        if fits_step("content_parts", parts := parts_of([{"type": "audio"} | audio])):
            step["content_parts"], extra["content_key"] = parts, "audio"
            del rest["audio"]


def _put_tool_calls(rest: dict[str, Any], step: dict[str, Any], extra: dict[str, Any]) -> None:
    calls = rest.pop("tool_calls", None)
    if calls is not None:
        if not isinstance(calls, list):
            raise FormatError(f"its tool_calls are {_kind(calls)}, not a list")
        # Some tools write each call as JSON text. It is read, and the text is kept where its spelling (spaces, order,
        # escapes) does not follow from the call.
        step["tool_calls"] = read = [_call(call) for call in calls]
        if any(isinstance(call, str) for call in calls):
            extra["tool_calls_as_text"] = True if calls == [*map(call_text, read)] else calls
    old_style = rest.get("function_call")
    if isinstance(old_style, dict) and calls is None:
        step["tool_calls"] = [{"function": rest.pop("function_call")}]
        extra["call_key"] = "function_call"


def call_text(call: dict[str, Any]) -> str:
    """A call as pydantic writes an OpenAI call."""
    function = call.get("function")
    if isinstance(function, dict):
        function = {name: function[name] for name in sorted(function)}
    return json.dumps({name: function if name == "function" else call[name] for name in _CALL_ORDER if name in call})


def _call(call: Any) -> dict[str, Any]:
    if isinstance(call, str):
        try:
            call = loads(call)
        except ValueError as error:
            raise FormatError(f"a tool call is text that is not JSON: {error}") from error
    if not isinstance(call, dict):
        raise FormatError(f"a tool call is {_kind(call)}, not an object")
    return call


def _put_tool_result(
    rest: dict[str, Any], step: dict[str, Any], extra: dict[str, Any], is_error: Callable[[str], bool] | None
) -> None:
    content = rest.pop("content", None)
    if step.get("tool_results") is not None:  # given as a column, which says more than the content does
        if isinstance(content, list):
            step["content_parts"] = parts_of(content)
        elif content is not None and all(result.get("content") != content for result in step["tool_results"]):
            rest["content"] = content
        return
    result: dict[str, Any] = {"call_id": rest.pop("tool_call_id", None), "content": content}
    if isinstance(content, list):
        step["content_parts"], result["content"] = parts_of(content), None
    elif content is not None and not isinstance(content, str):
        extra["content_kind"] = "object"
    if isinstance(rest.get("is_error"), bool):
        result["is_error"] = rest.pop("is_error")
    elif is_error is not None and isinstance(content, str):
        result["is_error"] = is_error(content)
    step["tool_results"] = [result]


def _taken(step: dict[str, Any]) -> Set[str]:
    """The keys under which the writer will put what the step's calls and results have beyond columns."""
    leftovers: dict[str, Any] = {}
    with suppress(UsageError):  # the writer will say so
        tool_calls(step.get("tool_calls") or [], leftovers)
        tool_results(step.get("tool_results") or [], leftovers)
    return leftovers.keys()


def merge_extra(rest: dict[str, Any], extra: dict[str, Any], taken: Set[str] = frozenset()) -> None:
    """Add what is left of an object to `extra`. An `extra` of its own is spread out, unless that would hide a key."""
    own = rest.pop("extra", None)
    extra.update(rest)
    if isinstance(own, dict) and not own.keys() & (extra.keys() | taken):
        extra.update(own)
    elif own is not None:
        extra["extra"] = own


def finite_or_not(value: Any) -> Any:
    """A number that our own JSON export had to write as text, as a number again; anything else unchanged."""
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _each_finite_or_not(value: Any) -> Any:
    return [finite_or_not(item) for item in value] if isinstance(value, list) else value


def _as_is(value: Any) -> Any:
    return value


def are_parts(content: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether this is the content of a multi-modal message: a list of objects that is not empty."""
    return isinstance(content, list) and bool(content) and all(isinstance(part, dict) for part in content)


def parts_of(parts: list[Any]) -> list[Any]:
    """The parts of a content as `content_parts` takes them, of which `messages.content_part` makes them again."""
    return [_part(part) if isinstance(part, dict) and isinstance(part.get("data"), str) else part for part in parts]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Base64 in `data` as bytes, where the very same text can be made of them again."""
    try:
        data = base64.b64decode(part["data"], validate=True)
    except ValueError:
        return part
    return part | {"data": data} if base64.b64encode(data).decode("ascii") == part["data"] else part


def _arrays(value: Any) -> Any:
    """Tensors as our own JSON export writes them (`{"name", "dtype", "shape", "data": base64}`) as arrays by name;
    anything else unchanged, which no column takes."""
    if not isinstance(value, list):
        return value
    arrays = {}
    for item in value:
        try:
            name, dtype, shape = item["name"], item["dtype"], item["shape"]
            if not _DTYPE.fullmatch(dtype) or not all(type(length) is int and length >= 0 for length in shape):
                return value
            data = base64.b64decode(item["data"], validate=True)
            arrays[name] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
        except (TypeError, KeyError, ValueError):
            return value
    return arrays if len(arrays) == len(value) else value


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "tensors": _arrays,
    "logprobs": _each_finite_or_not,
    **dict.fromkeys(("reward", "cost_usd", "latency_ms"), finite_or_not),
}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds[type(value)]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"

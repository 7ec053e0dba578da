"""Inspect's chat messages in OpenAI's form and back: tool calls, reasoning, media, attachments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trajlake.errors import FormatError
from trajlake.formats.messages import as_object

_ATTACHMENT = "attachment://"
_SAID_BY_ERROR = "content_is_error"
"""The mark of a tool's message that says nothing but its error, which is then what readers get as its content."""
_MEDIA = ("image", "audio", "video", "document")
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,([A-Za-z0-9+/]*={0,2})")


def resolved(value: Any, attachments: Mapping[str, Any]) -> Any:
    """The value with references to attachments replaced by what they stand for; unknown ones stay."""
    if isinstance(value, str):
        if value.startswith(_ATTACHMENT):
            text = attachments.get(value[len(_ATTACHMENT) :])
            return text if isinstance(text, str) else value
        return value
    if isinstance(value, dict):
        return {name: resolved(item, attachments) for name, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, attachments) for item in value]
    return value


def to_chat(message: Any) -> Any:
    """One message in the form that `chat_steps` reads. Raises FormatError."""
    if not isinstance(message, dict):
        raise FormatError("a message is not an object")
    given = dict(message)
    calls = given.get("tool_calls")
    if isinstance(calls, list):
        given["tool_calls"] = [_to_call(call) if isinstance(call, dict) else call for call in calls]
    content = given.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        parts = [_to_part(part) for part in content]
        thoughts = [part for part in parts if part.get("type") == "reasoning"]
        if thoughts and isinstance(thoughts[0].get("reasoning"), str) and "reasoning_content" not in given:
            given["reasoning_content"] = _thought(thoughts)
            if len(thoughts) == 1:  # of several, each keeps what it says
                del thoughts[0]["reasoning"]
        given["content"] = parts
    if given.get("role") == "tool":
        given["is_error"] = isinstance(given.get("error"), dict)
        if given.get("content") == "" and (words := error_text(given)):
            given["content"], given[_SAID_BY_ERROR] = words, True
    return given


def error_text(message: Mapping[str, Any]) -> str | None:
    """What a tool's message says of its error."""
    error = message.get("error")
    words = error.get("message") if isinstance(error, dict) else None
    return words if isinstance(words, str) else None


def _thought(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(part["reasoning"] for part in parts if isinstance(part.get("reasoning"), str))


def from_chat(message: dict[str, Any]) -> dict[str, Any]:
    """One message as Inspect has it, of what `chat_messages` gives."""
    given = dict(message)
    if isinstance(given.get("tool_calls"), list):
        given["tool_calls"] = [_from_call(call) for call in given["tool_calls"]]
    if given.pop(_SAID_BY_ERROR, None) is True:
        given["content"] = ""
    thought = given.pop("reasoning_content", None)
    if isinstance(given.get("content"), list):
        given["content"] = [_from_part(part) for part in given["content"]]
        thoughts = [part for part in given["content"] if part.get("type") == "reasoning"]
        silent = next((part for part in thoughts if "reasoning" not in part), None)
        if thought is not None and silent is not None:
            silent["reasoning"], thought = thought, None
        elif len(thoughts) > 1 and thought == _thought(thoughts):
            thought = None
    if thought is not None:  # recorded elsewhere
        text = given.get("content")
        parts = text if isinstance(text, list) else [{"type": "text", "text": text}] if text else []
        given["content"] = [{"type": "reasoning", "reasoning": thought}, *parts]
    if given.get("content") is None:
        given["content"] = ""
    return given


def _to_call(call: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(call.get("function"), str):
        return call
    rest = dict(call)
    return {"function": {"name": rest.pop("function"), "arguments": rest.pop("arguments", None)}, **rest}


def _from_call(call: dict[str, Any]) -> dict[str, Any]:
    rest = dict(call)
    function = rest.pop("function", None)
    if not isinstance(function, dict):
        return call
    return {**rest, "function": function.get("name"), "arguments": as_object(function.get("arguments"))}


def _to_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind not in _MEDIA or not isinstance(part.get(kind), str) or {"data", "media_type", "uri"} & part.keys():
        return dict(part)
    rest = dict(part)
    link = rest.pop(kind)
    match = _DATA.fullmatch(link)
    return {**rest, "media_type": match[1], "data": match[2]} if match else {**rest, "uri": link}


def _from_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind not in _MEDIA:
        return dict(part)
    rest = dict(part)
    if "uri" in rest:
        rest[kind] = rest.pop("uri")
    elif "data" in rest:
        rest[kind] = f"data:{rest.pop('media_type', '')};base64,{rest.pop('data')}"
    return rest

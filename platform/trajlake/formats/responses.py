"""Items of OpenAI's Responses API as calls, reasoning and messages: shared by every format that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trajlake.formats.chat import are_parts, parts_of
from trajlake.formats.messages import arguments, content_part

CALL = ("name", "arguments")


def call_of(item: dict[str, Any]) -> dict[str, Any]:
    """The call that an item of type `function_call` is; its keys are taken out of the item."""
    return {"id": item.pop("call_id", None), **{name: item.pop(name, None) for name in CALL}}


def call_keys(call: Mapping[str, Any]) -> dict[str, Any]:
    """What `call_of` took out."""
    return {"call_id": call["id"], "name": call["name"], "arguments": arguments(call)}


def reasoning_of(items: Iterable[Mapping[str, Any]]) -> str | None:
    """The text of the items of type `reasoning`: what their summaries say, or their content where these are empty."""
    found = [item for item in items if item.get("type") == "reasoning"]
    return (
        "\n".join(text for item in found for text in _texts(item.get("summary")) or _texts(item.get("content"))) or None
    )


def _texts(parts: Any) -> list[str]:
    found = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [text for text in found if isinstance(text, str)]


def take_output(output: Sequence[Mapping[str, Any]], step: dict[str, Any]) -> list[dict[str, Any]]:
    """Put a response, which is a list of items, into one step. Returns the items without what is in columns: of a
    single part its text, of several parts only how many each message has."""
    left = [dict(item) for item in output]
    if (reasoning := reasoning_of(left)) is not None:
        step["reasoning"] = reasoning
    if calls := [call_of(item) for item in left if item.get("type") == "function_call"]:
        step["tool_calls"] = calls
    messages = [item for item in left if item.get("type") == "message" and are_parts(item.get("content"))]
    parts = [part for item in messages for part in item["content"]]
    if len(parts) == 1 and isinstance(parts[0].get("text"), str):
        step["message"] = parts[0]["text"]
        messages[0]["content"] = [{name: item for name, item in parts[0].items() if name != "text"}]
    elif parts:
        step["content_parts"] = parts_of(parts)
        for item in messages:
            item["content"] = len(item["content"])
    return left


def put_output(left: Sequence[dict[str, Any]], step: Mapping[str, Any]) -> None:
    """The way back of `take_output`, in place."""
    calls = iter(step["tool_calls"] or ())
    parts = [content_part(part) for part in step["content_parts"] or ()]
    for item in left:
        content = item.get("content")
        if item.get("type") == "function_call" and (call := next(calls, None)) is not None:
            item |= call_keys(call)
        elif item.get("type") != "message":
            continue
        elif step["message"] is not None and are_parts(content):
            content[0]["text"] = step["message"]
        elif parts and type(content) is int and content > 0:
            item["content"], parts = parts[:content], parts[content:]

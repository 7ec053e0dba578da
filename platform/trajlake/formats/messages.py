"""From steps to chat messages again: the way back of trajlake.formats.chat."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any

from trajlake.formats.chat import ROLE_OF_SOURCE, call_text
from trajlake.formats.quick_json import own_loads
from trajlake.formats.rebuild import Exact, extra_of


def chat_messages(
    steps: Sequence[Mapping[str, Any]], *, columns: Set[str] = frozenset(), tells_errors: bool = False
) -> list[dict[str, Any]]:
    """The messages of these steps. `columns` as in `chat_steps`; `tells_errors` says that the format writes `is_error`
    beside a tool's content, where others let it be seen in the text."""
    return [_message(step, columns, tells_errors) for step in steps]


def _message(step: Mapping[str, Any], columns: Set[str], tells_errors: bool) -> dict[str, Any]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    extra = extra_of(step)
    message: dict[str, Any] = {"role": extra.pop("role", ROLE_OF_SOURCE[step["source"]]), "content": step["message"]}
    if step["content_parts"] is not None:
        message["content"] = [content_part(part) for part in step["content_parts"]]
    _put_said_elsewhere(extra, message)
    if step["reasoning"] is not None:
        message["reasoning_content"] = step["reasoning"]
    _put_calls(step, extra, message)
    if step["source"] == "tool" and step["tool_results"]:
        _put_result(step, extra, message, tells_errors)
    for name in columns:
        if step[name] is not None and name not in {"source", "content_parts", "tool_results"}:
            message[name] = _plain(name, step[name])
    return message | extra


def _put_said_elsewhere(extra: dict[str, Any], message: dict[str, Any]) -> None:
    """Where it was not `content` that said it, under the name that the source has for it."""
    content = message["content"]
    if extra.get("content_key") == "refusal":
        message[extra.pop("content_key")], message["content"] = content, None
    elif extra.get("content_key") == "audio" and isinstance(content, list) and len(content) == 1:
        audio = {"transcript" if name == "text" else name: value for name, value in content[0].items()}
        audio.pop("type", None)
        message[extra.pop("content_key")], message["content"] = audio, None


def _put_calls(step: Mapping[str, Any], extra: dict[str, Any], message: dict[str, Any]) -> None:
    leftovers = _leftovers(extra, "tool_calls")
    texts = extra.pop("tool_calls_as_text", None)
    if step["tool_calls"] is None:
        return
    calls = [chat_call(call, leftovers.get(str(position))) for position, call in enumerate(step["tool_calls"])]
    if extra.pop("call_key", None) == "function_call" and calls:
        message["function_call"] = calls[0]["function"]
    else:
        message["tool_calls"] = [*map(call_text, calls)] if texts is True else calls if texts is None else texts


def chat_call(call: Mapping[str, Any], leftovers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One call in OpenAI's form; `leftovers` are what its step's `extra` holds of it."""
    given: dict[str, Any] = {"id": call["id"], "type": "function"}
    function = {"name": call["name"], "arguments": arguments(call)}
    for name, value in (leftovers or {}).items():
        if name == "function" and isinstance(value, dict):
            function |= value
        else:
            given[name] = value
    return given | {"function": function}


def as_object(given: Any) -> Any:
    """A call's arguments for formats that want an object: of the text of one, it; of anything else, the same."""
    if isinstance(given, str):
        with suppress(ValueError):
            value = json.loads(given)
            return value if isinstance(value, dict) else given
    return {} if given is None else given


def arguments(call: Mapping[str, Any]) -> Any:
    """A call's arguments as the source had them: text, or a JSON value."""
    text = call["arguments"]
    return _value(text) if call["arguments_kind"] == "object" and text is not None else text


def _put_result(step: Mapping[str, Any], extra: dict[str, Any], message: dict[str, Any], tells_errors: bool) -> None:
    result = step["tool_results"][0]
    leftovers = _leftovers(extra, "tool_results")
    if step["content_parts"] is None:
        message["content"] = content_of(result, extra)
    if result["call_id"] is not None:
        message["tool_call_id"] = result["call_id"]
    if tells_errors and result["is_error"] is not None:
        message["is_error"] = result["is_error"]
    message |= leftovers.get("0", {})


def _leftovers(extra: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """What `extra` holds of a step's calls or results, by position, where it is what an import put there."""
    found = extra.get(name)
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        return {}
    del extra[name]
    return found


def content_of(result: Mapping[str, Any], extra: dict[str, Any]) -> Any:
    """What a tool returned, as text or the JSON value that it was; takes the mark of the latter from `extra`."""
    content = result["content"]
    return _value(content) if extra.pop("content_kind", None) == "object" and content is not None else content


def _value(text: str) -> Any:
    """The JSON value; the text itself where a source calls text an object that is none."""
    try:
        return own_loads(text)
    except ValueError:
        return text


def content_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """One part of a multi-modal content, as chat messages have it."""
    given = {name: part[name] for name in ("type", "text", "media_type", "uri") if part[name] is not None}
    if part["data"] is not None:
        given["data"] = base64.b64encode(part["data"]).decode("ascii")
    return given | (json.loads(part["extra"]) if part["extra"] else {})


def _plain(name: str, value: Any) -> Any:
    if name == "tensors":
        return [{**tensor, "data": base64.b64encode(tensor["data"]).decode("ascii")} for tensor in value]
    return value.isoformat() if name == "timestamp" else value

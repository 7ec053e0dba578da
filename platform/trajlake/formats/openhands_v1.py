"""OpenHands' events since version 1, which say by `kind` what they are: shared by the format `openhands`.

https://github.com/OpenHands/software-agent-sdk, `openhands/sdk/event`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trajlake.formats.base import fits_step
from trajlake.formats.chat import are_parts, parts_of
from trajlake.formats.messages import arguments, content_part
from trajlake.formats.moving import inside, move, move_time, time_text, with_repeats, without_repeats
from trajlake.formats.rebuild import extra_of
from trajlake.ingest.episode import StepFields

_SAID = {
    "MessageEvent": ("llm_message", "content"),
    "SystemPromptEvent": ("system_prompt",),
    "ActionEvent": ("thought",),
    "CondensationSummaryEvent": ("summary",),
}
"""Where the text or the parts stand that an event says."""

_RESULTS = {"ObservationEvent", "UserRejectObservation", "AgentErrorEvent"}
_CALL = ("id", "name", "arguments")


def is_event(value: Any) -> bool:
    """Whether this is an event of version 1."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    return not isinstance(value.get("action"), str) and not isinstance(value.get("observation"), str)


def step_of(event: Mapping[str, Any]) -> StepFields:
    """The step that is made of an event."""
    rest = dict(event)
    kind = rest["kind"]
    step: dict[str, Any] = {"source": _source(event)}
    move_time(rest, "timestamp", step, "timestamp")
    move(rest, "reasoning_content", step, "reasoning", fits_step)
    if path := _SAID.get(kind):
        step |= _take_said(rest, path)
    if kind == "ActionEvent":
        _put_call(rest, step)
    elif kind in _RESULTS:
        _put_result(rest, step, event)
    step["extra"] = rest
    return cast(StepFields, step)


def _source(event: Mapping[str, Any]) -> str:
    kind, role = event["kind"], inside(event, "llm_message", "role")
    if kind == "MessageEvent":
        return "user" if (role or event.get("source")) == "user" else "agent"
    known = {"ActionEvent": "agent", "SystemPromptEvent": "system", **dict.fromkeys(_RESULTS, "tool")}
    return known.get(kind, "environment")


def _put_call(rest: dict[str, Any], step: dict[str, Any]) -> None:
    given = rest.get("tool_call")
    if not isinstance(given, dict) or not isinstance(given.get("arguments"), str):
        return
    call = {name: given[name] for name in _CALL if isinstance(given.get(name), str)}
    step["tool_calls"] = [call]
    rest["tool_call"] = {name: value for name, value in given.items() if name not in call}
    kept = without_repeats(rest, _named(call.get("id"), call.get("name")))
    rest.clear()
    rest.update(kept)


def _named(call_id: Any, name: Any) -> dict[str, Any]:
    """What an event says a second time of its call."""
    return {"tool_call_id": call_id, "tool_name": name}


def _put_result(rest: dict[str, Any], step: dict[str, Any], event: Mapping[str, Any]) -> None:
    result: dict[str, Any] = {}
    if isinstance(rest.get("tool_call_id"), str):
        result["call_id"] = rest.pop("tool_call_id")
    said = next(filter(None, (_take_said(rest, path) for path in _PATHS)), {})
    if "message" in said:
        result["content"] = said.pop("message")
    step |= said
    observation = event.get("observation")
    codes = [inside(observation, *path) for path in (("exit_code",), ("metadata", "exit_code"))]
    code = next((code for code in codes if type(code) is int), None)
    flags = [inside(observation, name) for name in ("error", "is_error")]
    if event["kind"] != "ObservationEvent" or True in flags:
        result["is_error"] = True
    elif code is not None or False in flags:
        result["is_error"] = code not in (None, 0)
    step["tool_results"] = [result]


_PATHS: tuple[tuple[str, ...], ...] = (
    ("observation", "output"),
    ("observation", "content"),
    ("error",),
    ("rejection_reason",),
)
"""Where what a tool returned may stand, the first that holds something."""

_OTHER_PATHS = {"AgentErrorEvent": ("error",), "UserRejectObservation": ("rejection_reason",)}


def _take_said(rest: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Take away what is said at a path: as `message` text, an object with `text`, or a list of one such; as
    `content_parts` any other list of parts, in whose place an empty one stays. Empty where nothing is."""
    target = rest
    for name in path[:-1]:
        if not isinstance(target.get(name), dict):
            return {}
        target[name] = dict(target[name])
        target = target[name]
    value = target.get(path[-1])
    if isinstance(value, str):
        return {"message": target.pop(path[-1])}
    part = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        left = {name: item for name, item in part.items() if name != "text"}
        target[path[-1]] = [left] if isinstance(value, list) else left
        return {"message": part["text"]}
    if not are_parts(value):
        return {}
    target[path[-1]] = []
    return {"content_parts": parts_of([*map(_with_uri, value)])}


def _put_text(rest: dict[str, Any], path: Sequence[str], text: str) -> None:
    """The way back of `_take_said` for text."""
    target = inside(rest, *path[:-1]) if len(path) > 1 else rest
    if not isinstance(target, dict):
        return
    value = target.get(path[-1])
    part = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(part, dict):
        part["text"] = text
    elif value is None:
        target[path[-1]] = text


def _put_parts(rest: dict[str, Any], paths: Sequence[Sequence[str]], parts: Sequence[Mapping[str, Any]]) -> None:
    """The way back of `_take_said` for parts, which were at one of these paths."""
    for path in paths:
        left = inside(rest, *path)
        if left == []:
            left += [_without_uri(content_part(part)) for part in parts]
            return


def _with_uri(part: dict[str, Any]) -> dict[str, Any]:
    """An image, which may have several addresses here, with its one address where every format's are."""
    urls = part.get("image_urls")
    if part.get("type") != "image" or not isinstance(urls, list) or len(urls) != 1 or "uri" in part:
        return part
    return {**{name: item for name, item in part.items() if name != "image_urls"}, "uri": urls[0]}


def _without_uri(part: dict[str, Any]) -> dict[str, Any]:
    if part.get("type") != "image" or "uri" not in part or "image_urls" in part:
        return part
    return {**{name: item for name, item in part.items() if name != "uri"}, "image_urls": [part["uri"]]}


def event_of(step: Mapping[str, Any]) -> dict[str, Any]:
    """The event that a step was made from."""
    event = extra_of(step)
    kind = event.get("kind")
    if step["timestamp"] is not None:
        event.setdefault("timestamp", time_text(step["timestamp"]))
    if step["reasoning"] is not None:
        event["reasoning_content"] = step["reasoning"]
    if step["message"] is not None and isinstance(kind, str) and kind in _SAID:
        _put_text(event, _SAID[kind], step["message"])
    if step["content_parts"] is not None:
        _put_parts(event, [_SAID[kind]] if kind in _SAID else _PATHS, step["content_parts"])
    if step["tool_calls"] and isinstance(event.get("tool_call"), dict):
        call = step["tool_calls"][0]
        event["tool_call"] |= {"id": call["id"], "name": call["name"], "arguments": arguments(call)}
        event = with_repeats(event, _named(call["id"], call["name"]))
    if step["tool_results"] and kind in _RESULTS:
        result = step["tool_results"][0]
        if result["call_id"] is not None:
            event["tool_call_id"] = result["call_id"]
        if result["content"] is not None:
            content = inside(event, "observation", "content")
            usual = _PATHS[1] if content is not None else _PATHS[0]
            _put_text(event, _OTHER_PATHS.get(str(kind), usual), result["content"])
    return event

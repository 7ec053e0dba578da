"""OpenHands: a list of events, or evaluation output (JSON Lines with a `history` of events); a step an event.

https://github.com/All-Hands-AI/OpenHands, `openhands/events/serialization` and `evaluation/utils/shared.py`. Events
are of three generations: flat ones, of which some histories hold pairs of action and observation; those with `source`,
`args` and `extras`; and since version 1 those with a `kind` (trajlake.formats.openhands_v1). An action is a call, an
observation the result of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats import openhands_v1
from trajlake.formats.base import Format, Record, Refused, Row, fits_begin, fits_step, from_row, write_rows
from trajlake.formats.messages import arguments, content_of
from trajlake.formats.moving import (
    inside,
    move,
    move_time,
    text_or_none,
    time_text,
    usual_time,
    with_repeats,
    without_repeats,
)
from trajlake.formats.rebuild import Exact, episode_extra, exact, extra_of, same, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.read.trajectory import Trajectory

_SAID = {"message": "content", "system": "content"}  # actions that say something, and where
_LIMITS = ("maximum iteration", "maxiterationsreached", "iterationlimit", "maximum budget")
_METADATA = "tool_call_metadata"
_AS_CALL = "as its action"  # in place of an observation's metadata that repeats that of its call
_USAGE = {
    "prompt_tokens": ("prompt_tokens",),
    "completion_tokens": ("completion_tokens",),
    "cached_tokens": ("prompt_tokens_details", "cached_tokens"),
}


def _is_event(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if not isinstance(value.get("action"), str) and not isinstance(value.get("observation"), str):
        return openhands_v1.is_event(value) and ("source" in value or "timestamp" in value)
    return bool(value.keys() & {"args", "extras", "content", "thought", "command", "outputs"})


def _is_event_list(source: Source) -> bool:
    first = source.first_values
    return (
        bool(first)
        and source.layout == "array"
        and all(map(_is_event, first))
        and any("source" in event or "timestamp" in event for event in first)
    )


def _is_output(value: Any) -> bool:
    if not isinstance(value, dict) or "history" not in value:
        return False
    history = value["history"]
    if history is None and text_or_none(value.get("error")):
        history = []  # as in `_record`
    if not isinstance(history, list):
        return False
    events = list(_flattened(history[:3]))
    if events:
        return all(map(_is_event, events))
    return {"instance_id", "test_result", "metadata"} <= value.keys()


def _detect(source: Source) -> bool:
    return any(map(_is_output, source.first_values)) or _is_event_list(source)


def _read(source: Source) -> Iterator[Record | Refused]:
    if _is_event_list(source):
        yield _events_of(source)
        return
    file: dict[str, Any] = {"layout": source.layout}
    for row in source.rows():
        item = row if isinstance(row, Refused) else from_row(_record, row, _rebuild, file)
        if isinstance(item, Record):
            file = {}  # it is said once
        yield item


def _events_of(source: Source) -> Record | Refused:
    """The whole file as one episode, which a broken event spoils: what is missing would not be seen later."""
    events = []
    for row in source.rows():
        if isinstance(row, Refused):
            return Refused("row 1", f"the file is one list of events, and its {row.row} is broken: {row.reason}")
        events.append(row.value)
    return from_row(_record, Row("row 1", events), _rebuild, {"layout": "values"})


def _flattened(history: Sequence[Any]) -> Iterator[Any]:
    for item in history:
        if isinstance(item, list):
            yield from item
        else:
            yield item


def _record(value: Any, key: str) -> Record:
    if isinstance(value, list):
        steps = _steps(value)
        times = [_time(step) for step in (steps[:1] + steps[-1:])] or [None]
        return Record(
            key, {"agent_name": "OpenHands"}, steps, _ending(value, steps, None), times[0], times[-1], {"events": True}
        )
    if not isinstance(value, dict):
        raise FormatError("not an object: a row of OpenHands' output has history, metadata, test_result, …")
    rest = dict(value)
    history = rest.pop("history", None)
    source: dict[str, Any] = {}
    if history is None and text_or_none(rest.get("error")):
        history = []  # the evaluation failed before the agent did anything
        source["null"] = True
    if not isinstance(history, list):
        raise FormatError("has no `history`, the list of its events")
    if history and all(isinstance(item, list) for item in history):
        source["pairs"] = [len(item) for item in history]
        history = list(_flattened(history))
    steps = _steps(history)
    begin: dict[str, Any] = {}
    move(rest, "instance_id", begin, "task_id", fits_begin)
    issue = rest.get("issue")  # what the resolver of GitHub issues was given
    if "task_id" not in begin and isinstance(issue, dict) and {"owner", "repo", "number"} <= issue.keys():
        begin["task_id"] = f"{issue['owner']}/{issue['repo']}#{issue['number']}"
        source["issue"] = True
    if "task_id" in begin:
        begin["group_id"] = str(begin["task_id"])
    metadata = rest.get("metadata")
    for column, path in {
        "agent_name": ("agent_class",),
        "policy_name": ("llm", "model") if isinstance(inside(metadata, "llm"), dict) else ("llm_config", "model"),
        "agent_version": ("git_commit",),
        "task_family": ("dataset",),
    }.items():
        if (said := text_or_none(inside(metadata, *path))) is not None:
            begin[column] = said
    begin.setdefault("agent_name", "OpenHands")
    if rest.get("instruction") is not None and rest["instruction"] == _first_said(steps):
        del rest["instruction"]
        source["instruction"] = True
    end = _ending(history, steps, rest.get("error"))
    _put_success(rest, end)
    if rest:
        begin["extra"] = rest
    started, ended = (_time(steps[0]), _time(steps[-1])) if steps else (None, None)
    return Record(key, cast(EpisodeFields, begin), steps, end, started, ended, source)


def _time(step: StepFields) -> Any:
    """The time of a step as its event says it."""
    return step.source.get("timestamp") if type(step) is Exact else step.get("timestamp")


def _first_said(steps: Sequence[Mapping[str, Any]]) -> Any:
    return next((step["message"] for step in steps if step["source"] == "user" and step.get("message")), None)


def _put_success(rest: dict[str, Any], end: EndFields) -> None:
    """Whether the task was solved, by the evaluation's report, or by the resolver's own judgement."""
    result = rest.get("test_result")
    for path in (("report", "resolved"), ("resolved",), ("result", "resolved")):
        if isinstance(found := inside(result, *path), bool):
            end["success"] = found
            end["reward"] = float(found)
            return
    for name in ("success", "correct"):
        if isinstance(rest.get(name), bool):
            end["success"] = rest[name]
            return


def _ending(events: Sequence[Any], steps: Sequence[StepFields], error: Any) -> EndFields:
    error = text_or_none(error)
    limit = error if _says_limit(error) else _limit(events)
    if limit is not None:
        return {"status": "truncated", "truncated": True, "failure_stage": "budget", "failure_detail": limit}
    if error is not None:
        stage = "budget" if "budget" in error.lower() else "other"
        return {"status": "failed", "failure_stage": stage, "failure_detail": error}
    return {"status": "completed", "stop_reason": "finish"} if _last_call(steps) == "finish" else {}


def _limit(events: Sequence[Any]) -> str | None:
    """What the events say of a limit that the agent reached, if nobody did anything after that."""
    for event in reversed(events):
        kind = event.get("kind")
        if isinstance(event.get("action"), str) or kind in ("ActionEvent", "MessageEvent"):
            return None
        said: list[Any] = []
        if kind in ("ConversationErrorEvent", "ConversationIterationLimitEvent"):
            said = [event.get("code", kind), event.get("detail")]
        elif event.get("observation") == "agent_state_changed":
            said = [inside(event, "extras", "reason")]
        text = ": ".join(filter(None, map(text_or_none, said)))
        if _says_limit(text):
            return text
    return None


def _says_limit(text: str | None) -> bool:
    """Whether this is how OpenHands says that the agent has used up its iterations or its budget."""
    return text is not None and any(words in text.lower() for words in _LIMITS)


def _last_call(steps: Sequence[StepFields]) -> Any:
    return next((step["tool_calls"][0].get("name") for step in reversed(steps) if step.get("tool_calls")), None)


def _steps(events: Sequence[Any]) -> list[StepFields]:
    steps = []
    calls: dict[str, Any] = {}  # metadata by the call's id
    for number, event in enumerate(events, 1):
        if not isinstance(event, dict):
            raise FormatError(f"event {number}: not an object")
        if openhands_v1.is_event(event):
            steps.append(openhands_v1.step_of(event))
            continue
        if not isinstance(event.get("action"), str) and not isinstance(event.get("observation"), str):
            raise FormatError(f"event {number}: neither an action nor an observation")
        step = _step(event, calls)
        steps.append(exact(step, event) if _is_usual(event) else step)
    return steps


def _is_usual(event: dict[str, Any]) -> bool:
    """Whether `_event` makes the event again whatever else it holds: what it always writes is there, what has a column
    is of the type that this gives back, and what tells one generation from the other is of one."""
    has_time, has_message = "timestamp" in event, "message" in event
    if has_time and usual_time(event["timestamp"]) is None:
        return False
    if ("source" in event) != (has_time or has_message) or "content_kind" in event:
        return False
    metadata = event.get(_METADATA)
    if metadata is not None and type(metadata) is not dict:
        return False
    if type(event.get("action")) is not str:
        return type(event.get("content")) is str and "action" not in event
    _, answer = _answer(metadata)
    if answer is not None and not _said({}).keys() <= answer.keys():
        return False
    return event["action"] in _SAID or (type(event.get("args")) is dict) == (has_message or "id" in event)


def _step(event: dict[str, Any], calls: dict[str, Any]) -> StepFields:
    rest = dict(event)
    step: dict[str, Any] = {"source": _source(event)}
    move_time(rest, "timestamp", step, "timestamp")
    call_id = inside(event, _METADATA, "tool_call_id")
    if isinstance(event.get("action"), str):
        _put_action(rest, step, event)
        if isinstance(call_id, str):
            calls[call_id] = event[_METADATA]
            rest[_METADATA] = _with_message(event[_METADATA], lambda found: without_repeats(found, _said(step)))
        _put_usage(event, step)
    else:
        _put_observation(rest, step)
        if isinstance(call_id, str) and call_id in calls and same(calls[call_id], event[_METADATA]):
            rest[_METADATA] = _AS_CALL
    if isinstance(rest.get("message"), str) and rest["message"] == step.get("message"):
        rest["message"] = True
    elif isinstance(rest.get("message"), bool):
        raise FormatError("its `message` is a truth value")
    if rest.get("source") == _usual_source(step["source"]):
        del rest["source"]
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _said(step: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's answer repeats of the step that was made of it."""
    return {"role": "assistant", "content": step.get("message")}


def _answer(metadata: Any) -> tuple[Any, dict[str, Any] | None]:
    """The model's one answer in a call's metadata, and its message; None where there is none."""
    choices = inside(metadata, "model_response", "choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(inside(choices[0], "message"), dict):
        return None, None
    return choices[0], choices[0]["message"]


def _with_message(metadata: Any, change: Callable[[Any], Any]) -> Any:
    """A call's metadata with the message of the model's one answer changed; as it is where there is none."""
    answer, message = _answer(metadata)
    if message is None:
        return metadata
    response = metadata["model_response"]
    choice = {**answer, "message": change(message)}
    return {**metadata, "model_response": {**response, "choices": [choice]}}


def _source(event: Mapping[str, Any]) -> str:
    """Who acted. A flat event does not say: its first message is the user's, and what it observes the tools'."""
    said, action = event.get("source"), event.get("action")
    if isinstance(action, str):
        if action == "system":
            return "system"
        if said == "user" or (said is None and action == "message"):
            return "user" if action == "message" else "environment"
        return "agent" if said in ("agent", None) else "environment"
    return "tool" if said in ("agent", None) else "environment"


def _usual_source(source: str) -> str:
    return {"user": "user", "environment": "environment"}.get(source, "agent")


def _put_action(rest: dict[str, Any], step: dict[str, Any], event: Mapping[str, Any]) -> None:
    flat = not isinstance(rest.get("args"), dict)
    given: dict[str, Any] = rest if flat else dict(rest["args"])
    action = event["action"]
    said = _SAID.get(action, "thought")
    move(given, said, step, "message", fits_step)
    if action in _SAID:
        if not flat:
            rest["args"] = given
        return
    names = [name for name in given if name not in _BESIDE] if flat else list(given)
    call: dict[str, Any] = {"name": action, "arguments": {name: given[name] for name in names}}
    if isinstance(call_id := inside(event, _METADATA, "tool_call_id"), str):
        call["id"] = call_id
    step["tool_calls"] = [call]
    del rest["action"]
    for name in names if flat else ("args",):
        del rest[name]


_BESIDE = {
    "id",
    "timestamp",
    "source",
    "message",
    "cause",
    "action",
    "action_risk",
    _METADATA,
    "llm_metrics",
    "timeout",
}
"""Keys of an action that are no arguments, where both stand side by side."""


def _put_usage(event: Mapping[str, Any], step: dict[str, Any]) -> None:
    """The tokens of the answer that the action is from, where it is the only one: two would count them twice."""
    response = inside(event, _METADATA, "model_response")
    if (model := text_or_none(inside(response, "model"))) is not None:
        step["model"] = model
    if inside(event, _METADATA, "total_calls_in_response") == 1:
        for column, path in _USAGE.items():
            value = inside(response, "usage", *path)
            if value is not None and fits_step(column, value):
                step[column] = value


def _put_observation(rest: dict[str, Any], step: dict[str, Any]) -> None:
    result: dict[str, Any] = {}
    if (content := rest.get("content")) is not None:
        result["content"] = rest.pop("content")
        if not isinstance(content, str):
            rest["content_kind"] = "object"
    if isinstance(call_id := inside(rest, _METADATA, "tool_call_id"), str):
        result["call_id"] = call_id
    codes = (
        rest.get("exit_code"),
        inside(rest, "extras", "exit_code"),
        inside(rest, "extras", "metadata", "exit_code"),
    )
    if rest["observation"] == "error" or rest.get("success") is False:
        result["is_error"] = True
    elif any(type(code) is int for code in codes):
        result["is_error"] = any(type(code) is int and code != 0 for code in codes)
    step["tool_results"] = [result]


def _rebuild(trajectory: Trajectory) -> Any:
    episode, kept = trajectory.episode, source_row(trajectory.episode)
    calls: dict[str, Any] = {}
    events: list[Any] = [_event(step, calls) for step in trajectory.steps]
    if kept.get("events"):
        return events
    if "pairs" in kept:
        every = iter(events)
        events = [[next(every) for _ in range(length)] for length in kept["pairs"]]
    row: dict[str, Any] = {"history": None if kept.get("null") else events}
    if episode["task_id"] is not None and not kept.get("issue"):
        row["instance_id"] = episode["task_id"]
    if kept.get("instruction"):
        row["instruction"] = _first_said(trajectory.steps)
    return row | episode_extra(trajectory)


def _event(step: Mapping[str, Any], calls: dict[str, Any]) -> dict[str, Any]:
    if type(step) is Exact:
        known: dict[str, Any] = step.source
        call_id = inside(known, _METADATA, "tool_call_id")
        if isinstance(call_id, str) and "action" in known:
            calls[call_id] = known[_METADATA]
        return known
    rest = extra_of(step)
    if openhands_v1.is_event(rest):
        return openhands_v1.event_of(step)
    event: dict[str, Any] = {}
    if step["timestamp"] is not None:
        event["timestamp"] = time_text(step["timestamp"])
    if rest.get("message") is True:
        rest["message"] = step["message"]
    if step["tool_calls"]:
        given = arguments(step["tool_calls"][0]) or {}
        event["action"] = step["tool_calls"][0]["name"]
        said = {"thought": step["message"]} if step["message"] is not None else {}
        if "message" in rest or "id" in rest:
            event["args"] = {**given, **said}
        else:
            event |= given | said
    elif "action" in rest and step["message"] is not None:
        said = {_SAID.get(rest["action"], "thought"): step["message"]}
        if isinstance(rest.get("args"), dict):
            rest["args"] |= said
        else:
            event |= said
    elif step["tool_results"]:
        event["content"] = content_of(step["tool_results"][0], rest)
    if "timestamp" in event or "message" in rest:
        event["source"] = _usual_source(step["source"])
    metadata = rest.get(_METADATA)
    call_id = inside(metadata, "tool_call_id")
    if isinstance(call_id, str) and "action" in (event | rest):
        rest[_METADATA] = calls[call_id] = _with_message(metadata, lambda found: with_repeats(found, _said(step)))
    elif metadata == _AS_CALL:
        rest[_METADATA] = calls.get(step["tool_results"][0]["call_id"])
    return event | rest


FORMAT = Format(
    name="openhands",
    description="OpenHands: a JSON list of events, or evaluation output in JSON Lines with a `history` of events",
    detect=_detect,
    read=_read,
    write=write_rows(_rebuild, "lines"),
)

"""mini-swe-agent trajectories: one JSON object {info, messages, …}; an episode a file, a step a message.

https://github.com/SWE-agent/mini-swe-agent. With the Responses API a message is a whole response (`object`, `output`)
or an item (`function_call_output`), and has no role. What a message's `extra` says a second time (the answer as the API
gave it, the actions that follow from the calls, the output that stands in the text) is left out and made again.
SWE-bench evaluation reports (`resolved_ids`) are refused, and read by trajlake.formats.swe_bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, cast

from trajlake.errors import FormatError, NoTrajectories
from trajlake.formats.base import Format, Record, Refused, any_row, fits_begin, fits_end, fits_step, per_row, write_rows
from trajlake.formats.chat import are_parts, parts_of
from trajlake.formats.json_rows import loads
from trajlake.formats.messages import arguments, content_part
from trajlake.formats.moving import inside, move, move_time, text_or_none, with_repeats, without_repeats
from trajlake.formats.rebuild import Exact, episode_extra, exact, extra_of, same
from trajlake.formats.responses import put_output, take_output
from trajlake.formats.source import Source
from trajlake.formats.swe_bench import is_report
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.read.trajectory import Trajectory

_SOURCES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "agent",
    "tool": "tool",
    "exit": "environment",
}
_ROLES = {"system": "system", "user": "user", "agent": "assistant", "tool": "tool", "environment": "exit"}
_ENDINGS = {
    "Submitted": ("completed", None),
    "LimitsExceeded": ("truncated", "budget"),
    "TimeExceeded": ("truncated", "timeout"),
    "FormatError": ("failed", "validation"),
}
_BUILT = "built"  # in an `extra`: the names of what is left out there, because it can be made again
_USAGE = {
    "prompt_tokens": ("prompt_tokens",),
    "completion_tokens": ("completion_tokens",),
    "cached_tokens": ("prompt_tokens_details", "cached_tokens"),
}
_RESPONSE_USAGE = {
    "prompt_tokens": ("input_tokens",),
    "completion_tokens": ("output_tokens",),
    "cached_tokens": ("input_tokens_details", "cached_tokens"),
}
_RESULT = ("tool_call_id", "content")
_RESULT_ITEM = ("call_id", "output")


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return False
    version, info = value.get("trajectory_format"), value.get("info")
    if isinstance(version, str) and version.startswith("mini-swe-agent"):
        return True
    return isinstance(info, dict) and ("mini_version" in info or {"exit_status", "submission"} <= info.keys())


def _read(source: Source) -> Iterator[Record | Refused]:
    values = source.first_values
    if values and all(map(is_report, values)):
        raise NoTrajectories(
            f"{source.path}: an SWE-bench evaluation report, which holds no trajectories: it says which instances "
            "were resolved, and not in which run. Import and compact the .traj.json files, and then give what it says "
            "as scores: `trajlake score REPORT --run NAME`, or Writer.score"
        )
    yield from _rows(source)


def _record(value: Any, key: str) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a trajectory of mini-swe-agent has info, messages and trajectory_format")
    rest = dict(value)
    messages = rest.pop("messages", None)
    if not isinstance(messages, list):
        raise FormatError("has no `messages`, the list of what was said")
    steps = []
    for number, message in enumerate(messages, 1):
        try:
            step = _step(message)
            steps.append(exact(step, message) if _is_usual(message) else step)
        except FormatError as error:
            raise FormatError(f"message {number}: {error}") from error
    begin: dict[str, Any] = {"agent_name": "mini-swe-agent"}
    end: dict[str, Any] = {}
    move(rest, "instance_id", begin, "task_id", fits_begin)
    begin["group_id"] = begin.get("task_id")
    if isinstance(info := rest.get("info"), dict):
        rest["info"] = dict(info)
        move(rest["info"], "mini_version", begin, "agent_version", fits_begin)
        move(rest["info"], "exit_status", end, "stop_reason", fits_end)
    config = inside(rest, "info", "config")
    begin["policy_name"] = text_or_none(inside(config, "model", "model_name"))
    begin["env_snapshot"] = text_or_none(inside(config, "environment", "image"))
    if "swebench" in (text_or_none(inside(config, "agent_type")) or ""):
        begin["task_family"] = "swe-bench"
    if (reason := end.get("stop_reason")) is not None:
        status, stage = _ENDINGS.get(reason, ("failed", "other"))
        end |= {"status": status, "failure_stage": stage}
        if status == "truncated":
            end["truncated"] = True
        if stage is not None:
            end["failure_detail"] = reason
    if rest:
        begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end))


def _step(message: Any) -> StepFields:
    if not isinstance(message, dict):
        raise FormatError("not an object")
    rest = dict(message)
    given = rest.pop("role", None)
    role = _role_without_one(message) if given is None else given
    if not isinstance(role, str) or role not in _SOURCES:
        raise FormatError(f"its role is none of {', '.join(_SOURCES)}")
    step: dict[str, Any] = {"source": _SOURCES[role]}
    if given != _ROLES[step["source"]]:
        rest["role"] = given
    if isinstance(rest.get("extra"), dict):
        rest["extra"] = dict(rest["extra"])
        move_time(rest["extra"], "timestamp", step, "timestamp")
        move(rest["extra"], "cost", step, "cost_usd", fits_step)
    if role == "tool":
        _put_result(rest, step, _RESULT_ITEM if given is None else _RESULT)
    else:
        if given is None:
            _put_response(rest, step)
        else:
            move(rest, "content", step, "message", fits_step)
            if are_parts(rest.get("content")):
                step["content_parts"] = parts_of(rest.pop("content"))
            _put_calls(rest, step)
        if isinstance(rest.get("extra"), dict):
            _put_answer(rest["extra"], step, message)
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _role_without_one(message: dict[str, Any]) -> str | None:
    """The role of what the Responses API gave, or was given."""
    if message.get("object") == "response":
        return "assistant"
    return "tool" if message.get("type") == "function_call_output" else None


def _put_response(rest: dict[str, Any], step: dict[str, Any]) -> None:
    move(rest, "model", step, "model", fits_step)
    _put_usage(rest.get("usage"), _RESPONSE_USAGE, step)
    if are_parts(rest.get("output")):
        rest["output"] = take_output(rest["output"], step)


def _put_usage(usage: Any, paths: Mapping[str, Sequence[str]], step: dict[str, Any]) -> None:
    for column, path in paths.items():
        value = inside(usage, *path)
        if value is not None and fits_step(column, value):
            step[column] = value


def _is_usual(message: dict[str, Any]) -> bool:
    """Whether `_message` makes the message again whatever else it holds: what it always writes is there, and what has
    a column is of the type that this gives back."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    extra = message.get("extra")
    if role is None or role != _ROLES[_SOURCES[role]] or type(content) is list:
        return False
    if type(extra) is dict:
        if _BUILT in extra or type(extra.get("timestamp", 0.0)) is not float or type(extra.get("cost")) is int:
            return False
        response = extra.get("response")
        if type(response) is dict and _is_answer(response):
            answer = response["choices"][0]["message"]
            if role == "tool" or not _said(message).keys() <= answer.keys():
                return False
    if role == "tool":
        return type(content) is str and type(message.get("tool_call_id")) is str
    return calls is None or (type(calls) is list and all(map(_is_usual_call, calls, count())))


def _is_usual_call(call: Any, position: int) -> bool:
    if type(call) is not dict or len(call) != 4 or type(call.get("index")) is not int or call["index"] != position:
        return False
    function = call.get("function")
    return (
        type(function) is dict
        and function.keys() == {"name", "arguments"}
        and call.get("type") == "function"
        and all(type(text) is str for text in (call.get("id"), *function.values()))
    )


def _put_result(rest: dict[str, Any], step: dict[str, Any], names: tuple[str, str]) -> None:
    result: dict[str, Any] = {}
    for name, column in zip(names, ("call_id", "content"), strict=True):
        if isinstance(rest.get(name), str):
            result[column] = rest.pop(name)
    if are_parts(rest.get(names[1])):
        step["content_parts"] = parts_of(rest.pop(names[1]))
    extra = rest.get("extra")
    code = inside(extra, "returncode")
    if isinstance(code, int):
        result["is_error"] = code != 0 or bool(inside(extra, "exception_info"))
    if (
        isinstance(extra, dict)
        and "raw_output" in extra
        and _output(result.get("content"), code) == extra["raw_output"]
    ):
        del extra["raw_output"]
        extra[_BUILT] = ["raw_output"]
    step["tool_results"] = [result]


def _output(content: Any, code: Any) -> str | None:
    """The output that stands in the text of an observation, by mini-swe-agent's usual template."""
    before, after = f"<returncode>{code}</returncode>\n<output>\n", "</output>"
    if not isinstance(content, str) or not content.startswith(before) or not content.endswith(after):
        return None
    return content[len(before) : -len(after)]


def _put_calls(rest: dict[str, Any], step: dict[str, Any]) -> None:
    calls = rest.get("tool_calls")
    if not isinstance(calls, list) or not fits_step("tool_calls", calls):
        return
    del rest["tool_calls"]
    step["tool_calls"] = [
        {name: value for name, value in call.items() if name != "index" or value != position}
        for position, call in enumerate(calls)
    ]


def _put_answer(extra: dict[str, Any], step: dict[str, Any], message: dict[str, Any]) -> None:
    """The model's answer as its API gave it, without what it repeats of the message."""
    built = []
    if "actions" in extra and (actions := _actions(message)) and same(actions, extra["actions"]):
        del extra["actions"]
        built.append("actions")
    if isinstance(response := extra.get("response"), dict):
        move(response := dict(response), "model", step, "model", fits_step)
        extra["response"] = response
        _put_usage(response.get("usage"), _USAGE, step)
        if _is_answer(response):
            choice = dict(response["choices"][0])
            choice["message"] = without_repeats(choice["message"], _said(message))
            response["choices"] = [choice]
    if built:
        extra[_BUILT] = built


def _is_answer(response: Any) -> bool:
    choices = response.get("choices")
    return isinstance(choices, list) and len(choices) == 1 and isinstance(inside(choices[0], "message"), dict)


def _said(message: dict[str, Any]) -> dict[str, Any]:
    names = ("content", "role", "tool_calls", "function_call")
    return {name: message[name] for name in names if name in message}


def _actions(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The actions that follow from calls of the tool `bash`."""
    calls, items = message.get("tool_calls"), message.get("output")
    texts = [(inside(call, "id"), inside(call, "function", "arguments")) for call in _list(calls)]
    texts += [(inside(item, "call_id"), inside(item, "arguments")) for item in _list(items)]
    actions = []
    for call_id, text in texts:
        try:
            given = loads(text) if isinstance(text, str) else None
        except ValueError:
            given = None
        if isinstance(given, dict):
            actions.append({**given, "tool_call_id": call_id})
    return actions


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    row: dict[str, Any] = {"messages": [_message(step) for step in trajectory.steps]}
    if episode["task_id"] is not None:
        row["instance_id"] = episode["task_id"]
    if isinstance(extra.get("info"), dict):
        for name, column in (("exit_status", "stop_reason"), ("mini_version", "agent_version")):
            if episode[column] is not None:
                extra["info"][name] = episode[column]
    return row | extra


def _message(step: dict[str, Any]) -> dict[str, Any]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    rest = extra_of(step)
    role = rest.pop("role", _ROLES[step["source"]])
    message: dict[str, Any] = {} if role is None else {"role": role}
    parts = None if step["content_parts"] is None else [content_part(part) for part in step["content_parts"]]
    if step["source"] == "tool" and step["tool_results"]:
        result = step["tool_results"][0]
        call_id, content = _RESULT_ITEM if role is None else _RESULT
        message |= {call_id: result["call_id"], content: result["content"] if parts is None else parts}
    elif role is None:
        if are_parts(rest.get("output")):
            put_output(rest["output"], step)
        if step["model"] is not None:
            message["model"] = step["model"]
    else:
        if step["message"] is not None or parts is not None:
            message["content"] = step["message"] if parts is None else parts
        _put_chat_calls(rest, step, message)
    message |= rest
    if isinstance(extra := message.get("extra"), dict):
        _restore(extra, step, message)
    return message


def _put_chat_calls(rest: dict[str, Any], step: dict[str, Any], message: dict[str, Any]) -> None:
    if step["tool_calls"] is None:
        return
    leftovers = rest.pop("tool_calls", None)
    message["tool_calls"] = [
        {
            "index": position,
            "function": {"name": call["name"], "arguments": arguments(call)},
            "id": call["id"],
            "type": "function",
            **(inside(leftovers, str(position)) or {}),
        }
        for position, call in enumerate(step["tool_calls"])
    ]


def _restore(extra: dict[str, Any], step: dict[str, Any], message: dict[str, Any]) -> None:
    built = extra.pop(_BUILT, ())
    if not isinstance(built, (list, str, dict)):  # the source's own
        built = ()
    if "raw_output" in built:
        extra["raw_output"] = _output(message.get(_RESULT[1], message.get(_RESULT_ITEM[1])), extra.get("returncode"))
    if "actions" in built:
        extra["actions"] = _actions(message)
    if step["timestamp"] is not None:
        extra.setdefault("timestamp", step["timestamp"].timestamp())
    if step["cost_usd"] is not None:
        extra["cost"] = step["cost_usd"]
    response = extra.get("response")
    if isinstance(response, dict):
        if step["model"] is not None:
            response["model"] = step["model"]
        if _is_answer(response):
            choice = response["choices"][0]
            choice["message"] = with_repeats(choice["message"], _said(message))


_rows = per_row(_record, _rebuild)

FORMAT = Format(
    name="mini-swe-agent",
    description="mini-swe-agent trajectories: one JSON object {info, messages, trajectory_format}",
    detect=any_row(lambda value: _is_row(value) or is_report(value)),
    read=_read,
    write=write_rows(_rebuild, "values"),
    suffix=".traj.json",
)

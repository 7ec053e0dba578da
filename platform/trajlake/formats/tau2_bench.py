"""tau2-bench results: one JSON object {timestamp, info, tasks, simulations}; an episode a simulation, a step a message.

https://github.com/sierra-research/tau2-bench, `src/tau2/data_model/simulation.py` and `message.py`. What is said once
of all simulations (`info`, …) is kept with the first episode of the file; a task with each episode that tried it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

from trajlake.errors import FormatError, UsageError
from trajlake.formats.base import (
    Format,
    Record,
    Refused,
    any_row,
    fits_begin,
    fits_end,
    fits_step,
    traced,
    write_groups,
)
from trajlake.formats.messages import arguments
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
from trajlake.formats.rebuild import LONG_TEXT, Exact, episode_extra, extra_of, rebuilt, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.read.trajectory import Trajectory

_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "tool"}
_ROLES = {source: role for role, source in _SOURCES.items()}
_TOLERANCE = 1e-6
_JUDGED = {"NL_ASSERTION"}
_LARGE = 2**63  # for a column of whole numbers
_TASK = "task"  # in an episode's `extra`: its task, out of the file's list


def _is_results(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("simulations"), list):
        return False
    return isinstance(value.get("info"), dict) or isinstance(value.get("tasks"), list)


def _read(source: Source) -> Iterator[Record | Refused]:
    for row in source.rows():
        if isinstance(row, Refused):
            yield row
        elif not _is_results(row.value):
            yield Refused(row.key, "not tau2-bench results: an object with `simulations` and `info` or `tasks`")
        else:
            yield from _simulations(row.value, row.key, source.layout)


def _simulations(results: dict[str, Any], place: str, layout: str) -> Iterator[Record | Refused]:
    begin = _begin(results.get("info"))
    tasks = _tasks(results.get("tasks"))
    items: list[Record | Refused] = []
    for number, simulation in enumerate(results["simulations"], 1):
        key = f"{place}, simulation {number}"
        try:
            items.append(traced(_record(simulation, key, begin, tasks), simulation, _rebuild))
        except (FormatError, UsageError) as error:
            items.append(Refused(key, str(error)))
    if not items:
        yield Refused(place, "has no simulations")
    told = {item.source.get("task") for item in items if isinstance(item, Record)}
    file = {"layout": layout, **_around(results, told)}
    for item in items:
        if isinstance(item, Record) and file:
            item, file = replace(item, source={**item.source, "file": file}), {}  # it is said once
        yield item


def _tasks(tasks: Any) -> dict[str, Any]:
    """The tasks by id; none where it is not clear which task an id means."""
    if not isinstance(tasks, list):
        return {}
    named = {task["id"]: task for task in tasks if isinstance(task, dict) and isinstance(task.get("id"), str)}
    return named if len(named) == len(tasks) else {}


def _around(results: Mapping[str, Any], told: Set[Any]) -> dict[str, Any]:
    """What stands around the simulations. A task that one of the episodes has is there by its id."""
    around = {name: value for name, value in results.items() if name != "simulations"}
    if not told - {None}:
        return {"results": around}
    ids = [task["id"] if task["id"] in told else None for task in around["tasks"]]
    around["tasks"] = [task for task in around["tasks"] if task["id"] not in told]
    return {"results": around, "tasks": ids}


def _begin(info: Any) -> dict[str, Any]:
    """What `info` says of every simulation, as far as columns take it."""
    begin: dict[str, Any] = {"task_family": "tau2-bench"}
    for column, path in {
        "domain": ("environment_info", "domain_name"),
        "policy_name": ("agent_info", "llm"),
        "agent_name": ("agent_info", "implementation"),
        "env_version": ("git_commit",),
    }.items():
        if (value := text_or_none(inside(info, *path))) is not None:
            begin[column] = value
    return begin


def _record(simulation: Any, key: str, said: Mapping[str, Any], tasks: Mapping[str, Any]) -> Record:
    if not isinstance(simulation, dict):
        raise FormatError("not an object: a simulation has id, task_id, messages, reward_info, …")
    rest = dict(simulation)
    messages = rest.pop("messages", None)
    if not isinstance(messages, list):
        raise FormatError("has no `messages`, the list of what was said")
    steps = []
    for index, message in enumerate(messages):
        try:
            steps.append(_usual(message, index) or _step(message, index))
        except FormatError as error:
            raise FormatError(f"message {index + 1}: {error}") from error
    begin: dict[str, Any] = dict(said)
    end: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for name in ("task_id", "trial", "seed"):
        move(rest, name, begin, name, fits_begin)
    if "task_id" in begin:
        begin["group_id"] = "/".join(str(begin[name]) for name in ("task_family", "domain", "task_id") if name in begin)
    move_time(rest, "start_time", times, "started_at")
    move_time(rest, "end_time", times, "ended_at")
    move(rest, "termination_reason", end, "stop_reason", fits_end)
    end.update(_ending(end.get("stop_reason")))
    _put_rewards(rest, end)
    source: dict[str, Any] = {}
    task_id = begin.get("task_id")
    if isinstance(task_id, str) and task_id in tasks and _TASK not in rest:
        rest[_TASK] = tasks[task_id]
        source["task"] = task_id
    if rest:
        begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end), source=source, **times)


def _ending(reason: str | None) -> Mapping[str, Any]:
    if reason is None:
        return {}
    if reason == "max_steps":
        return {"status": "truncated", "truncated": True, "failure_stage": "budget", "failure_detail": reason}
    if reason in {"user_stop", "agent_stop"}:
        return {"status": "completed"}
    stage = "tool_call" if reason == "too_many_errors" else "other"
    return {"status": "failed", "failure_stage": stage, "failure_detail": reason}


def _put_rewards(rest: dict[str, Any], end: dict[str, Any]) -> None:
    given = rest.get("reward_info")
    if not isinstance(given, dict):
        return
    info = rest["reward_info"] = dict(given)
    move(info, "reward", end, "reward", fits_end)
    if "reward" in end:  # tau2's own definition of success (`is_successful` in metrics/agent_metrics.py)
        end["success"] = 1 - _TOLERANCE <= end["reward"] <= 1 + _TOLERANCE
    parts = info.get("reward_breakdown")
    if isinstance(parts, dict) and parts and fits_end("rewards", parts):
        end["rewards"] = [
            {"name": name, "value": value, "kind": "judged" if name in _JUDGED else "verifiable"}
            for name, value in parts.items()
        ]
        del info["reward_breakdown"]


def _usual(message: Any, index: int) -> StepFields | None:
    """The step of a message as nearly all are, which `_message` makes again: what it always writes is there, and of
    the type that its column gives back."""
    if type(message) is not dict or message.get("turn_idx") != index or type(message["turn_idx"]) is not int:
        return None
    role, content, rest = message.get("role"), message.get("content"), message.copy()
    del rest["turn_idx"]
    if type(role) is not str or role not in _SOURCES or rest.keys() & {"tool_results", "extra"}:
        return None
    del rest["role"]
    step = Exact(source=_SOURCES[role])
    step.source = message
    if "timestamp" in rest:
        step["timestamp"] = usual_time(rest.pop("timestamp"))
        if step["timestamp"] is None:
            return None
    if role == "tool":
        call_id, is_error = rest.pop("id", None), rest.pop("error", None)
        if type(content) is not str or type(call_id) is not str or type(is_error) is not bool:
            return None
        if len(content) > LONG_TEXT:
            return None
        del rest["content"]
        step["tool_results"] = [{"call_id": call_id, "content": content, "is_error": is_error}]
    elif not _put_usual_utterance(rest, step, role):
        return None
    if rest:
        step["extra"] = json_text(rest)
    return cast(StepFields, step)


def _put_usual_utterance(rest: dict[str, Any], step: Exact, role: str) -> bool:
    """Whether it is as usual; both dicts are changed."""
    if not {"content", "tool_calls", "cost"} <= rest.keys() or rest.get("errors"):
        return False
    for name, column, kind in (
        ("content", "message", str),
        ("reasoning", "reasoning", str),
        ("cost", "cost_usd", float),
    ):
        value = rest.get(name)
        if type(value) is str and len(value) > LONG_TEXT:
            return False
        if type(value) is kind:
            step[column] = rest.pop(name)
        elif value is not None:
            return False
    calls = rest["tool_calls"]
    if calls is not None:
        if type(calls) is not list or (rows := _usual_calls(calls, role)) is None:
            return False
        step["tool_calls"] = rows
        del rest["tool_calls"]
    usage, raw = rest.get("usage"), rest.get("raw_data")
    if type(usage) is dict:
        rest["usage"] = usage = usage.copy()
        for name in ("prompt_tokens", "completion_tokens"):
            value = usage.get(name)
            if type(value) is int and abs(value) < _LARGE:
                step[name] = usage.pop(name)
            elif value is not None:
                return False
    if type(raw) is dict and type(answer := raw.get("message")) is dict:
        said = _said(step["message"], calls)
        if not said.keys() <= answer.keys():
            return False
        rest["raw_data"] = {**raw, "message": without_repeats(answer, said)}
    return True


def _usual_calls(calls: list[Any], role: str) -> list[dict[str, Any]] | None:
    rows = []
    for call in calls:
        if type(call) is not dict or len(call) != 4 or call.get("requestor") != role:
            return None
        call_id, name, given = call.get("id"), call.get("name"), call.get("arguments")
        if type(call_id) is not str or type(name) is not str or type(given) is not dict:
            return None
        rows.append({"id": call_id, "name": name, "arguments": json_text(given), "arguments_kind": "object"})
    return rows


def _step(message: Any, index: int) -> StepFields:
    if not isinstance(message, dict):
        raise FormatError("not an object")
    rest = dict(message)
    role = rest.pop("role", None)
    if not isinstance(role, str) or role not in _SOURCES:
        raise FormatError(f"its role is none of {', '.join(_SOURCES)}")
    step: dict[str, Any] = {"source": _SOURCES[role]}
    move_time(rest, "timestamp", step, "timestamp")
    if type(rest.get("turn_idx")) is int and rest["turn_idx"] == index:
        del rest["turn_idx"]
    if role == "tool":
        _put_result(rest, step)
    else:
        _put_utterance(rest, step, role)
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _put_result(rest: dict[str, Any], step: dict[str, Any]) -> None:
    result: dict[str, Any] = {}
    for name, column, kind in (("id", "call_id", str), ("content", "content", str), ("error", "is_error", bool)):
        if isinstance(rest.get(name), kind):
            result[column] = rest.pop(name)
    step["tool_results"] = [result]


def _put_utterance(rest: dict[str, Any], step: dict[str, Any], role: str) -> None:
    move(rest, "content", step, "message", fits_step)
    move(rest, "reasoning", step, "reasoning", fits_step)
    move(rest, "cost", step, "cost_usd", fits_step)
    calls = rest.get("tool_calls")
    if isinstance(calls, list) and fits_step("tool_calls", calls):
        step["tool_calls"] = [
            {name: value for name, value in call.items() if name != "requestor" or value != role} for call in calls
        ]
        del rest["tool_calls"]
    if isinstance(usage := rest.get("usage"), dict):
        rest["usage"] = dict(usage)
        for name in ("prompt_tokens", "completion_tokens"):
            move(rest["usage"], name, step, name, fits_step)
    if isinstance(raw := rest.get("raw_data"), dict) and "message" in raw:
        said = _said(step.get("message"), step.get("tool_calls"))
        rest["raw_data"] = {**raw, "message": without_repeats(raw["message"], said)}
    if errors := rest.get("errors"):
        step["error"] = errors if isinstance(errors, str) else json.dumps(errors)


def _said(content: Any, calls: Any) -> dict[str, Any]:
    """What a model's answer as its API gave it repeats of the message that was made of it."""
    texts = None
    if isinstance(calls, list) and calls and all(isinstance(call, dict) for call in calls):
        texts = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call.get("name"),
                    "arguments": json.dumps(call.get("arguments"), ensure_ascii=False, separators=(",", ":")),
                },
            }
            for call in calls
        ]
    return {"role": "assistant", "content": content, "tool_calls": texts}


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    if "task" in source_row(episode):
        extra.pop(_TASK, None)
    row: dict[str, Any] = {
        "id": None,
        "task_id": episode["task_id"],
        "start_time": episode["started_at"] and time_text(episode["started_at"]),
        "end_time": episode["ended_at"] and time_text(episode["ended_at"]),
        "termination_reason": episode["stop_reason"],
        "messages": [_message(step) for step in trajectory.steps],
        "trial": episode["trial"],
        "seed": episode["seed"],
    }
    info = extra.pop("reward_info", {})
    if isinstance(info, dict):
        if episode["reward"] is not None:
            info["reward"] = episode["reward"]
        if episode["rewards"] is not None:
            info["reward_breakdown"] = {part["name"]: part["value"] for part in episode["rewards"]}
    return row | extra | {"reward_info": info or None}


def _message(step: dict[str, Any]) -> dict[str, Any]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    extra = extra_of(step)
    role = _ROLES.get(step["source"], "assistant")
    message: dict[str, Any] = {"role": role, "turn_idx": step["step_index"]}
    if step["timestamp"] is not None:
        message["timestamp"] = time_text(step["timestamp"])
    if role == "tool":
        result = (step["tool_results"] or [{"call_id": None, "content": None, "is_error": None}])[0]
        names = {"id": "call_id", "content": "content", "error": "is_error"}
        return message | {name: result[column] for name, column in names.items()} | extra
    leftovers = extra.pop("tool_calls", None)
    message |= {"content": step["message"], "tool_calls": None, "cost": step["cost_usd"]}
    if step["reasoning"] is not None:
        message["reasoning"] = step["reasoning"]
    if step["tool_calls"] is not None:
        beyond = leftovers if isinstance(leftovers, dict) else {}
        message["tool_calls"] = [
            {"id": call["id"], "name": call["name"], "arguments": arguments(call), "requestor": role}
            | beyond.get(str(position), {})
            for position, call in enumerate(step["tool_calls"])
        ]
    elif leftovers is not None:
        message["tool_calls"] = leftovers
    if isinstance(extra.get("usage"), dict):
        for name in ("prompt_tokens", "completion_tokens"):
            if step[name] is not None:
                extra["usage"][name] = step[name]
    if isinstance(raw := extra.get("raw_data"), dict) and "message" in raw:
        raw["message"] = with_repeats(raw["message"], _said(step["message"], message["tool_calls"]))
    return message | extra


def _join(file: Mapping[str, Any], episodes: Sequence[Trajectory]) -> dict[str, Any]:
    results = dict(file.get("results") or {"info": {}, "tasks": []})
    if "tasks" in file:
        told = {source_row(one.episode).get("task"): episode_extra(one).get(_TASK) for one in episodes}
        others = iter(results["tasks"])
        tasks = [next(others, None) if task_id is None else told.get(task_id) for task_id in file["tasks"]]
        results["tasks"] = [task for task in tasks if task is not None]  # some episodes may be left out
    return {**results, "simulations": [rebuilt(episode, _rebuild) for episode in episodes]}


FORMAT = Format(
    name="tau2-bench",
    description="tau2-bench results: one JSON object {timestamp, info, tasks, simulations}",
    detect=any_row(_is_results),
    read=_read,
    write=write_groups(_join),
)

"""SWE-agent trajectories (.traj): one JSON object {environment, trajectory, history, info}, one episode a file.

https://github.com/SWE-agent/SWE-agent, versions 0 and 1. A step is an entry of `trajectory`: what the model said, the
command that it gave, and what came back. `history`, the messages as the model saw them, stays in `extra`, but for what
repeats a step. The task is not named inside; SWE-agent names the file after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import (
    Format,
    Record,
    Refused,
    any_row,
    fits_begin,
    fits_end,
    fits_step,
    from_row,
    write_rows,
)
from trajlake.formats.json_rows import loads
from trajlake.formats.moving import inside, move, text_or_none, with_repeats, without_repeats
from trajlake.formats.rebuild import Exact, episode_extra, exact, extra_of
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.read.trajectory import Trajectory

_STEP = "step"  # in an entry of the history: the step that it repeats
_FAILURES = (("timeout", "timeout"), ("format", "validation"), ("environment", "environment"))
_BUDGETS = ("exit_cost", "exit_context", "exit_total", "early_exit")


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    trajectory, history = value.get("trajectory"), value.get("history")
    if isinstance(trajectory, list) and ("info" in value or "environment" in value):
        return all(isinstance(entry, dict) and {"action", "observation"} <= entry.keys() for entry in trajectory[:3])
    # A demonstration may have nothing but the messages.
    return value.keys() == {"history"} and isinstance(history, list) and any(inside(item, "agent") for item in history)


def _read(source: Source) -> Iterator[Record | Refused]:
    file: dict[str, Any] = {"layout": source.layout}
    task = source.path.name.removesuffix(".traj")
    for row in source.rows():
        item = (
            row
            if isinstance(row, Refused)
            else from_row(lambda value, key: _record(value, key, task), row, _rebuild, file)
        )
        if isinstance(item, Record):
            file = {}  # it is said once
        yield item


def _record(value: Any, key: str, task: str) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a trajectory of SWE-agent has trajectory, history and info")
    rest = dict(value)
    steps: list[StepFields] = []
    if "trajectory" in rest:
        entries = rest.pop("trajectory")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise FormatError("its `trajectory` is not a list of objects")
        steps = [exact(_step(entry), entry) if _is_usual(entry) else _step(entry) for entry in entries]
    elif "history" not in rest:
        raise FormatError("has neither `trajectory` nor `history`")
    begin: dict[str, Any] = {"task_id": task, "group_id": task, "agent_name": "SWE-agent"}
    end: dict[str, Any] = {}
    move(rest, "environment", begin, "env_name", fits_begin)
    if isinstance(info := rest.get("info"), dict):
        rest["info"] = dict(info)
        move(rest["info"], "exit_status", end, "stop_reason", fits_end)
        move(rest["info"], "swe_agent_version", begin, "agent_version", fits_begin)
        end |= _ending(end.get("stop_reason"))
    config = _config(rest.get("replay_config"))
    begin["policy_name"] = text_or_none(inside(config, "agent", "model", "name"))
    begin["env_snapshot"] = text_or_none(inside(config, "env", "deployment", "image"))
    if isinstance(history := rest.get("history"), list):
        rest["history"] = _without_steps(history, steps)
    if rest:
        begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end))


def _config(value: Any) -> Any:
    """`replay_config`, which some versions write as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value)
    except ValueError:
        return None


def _ending(status: Any) -> dict[str, Any]:
    if not isinstance(status, str):
        return {}
    if any(word in status for word in _BUDGETS):  # also "submitted (exit_cost)": what was done so far
        return {"status": "truncated", "truncated": True, "failure_stage": "budget", "failure_detail": status}
    if status.startswith("submitted"):
        return {"status": "completed"}
    stage = next((stage for word, stage in _FAILURES if word in status), "other")
    return {"status": "failed", "failure_stage": stage, "failure_detail": status}


def _step(entry: dict[str, Any]) -> StepFields:
    rest = dict(entry)
    step: dict[str, Any] = {"source": "agent"}
    move(rest, "response", step, "message", fits_step)
    if rest.get("thought") is not None and rest["thought"] == step.get("message"):
        del rest["thought"]
    move(rest, "thought", step, "reasoning", fits_step)
    if isinstance(action := rest.get("action"), str):
        del rest["action"]
        step["tool_calls"] = [{"name": next(iter(action.split()), None), "arguments": action}]
    if isinstance(rest.get("observation"), str):
        step["tool_results"] = [{"content": rest.pop("observation")}]
    seconds = rest.get("execution_time")
    if isinstance(seconds, float) and fits_step("latency_ms", seconds * 1000):
        step["latency_ms"] = seconds * 1000
        if step["latency_ms"] / 1000 == seconds:
            del rest["execution_time"]
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _is_usual(entry: dict[str, Any]) -> bool:
    """Whether `_entry` makes the entry again whatever else it holds: it writes no response without a thought."""
    return type(entry.get("response")) is not str or "thought" in entry


def _said(response: Any, thought: Any, action: Any) -> dict[str, Any]:
    """What the message of a step in the history repeats of it."""
    return {"role": "assistant", "content": response, "thought": thought, "action": action}


def _without_steps(history: Sequence[Any], steps: Sequence[StepFields]) -> list[Any]:
    """The history without what its messages repeat of the steps, which both are in the same order."""
    kept = []
    index = 0
    for entry in history:
        found = index
        if isinstance(entry, dict) and entry.get("role") == "assistant" and _STEP not in entry:
            while found < len(steps) and steps[found].get("message") != entry.get("content"):
                found += 1
        else:
            found = len(steps)
        if found < len(steps):
            step = steps[found]
            calls = step.get("tool_calls") or [{}]
            said = _said(step.get("message"), step.get("reasoning", step.get("message")), calls[0].get("arguments"))
            entry = {**without_repeats(entry, said), _STEP: found}
            index = found + 1
        kept.append(entry)
    return kept


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    entries = [_entry(step) for step in trajectory.steps]
    row: dict[str, Any] = {"trajectory": entries}
    if episode["env_name"] is not None:
        row["environment"] = episode["env_name"]
    if isinstance(extra.get("info"), dict):
        for name, column in (("exit_status", "stop_reason"), ("swe_agent_version", "agent_version")):
            if episode[column] is not None:
                extra["info"][name] = episode[column]
    if isinstance(extra.get("history"), list):
        extra["history"] = [_with_step(entry, entries) for entry in extra["history"]]
    return row | extra


def _with_step(entry: Any, entries: Sequence[dict[str, Any]]) -> Any:
    if not isinstance(entry, dict) or type(entry.get(_STEP)) is not int or not 0 <= entry[_STEP] < len(entries):
        return entry
    step = entries[entry[_STEP]]
    said = _said(step.get("response"), step.get("thought"), step.get("action"))
    return with_repeats({name: value for name, value in entry.items() if name != _STEP}, said)


def _entry(step: dict[str, Any]) -> dict[str, Any]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    entry: dict[str, Any] = {}
    if step["tool_calls"]:
        entry["action"] = step["tool_calls"][0]["arguments"]
    if step["tool_results"]:
        entry["observation"] = step["tool_results"][0]["content"]
    if step["message"] is not None:
        entry |= {"response": step["message"], "thought": step["message"]}
    if step["reasoning"] is not None:
        entry["thought"] = step["reasoning"]
    if step["latency_ms"] is not None:
        entry["execution_time"] = step["latency_ms"] / 1000
    return entry | extra_of(step)


FORMAT = Format(
    name="swe-agent",
    description="SWE-agent trajectories (.traj): one JSON object {environment, trajectory, history, info}",
    detect=any_row(_is_row),
    read=_read,
    write=write_rows(_rebuild, "values"),
    suffix=".traj",
)

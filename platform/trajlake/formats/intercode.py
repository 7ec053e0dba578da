"""InterCode results: one JSON object of {number: log}, or {meta, logs}; one episode a log, one step a turn.

https://github.com/princeton-nlp/intercode, `experiments/`. Two kinds of log: `turn_history` of parallel lists (actions,
observations, rewards, …) with a `summary`, and the human one, a `trajectory` of {action, observation} with a `reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from trajlake.formats.messages import content_of
from trajlake.formats.moving import inside, move, text_or_none
from trajlake.formats.rebuild import LONG_TEXT, Exact, episode_extra, extra_of, rebuilt, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.read.trajectory import Trajectory

_TURNS = {"actions", "observations"}
_PREFIX = "ic_"


def _is_log(value: Any) -> bool:
    if not isinstance(value, dict) or "environment" not in value or "query" not in value:
        return False
    return isinstance(value.get("turn_history"), dict) or isinstance(value.get("trajectory"), list)


def _logs(value: Any) -> dict[str, Any] | None:
    """The logs by name, if this is a results file."""
    if not isinstance(value, dict):
        return None
    logs = value.get("logs", value)
    return logs if isinstance(logs, dict) and any(map(_is_log, logs.values())) else None


def _read(source: Source) -> Iterator[Record | Refused]:
    for row in source.rows():
        if isinstance(row, Refused):
            yield row
            continue
        logs = _logs(row.value)
        if logs is None:
            yield Refused(row.key, "not InterCode results: an object of logs with environment, query and turns")
            continue
        file: dict[str, Any] = {"layout": source.layout}
        if logs is not row.value:
            file["around"] = {name: value for name, value in row.value.items() if name != "logs"}
        for name, log in logs.items():
            key = f"{row.key}, log {name}"
            try:
                record = replace(_record(log, key), source={"name": name})
                yield traced(record, log, _rebuild, file)
                file = {}  # it is said once
            except (FormatError, UsageError) as error:
                yield Refused(key, str(error))


def _record(log: Any, key: str) -> Record:
    if not isinstance(log, dict):
        raise FormatError("not an object: a log has environment, query and turns")
    rest = dict(log)
    begin: dict[str, Any] = {"task_family": "intercode"}
    end: dict[str, Any] = {}
    move(rest, "environment", begin, "env_name", fits_begin)
    if "env_name" in begin:
        begin["domain"] = str(begin["env_name"]).removeprefix(_PREFIX)
    steps = _steps(rest, begin.get("domain"))
    for name in ("task_id", "query_idx"):
        if "task_id" not in begin:
            move(rest, name, begin, "task_id", fits_begin)
    if "task_id" in begin:
        number, dataset = begin["task_id"], text_or_none(log.get("dataset"))
        place = ("intercode", begin.get("domain"), dataset, number)
        begin["group_id"] = "/".join(str(part) for part in place if part is not None)
        if dataset is not None:  # each begins to count anew
            begin["task_id"] = f"{dataset.rpartition('/')[2].removesuffix('.json')}/{number}"
            rest |= {name: log[name] for name in ("task_id", "query_idx") if name in log}
    _put_outcome(rest, end)
    begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end))


def _steps(rest: dict[str, Any], tool: Any) -> list[StepFields]:
    """The turns. `turn_history` and `trajectory` leave what no column takes behind in `rest`."""
    history, trajectory = rest.get("turn_history"), rest.get("trajectory")
    if isinstance(history, dict):
        lists = {name: values for name, values in history.items() if isinstance(values, list)}
        if not lists.keys() >= _TURNS or len({len(lists[name]) for name in _TURNS}) != 1:
            raise FormatError("its `turn_history` has not as many observations as actions")
        length = len(lists["actions"])
        whole = {name: values for name, values in lists.items() if len(values) == length}
        rest["turn_history"] = {name: value for name, value in history.items() if name not in whole}
        turns = [{name: values[turn] for name, values in whole.items()} for turn in range(length)]
        return [_usual(turn, _IN_LISTS, tool) or _step(turn, _IN_LISTS, tool) for turn in turns]
    if isinstance(trajectory, list):
        del rest["trajectory"]
        if not all(isinstance(turn, dict) for turn in trajectory):
            raise FormatError("its `trajectory` is not a list of objects")
        return [_usual(turn, _IN_OBJECTS, tool) or _step(turn, _IN_OBJECTS, tool) for turn in trajectory]
    raise FormatError("has neither `turn_history` nor `trajectory`")


_IN_LISTS = {"action": "actions", "observation": "observations", "reward": "rewards", "thought": "thoughts"}
_IN_OBJECTS = {"action": "action", "observation": "observation", "reward": "reward", "thought": "thought"}


def _usual(turn: dict[str, Any], names: dict[str, str], tool: Any) -> StepFields | None:
    """The step of a turn as nearly all are, which `_turn` makes again: an action, its observation and a reward, of the
    types that their columns give back."""
    rest = turn.copy()
    action, observation = rest.pop(names["action"], None), rest.get(names["observation"])
    if type(action) is not str or "content_kind" in rest:
        return None
    step = Exact(source="agent")
    step.source = turn
    step["tool_calls"] = [{"id": None, "name": tool, "arguments": action, "arguments_kind": "string"}]
    if observation is not None:
        if type(observation) is not str or len(observation) + len(action) > LONG_TEXT:
            return None
        del rest[names["observation"]]
        is_valid = rest.pop("valid_action") if type(rest.get("valid_action")) is bool else None
        is_error = None if is_valid is None else not is_valid
        step["tool_results"] = [{"call_id": None, "content": observation, "is_error": is_error}]
    for name, column, kind in (
        (names["reward"], "reward", float),
        (names["thought"], "reasoning", str),
        ("steps", "message", str),
    ):
        value = rest.get(name)
        if type(value) is kind:
            step[column] = rest.pop(name)
        elif value is not None:
            return None
    if rest:
        step["extra"] = json_text(rest)
    return cast(StepFields, step)


def _step(turn: dict[str, Any], names: dict[str, str], tool: Any) -> StepFields:
    rest = dict(turn)
    step: dict[str, Any] = {"source": "agent"}
    if isinstance(rest.get(names["action"]), str):
        step["tool_calls"] = [{"name": tool, "arguments": rest.pop(names["action"])}]
    if (observation := rest.get(names["observation"])) is not None:
        result = {"content": observation}
        if isinstance(rest.get("valid_action"), bool):
            result["is_error"] = not rest.pop("valid_action")
        del rest[names["observation"]]
        if not isinstance(observation, str):
            rest["content_kind"] = "object"
        step["tool_results"] = [result]
    move(rest, names["reward"], step, "reward", fits_step)
    move(rest, names["thought"], step, "reasoning", fits_step)
    move(rest, "steps", step, "message", fits_step)  # the plan's step that the action carries out
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _put_outcome(rest: dict[str, Any], end: dict[str, Any]) -> None:
    """The reward of an episode is the best of its turns, as InterCode's success rate is defined."""
    if isinstance(summary := rest.get("summary"), dict):
        rest["summary"] = dict(summary)
        move(rest["summary"], "max_reward", end, "reward", fits_end)
    else:
        move(rest, "reward", end, "reward", fits_end)
    if "reward" in end:
        end["success"] = end["reward"] == 1
    taken, most = inside(summary, "turns_taken"), inside(summary, "turns_max")
    if isinstance(taken, int) and isinstance(most, int) and taken >= most and end.get("success") is False:
        end |= {"status": "truncated", "truncated": True, "failure_stage": "budget"}
    parts = inside(rest, "info", "reward")
    if isinstance(parts, dict) and parts and fits_end("rewards", parts):
        end["rewards"] = [{"name": name, "value": value, "kind": "verifiable"} for name, value in parts.items()]
        rest["info"] = {name: value for name, value in rest["info"].items() if name != "reward"}


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    log = {"environment": episode["env_name"]}
    if isinstance(extra.get("turn_history"), dict):
        turns = [_turn(step, _IN_LISTS) for step in trajectory.steps]
        names = dict.fromkeys(name for turn in turns for name in turn) if turns else _TURNS
        extra["turn_history"] |= {name: [turn.get(name) for turn in turns] for name in names}
        log["task_id"] = episode["task_id"]
    else:
        extra["trajectory"] = [_turn(step, _IN_OBJECTS) for step in trajectory.steps]
        log["query_idx"] = episode["task_id"]
    if isinstance(extra.get("summary"), dict):
        extra["summary"]["max_reward"] = episode["reward"]
    elif episode["reward"] is not None:
        extra["reward"] = episode["reward"]
    if episode["rewards"] is not None and isinstance(extra.get("info"), dict):
        extra["info"]["reward"] = {part["name"]: part["value"] for part in episode["rewards"]}
    return log | extra


def _turn(step: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    extra = extra_of(step)
    turn: dict[str, Any] = {}
    if step["tool_calls"]:
        turn[names["action"]] = step["tool_calls"][0]["arguments"]
    if step["tool_results"]:
        result = step["tool_results"][0]
        turn[names["observation"]] = content_of(result, extra)
        if result["is_error"] is not None:
            turn["valid_action"] = not result["is_error"]
    for name, column in ((names["reward"], "reward"), (names["thought"], "reasoning"), ("steps", "message")):
        if step[column] is not None:
            turn[name] = step[column]
    return turn | extra


def _join(file: Mapping[str, Any], episodes: Sequence[Trajectory]) -> dict[str, Any]:
    logs = {
        source_row(episode.episode).get("name", str(position)): rebuilt(episode, _rebuild)
        for position, episode in enumerate(episodes)
    }
    return logs if file.get("around") is None else {**file["around"], "logs": logs}


FORMAT = Format(
    name="intercode",
    description="InterCode results: one JSON object of {number: log}, or {meta, logs}",
    detect=any_row(lambda value: _logs(value) is not None),
    read=_read,
    write=write_groups(_join),
)

"""kaggle-environments replays: `{name, configuration, steps, …}`, one episode a replay, one step a turn.

https://github.com/Kaggle/kaggle-environments, `kaggle_environments/core.py` and `schemas.json`. A turn holds one state
an agent: the action that led to it, the agent's reward up to then, what it observes, and its status. All agents of a
turn act at once, so that a turn is one step: its message is the JSON list of their actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, any_row, fits_begin, fits_end, per_row, write_rows
from trajlake.formats.quick_json import own_loads
from trajlake.formats.rebuild import LONG_TEXT, Exact, episode_extra, extra_of
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.read.trajectory import Trajectory

_FAILURES = {"TIMEOUT": "timeout", "INVALID": "validation", "ERROR": "other"}
"""The statuses of an agent that was stopped, and the stage of failure that each is."""


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "configuration" not in value:
        return False
    turns = value.get("steps")
    return isinstance(turns, list) and bool(turns) and _is_turn(turns[0])


def _is_turn(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(state, dict) and "action" in state for state in value)
    )


def _record(value: Any, key: str) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
        raise FormatError("not a replay: an object with `steps`, one list of agents' states a turn")
    rest = dict(value)
    turns = rest.pop("steps")
    steps = [_usual(turn, number) or _step(turn, number) for number, turn in enumerate(turns)]
    begin: dict[str, Any] = {"task_family": "kaggle-environments"}
    for name, column in (("name", "env_name"), ("version", "env_version")):
        if rest.get(name) is not None and fits_begin(column, rest[name]):
            begin[column] = rest.pop(name)
    configuration = rest.get("configuration")
    seed = configuration.get("seed") if isinstance(configuration, dict) else None
    if seed is not None and fits_begin("seed", seed):
        begin["seed"] = seed
    end = _outcome(rest, turns[-1] if turns else [])
    if end.get("terminated") and steps:
        steps[-1]["terminated"] = True
    begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, end)


def _usual(turn: Any, number: int) -> StepFields | None:
    """The step of a turn as `_step` gives it, stored; `_turn` makes any turn again."""
    if not _is_turn(turn):
        return None
    step = Exact(source="agent" if number else "environment", message=json_text([state["action"] for state in turn]))
    step.source = turn
    agents = [{name: item for name, item in state.items() if name != "action"} for state in turn]
    step["extra"] = json_text({"agents": agents})
    if len(turn) == 1 and _is_number(turn[0].get("reward")):
        step["reward"] = float(turn[0]["reward"])
    return cast(StepFields, step) if len(step["message"]) <= LONG_TEXT else None


def _step(turn: Any, number: int) -> StepFields:
    if not _is_turn(turn):
        raise FormatError(f"turn {number + 1} is not a list of agents' states with an `action` each")
    step: StepFields = {
        "source": "agent" if number else "environment",  # the first turn is the state before anyone acted
        "message": json_text([state["action"] for state in turn]),
        "extra": {"agents": [{name: item for name, item in state.items() if name != "action"} for state in turn]},
    }
    if len(turn) == 1 and _is_number(turn[0].get("reward")):
        step["reward"] = turn[0]["reward"]
    return step


def _outcome(replay: Mapping[str, Any], last: list[Any]) -> EndFields:
    """The agents' rewards by name, and how it ended. The rows win over the summary: a replay may lack the latter."""
    end: EndFields = {}
    rewards = [state.get("reward") for state in last]
    if not any(map(_is_number, rewards)) and isinstance(replay.get("rewards"), list):
        rewards = replay["rewards"]
    named = [
        {"name": f"agent-{agent}", "value": float(reward)} for agent, reward in enumerate(rewards) if _is_number(reward)
    ]
    if len(rewards) == 1 and named:
        end["reward"] = float(rewards[0])
    elif named:
        end["rewards"] = named
    statuses = [state.get("status") for state in last]
    known = [status for status in statuses if isinstance(status, str)]
    if known:
        end["stop_reason"] = ", ".join(dict.fromkeys(known))
        end["terminated"] = not {"ACTIVE", "INACTIVE"} & set(known)
    for agent, status in enumerate(statuses):
        if isinstance(status, str) and status in _FAILURES:
            end["status"] = "failed"
            end["failure_stage"] = _FAILURES[status]
            end["failure_detail"] = f"agent {agent}: {status}"
            break
    return end


def _is_number(value: Any) -> bool:
    return value is not None and fits_end("reward", value)


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode = trajectory.episode
    replay = {"name": episode["env_name"], "version": episode["env_version"]} | episode_extra(trajectory)
    replay["steps"] = [_turn(step) for step in trajectory.steps]
    return {name: value for name, value in replay.items() if value is not None}


def _turn(step: Mapping[str, Any]) -> list[dict[str, Any]]:
    if type(step) is Exact:
        return step.source  # type: ignore[no-any-return]
    agents = extra_of(step).get("agents", [])
    actions = own_loads(step["message"]) if step["message"] else []
    return [{"action": action} | state for action, state in zip(actions, agents, strict=False)]


FORMAT = Format(
    name="kaggle",
    description="kaggle-environments replay: {name, configuration, steps: [[{action, reward, observation, status}]]}",
    detect=any_row(_is_row),
    read=per_row(_record, _rebuild),
    write=write_rows(_rebuild, "values"),
)

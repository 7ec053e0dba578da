"""ATIF trajectories (Agent Trajectory Interchange Format, 1.0 and on), as Harbor writes them: one episode a file.

https://github.com/laude-institute/harbor, `docs/rfcs/0001-trajectory-format.md`. A step of ATIF is a step here, with
the calls that it makes and the results that came back. `metrics.prompt_token_ids` become the tensor of that name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isclose
from mimetypes import guess_type
from typing import Any, cast

import numpy as np

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, any_row, fits_begin, fits_end, fits_step, per_row, write_rows
from trajlake.formats.messages import arguments, as_object, content_part
from trajlake.formats.quick_json import own_loads
from trajlake.formats.rebuild import LONG_TEXT, Exact, episode_extra, extra_of
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.read.trajectory import Trajectory, to_array

_VERSION = re.compile(r"ATIF-v1\.\d+")
_SOURCES = {"system": "system", "user": "user", "agent": "agent"}
_COLUMNS = {
    "timestamp": "timestamp", "model_name": "model", "reasoning_content": "reasoning",
    "is_copied_context": "is_copied_context",
}  # fmt: skip
_METRICS = {
    "prompt_tokens": "prompt_tokens", "completion_tokens": "completion_tokens", "cached_tokens": "cached_tokens",
    "cost_usd": "cost_usd", "completion_token_ids": "token_ids", "logprobs": "logprobs",
}  # fmt: skip
_AGENT = {"name": "agent_name", "version": "agent_version", "model_name": "policy_name"}
_TOTALS = {
    "total_prompt_tokens": "prompt_tokens", "total_completion_tokens": "completion_tokens",
    "total_cached_tokens": "cached_tokens", "total_cost_usd": "cost_usd",
}  # fmt: skip
_PROMPT_IDS = "prompt_token_ids"
_ROOT = frozenset(
    {
        *("schema_version", "session_id", "trajectory_id", "agent", "notes", "final_metrics", "extra"),
        *("continued_trajectory_ref", "subagent_trajectories"),
    }
)
_STEP = frozenset(
    {"step_id", "timestamp", "message", "observation", "metrics", "reasoning_effort", "llm_call_count", "extra"}
    | _COLUMNS.keys()
)
_USUAL = (_STEP | {"source", "tool_calls"}) - {"timestamp"}
_SIMPLE = {
    "model_name": ("model", str), "reasoning_content": ("reasoning", str),
    "is_copied_context": ("is_copied_context", bool),
}  # fmt: skip
_COUNTS = {"prompt_tokens": int, "completion_tokens": int, "cached_tokens": int, "cost_usd": float}
_LARGE = 2**63  # for a column of whole numbers
_OUTCOME = ("task_id", "reward", "success")
"""What ATIF has no place for, and others have."""
_NEWEST = "ATIF-v1.7"
_OF_AGENTS = ("model_name", "reasoning_content", "tool_calls", "metrics")
"""What may stand in a step of the agent only."""
_IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("steps"), list)
        and isinstance(value.get("schema_version"), str)
        and value["schema_version"].startswith("ATIF-")
    )


def _record(value: Any, key: str) -> Record:
    if not isinstance(value, dict) or not isinstance(value.get("steps"), list):
        raise FormatError("not a trajectory of ATIF: an object with schema_version, agent and steps")
    version = value.get("schema_version")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise FormatError(f"its schema_version is {str(version)[:40]!r}; versions ATIF-v1.0 and on are read")
    rest = dict(value)
    steps = []
    for number, step in enumerate(rest.pop("steps"), 1):
        try:
            steps.append(_usual(step, number) or _step(step, number))
        except FormatError as error:
            raise FormatError(f"step {number}: {error}") from error
    begin: dict[str, Any] = {"task_family": None}
    agent = rest.get("agent")
    if isinstance(agent, dict):
        agent = rest["agent"] = dict(agent)
        for name, column in _AGENT.items():
            if agent.get(name) is not None and fits_begin(column, agent[name]):
                begin[column] = agent.pop(name)
    notes = _contradictions(rest.get("final_metrics"), steps)
    begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, EndFields(), notes=notes)


def _contradictions(totals: Any, steps: list[StepFields]) -> list[str]:
    """Where the summary says something else than the steps, which then count: in words."""
    if not isinstance(totals, dict):
        return []
    found = []
    if isinstance(totals.get("total_steps"), int) and totals["total_steps"] != len(steps):
        found.append(f"total_steps is {totals['total_steps']}, there are {len(steps)}")
    for name, column in _TOTALS.items():
        said = totals.get(name)
        given = [cast(dict[str, Any], step)[column] for step in steps if column in step]
        if given and said is not None and fits_end("reward", said) and not isclose(said, sum(given), rel_tol=1e-6):
            found.append(f"{name} is {said}, the steps' sum is {sum(given)}")
    return [f"final_metrics contradict the steps: {', '.join(found)}"] if found else []


def _usual(given: Any, number: int) -> StepFields | None:
    """The step of one as nearly all are, which `_given` makes again: its keys are ATIF's, and what has a column is of
    the type that this gives back."""
    if type(given) is not dict or not given.keys() <= _USUAL or type(given.get("message")) is not str:
        return None
    source, rest = given.get("source"), given.copy()
    if source not in ("system", "user", "agent") or type(given.get("step_id")) is not int:
        return None
    if given["step_id"] != number or len(given["message"]) > LONG_TEXT:
        return None
    del rest["source"], rest["step_id"]
    step = Exact(source=source, message=rest.pop("message"))
    step.source = given
    for name, (column, kind) in _SIMPLE.items():
        value = rest.get(name)
        if type(value) is kind:
            step[column] = rest.pop(name)
        elif value is not None:
            return None
    if "tool_calls" in rest:
        calls = _usual_calls(rest.pop("tool_calls"))
        if calls is None:
            return None
        step["tool_calls"] = calls
    if "observation" in rest:
        results = _usual_results(rest["observation"])
        if results is None:
            return None
        step["tool_results"] = results
        rest["observation"] = {name: item for name, item in rest["observation"].items() if name != "results"}
    if "metrics" in rest:
        metrics = rest["metrics"]
        if type(metrics) is not dict or source != "agent" or not metrics.keys() <= _COUNTS.keys():
            return None
        if any(type(value) is not _COUNTS[name] for name, value in metrics.items()):
            return None
        if any(abs(value) >= _LARGE for value in metrics.values()):
            return None
        step.update({_METRICS[name]: value for name, value in metrics.items()})
        rest["metrics"] = {}
    if rest:
        step["extra"] = json_text(rest)
    return cast(StepFields, step)


def _usual_calls(calls: Any) -> list[dict[str, Any]] | None:
    rows = []
    for call in calls if type(calls) is list else [None]:
        if type(call) is not dict or len(call) != 3:
            return None
        call_id, name, given = call.get("tool_call_id"), call.get("function_name"), call.get("arguments")
        if type(call_id) is not str or type(name) is not str or type(given) is not dict:
            return None
        rows.append({"id": call_id, "name": name, "arguments": json_text(given), "arguments_kind": "object"})
    return rows


def _usual_results(observation: Any) -> list[dict[str, Any]] | None:
    results = observation.get("results") if type(observation) is dict else None
    rows = []
    for result in results if type(results) is list else [None]:
        if type(result) is not dict or len(result) != 2:
            return None
        call_id, content = result.get("source_call_id"), result.get("content")
        if type(call_id) is not str or type(content) is not str or len(content) > LONG_TEXT:
            return None
        rows.append({"call_id": call_id, "content": content, "is_error": None})
    return rows


def _step(given: Any, number: int) -> StepFields:
    if not isinstance(given, dict):
        raise FormatError("it is not an object")
    rest = dict(given)
    source = rest.pop("source", None)
    if source not in ("system", "user", "agent"):
        raise FormatError(f"its source is {str(source)[:40]!r}; system, user and agent are")
    step: dict[str, Any] = {"source": source}
    if type(rest.get("step_id")) is int and rest["step_id"] == number:
        del rest["step_id"]
    for name, column in _COLUMNS.items():
        if rest.get(name) is not None and fits_step(column, rest[name]):
            step[column] = rest.pop(name)
    _put_message(rest, step)
    _put_calls(rest, step)
    _put_results(rest, step)
    _put_metrics(rest, step)
    if rest:
        step["extra"] = rest
    return cast(StepFields, step)


def _put_message(rest: dict[str, Any], step: dict[str, Any]) -> None:
    message = rest.pop("message", None)
    if isinstance(message, str):
        step["message"] = message
    elif isinstance(message, list) and all(isinstance(part, dict) for part in message):
        step["content_parts"] = message
    elif message is not None:
        raise FormatError("its message is neither text nor a list of parts")


def _put_calls(rest: dict[str, Any], step: dict[str, Any]) -> None:
    calls = rest.pop("tool_calls", None)
    if calls is None:
        return
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise FormatError("its tool_calls are not a list of objects")
    step["tool_calls"] = []
    for given in calls:
        call = dict(given)
        step["tool_calls"].append(
            {"id": call.pop("tool_call_id", None), "name": call.pop("function_name", None)}
            | {"arguments": call.pop("arguments", None)}
            | ({"rest": call} if call else {})
        )


def _put_results(rest: dict[str, Any], step: dict[str, Any]) -> None:
    observation = rest.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    if results is None:
        return
    if not isinstance(results, list) or not all(isinstance(result, dict) for result in results):
        raise FormatError("its observation's results are not a list of objects")
    rest["observation"] = {name: item for name, item in rest["observation"].items() if name != "results"}
    step["tool_results"] = []
    for given in results:
        result = dict(given)
        content = result.pop("content", None)
        kept = {"call_id": result.pop("source_call_id", None), "content": content}
        if content is not None and not isinstance(content, str):
            result = {"rest": result, "content_kind": "object"}
        elif result:
            result = {"rest": result}
        step["tool_results"].append(kept | result)


def _put_metrics(rest: dict[str, Any], step: dict[str, Any]) -> None:
    if not isinstance(rest.get("metrics"), dict):
        return
    metrics = rest["metrics"] = dict(rest["metrics"])
    for name, column in _METRICS.items():
        if metrics.get(name) is not None and fits_step(column, metrics[name]):
            step[column] = metrics.pop(name)
    if isinstance(metrics.get(_PROMPT_IDS), list) and fits_step("token_ids", metrics[_PROMPT_IDS]):
        step["tensors"] = {_PROMPT_IDS: np.array(metrics.pop(_PROMPT_IDS), np.int32)}


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    given = enumerate(trajectory.steps, 1)
    steps = [step.source if type(step) is Exact else _given(step, number) for number, step in given]
    return _root(trajectory, steps)


def _root(trajectory: Trajectory, steps: list[dict[str, Any]]) -> dict[str, Any]:
    episode = trajectory.episode
    value: dict[str, Any] = {"schema_version": _NEWEST} | _fitting(episode_extra(trajectory), _ROOT, episode, _OUTCOME)
    agent = {name: episode[column] for name, column in _AGENT.items() if episode[column] is not None}
    value["agent"] = agent | (value["agent"] if isinstance(value.get("agent"), dict) else {})
    for name in ("name", "version"):  # both are required
        value["agent"].setdefault(name, "unknown")
    return value | {"steps": steps}


def _fitting(extra: dict[str, Any], known: frozenset[str], row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    """What is kept of an object, of which only keys that ATIF knows may stand in it: the others, and columns that it
    has no place for, go to its own `extra`."""
    more = {name: extra.pop(name) for name in list(extra) if name not in known}
    more |= {name: row[name] for name in columns if row[name] is not None}
    if more:
        extra["extra"] = more | (extra["extra"] if isinstance(extra.get("extra"), dict) else {})
    return extra


def _given(step: Mapping[str, Any], number: int) -> dict[str, Any]:
    kept = extra_of(step)
    more = {name: kept.pop(name) for name in ("tool_calls", "tool_results") if isinstance(kept.get(name), dict)}
    extra = _fitting(kept, _STEP, step, ("reward",))
    source = _SOURCES.get(step["source"], "system")
    given: dict[str, Any] = {"step_id": number, "source": source, "message": step["message"] or ""}
    if step["content_parts"] is not None:
        given["message"] = [content_part(part) for part in step["content_parts"]]
    for name, column in _COLUMNS.items():
        if step[column] is not None:
            given[name] = step[column].isoformat().replace("+00:00", "Z") if name == "timestamp" else step[column]
    if step["tool_calls"] is not None:
        given["tool_calls"] = [
            {"tool_call_id": call["id"], "function_name": call["name"], "arguments": as_object(arguments(call))}
            | more.get("tool_calls", {}).get(str(position), {}).get("rest", {})
            for position, call in enumerate(step["tool_calls"])
        ]
    given |= extra
    if step["tool_results"] is not None:
        observation = extra.get("observation")
        results = {"results": _results(step, more.get("tool_results", {}))}
        given["observation"] = results | (observation if isinstance(observation, dict) else {})
    metrics: dict[str, Any] = {name: step[column] for name, column in _METRICS.items() if step[column] is not None}
    for tensor in step["tensors"] or ():
        if tensor["name"] == _PROMPT_IDS:
            metrics[_PROMPT_IDS] = to_array(tensor).tolist()
    if metrics:
        given["metrics"] = metrics | (extra["metrics"] if isinstance(extra.get("metrics"), dict) else {})
    return given


def _results(step: Mapping[str, Any], kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_result(result, kept.get(str(position), {})) for position, result in enumerate(step["tool_results"])]


def _result(result: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    content = result["content"]
    if kept.get("content_kind") == "object":
        content = own_loads(content)
    given: dict[str, Any] = {"source_call_id": result["call_id"], "content": content}
    return given | dict(kept.get("rest", {}))


def _build(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory of an episode from elsewhere, as Harbor's validator takes it. Elsewhere a tool's answer is a step
    of its own; here it stands in the step of its call."""
    if not trajectory.steps:
        name = trajectory.episode["episode_id"]
        raise FormatError(f'episode {name} has no steps, and ATIF wants some: leave such out with "n_steps > 0"')
    steps: list[dict[str, Any]] = []
    callers: dict[str, dict[str, Any]] = {}  # ids come again, and the last call counts
    for step in trajectory.steps:
        answers = [(callers.get(result["call_id"]), _answer(step, result)) for result in step["tool_results"] or ()]
        strays = [answer for caller, answer in answers if caller is None]
        for caller, answer in answers:
            if caller is not None:
                caller.setdefault("observation", {}).setdefault("results", []).append(answer)
        if step["source"] != "tool" or strays or not answers or step["message"] is not None:
            own = _given({**step, "tool_results": None}, len(steps) + 1)
            if step["source"] == "tool" and answers:
                own["message"] = step["message"] or ""
            elif step["content_parts"] is not None and step["message"]:
                own["message"].insert(0, {"type": "text", "text": step["message"]})
            if strays:
                own["observation"] = {"results": strays}
            steps.append(own)
            callers |= {call["tool_call_id"]: own for call in own.get("tool_calls", ())}
    for given in steps:
        _keep_rules(given)
    return _root(trajectory, steps)


def _answer(step: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"source_call_id": result["call_id"], "content": result["content"]}
    extra: dict[str, Any] = {"is_error": True} if result["is_error"] else {}
    if step["source"] == "tool":
        extra |= {name: step[name] for name in ("reward", "error") if step[name] is not None}
        if step["content_parts"] is not None:
            parts = [content_part(part) for part in step["content_parts"]]
            if result["content"] is None:
                answer["content"] = parts
            else:
                extra["content_parts"] = parts
    return answer | ({"extra": extra} if extra else {})


def _keep_rules(given: dict[str, Any]) -> None:
    """Move what may not stand where it is in a step into the `extra` beside it."""
    extra: dict[str, Any] = {}
    given["message"] = _content(given["message"], extra)
    for call in given.get("tool_calls", ()):
        call["function_name"] = call["function_name"] or ""
        if not isinstance(call["arguments"], dict):
            call["extra"], call["arguments"] = {"arguments": call["arguments"]}, {}
    metrics = given.get("metrics", {})
    if None in metrics.get("logprobs", ()):
        metrics["extra"] = {"logprobs": metrics.pop("logprobs")}
    if given["source"] != "agent":
        extra |= {name: given.pop(name) for name in _OF_AGENTS if name in given}
    ids = {call["tool_call_id"] for call in given.get("tool_calls", ())}
    for result in given.get("observation", {}).get("results", ()):
        more: dict[str, Any] = {}
        result["content"] = _content(result["content"], more)
        if result["source_call_id"] not in {*ids, None}:
            more["source_call_id"], result["source_call_id"] = result["source_call_id"], None
        if more:
            result["extra"] = result.get("extra", {}) | more
    if extra:
        given["extra"] = given.get("extra", {}) | extra


def _content(content: Any, extra: dict[str, Any]) -> Any:
    """Text or parts as ATIF has them: text and images of which the kind is known. Other parts go to `extra`."""
    if not isinstance(content, list):
        return content
    parts = [(part, _part(part)) for part in content]
    if others := [part for part, again in parts if again is None]:
        extra["content_parts"] = others
    return [again for _, again in parts if again is not None] or ""


def _part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    link, kind = part.get("uri"), part.get("media_type")
    named = part.get("image_url")  # as OpenAI has images
    if isinstance(named, dict):
        named = named.get("url")
    if "data" in part:
        kind = kind or "image/png"
        link = f"data:{kind};base64,{part['data']}"
    elif isinstance(named, str):
        link = named
    if not isinstance(link, str) or not str(part.get("type")).startswith("image"):
        return None
    kind = kind or (link[5:].partition(";")[0] if link.startswith("data:") else guess_type(link)[0])
    return {"type": "image", "source": {"media_type": kind, "path": link}} if kind in _IMAGES else None


FORMAT = Format(
    name="atif",
    description="ATIF trajectory (Harbor): {schema_version: ATIF-v1.x, agent, steps}, 1.0 to 1.8",
    detect=any_row(_is_row),
    read=per_row(_record, _rebuild),
    write=write_rows(_rebuild, "values", _build),
    takes_any=True,
)

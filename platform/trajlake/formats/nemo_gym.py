"""NeMo Gym rollouts: JSON Lines of `{responses_create_params, response, reward, …}`, one episode a line.

https://github.com/NVIDIA-NeMo/Gym, `nemo_gym/rollout_collection.py`. Input and output are items of OpenAI's Responses
API; one item is one step. An item that a model under training made also carries its token ids and their
log-probabilities, and the ids of the whole prompt, which stay beside it as tensor `prompt_token_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, any_row, fits_begin, fits_end, fits_step, per_row, write_rows
from trajlake.formats.chat import ROLES
from trajlake.formats.messages import content_part
from trajlake.formats.quick_json import own_loads
from trajlake.formats.rebuild import LONG_TEXT, Exact, episode_extra, extra_of
from trajlake.formats.responses import call_keys, call_of, reasoning_of
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.ingest.lists import content_parts, usual_calls
from trajlake.read.trajectory import Trajectory, to_array

_REQUEST, _RESPONSE = "responses_create_params", "response"
_IDS = {"_ng_task_index": "task_id", "_ng_rollout_index": "trial"}
_TOKENS = {"generation_token_ids": "token_ids", "generation_log_probs": "logprobs"}
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens"}
_PROMPT_IDS = "prompt_token_ids"
_UNUSUAL = {*_TOKENS, _PROMPT_IDS, "content_kind"}


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or "reward" not in value:
        return False
    response = value.get(_RESPONSE)
    return (
        isinstance(value.get(_REQUEST), dict)
        and isinstance(response, dict)
        and isinstance(response.get("output"), list)
    )


def _record(value: Any, key: str) -> Record:
    if not isinstance(value, dict):
        raise FormatError(f"not an object: a rollout of NeMo Gym has {_REQUEST}, {_RESPONSE} and reward")
    rest = dict(value)
    request, response = _object(rest, _REQUEST), _object(rest, _RESPONSE)
    prompt, output = request.pop("input", None), response.pop("output", None)
    if isinstance(prompt, str):
        steps: list[StepFields] = [{"source": "user", "message": prompt, "extra": {"input": "text"}}]
    else:
        steps = _steps(prompt, "input")
    steps += _steps(output, "output")
    _put_usage(response.get("usage"), steps, len(steps) - len(output or ()))
    begin: dict[str, Any] = {"task_family": "nemo-gym"}
    for name, column in _IDS.items():
        if rest.get(name) is not None and fits_begin(column, rest[name]):
            begin[column] = rest.pop(name)
    model = response.get("model") or request.get("model")
    if isinstance(model, str):
        begin["policy_name"] = model
    agent = rest.get("agent_ref")
    if isinstance(agent, dict) and isinstance(agent.get("name"), str):
        begin["agent_name"] = agent["name"]
    if "task_id" in begin:  # the index counts the rows of what was asked, in which every agent may have some
        names = ("task_family", "agent_name", "task_id")
        begin["group_id"] = "/".join(str(begin[name]) for name in names if name in begin)
    end: dict[str, Any] = {}
    if rest.get("reward") is not None:
        if not fits_end("reward", rest["reward"]):
            raise FormatError("its `reward` is not a number")
        end["reward"] = rest.pop("reward")
    incomplete = response.get("incomplete_details")
    if isinstance(incomplete, dict) and isinstance(incomplete.get("reason"), str):
        end |= {"status": "truncated", "truncated": True, "stop_reason": incomplete["reason"]}
    begin["extra"] = {**rest, _REQUEST: request, _RESPONSE: response}
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end))


def _object(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(row.get(name), dict):
        raise FormatError(f"has no `{name}`, or it is not an object")
    return dict(row[name])


def _steps(items: Any, what: str) -> list[StepFields]:
    if not isinstance(items, list):
        raise FormatError(f"its `{what}` is neither text nor a list of items")
    steps = []
    for number, item in enumerate(items, 1):
        try:
            steps.append(_usual(item, what) or _step(item, what))
        except FormatError as error:
            raise FormatError(f"{what} item {number}: {error}") from error
    return steps


def _usual(item: Any, what: str) -> StepFields | None:
    """The step of an item as nearly all are, which `_items` makes again: a message, a call or what came of one, of the
    types that their columns give back."""
    if type(item) is not dict or not _UNUSUAL.isdisjoint(item):
        return None
    rest, step = item.copy(), Exact()
    step.source = item
    kind = item.get("type")
    if kind == "message":
        role, content = item.get("role"), rest.pop("content", None)
        if type(role) is not str or role not in ROLES:
            return None
        step["source"], rest["role"] = ROLES[role], rest.pop("role")
        if type(content) is str:
            step["message"] = content
        elif type(content) is not list or not all(map(_is_usual_part, content)):
            return None
        else:
            step["content_parts"] = content_parts(content)
            content = ""
        size = len(content)
    elif kind == "function_call_output":
        call_id, content = rest.pop("call_id", None), rest.pop("output", None)
        if type(call_id) is not str or type(content) is not str:
            return None
        step["source"], size = "tool", len(content)
        step["tool_results"] = [{"call_id": call_id, "content": content, "is_error": None}]
    elif kind == "function_call":
        calls = usual_calls([call_of(rest)])
        if calls is None or None in calls[0][0].values():
            return None
        step["source"], size = "agent", calls[1]
        step["tool_calls"] = calls[0]
    else:
        return None
    step["extra"] = json_text({what: rest})
    return cast(StepFields, step) if size <= LONG_TEXT else None


def _is_usual_part(part: Any) -> bool:
    return (
        type(part) is dict
        and "data" not in part
        and all(type(part.get(name, "")) is str for name in ("type", "text", "media_type", "uri"))
    )


def _step(item: Any, what: str) -> StepFields:
    if not isinstance(item, dict):
        raise FormatError("it is not an object")
    rest = dict(item)
    step: dict[str, Any] = {}
    _put_tokens(rest, step)
    kind = rest.get("type", "message")
    if kind == "message":
        role = rest.pop("role", None)
        if not isinstance(role, str) or role not in ROLES:
            raise FormatError(f"its role is none of {', '.join(ROLES)}")
        step["source"] = ROLES[role]
        rest["role"] = role
        content = rest.pop("content", None)
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            step["content_parts"] = content
        elif isinstance(content, str):
            step["message"] = content
        else:
            raise FormatError("its content is neither text nor a list of parts")
    elif kind == "function_call_output":
        step["source"] = "tool"
        output = rest.pop("output", None)
        step["tool_results"] = [{"call_id": rest.pop("call_id", None), "content": output}]
        if output is not None and not isinstance(output, str):
            rest["content_kind"] = "object"
    else:
        step["source"] = "agent"
        if kind == "function_call":
            step["tool_calls"] = [call_of(rest)]
        else:
            step["reasoning"] = reasoning_of([rest])
    step["extra"] = {what: rest}
    return cast(StepFields, step)


def _put_tokens(rest: dict[str, Any], step: dict[str, Any]) -> None:
    for name, column in _TOKENS.items():
        if rest.get(name) is not None and fits_step(column, rest[name]):
            step[column] = rest.pop(name)
    ids = rest.get(_PROMPT_IDS)
    if isinstance(ids, list) and fits_step("token_ids", ids):
        step["tensors"] = {_PROMPT_IDS: np.array(rest.pop(_PROMPT_IDS), np.int32)}


def _put_usage(usage: Any, steps: list[StepFields], first: int) -> None:
    """The tokens of the whole rollout, which is all that there is, at the last step that the model made."""
    made = [step for step in steps[first:] if step["source"] == "agent"]
    if not made or not isinstance(usage, dict):
        return
    last = cast(dict[str, Any], made[-1])
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    for column, value in [*((column, usage.get(name)) for name, column in _USAGE.items()), ("cached_tokens", cached)]:
        if value is not None and fits_step(column, value):
            last[column] = value


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode = trajectory.episode
    extra = episode_extra(trajectory)
    request, response = (extra.pop(name, {}) for name in (_REQUEST, _RESPONSE))
    row: dict[str, Any] = {_REQUEST: dict(request), _RESPONSE: dict(response), "reward": episode["reward"]}
    items: dict[str, list[Any]] = {"input": [], "output": []}
    started = False
    for step in trajectory.steps:
        if type(step) is Exact:
            started = started or step["source"] == "agent"
            items["input" if step["extra"].startswith('{"input":') else "output"].append(step.source)
            continue
        kept = extra_of(step)
        if kept.get("input") == "text":
            items["input"] = step["message"]
            continue
        # Without a word from an import: what comes before the model's first item was the prompt.
        started = started or step["source"] == "agent"
        what = "input" if "input" in kept else "output" if "output" in kept or started else "input"
        for item in _items(step, kept.get(what)):
            items[what].append(item)
    row[_REQUEST]["input"], row[_RESPONSE]["output"] = items["input"], items["output"]
    for name, column in _IDS.items():
        if episode[column] is not None:
            row[name] = episode[column]
    return row | extra


def _items(step: Mapping[str, Any], kept: Any) -> list[dict[str, Any]]:
    """The step as one item; one that was recorded elsewhere as one item a message, call and result."""
    rest = dict(kept) if isinstance(kept, dict) else {}
    tokens: dict[str, Any] = {name: step[column] for name, column in _TOKENS.items() if step[column] is not None}
    for tensor in step["tensors"] or ():
        if tensor["name"] == _PROMPT_IDS:
            tokens[_PROMPT_IDS] = to_array(tensor).tolist()
    made: list[dict[str, Any]] = []
    is_object = rest.pop("content_kind", None) == "object"
    for result in step["tool_results"] or ():
        content = own_loads(result["content"]) if is_object else result["content"]
        made.append({"type": "function_call_output", "call_id": result["call_id"], "output": content})
    made += [{"type": "function_call", **call_keys(call)} for call in step["tool_calls"] or ()]
    parts = None if step["content_parts"] is None else [content_part(part) for part in step["content_parts"]]
    if parts is not None and made and step["source"] == "tool" and made[0].get("output", ...) is None:
        made[0]["output"] = parts  # what a tool returned elsewhere
    elif parts is not None or step["message"] is not None:
        content = step["message"] if parts is None else parts
        role = {"agent": "assistant", "tool": "user", "environment": "user"}.get(step["source"], step["source"])
        made.insert(0, {"type": "message", "role": role, "content": content})
    if kept is None and step["reasoning"] is not None:
        made.insert(0, {"type": "reasoning", "summary": [{"type": "summary_text", "text": step["reasoning"]}]})
    if not made:
        made.append({})
    made[-1] |= rest | tokens
    return made


def _build(trajectory: Trajectory) -> dict[str, Any]:
    """The row of an episode from elsewhere, with what the Responses API wants in a response."""
    episode = trajectory.episode
    row = _rebuild(trajectory)
    for number, item in enumerate(row[_RESPONSE]["output"]):
        if item.get("role") == "assistant":
            if isinstance(item["content"], str):
                item["content"] = [{"type": "output_text", "text": item["content"], "annotations": []}]
            item |= {"id": f"msg_{number}", "status": "completed"}
    response: dict[str, Any] = {
        "id": f"resp_{episode['episode_id']}",
        "object": "response",
        "created_at": episode["started_at"].timestamp() if episode["started_at"] else 0,
        "model": episode["policy_name"] or "",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    return {**row, _RESPONSE: response | row[_RESPONSE]}


FORMAT = Format(
    name="nemo-gym",
    description="NeMo Gym rollouts: JSON Lines of {responses_create_params, response: {output: […]}, reward, …}",
    detect=any_row(_is_row),
    read=per_row(_record, _rebuild),
    write=write_rows(_rebuild, "lines", _build),
    takes_any=True,
    one_file_each=False,
    suffix=".jsonl",
)

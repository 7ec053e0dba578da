"""One trajectory as one JSON record: flat episode columns, and `messages` as chat templates expect them.

A step is a message; what chat messages do not have (reward, token ids, …) stands beside it under the name of its
column. Tool results become messages of role `tool`, one a result. `openai-chat` reads such records back.
"""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from typing import Any

from trajlake.read.trajectory import Trajectory
from trajlake_schemas import EPISODES

ROLES = {"system": "system", "user": "user", "agent": "assistant", "tool": "tool", "environment": "environment"}
_PLACE = {"steps_path", "row_group", "row_offset", "row_count", "restore"}
EPISODE_COLUMNS = tuple(column for column in EPISODES if column.name not in _PLACE)
_SPELLED_OUT = {
    "episode_id", "step_index", "source", "message", "reasoning", "content_parts", "tool_calls", "tool_results",
    "tensors", "extra",
}  # fmt: skip


def record(trajectory: Trajectory) -> dict[str, Any]:
    """The JSON record of one trajectory; columns that are null are left out."""
    episode = trajectory.episode
    row = {column.name: _plain(episode[column.name]) for column in EPISODE_COLUMNS if episode[column.name] is not None}
    if "extra" in row:
        row["extra"] = json.loads(row["extra"])
    row["messages"] = messages(trajectory)
    return row


def messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The steps as chat messages, in order."""
    return [message for step in trajectory.steps for message in _messages(step)]


def _messages(step: dict[str, Any]) -> list[dict[str, Any]]:
    beside: dict[str, Any] = {
        name: _plain(value) for name, value in step.items() if value is not None and name not in _SPELLED_OUT
    }
    if step["reasoning"] is not None:
        beside["reasoning_content"] = step["reasoning"]
    if step["tensors"] is not None:
        beside["tensors"] = [{**tensor, "data": _base64(tensor["data"])} for tensor in step["tensors"]]
    if step["extra"] is not None:
        beside["extra"] = json.loads(step["extra"])
    results = [_result(result) for result in step["tool_results"] or ()]
    if step["source"] == "tool" and results and step["message"] is None and not step["tool_calls"]:
        results[0] |= beside
        return results
    message: dict[str, Any] = {"role": ROLES[step["source"]], "content": step["message"]}
    if step["content_parts"] is not None:
        message["content"] = [_part(part) for part in step["content_parts"]]
    if step["tool_calls"] is not None:
        message["tool_calls"] = [_call(call) for call in step["tool_calls"]]
    return [message | beside, *results]


def _call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    if call["arguments_kind"] == "object":
        arguments = json.loads(arguments)
    return {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _result(result: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": result["call_id"], "content": result["content"]}
    if result["is_error"] is not None:
        message["is_error"] = result["is_error"]
    return message


def _part(part: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in part.items() if value is not None and name not in {"data", "extra"}}
    if part["data"] is not None:
        given["data"] = _base64(part["data"])
    return given | (json.loads(part["extra"]) if part["extra"] else {})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _plain(value: Any) -> Any:
    """JSON has no NaN, no infinities and no times: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return _base64(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def json_line(value: Any) -> str:
    """Compact JSON in readable Unicode; escaped to ASCII where the text holds lone surrogates."""
    try:
        text = _compact(value, ensure_ascii=False)
    except ValueError:  # NaN or infinities in what was JSON text: arguments, `extra`
        value = _plain(value)
        text = _compact(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _compact(value, ensure_ascii=True)
    return text


def _compact(value: Any, *, ensure_ascii: bool) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, separators=(",", ":"), allow_nan=False)

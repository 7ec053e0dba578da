"""tau-bench results: a JSON array of {task_id, reward, info, traj, trial}, one episode a row, one step a message.

https://github.com/sierra-research/tau-bench, `run.py` and `tau_bench/types.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, Refused, any_row, fits_end, per_row, write_rows
from trajlake.formats.chat import are_messages, chat_steps
from trajlake.formats.messages import chat_messages
from trajlake.formats.rebuild import episode_extra
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields
from trajlake.read.trajectory import Trajectory

_POLICY = re.compile(r"\s*#\s*(airline|retail) agent policy", re.IGNORECASE)
_TOLERANCE = 1e-6


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or not {"task_id", "traj"} <= value.keys():
        return False
    return value["traj"] == [] or are_messages(value["traj"])


def _read(source: Source) -> Iterator[Record | Refused]:
    """All rows of a file are of one domain, which those do not say that raised before their first message."""
    domain = next(filter(None, map(_domain_of_row, source.first_values)), None)

    def record(value: Any, key: str) -> Record:
        nonlocal domain
        domain = _domain_of_row(value) or domain
        return _record(value, key, domain)

    return per_row(record, _rebuild)(source)


def _record(value: Any, key: str, file_domain: str | None) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a row of tau-bench has task_id, reward, info, traj and trial")
    rest = dict(value)
    if "traj" not in rest:
        raise FormatError("has no `traj`, the list of its messages")
    messages = rest.pop("traj")
    steps = chat_steps(messages, is_error=_is_error, exact=True)
    task_id, trial = rest.pop("task_id", None), rest.pop("trial", None)
    domain = _domain(messages) if messages else file_domain
    begin: dict[str, Any] = {"task_family": "tau-bench", "domain": domain, "task_id": task_id, "trial": trial}
    if task_id is not None:
        begin["group_id"] = "/".join(["tau-bench", *([domain] if domain else []), str(task_id)])
    end = _outcome(rest.pop("reward", None), rest.get("info"))
    # Rows that `_build` made say it where the reward says otherwise.
    if "success" in rest and fits_end("success", rest["success"]):
        end["success"] = rest.pop("success")
    if rest:
        begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, end)


def _outcome(reward: Any, info: Any) -> EndFields:
    end: EndFields = {}
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, (int, float)):
            raise FormatError("its `reward` is not a number")
        end["reward"] = reward
        end["success"] = _is_successful(reward)
    # A trial that raised is written with reward 0.0, no messages, and the exception in `info`.
    if isinstance(info, dict) and isinstance(info.get("error"), str):
        end["status"] = "failed"
        end["failure_stage"] = "other"
        end["failure_detail"] = info["error"]
    return end


def _is_successful(reward: float) -> bool:
    """tau-bench's own definition (in run.py), which is also False for NaN and for rewards above 1."""
    return 1 - _TOLERANCE <= reward <= 1 + _TOLERANCE


def _domain_of_row(value: Any) -> str | None:
    return _domain(value["traj"]) if _is_row(value) else None


def _domain(messages: Any) -> str | None:
    for message in messages:
        if message["role"] == "system":
            heading = _POLICY.match(message["content"]) if isinstance(message.get("content"), str) else None
            return heading[1].lower() if heading else None
    return None


def _is_error(content: str) -> bool:
    # `Env.step` answers an exception with "Error: …" and the tools themselves do so too.
    return content.startswith(("Error", "Unknown action "))


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode = trajectory.episode
    return {
        "task_id": episode["task_id"],
        "reward": episode["reward"],
        "traj": chat_messages(trajectory.steps),
        "trial": episode["trial"],
        **episode_extra(trajectory),
    }


def _build(trajectory: Trajectory) -> dict[str, Any]:
    """The row of an episode from elsewhere, with its `success` where tau-bench would take another from its reward."""
    row = {**_rebuild(trajectory), "info": {}}
    reward, success = row["reward"], trajectory.episode["success"]
    read_back = None if reward is None else _is_successful(reward)
    return row if success is read_back else {**row, "success": success}


FORMAT = Format(
    name="tau-bench",
    description="tau-bench results: a JSON array of {task_id, reward, info, traj, trial}",
    detect=any_row(_is_row),
    read=_read,
    write=write_rows(_rebuild, build=_build),
    takes_any=True,
    one_file_each=False,
)

"""verifiers results: JSON Lines of {id, prompt, completion, reward, …}; an episode a row, a step a message.

https://github.com/PrimeIntellect-ai/verifiers, `vf-eval -s`. The steps are those of `completion`; `prompt` is what the
episode starts from, and stays in `extra`. `metadata.json` beside the rows says which environment and
model they are of. Where its averages disagree with the rows, the rows win, and the disagreement is reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from trajlake.errors import FormatError, NoTrajectories
from trajlake.formats.base import Format, Record, Refused, any_row, fits_begin, fits_end, from_row, write_rows
from trajlake.formats.chat import chat_steps
from trajlake.formats.json_rows import loads
from trajlake.formats.messages import chat_messages
from trajlake.formats.moving import move, text_or_none
from trajlake.formats.rebuild import episode_extra, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.ingest.json_text import json_text
from trajlake.read.trajectory import Trajectory

_METADATA = "metadata.json"
_LARGEST_METADATA = 1 << 20
_TOLERANCE = 1e-6
_IDS = ("example_id", "id")
_NO_REWARD = {"id", "example_id", "reward", "generation_ms", "scoring_ms", "total_ms", "success", "is_truncated"}
"""Numbers of a row that are no component of its reward."""


def _is_row(value: Any) -> bool:
    if not isinstance(value, dict) or not {"prompt", "completion"} <= value.keys():
        return False
    return "reward" in value and bool(value.keys() & {*_IDS, "task", "generation_ms", "timing"})


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and {"model", "num_examples", "rollouts_per_example"} <= value.keys()


def _read(source: Source) -> Iterator[Record | Refused]:
    values = source.first_values
    if values and all(map(_is_metadata, values)):
        raise NoTrajectories(
            f"{source.path}: metadata of a verifiers evaluation, which holds no rollouts: "
            "it is read with the results.jsonl beside it"
        )
    file = _File(_metadata_beside(source.path))
    said: dict[str, Any] = {"layout": source.layout}
    waiting: list[Record | Refused] = []  # the last record so far and what follows it: it will bear the notes
    for row in source.rows():
        item = row if isinstance(row, Refused) else from_row(file.record, row, _rebuild, said)
        if isinstance(item, Record):
            said = {}  # it is said once
            yield from waiting
            waiting = []
        waiting.append(item)
    if waiting and isinstance(waiting[0], Record):
        waiting[0] = replace(waiting[0], notes=file.contradictions())
    yield from waiting


def _metadata_beside(path: Path) -> Mapping[str, Any]:
    """What metadata.json says; empty where there is none that can be read."""
    beside = path.parent / _METADATA
    try:
        if not beside.is_file() or beside.stat().st_size > _LARGEST_METADATA:
            return {}
        value = loads(beside.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if _is_metadata(value) else {}


@dataclass
class _File:
    """What is known of a file while its rows are read."""

    metadata: Mapping[str, Any]
    trials: Counter[str] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)

    def record(self, value: Any, key: str) -> Record:
        environment = text_or_none(self.metadata.get("env_id")) or text_or_none(self.metadata.get("env"))
        record = _record(value, key, environment, text_or_none(self.metadata.get("model")))
        if (reward := record.end.get("reward")) is not None:
            self.rewards.append(reward)
        group = record.begin.get("group_id")
        if group is None:
            return record
        self.trials[str(group)] += 1
        return replace(record, begin={**record.begin, "trial": self.trials[str(group)] - 1})

    def contradictions(self) -> tuple[str, ...]:
        said = self.metadata.get("avg_reward")
        if not self.rewards or isinstance(said, bool) or not isinstance(said, (int, float)):
            return ()
        mean = math.fsum(self.rewards) / len(self.rewards)
        if math.isclose(said, mean, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            return ()
        return (
            f"{_METADATA} beside it says that the average reward is {said}, and the {len(self.rewards)} rows have "
            f"{mean:.6g} on average: the rows are right",
        )


def _record(value: Any, key: str, environment: str | None, model: str | None) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a row of verifiers has prompt, completion and reward")
    rest = dict(value)
    if "completion" not in rest:
        raise FormatError("has no `completion`")
    source: dict[str, Any] = {}
    steps = _steps(rest.pop("completion"), source)
    begin: dict[str, Any] = {"task_family": environment or "verifiers", "env_name": environment, "policy_name": model}
    end: dict[str, Any] = {}
    task = text_or_none(rest.get("task"))
    move(rest, "task", begin, "domain", fits_begin)
    for name in _IDS:
        if "task_id" not in begin:
            move(rest, name, begin, "task_id", fits_begin)
            source.update({"id": name} if "task_id" in begin and name != _IDS[0] else {})
    if "task_id" in begin:
        begin["group_id"] = "/".join(filter(None, (begin["task_family"], task, str(begin["task_id"]))))
    _put_outcome(rest, end, source)
    if rest:
        begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end), source=source)


def _steps(completion: Any, source: dict[str, Any]) -> list[StepFields]:
    if isinstance(completion, str):  # of a model without chat messages
        source["text"] = True
        return [{"source": "agent", "message": completion}]
    if completion is None:  # it failed before the model said anything
        source["null"] = True
        return []
    return chat_steps(completion, exact=True)


def _put_outcome(rest: dict[str, Any], end: dict[str, Any], source: dict[str, Any]) -> None:
    move(rest, "reward", end, "reward", fits_end)
    success = rest.get("success")
    if isinstance(success, (bool, int, float)) and success in {0, 1}:
        end["success"] = bool(rest.pop("success"))
        if isinstance(success, bool):
            source["success"] = "bool"
    metrics = rest.get("metrics")
    inner = isinstance(metrics, dict)
    given = metrics if isinstance(metrics, dict) else rest
    parts = {name: number for name, number in given.items() if inner or name not in _NO_REWARD if _is_number(number)}
    if parts:
        end["rewards"] = [
            {"name": name, "value": number, "kind": "judged" if "judge" in name else None}
            for name, number in parts.items()
        ]
        kept = {name: item for name, item in given.items() if name not in parts}
        if inner:
            rest["metrics"] = kept
        else:
            rest.clear()
            rest.update(kept)
    move(rest, "stop_condition", end, "stop_reason", fits_end)
    if rest.get("is_truncated") is True:
        end |= {"truncated": True, "status": "truncated"}
    error = rest.get("error")
    if isinstance(error, dict) and error:  # in newer rows
        said = (text_or_none(error.get(name)) for name in ("error_chain_repr", "message", "error"))
        error = next(filter(None, said), None) or json_text(error)
    if text_or_none(error) or end.get("stop_reason") == "has_error":
        end |= {"status": "failed", "failure_stage": "other", "failure_detail": text_or_none(error)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and fits_end("reward", value)


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    kept = source_row(episode)
    row: dict[str, Any] = {kept.get("id") or _IDS[0]: episode["task_id"]}
    if kept.get("text"):
        row["completion"] = trajectory.steps[0]["message"]
    else:
        row["completion"] = None if kept.get("null") else chat_messages(trajectory.steps)
    for name, column in (("task", "domain"), ("reward", "reward"), ("stop_condition", "stop_reason")):
        if episode[column] is not None:
            row[name] = episode[column]
    if episode["success"] is not None:
        row["success"] = episode["success"] if kept.get("success") == "bool" else float(episode["success"])
    parts = {part["name"]: part["value"] for part in episode["rewards"] or ()}
    if isinstance(extra.get("metrics"), dict):
        extra["metrics"] |= parts
    else:
        row |= parts
    return row | extra


def _build(trajectory: Trajectory) -> dict[str, Any]:
    """The row of an episode from elsewhere: what was said before the agent's first word is the prompt."""
    episode, steps = trajectory.episode, trajectory.steps
    first = next((place for place, step in enumerate(steps) if step["source"] == "agent"), len(steps))
    row = _rebuild(Trajectory({**episode, "rewards": None}, steps[first:]))
    metrics = {part["name"]: part["value"] for part in episode["rewards"] or ()}
    return {"prompt": chat_messages(steps[:first]), "reward": None, "answer": "", "info": {}, "metrics": metrics} | row


FORMAT = Format(
    name="verifiers",
    description="verifiers results: JSON Lines of {id, prompt, completion, reward, …}, with metadata.json beside them",
    detect=any_row(lambda value: _is_row(value) or _is_metadata(value)),
    read=_read,
    write=write_rows(_rebuild, "lines", _build),
    takes_any=True,
    one_file_each=False,
    suffix=".jsonl",
)

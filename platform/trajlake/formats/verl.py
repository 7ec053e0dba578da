"""verl rollouts: the JSON Lines that `trainer.rollout_data_dir` and `validation_data_dir` make, one episode a line.

https://github.com/volcengine/verl, `RayPPOTrainer._dump_generations`: `input` and `output` as text (several turns stand
in `output` as the chat template put them), `gts` (the ground truth), `score`, `step` (of the training), and one key for
each of the reward function's own figures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, any_row, fits_begin, fits_end, per_row, write_rows
from trajlake.formats.messages import as_object
from trajlake.formats.rebuild import episode_extra
from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields
from trajlake.read.trajectory import Trajectory

_TEXTS = ("input", "output")


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and "score" in value and all(isinstance(value.get(name), str) for name in _TEXTS)


def _record(value: Any, key: str) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a verl rollout has input, output, score and step")
    for name in (*_TEXTS, "score"):
        if name not in value:
            raise FormatError(f"has no `{name}`: a verl rollout has input, output, score and step")
        if name in _TEXTS and not isinstance(value[name], str):
            raise FormatError(f"its `{name}` is not text")
    rest = dict(value)
    prompt, output = rest.pop("input"), rest.pop("output")
    steps: list[StepFields] = [{"source": "user", "message": prompt}, {"source": "agent", "message": output}]
    # All rollouts of one prompt are a group, also over training steps.
    group = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    begin: dict[str, Any] = {"task_family": "verl", "group_id": group}
    if "step" in rest and rest["step"] is not None and fits_begin("policy_version", rest["step"]):
        begin["policy_version"] = rest.pop("step")
    end: dict[str, Any] = {}
    score = rest.pop("score")
    if score is not None and not fits_end("reward", score):
        raise FormatError("its `score` is not a number")
    if score is not None:
        end["reward"] = score
    # The reward functions that verl ships say with `acc` whether the answer was right.
    if rest.get("acc") in (0, 1):
        end["success"] = bool(rest["acc"])
    begin["extra"] = rest
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end))


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, steps = trajectory.episode, trajectory.steps
    said = [step for step in steps if step["source"] == "agent"]
    row: dict[str, Any] = {
        "input": "\n".join(step["message"] or "" for step in steps if step["source"] != "agent"),
        "output": "\n".join(step["message"] or "" for step in said),
        "score": episode["reward"],
    }
    if episode["policy_version"] is not None:
        row["step"] = episode["policy_version"]
    return row | episode_extra(trajectory)


def _build(trajectory: Trajectory) -> dict[str, Any]:
    """The row of an episode from elsewhere: the prompt is what was said before the agent's first word, and all turns
    from there on are the output. What `acc` says is the reward function's, so it is there where success is known."""
    episode, steps = trajectory.episode, trajectory.steps
    first = next((place for place, step in enumerate(steps) if step["source"] == "agent"), len(steps))
    row = {
        "input": "\n".join(map(_said, steps[:first])),
        "output": "\n".join(map(_said, steps[first:])),
        "gts": None,
        "score": episode["reward"],
        "step": episode["policy_version"],
    }
    return row if episode["success"] is None else {**row, "acc": episode["success"]}


def _said(step: Mapping[str, Any]) -> str:
    """What a step says as text; a call as most chat templates write it."""
    texts = [step["message"], *(part["text"] for part in step["content_parts"] or ())]
    for call in step["tool_calls"] or ():
        given = {"name": call["name"], "arguments": as_object(call["arguments"])}
        texts.append(f"<tool_call>\n{json.dumps(given, ensure_ascii=False)}\n</tool_call>")
    texts += [result["content"] for result in step["tool_results"] or ()]
    return "\n".join(text for text in texts if text)


FORMAT = Format(
    name="verl",
    description="verl rollouts: JSON Lines of {input, output, gts, score, step, …}",
    detect=any_row(_is_row),
    read=per_row(_record, _rebuild),
    write=write_rows(_rebuild, "lines", _build),
    takes_any=True,
    one_file_each=False,
    suffix=".jsonl",
)

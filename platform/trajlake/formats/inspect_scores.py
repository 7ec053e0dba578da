"""What Inspect's scores, errors and limits say of an episode's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from trajlake.formats.base import fits_end
from trajlake.ingest.episode import EndFields

_LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_VERDICTS = _LETTERS.keys() - {"P"}  # half right is for the reader to judge; no answer counts as incorrect
_WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
_STAGES = {"time": "timeout", "working": "timeout", "token": "budget", "message": "budget", "cost": "budget"}


def outcome(sample: Mapping[str, Any]) -> EndFields:
    """Reward, success and status of a sample. With one scorer its score is the reward; with several each is one of
    `rewards`, and which of them counts is for the reader to say."""
    end: dict[str, Any] = {}
    scores = sample.get("scores")
    if not scores and sample.get("score") is not None:  # one score, as the oldest logs have it
        scores = {"score": sample["score"]}
    named = (
        {name: score.get("value") for name, score in scores.items() if isinstance(score, dict)}
        if isinstance(scores, dict)
        else {}
    )
    components = [component for name, value in named.items() for component in _components(name, value)]
    if components:
        end["rewards"] = components
    if len(components) == 1:
        end["reward"] = components[0]["value"]
        value = next(iter(named.values()))
        if isinstance(value, bool) or (isinstance(value, str) and value in _VERDICTS):
            end["success"] = value in ("C", True)
    _put_status(sample, end)
    return cast(EndFields, end)


def as_number(value: Any) -> float | None:
    """As Inspect's `value_to_float`: C is 1, P is 0.5, I and N are 0, yes and true are 1; text is read as a number.
    None for what is no number."""
    if isinstance(value, str):
        if value in _LETTERS:
            return _LETTERS[value]
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            return float(value)
        except ValueError:
            return None
    if isinstance(value, bool):
        return float(value)
    return float(value) if value is not None and fits_end("reward", value) else None


def _components(name: str, value: Any) -> list[dict[str, Any]]:
    kind = {"kind": "judged"} if name.startswith("model_graded") else {}
    if isinstance(value, dict):
        parts = [(f"{name}.{part}", as_number(item)) for part, item in value.items()]
    else:
        parts = [(name, as_number(value))]
    return [{"name": part, "value": number, **kind} for part, number in parts if number is not None]


def _put_status(sample: Mapping[str, Any], end: dict[str, Any]) -> None:
    error, limit = sample.get("error"), sample.get("limit")
    if isinstance(error, dict):
        end |= {"status": "failed", "failure_stage": "other"}
        if isinstance(error.get("message"), str):
            end["failure_detail"] = error["message"]
    elif isinstance(limit, dict) and isinstance(limit.get("type"), str):
        end |= {"status": "truncated", "truncated": True, "stop_reason": limit["type"]}
        end["failure_stage"] = _STAGES.get(limit["type"], "other")
    if "stop_reason" not in end:
        output = sample.get("output")
        choices = output.get("choices") if isinstance(output, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(first, dict) and isinstance(first.get("stop_reason"), str):
            end["stop_reason"] = first["stop_reason"]

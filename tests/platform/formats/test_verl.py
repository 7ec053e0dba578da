"""verl rollouts: prompt and answer as two steps, rollouts of one prompt as a group."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.mutation import check, mutations

from trajlake.formats import detect, format_named

pytestmark = pytest.mark.unit

ROW = {"input": "user\n1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 40, "acc": True, "pred": "2"}


def test_a_line_is_an_episode_of_prompt_and_answer(put: Any, run_import: Any) -> None:
    rows = [ROW, {**ROW, "output": "3", "score": -1, "acc": 0}, {**ROW, "input": "another", "acc": 0.5}]
    imported = run_import(put("\n".join(map(json.dumps, rows))))
    assert imported.report.files[0].format == "verl"
    assert [(step["source"], step["message"]) for step in imported.steps[:2]] == [
        ("user", "user\n1+1?"),
        ("agent", "2"),
    ]
    first, second, third = imported.begins
    assert first["group_id"] == second["group_id"] != third["group_id"]
    assert (first["policy_version"], json.loads(first["restore"])) == ("40", {"policy_version": 40})
    extra = json.loads(first["extra"])
    assert (extra["gts"], extra["acc"], extra["pred"]) == ("2", True, "2")
    assert [(end["reward"], end["success"]) for end in imported.ends] == [(1.0, True), (-1.0, False), (1.0, None)]


@pytest.mark.parametrize(("text", "expected"), [("null", None), ("0", 0.0), ("NaN", math.nan), ("1.5", 1.5)])
def test_four_different_scores_stay_different(put: Any, run_import: Any, text: str, expected: float | None) -> None:
    [end] = run_import(put(json.dumps({**ROW, "score": "?"}).replace('"?"', text))).ends
    assert end["reward"] == expected or (math.isnan(end["reward"]) and math.isnan(expected or 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"score": "high"}, "its `score` is not a number"),
        ({"output": None}, "its `output` is not text"),
        ({"score": [1]}, "its `score` is not a number"),
    ],
)
def test_a_broken_line_is_refused_alone(put: Any, run_import: Any, change: dict[str, Any], reason: str) -> None:
    [file] = run_import(put("\n".join(map(json.dumps, [ROW, {**ROW, **change}, ROW])))).report.files
    assert (file.episodes, [refused.row for refused in file.refusals]) == (2, ["line 2"])
    assert file.refusals[0].reason == reason


def test_the_two_texts_alone_are_no_verl(put: Any) -> None:
    path = put([{"input": "a", "output": "b", "messages": [{"role": "user", "content": "x"}]}])
    assert detect(path).name == "openai-chat"


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([ROW]))
def test_mutated_rollouts_come_out_as_they_went_in_or_are_refused(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "40.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(ROW) + "\n")
    check(format_named("verl"), path)

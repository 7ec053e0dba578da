"""ATIF trajectories: a step of ATIF is a step; metrics, calls and results in columns; every version 1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.mutation import check, mutations

from trajlake.formats import Record, format_named, open_source
from trajlake.formats.rebuild import stored

pytestmark = pytest.mark.unit

STEPS: list[dict[str, Any]] = [
    {"step_id": 1, "source": "system", "message": "Be brief."},
    {
        "step_id": 2,
        "timestamp": "2025-10-11T10:30:00Z",
        "source": "user",
        "message": [
            {"type": "text", "text": "What is this?"},
            {"type": "image", "source": {"media_type": "image/png", "path": "images/1.png"}},
        ],
    },
    {
        "step_id": 3,
        "timestamp": "2025-10-11T10:30:02.250000+02:00",
        "source": "agent",
        "message": "",
        "model_name": "gemini",
        "reasoning_content": "Look.",
        "reasoning_effort": "high",
        "llm_call_count": 1,
        "tool_calls": [
            {"tool_call_id": "a", "function_name": "look", "arguments": {"x": 1}, "extra": {"timeout": 5}},
            {"tool_call_id": "b", "function_name": "wait", "arguments": {}},
        ],
        "observation": {
            "results": [
                {"source_call_id": "a", "content": "a cat", "extra": {"score": 0.5}},
                {"source_call_id": "b", "content": [{"type": "text", "text": "ok"}]},
                {"content": None, "subagent_trajectory_ref": [{"trajectory_id": "sub"}]},
            ]
        },
        "metrics": {
            "prompt_tokens": 520,
            "completion_tokens": 80,
            "cached_tokens": 200,
            "cost_usd": 0.00045,
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3, 4],
            "logprobs": [-0.1, -0.25],
            "extra": {"reasoning_tokens": 7},
        },
    },
    {"step_id": 4, "source": "agent", "message": "A cat.", "is_copied_context": True, "extra": {"a": 1}},
]
TRAJECTORY: dict[str, Any] = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "trajectory_id": "t",
    "agent": {"name": "terminus", "version": "2.0", "model_name": "gemini", "tool_definitions": [{"name": "look"}]},
    "steps": STEPS,
    "notes": "n",
    "final_metrics": {"total_prompt_tokens": 520, "total_completion_tokens": 80, "total_steps": 4},
    "subagent_trajectories": [{"schema_version": "ATIF-v1.7", "trajectory_id": "sub", "steps": []}],
}


def test_a_step_is_a_step_with_its_calls_and_results(put: Any, run_import: Any) -> None:
    imported = run_import(put(TRAJECTORY))
    [file] = imported.report.files
    assert (file.format, file.episodes, file.steps, file.notes) == ("atif", 1, 4, [])
    [begin] = imported.begins
    assert (begin["agent_name"], begin["agent_version"], begin["policy_name"]) == ("terminus", "2.0", "gemini")
    user, agent, copied = imported.steps[1:]
    assert [part["type"] for part in user["content_parts"]] == ["text", "image"]
    assert (agent["reasoning"], agent["model"], agent["cost_usd"]) == ("Look.", "gemini", 0.00045)
    assert [call["name"] for call in agent["tool_calls"]] == ["look", "wait"]
    assert agent["tool_calls"][0]["arguments_kind"] == "object"
    assert [result["call_id"] for result in agent["tool_results"]] == ["a", "b", None]
    assert (list(agent["token_ids"]), agent["prompt_tokens"], agent["cached_tokens"]) == ([3, 4], 520, 200)
    assert np.frombuffer(agent["tensors"][0]["data"], np.int32).tolist() == [1, 2]
    assert copied["is_copied_context"] is True
    assert agent["timestamp"].isoformat() == "2025-10-11T08:30:02.250000+00:00"


@pytest.mark.parametrize("minor", range(9))
def test_every_version_one_is_read(put: Any, run_import: Any, minor: int) -> None:
    steps = [{"step_id": 1, "source": "user", "message": "hi"}]
    imported = run_import(
        put({"schema_version": f"ATIF-v1.{minor}", "agent": {"name": "a", "version": "1"}, "steps": steps})
    )
    assert (imported.report.episodes, imported.report.steps) == (1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "ATIF-v2.0"}, "its schema_version is 'ATIF-v2.0'; versions ATIF-v1.0 and on are read"),
        ({"steps": [{"source": "tool", "message": ""}]}, "step 1: its source is 'tool'; system, user and agent are"),
        ({"steps": [STEPS[0], 5]}, "step 2: it is not an object"),
        ({"steps": [{"source": "user", "message": 5}]}, "step 1: its message is neither text nor a list of parts"),
    ],
)
def test_what_cannot_be_told_is_refused(put: Any, run_import: Any, change: dict[str, Any], reason: str) -> None:
    [file] = run_import(put({**TRAJECTORY, **change})).report.files
    assert file.refusals[0].reason == reason


def test_a_summary_that_contradicts_its_steps_is_reported_and_the_steps_win(put: Any, run_import: Any) -> None:
    totals = {"total_prompt_tokens": 999, "total_steps": 40}
    [file] = run_import(put({**TRAJECTORY, "final_metrics": totals})).report.files
    assert file.notes == [
        "final_metrics contradict the steps: total_steps is 40, there are 4, "
        "total_prompt_tokens is 999, the steps' sum is 520"
    ]
    assert file.steps == 4


def test_a_trajectory_comes_out_as_it_went_in_with_little_help(put: Any) -> None:
    [record] = check(format_named("atif"), put(TRAJECTORY))
    paths = [path for path, *_ in record.source.get("patch", [])]
    assert [path[-1] for path in paths if "logprobs" not in path] == ["timestamp", "source_call_id"]


def test_episodes_from_elsewhere_become_trajectories_of_atif(put: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a cat", "tool_call_id": "c", "name": "look"},
        {"role": "tool", "content": "stray", "tool_call_id": "d"},
    ]
    [record] = format_named("openai-chat").read(open_source(put([{"messages": messages, "task_id": 5, "reward": 1}])))
    assert isinstance(record, Record)
    write = format_named("atif").write
    assert write is not None
    trajectory = json.loads(b"".join(write([stored(replace(record, source={}))])))
    assert trajectory["agent"] == {"name": "unknown", "version": "unknown"}
    assert trajectory["extra"] == {"task_id": 5, "reward": 1.0}
    system, agent, stray = trajectory["steps"]
    assert system == {"step_id": 1, "source": "system", "message": "Be brief."}
    assert agent["tool_calls"] == [{"tool_call_id": "c", "function_name": "look", "arguments": {"x": 1}}]
    assert agent["observation"] == {"results": [{"source_call_id": "c", "content": "a cat"}]}
    assert (stray["step_id"], stray["source"]) == (3, "system")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([TRAJECTORY]))
def test_mutated_trajectories_come_out_as_they_went_in_or_are_refused(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(row))
    check(format_named("atif"), path)

"""SWE-agent trajectories: a command and what came back is a step; the history repeats none of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.swe_agent import FORMAT

ACTION = "find_file missing_colon.py\n"
HISTORY = [
    {"role": "system", "content": "SETTING", "agent": "main", "message_type": "system_prompt"},
    {"role": "user", "content": "the issue", "agent": "main"},
    {"role": "assistant", "content": "I look", "thought": "I look", "action": ACTION, "agent": "main"},
    {"role": "tool", "content": "Found 1 match", "agent": "main", "tool_call_ids": ["c"]},
    {"role": "assistant", "content": "Done ```submit```", "thought": "Done", "action": "submit", "agent": "main"},
]


def trajectory(**changes: Any) -> dict[str, Any]:
    whole = {
        "environment": "swe_main",
        "trajectory": [
            {
                "action": ACTION,
                "observation": "Found 1 match",
                "response": "I look",
                "thought": "I look",
                "execution_time": 0.5,
                "state": {"open_file": "n/a"},
            },
            {"action": "submit", "observation": "", "response": "Done ```submit```", "thought": "Done", "state": "{}"},
        ],
        "history": HISTORY,
        "info": {"exit_status": "submitted", "submission": "diff", "model_stats": {"tokens_sent": 7141}},
    }
    return whole | changes


def record(put: Any, content: Any, name: str = "pydicom__pydicom-1458.traj") -> Record:
    path = put(content, name)
    assert detect(path).name == "swe-agent"
    assert check(FORMAT, path)
    [found] = FORMAT.read(open_source(path))
    assert isinstance(found, Record)
    return found


@pytest.mark.unit
def test_an_entry_of_the_trajectory_is_a_step(put: Any) -> None:
    found = record(put, trajectory())
    assert found.begin["task_id"] == found.begin["group_id"] == "pydicom__pydicom-1458"
    assert (found.begin["env_name"], found.begin["agent_name"]) == ("swe_main", "SWE-agent")
    assert found.end == {"stop_reason": "submitted", "status": "completed"}
    first, second = found.rows.steps
    assert first == {
        "source": "agent",
        "message": "I look",
        "tool_calls": [{"id": None, "name": "find_file", "arguments": ACTION, "arguments_kind": "string"}],
        "tool_results": [{"call_id": None, "content": "Found 1 match", "is_error": None}],
        "latency_ms": 500.0,
        "extra": '{"state":{"open_file":"n/a"}}',
    }
    assert (second["message"], second["reasoning"]) == ("Done ```submit```", "Done")
    assert "patch" not in found.source


@pytest.mark.unit
def test_the_history_is_kept_without_what_repeats_the_steps(put: Any) -> None:
    kept = record(put, trajectory()).begin["extra"]["history"]
    assert kept == [*HISTORY[:2], {"agent": "main", "step": 0}, HISTORY[3], {"agent": "main", "step": 1}]


@pytest.mark.unit
@pytest.mark.parametrize("as_text", [True, False])
def test_model_and_image_are_in_the_replay_config(put: Any, as_text: bool) -> None:
    config: Any = {"agent": {"model": {"name": "gpt-4o"}}, "env": {"deployment": {"image": "tiny"}}}
    begin = record(put, trajectory(replay_config=json.dumps(config) if as_text else config)).begin
    assert (begin["policy_name"], begin["env_snapshot"]) == ("gpt-4o", "tiny")
    assert record(put, trajectory(replay_config="{")).begin["policy_name"] is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("exit_status", "status", "stage"),
    [
        ("submitted (exit_cost)", "truncated", "budget"),
        ("exit_context", "truncated", "budget"),
        ("exit_command_timeout", "failed", "timeout"),
        ("exit_format", "failed", "validation"),
        ("exit_error", "failed", "other"),
        (None, None, None),
        (7, None, None),
    ],
)
def test_the_exit_status_gives_the_status(put: Any, exit_status: Any, status: str | None, stage: str | None) -> None:
    end = record(put, trajectory(info={"exit_status": exit_status})).end
    assert (end.get("status"), end.get("failure_stage")) == (status, stage)
    assert end.get("stop_reason") == exit_status


@pytest.mark.unit
def test_a_demonstration_that_is_a_history_only_has_no_steps(put: Any) -> None:
    found = record(put, {"history": HISTORY})
    assert found.steps == []
    assert found.begin["extra"] == {"history": HISTORY}


@pytest.mark.unit
def test_what_is_no_trajectory_is_refused(put: Any) -> None:
    for content, reason in (
        ([5], "not an object: a trajectory of SWE-agent has trajectory, history and info"),
        ({"info": {}}, "has neither `trajectory` nor `history`"),
        (trajectory(trajectory=[1]), "its `trajectory` is not a list of objects"),
    ):
        [found] = FORMAT.read(open_source(put(content)))
        assert isinstance(found, Refused)
        assert found.reason == reason


@pytest.mark.unit
def test_mutated_trajectories_give_records_and_refusals(tmp_path: Path) -> None:
    withstand(FORMAT, [trajectory(), {"history": HISTORY}], tmp_path)


def test_the_published_trajectories_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "swe-agent")
    assert len(files) == 8
    for path, episodes, steps in files:
        [found] = check_real_file(FORMAT, path, episodes, steps, tmp_path)
        assert found.begin["task_id"] == path.stem
        assert len(found.source.get("patch", [])) <= 1


def test_mutated_published_trajectories(realdata: Path, tmp_path: Path) -> None:
    withstand(FORMAT, [json.loads(path.read_text()) for path, _, _ in real_files(realdata, "swe-agent")], tmp_path)

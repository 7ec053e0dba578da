"""kaggle-environments replays: one episode a replay, one step a turn, the agents' rewards by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.mutation import check, mutations

from trajlake.formats import detect, format_named

pytestmark = pytest.mark.unit

STATE = {"reward": 0, "info": {}, "observation": {"board": [0, 1], "step": 0}, "status": "ACTIVE"}
REPLAY = {
    "id": "r",
    "name": "connectx",
    "version": "1.0.1",
    "configuration": {"seed": 7, "episodeSteps": 1000},
    "steps": [
        [{"action": None, **STATE}, {"action": 0, **STATE}],
        [{"action": {"column": 3}, **STATE}, {"action": "x", **STATE, "reward": None}],
        [{"action": 1, **STATE, "reward": 1, "status": "DONE"}, {"action": 0, **STATE, "reward": -1, "status": "DONE"}],
    ],
    "rewards": [1, -1],
    "statuses": ["DONE", "DONE"],
}


def with_last(*states: dict[str, Any]) -> dict[str, Any]:
    return {**REPLAY, "steps": [*REPLAY["steps"][:-1], [{"action": 0, **STATE, **state} for state in states]]}


def test_a_turn_is_a_step_and_its_message_the_actions(put: Any, run_import: Any) -> None:
    imported = run_import(put(REPLAY))
    [begin], [end] = imported.begins, imported.ends
    assert imported.report.files[0].format == "kaggle"
    assert [step["source"] for step in imported.steps] == ["environment", "agent", "agent"]
    assert json.loads(imported.steps[1]["message"]) == [{"column": 3}, "x"]
    assert (begin["env_name"], begin["env_version"], begin["seed"]) == ("connectx", "1.0.1", 7)
    assert [(part["name"], part["value"]) for part in end["rewards"]] == [("agent-0", 1.0), ("agent-1", -1.0)]
    assert (end["reward"], end["stop_reason"], end["terminated"], end["truncated"]) == (None, "DONE", True, None)
    assert [step["terminated"] for step in imported.steps] == [None, None, True]


def test_one_agent_alone_has_the_reward_itself(put: Any, run_import: Any) -> None:
    turns = [[{"action": 0, **STATE, "reward": 0.5}], [{"action": 1, **STATE, "reward": 2}]]
    imported = run_import(put({**REPLAY, "steps": turns}))
    assert [step["reward"] for step in imported.steps] == [0.5, 2.0]
    assert (imported.ends[0]["reward"], imported.ends[0]["rewards"]) == (2.0, None)
    assert imported.ends[0]["terminated"] is False


@pytest.mark.parametrize(("status", "stage"), [("TIMEOUT", "timeout"), ("INVALID", "validation"), ("ERROR", "other")])
def test_an_agent_that_was_stopped_is_named(put: Any, run_import: Any, status: str, stage: str) -> None:
    [end] = run_import(put(with_last({"status": "DONE"}, {"status": status, "reward": None}))).ends
    assert (end["status"], end["failure_stage"], end["failure_detail"]) == ("failed", stage, f"agent 1: {status}")
    assert end["stop_reason"] == f"DONE, {status}"
    assert [part["name"] for part in end["rewards"]] == ["agent-0"]


def test_rewards_of_the_summary_serve_where_the_turns_have_none(put: Any, run_import: Any) -> None:
    [end] = run_import(put({**with_last({"reward": None}, {"reward": None}), "rewards": [3, None]})).ends
    assert [(part["name"], part["value"]) for part in end["rewards"]] == [("agent-0", 3.0)]


def test_a_turn_without_actions_refuses_the_replay(put: Any, run_import: Any) -> None:
    [file] = run_import(put({**REPLAY, "steps": [REPLAY["steps"][0], [{"reward": 1}]]})).report.files
    assert file.refused == 1
    assert file.refusals[0].reason.startswith("turn 2 is not a list of agents' states")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([REPLAY]))
def test_mutated_replays_come_out_as_they_went_in_or_are_refused(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(row))
    check(format_named("kaggle"), path)


def test_real_replays_come_out_as_they_went_in(realdata: Path, tmp_path: Path) -> None:
    paths = sorted((realdata / "kaggle-environments").rglob("*.json"))
    assert len(paths) == 11
    for path in paths:
        assert detect(path).name == "kaggle"
        copy = tmp_path / "replay.json"
        copy.write_bytes(path.read_bytes())
        assert len(check(format_named("kaggle"), copy)) == 1

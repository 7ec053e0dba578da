"""tau2-bench results come in with tau2's own definitions, and go out as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.json_rows import Row
from trajlake.formats.rebuild import stored
from trajlake.formats.tau2_bench import FORMAT

RAW = {
    "finish_reason": "tool_calls",
    "message": {
        "content": None,
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"id":"é"}'}}],
        "annotations": [],
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "name": "look", "arguments": {"id": "é"}, "requestor": "assistant"}],
    "turn_idx": 1,
    "timestamp": "2025-08-01T16:20:50.283373",
    "cost": 0.00705,
    "usage": {"completion_tokens": 22, "prompt_tokens": 3437},
    "raw_data": RAW,
    "errors": None,
}
RESULT = {
    "id": "c1",
    "role": "tool",
    "content": "Error: no such id",
    "requestor": "assistant",
    "error": True,
    "turn_idx": 2,
    "timestamp": "2025-08-01T16:20:50.284163",
}
USER = {
    "role": "user",
    "content": "hi",
    "tool_calls": None,
    "turn_idx": 0,
    "cost": 0.001,
    "usage": None,
    "raw_data": None,
}


def simulation(**changes: Any) -> dict[str, Any]:
    whole = {
        "id": "b76",
        "task_id": "13",
        "timestamp": "2025-08-01T16:21:03.551563",
        "start_time": "2025-08-01T16:20:44.321269",
        "end_time": "2025-08-01T16:21:03",
        "duration": 19.2,
        "termination_reason": "user_stop",
        "agent_cost": 0.02746,
        "reward_info": {
            "reward": 1.0,
            "reward_basis": ["DB", "NL_ASSERTION"],
            "reward_breakdown": {"DB": 1.0, "NL_ASSERTION": 1.0},
            "info": None,
        },
        "messages": [USER, CALL, RESULT],
        "trial": 2,
        "seed": 626729,
    }
    return whole | changes


def results(*simulations: Any) -> dict[str, Any]:
    return {
        "timestamp": "2025-08-01T16:20:43.824977",
        "info": {
            "git_commit": "b02b",
            "agent_info": {"implementation": "llm_agent", "llm": "gpt-4.1"},
            "environment_info": {"domain_name": "airline", "policy": "# Airline"},
        },
        "tasks": [{"id": "13", "ticket": None}],
        "simulations": list(simulations),
    }


@pytest.mark.unit
@pytest.mark.parametrize("calls", [5, [None], [5], "f()", {"a": 1}])
def test_calls_that_are_none_stay_as_they_are_beside_an_answer_of_the_api(put: Any, calls: Any) -> None:
    message = {**CALL, "tool_calls": calls, "raw_data": {"message": {"role": "assistant", "tool_calls": calls}}}
    assert len(check(FORMAT, put(results(simulation(messages=[message]))))) == 1


def records(path: Path) -> list[Record]:
    found = list(FORMAT.read(open_source(path)))
    assert all(isinstance(item, Record) for item in found), found
    return [item for item in found if isinstance(item, Record)]


@pytest.mark.unit
def test_a_simulation_becomes_an_episode_and_each_message_a_step(put: Any) -> None:
    path = put(results(simulation(), simulation(trial=3)))
    assert detect(path).name == "tau2-bench"
    first, second = records(path)
    assert first.begin["extra"] == {
        "id": "b76",
        "timestamp": "2025-08-01T16:21:03.551563",
        "duration": 19.2,
        "agent_cost": 0.02746,
        "reward_info": {"reward_basis": ["DB", "NL_ASSERTION"], "info": None},
        "task": {"id": "13", "ticket": None},
    }
    assert {name: value for name, value in first.begin.items() if name != "extra"} == {
        "task_family": "tau2-bench",
        "domain": "airline",
        "policy_name": "gpt-4.1",
        "agent_name": "llm_agent",
        "env_version": "b02b",
        "task_id": "13",
        "group_id": "tau2-bench/airline/13",
        "trial": 2,
        "seed": 626729,
    }
    assert first.end == {
        "stop_reason": "user_stop",
        "status": "completed",
        "reward": 1.0,
        "success": True,
        "rewards": [
            {"name": "DB", "value": 1.0, "kind": "verifiable"},
            {"name": "NL_ASSERTION", "value": 1.0, "kind": "judged"},
        ],
    }
    assert first.started_at == "2025-08-01T16:20:44.321269"
    user, call, result = first.rows.steps
    assert (user["source"], user["message"], user["cost_usd"]) == ("user", "hi", 0.001)
    [look] = call["tool_calls"]
    assert look == {"id": "c1", "name": "look", "arguments": '{"id":"é"}', "arguments_kind": "object"}
    assert (call["prompt_tokens"], call["completion_tokens"]) == (3437, 22)
    assert result["tool_results"] == [{"call_id": "c1", "content": "Error: no such id", "is_error": True}]
    assert second.begin["trial"] == 3


@pytest.mark.unit
def test_what_an_answer_repeats_of_its_message_is_stored_once(put: Any) -> None:
    [record] = records(put(results(simulation())))
    extra = json.loads(record.rows.steps[1]["extra"])
    assert extra["raw_data"] == {"finish_reason": "tool_calls", "message": {"annotations": []}}
    assert "patch" not in record.source


@pytest.mark.unit
def test_what_is_said_once_of_the_file_is_kept_with_its_first_episode(put: Any) -> None:
    unused = {"id": "14", "ticket": "x"}
    whole = {**results(simulation(), simulation()), "tasks": [unused, {"id": "13", "ticket": None}]}
    path = put(whole)
    first, second = records(path)
    assert first.source["file"] == {
        "layout": "values",
        "results": {"timestamp": whole["timestamp"], "info": whole["info"], "tasks": [unused]},
        "tasks": [None, "13"],
    }
    assert "file" not in second.source
    assert first.begin["extra"]["task"] == second.begin["extra"]["task"] == {"id": "13", "ticket": None}
    assert len(check(FORMAT, path)) == 2


@pytest.mark.unit
@pytest.mark.parametrize("tasks", [None, [{"id": "13"}, {"id": "13"}], [{"id": "13"}, 5], {"13": {}}])
def test_tasks_that_cannot_be_told_apart_stay_together(put: Any, tasks: Any) -> None:
    path = put({**results(simulation()), "tasks": tasks})
    [record] = records(path)
    assert "task" not in record.begin["extra"]
    assert record.source["file"]["results"]["tasks"] == tasks
    assert check(FORMAT, path)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("reason", "status", "stage"),
    [
        ("agent_stop", "completed", None),
        ("max_steps", "truncated", "budget"),
        ("too_many_errors", "failed", "tool_call"),
        ("agent_error", "failed", "other"),
    ],
)
def test_why_it_ended_gives_the_status(put: Any, reason: str, status: str, stage: str | None) -> None:
    [record] = records(put(results(simulation(termination_reason=reason))))
    assert (record.end["status"], record.end.get("failure_stage")) == (status, stage)
    assert record.end["stop_reason"] == reason


@pytest.mark.unit
@pytest.mark.parametrize("info", [None, {"reward": None}, {}])
def test_a_simulation_that_was_not_scored_has_no_reward(put: Any, info: Any) -> None:
    path = put(results(simulation(reward_info=info)))
    [record] = records(path)
    assert "reward" not in record.end
    assert "success" not in record.end
    check(FORMAT, path)


@pytest.mark.unit
def test_simulations_that_are_none_are_refused_one_by_one(put: Any) -> None:
    [empty] = FORMAT.read(open_source(put(results())))
    assert empty == Refused("row 1", "has no simulations")
    path = put(results(simulation(), 5, simulation(messages=None), simulation(messages=[{"role": "x"}])))
    good, *refused = list(FORMAT.read(open_source(path)))
    assert isinstance(good, Record)
    assert [item.reason for item in refused if isinstance(item, Refused)] == [
        "not an object: a simulation has id, task_id, messages, reward_info, …",
        "has no `messages`, the list of what was said",
        "message 1: its role is none of system, user, assistant, tool",
    ]
    assert isinstance(refused[0], Refused)
    assert refused[0].row == "row 1, simulation 2"


@pytest.mark.unit
def test_episodes_of_two_files_are_two_results_in_one(put: Any) -> None:
    whole = [results(simulation(id="a"), simulation(id="b")), {**results(simulation(id="c")), "info": {}}]
    assert FORMAT.write is not None
    episodes = [stored(record) for number, one in enumerate(whole) for record in records(put(one, str(number)))]
    path = put(b"".join(FORMAT.write(episodes)))
    assert [row.value for row in open_source(path).rows() if isinstance(row, Row)] == whole
    assert len(check(FORMAT, path)) == 3
    assert b"".join(FORMAT.write([])) == b""


@pytest.mark.unit
def test_a_file_that_was_cut_off_is_refused_whole(put: Any) -> None:
    path = put(json.dumps(results(simulation()))[:-20])
    [refused] = list(FORMAT.read(open_source(path)))
    assert isinstance(refused, Refused)
    assert "truncated" in refused.reason


@pytest.mark.unit
def test_mutated_results_give_records_and_refusals(tmp_path: Path) -> None:
    withstand(FORMAT, [results(simulation(), simulation(trial=3))], tmp_path)


def test_the_published_results_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "tau2-bench")
    assert len(files) == 2
    for path, episodes, steps in files:
        found = check_real_file(FORMAT, path, episodes, steps, tmp_path)
        assert sum("patch" in record.source for record in found) == 0
        rewards = [record.end["reward"] for record in found]
        assert rewards == [row["reward_info"]["reward"] for row in json.loads(path.read_text())["simulations"]]


def test_mutated_published_results(realdata: Path, tmp_path: Path) -> None:
    whole = [json.loads(path.read_text()) for path, _, _ in real_files(realdata, "tau2-bench")]
    withstand(FORMAT, [{**one, "tasks": [], "simulations": one["simulations"][:2]} for one in whole], tmp_path)

"""InterCode results: turns of a shell or a database, the best of which counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.intercode import FORMAT


def log(**changes: Any) -> dict[str, Any]:
    whole = {
        "environment": "ic_bash",
        "dataset": "./data/nl2bash/nl2bash_fs_1.json",
        "task_id": 0,
        "query": "count files",
        "turn_history": {
            "actions": ["ls", "ls | wc -l", "submit"],
            "observations": ["a\0b", [["5", 1]], ""],
            "rewards": [0, 0.67, 1.0],
            "valid_action": [False, True, True],
            "note": "x",
        },
        "info": {"reward": {"file_diff": 0.33, "answer_similarity": 0.33}, "diff_miss": []},
        "summary": {"max_reward": 1.0, "max_reward_idx": 2, "turns_taken": 3, "turns_max": 3},
    }
    return whole | changes


HUMAN = {
    "environment": "ic_sql",
    "query_idx": 809,
    "query": "which languages",
    "gold": "SELECT 1",
    "reward": 0.0,
    "trajectory": [{"action": "show tables;", "observation": "('city',)"}, {"action": "submit", "observation": None}],
    "info": {"reward": 0.0},
}


def record(put: Any, content: Any) -> Record:
    path = put(content)
    assert check(FORMAT, path)
    [found] = FORMAT.read(open_source(path))
    assert isinstance(found, Record)
    return found


@pytest.mark.unit
def test_a_log_becomes_an_episode_and_each_turn_a_step(put: Any) -> None:
    path = put({"0": log()})
    assert detect(path).name == "intercode"
    found = record(put, {"0": log()})
    assert {name: value for name, value in found.begin.items() if name != "extra"} == {
        "task_family": "intercode",
        "env_name": "ic_bash",
        "domain": "bash",
        "task_id": "nl2bash_fs_1/0",
        "group_id": "intercode/bash/./data/nl2bash/nl2bash_fs_1.json/0",
    }
    assert (found.end["reward"], found.end["success"]) == (1.0, True)
    assert [part["name"] for part in found.end["rewards"]] == ["file_diff", "answer_similarity"]  # type: ignore[index]
    first, second, _ = found.steps
    assert first["tool_calls"] == [{"name": "bash", "arguments": "ls"}]
    assert first["tool_results"] == [{"content": "a\0b", "is_error": True}]
    assert second["tool_results"] == [{"content": [["5", 1]], "is_error": False}]
    assert [step["reward"] for step in found.steps] == [0, 0.67, 1.0]
    assert "patch" not in found.source


@pytest.mark.unit
def test_plans_and_thoughts_have_their_columns(put: Any) -> None:
    history = {"actions": ["ls"], "observations": [""], "rewards": [1], "steps": ["look"], "thoughts": ["hm"]}
    [step] = record(put, {"meta": {"env": "bash"}, "logs": {"3": log(turn_history=history)}}).steps
    assert (step["message"], step["reasoning"]) == ("look", "hm")


@pytest.mark.unit
def test_the_human_kind_of_log(put: Any) -> None:
    found = record(put, {"809": HUMAN})
    assert (found.begin["task_id"], found.begin["domain"], found.end["reward"]) == (809, "sql", 0.0)
    assert found.end["success"] is False
    assert len(found.steps) == 2


@pytest.mark.unit
def test_all_turns_taken_without_success_is_truncated(put: Any) -> None:
    summary = {"max_reward": 0.67, "turns_taken": 3, "turns_max": 3}
    end = record(put, {"0": log(summary=summary)}).end
    assert (end["status"], end["truncated"], end["failure_stage"]) == ("truncated", True, "budget")
    assert record(put, {"0": log(summary={**summary, "turns_max": 10})}).end.get("status") is None


@pytest.mark.unit
def test_logs_that_are_none_are_refused_one_by_one(put: Any) -> None:
    uneven = {"actions": ["a"], "observations": []}
    path = put({"0": log(), "1": 5, "2": log(turn_history=uneven), "3": {"environment": "x", "query": ""}})
    good, *refused = FORMAT.read(open_source(path))
    assert isinstance(good, Record)
    assert [item.reason for item in refused if isinstance(item, Refused)] == [
        "not an object: a log has environment, query and turns",
        "its `turn_history` has not as many observations as actions",
        "has neither `turn_history` nor `trajectory`",
    ]


@pytest.mark.unit
def test_mutated_logs_give_records_and_refusals(tmp_path: Path) -> None:
    withstand(FORMAT, [{"0": log(), "1": log()}, {"meta": {}, "logs": {"0": log()}}, {"809": HUMAN}], tmp_path)


def test_the_published_results_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "intercode")
    assert len(files) == 7
    for path, episodes, steps in files:
        found = check_real_file(FORMAT, path, episodes, steps, tmp_path)
        logs = json.loads(path.read_text())
        best = [row["summary"]["max_reward"] for row in logs.get("logs", logs).values() if "summary" in row]
        if best:
            solved = sum(bool(record.end["success"]) for record in found)
            assert solved == sum(reward == 1 for reward in best)


def test_mutated_published_results(realdata: Path, tmp_path: Path) -> None:
    whole = [json.loads(path.read_text()) for path, _, _ in real_files(realdata, "intercode")]
    withstand(FORMAT, [dict(list(one.get("logs", one).items())[:2]) for one in whole], tmp_path)

"""tau-bench results come in with their own definitions of task, trial, success and tool error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.tau_bench import FORMAT

SYSTEM = {"role": "system", "content": "# Airline Agent Policy\n\nThe current time is …"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "book", "arguments": '{"to":  "SEA", "n": 1.0}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "book", "content": "Error: payment method not found"}


def row(**changes: Any) -> dict[str, Any]:
    whole = {
        "task_id": 17,
        "reward": 1.0,
        "info": {"user_cost": 0.5, "task": {"instruction": "…"}},
        "traj": [SYSTEM, {"role": "user", "content": "hi"}, CALL, RESULT, {"role": "assistant", "content": ""}],
        "trial": 2,
    }
    return whole | changes


def read(path: Path) -> list[Record | Refused]:
    return list(FORMAT.read(open_source(path)))


def record(put: Any, **changes: Any) -> Record:
    [found] = read(put([row(**changes)]))
    assert isinstance(found, Record), found
    return found


def refusal(put: Any, content: Any) -> str:
    [found] = read(put([content]))
    assert isinstance(found, Refused)
    return f"{found.row}: {found.reason}"


@pytest.mark.unit
@pytest.mark.parametrize("place", [0, 1])
def test_a_trial_that_raised_before_its_first_message_is_of_the_domain_of_its_file(put: Any, place: int) -> None:
    rows = [row(), row(trial=3)]
    rows.insert(place, row(traj=[], reward=0.0, info={"error": "boom"}))
    found = [item for item in read(put(rows)) if isinstance(item, Record)]
    assert {(item.begin["domain"], item.begin["group_id"]) for item in found} == {("airline", "tau-bench/airline/17")}
    assert "domain" not in {name for name, value in record(put, traj=[]).begin.items() if value is not None}


@pytest.mark.unit
def test_a_row_becomes_an_episode_and_each_message_a_step(put: Any) -> None:
    path = put([row()])
    assert detect(path).name == "tau-bench"
    episode = record(put)
    assert episode.begin == {
        "task_family": "tau-bench",
        "domain": "airline",
        "task_id": 17,
        "trial": 2,
        "group_id": "tau-bench/airline/17",
        "extra": {"info": row()["info"]},
    }
    assert episode.end == {"reward": 1.0, "success": True}
    assert [step["source"] for step in episode.steps] == ["system", "user", "agent", "tool", "agent"]
    assert episode.steps[2].get("message") is None
    assert episode.steps[4]["message"] == ""
    assert episode.steps[3]["tool_results"] == [{"call_id": "c1", "content": RESULT["content"], "is_error": True}]
    assert json.loads(str(episode.steps[3]["extra"])) == {"name": "book"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "success"),
    [("1.0", True), ("1", True), ("0.9999995", True), ("0.0", False), ("0.5", False), ("1.5", False), ("NaN", False)],
)
def test_success_is_a_reward_of_one_as_tau_bench_defines_it(put: Any, text: str, success: bool) -> None:
    [found] = read(put(json.dumps([row(reward="?")]).replace('"?"', text)))
    assert isinstance(found, Record)
    assert found.end["success"] is success


@pytest.mark.unit
@pytest.mark.parametrize(("reward", "success"), [(0.5, True), (1.0, False), (1.0, None), (None, True)])
def test_a_row_that_says_its_success_is_believed(put: Any, reward: float | None, success: bool | None) -> None:
    found = record(put, reward=reward, success=success)
    assert (found.end.get("reward"), found.end["success"]) == (reward, success)
    assert found.begin["extra"] == {"info": row()["info"]}


@pytest.mark.unit
def test_a_success_that_is_no_verdict_stays_in_extra(put: Any) -> None:
    found = record(put, success="partly")
    assert found.end["success"] is True
    assert found.begin["extra"] == {"info": row()["info"], "success": "partly"}


@pytest.mark.unit
@pytest.mark.parametrize("changed", [{"reward": None}, {}])
def test_a_row_without_a_reward_is_not_scored_and_not_judged(put: Any, changed: dict[str, Any]) -> None:
    content = row() | changed
    if not changed:
        del content["reward"]
    [found] = read(put([content]))
    assert isinstance(found, Record)
    assert found.end == {}


@pytest.mark.unit
def test_a_trial_that_raised_is_a_failed_episode_without_steps(put: Any) -> None:
    path = put([row(traj=[], reward=0.0, info={"error": "rate limit", "traceback": "…"})])
    assert detect(path).name == "tau-bench"
    [found] = read(path)
    assert isinstance(found, Record)
    assert found.steps == []
    assert (found.end["status"], found.end["failure_detail"]) == ("failed", "rate limit")


@pytest.mark.unit
def test_domain_is_taken_from_the_policy_only(put: Any) -> None:
    retail = {"role": "system", "content": "# Retail agent policy\n…"}
    other = {"role": "system", "content": "You book flights for an airline."}
    assert record(put, traj=[retail]).begin["domain"] == "retail"
    assert record(put, traj=[other]).begin["domain"] is None
    assert record(put, traj=[other]).begin["group_id"] == "tau-bench/17"


@pytest.mark.unit
def test_keys_that_no_column_holds_stay_in_extra(put: Any) -> None:
    found = record(put, model="gpt-4o", traj=[SYSTEM | {"reward": 0.25, "weight": None}])
    assert found.begin["extra"] == {"info": row()["info"], "model": "gpt-4o"}
    assert json.loads(str(found.steps[0]["extra"])) == {"reward": 0.25, "weight": None}


@pytest.mark.unit
def test_rows_that_are_no_episode_are_refused_with_their_reason(put: Any) -> None:
    without = row()
    del without["traj"]
    assert refusal(put, without) == "row 1: has no `traj`, the list of its messages"
    assert "not a list" in refusal(put, row(traj={"0": SYSTEM}))
    assert "message 1: it is text" in refusal(put, row(traj=["hi"]))
    assert "message 2: the role 'narrator'" in refusal(put, row(traj=[SYSTEM, {"role": "narrator", "content": ""}]))
    assert "message 1: the role None" in refusal(put, row(traj=[{"content": ""}]))
    assert "`reward` is not a number" in refusal(put, row(reward="high"))
    assert "`reward` is not a number" in refusal(put, row(reward=True))
    assert "not an object" in refusal(put, [1])
    assert "content is a number" in refusal(put, row(traj=[{"role": "user", "content": 5}]))


@pytest.mark.unit
def test_a_broken_first_row_does_not_hide_the_format(put: Any) -> None:
    path = put('[{"task_id": tru}, {"task_id": 1}, ' + json.dumps([row()])[1:])
    assert detect(path).name == "tau-bench"
    assert [type(found) for found in read(path)] == [Refused, Refused, Record]


def test_the_published_airline_results_come_in_whole(realdata: Path, run_import: Any) -> None:
    path = realdata / "tau-bench/historical_trajectories/gpt-4o-airline.json"
    source = json.loads(path.read_text())
    imported = run_import(path, begin={"policy_name": "gpt-4o"})
    [report] = imported.report.files
    assert (report.format, report.rows_in, report.episodes, report.steps) == ("tau-bench", 200, 200, 5308)
    assert (report.refused, report.error) == (0, None)
    assert len(imported.steps) == 5308
    assert sum(end["reward"] == 1.0 for end in imported.ends) == 84
    assert sum(end["success"] for end in imported.ends) == 84
    assert {begin["domain"] for begin in imported.begins} == {"airline"}
    assert {begin["policy_name"] for begin in imported.begins} == {"gpt-4o"}
    groups = [begin["group_id"] for begin in imported.begins]
    assert {groups.count(group) for group in groups} == {4}
    assert len(set(groups)) == 50
    # Everything that the file holds can be had again.
    messages = [message for row in source for message in row["traj"]]
    for step, message in zip(imported.steps, messages, strict=True):
        assert as_message(step) == message
    for number, (begin, row_) in enumerate(zip(imported.begins, source, strict=True), 1):
        assert json.loads(begin["restore"])["task_id"] == row_["task_id"]
        assert begin["trial"] == row_["trial"]
        file = {"file": {"layout": "array"}} if number == 1 else {}
        assert json.loads(begin["extra"]) == {
            "info": row_["info"],
            "source_row": {"row": number, "added": ["policy_name"], **file},
        }


def as_message(step: dict[str, Any]) -> dict[str, Any]:
    """The chat message that a step was made from, written here a second time and the other way round."""
    role = {"agent": "assistant"}.get(step["source"], step["source"])
    message = {"role": role, "content": step["message"], **json.loads(step["extra"] or "{}")}
    if step["tool_results"]:
        [result] = step["tool_results"]
        assert result["is_error"] is result["content"].startswith("Error")
        message |= {"content": result["content"], "tool_call_id": result["call_id"]}
    if step["tool_calls"]:
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in step["tool_calls"]
        ]
        assert {call["arguments_kind"] for call in step["tool_calls"]} == {"string"}
    return message


@pytest.mark.parametrize(
    "pattern", ["verifiers/**/results.jsonl*", "mini-swe-agent*/**/*.traj.json", "tau2-bench/**/*.json", "**/*.traj"]
)
def test_files_of_other_projects_are_not_taken_for_tau_bench(realdata: Path, pattern: str) -> None:
    paths = [path for path in sorted(realdata.glob(pattern)) if path.stat().st_size > 200]
    assert paths
    for path in paths:
        assert not FORMAT.detect(open_source(path)), path

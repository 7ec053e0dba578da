"""OpenHands in its three generations: events become steps, actions calls, observations results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, open_source, openhands_v1
from trajlake.formats.openhands import FORMAT
from trajlake_schemas import STEPS

METADATA = {
    "function_name": "execute_bash",
    "tool_call_id": "t1",
    "model_response": {
        "model": "claude",
        "choices": [{"message": {"content": "I look", "role": "assistant", "tool_calls": []}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
    },
    "total_calls_in_response": 1,
}
EVENTS: list[dict[str, Any]] = [
    {
        "id": 0,
        "timestamp": "2025-01-27T22:44:56.900854",
        "source": "user",
        "message": "fix it",
        "action": "message",
        "args": {"content": "fix it", "image_urls": None},
    },
    {
        "id": 1,
        "timestamp": "2025-01-27T22:44:57",
        "source": "agent",
        "message": "Running command: ls",
        "action": "run",
        "tool_call_metadata": METADATA,
        "args": {"command": "ls", "thought": "I look", "hidden": False},
    },
    {
        "id": 2,
        "timestamp": "2025-01-27T22:44:58.100000",
        "source": "agent",
        "message": "Command `ls` executed with exit code 1.",
        "cause": 1,
        "observation": "run",
        "tool_call_metadata": METADATA,
        "content": "no such file",
        "extras": {"command": "ls", "metadata": {"exit_code": 1}},
        "success": False,
    },
    {
        "id": 3,
        "source": "environment",
        "message": "",
        "observation": "agent_state_changed",
        "content": "",
        "extras": {},
    },
    {"id": 4, "source": "agent", "message": "All done", "action": "finish", "args": {"outputs": {}, "thought": ""}},
]
FLAT: list[dict[str, Any]] = [
    {"content": "fix it", "images_urls": None, "action": "message", "action_risk": None},
    {"command": "ls", "thought": "I look", "action": "run", "action_risk": None},
    {"content": "a", "command_id": -1, "command": "ls", "exit_code": 0, "observation": "run"},
    {"outputs": {}, "thought": "done", "action": "finish"},
]


V1: list[dict[str, Any]] = [
    {
        "kind": "SystemPromptEvent",
        "id": "0",
        "timestamp": "2025-10-30T03:50:29.900000",
        "source": "agent",
        "system_prompt": {"type": "text", "text": "You are", "cache_prompt": False},
        "tools": [],
    },
    {
        "kind": "MessageEvent",
        "id": "1",
        "timestamp": "2025-10-30T03:50:30",
        "source": "user",
        "llm_message": {"role": "user", "content": [{"type": "text", "text": "fix it"}]},
    },
    {
        "kind": "ActionEvent",
        "id": "2",
        "timestamp": "2025-10-30T03:50:30.915175",
        "source": "agent",
        "thought": [{"type": "text", "text": "I look"}],
        "reasoning_content": "hm",
        "thinking_blocks": [],
        "action": {"kind": "ExecuteBashAction", "command": "ls", "timeout": None},
        "tool_name": "execute_bash",
        "tool_call_id": "c1",
        "tool_call": {"id": "c1", "name": "execute_bash", "arguments": '{"command":  "ls"}', "origin": "completion"},
    },
    {
        "kind": "ObservationEvent",
        "id": "3",
        "timestamp": "2025-10-30T03:50:33.491879",
        "source": "environment",
        "tool_name": "execute_bash",
        "tool_call_id": "c1",
        "observation": {
            "kind": "ExecuteBashObservation",
            "output": "\x1b[?2004lnot found",
            "error": False,
            "metadata": {"exit_code": 127},
        },
        "action_id": "2",
    },
    {
        "kind": "ObservationEvent",
        "source": "environment",
        "tool_call_id": "c2",
        "observation": {"content": [{"type": "text", "text": "ok"}], "is_error": False},
    },
    {"kind": "AgentErrorEvent", "source": "agent", "tool_call_id": "c3", "error": "no such tool"},
    {"kind": "UserRejectObservation", "source": "environment", "rejection_reason": "no"},
    {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "x", "value": {}},
    {
        "kind": "ActionEvent",
        "source": "agent",
        "thought": [],
        "tool_name": "finish",
        "tool_call": {"id": "c4", "name": "finish", "arguments": "{}"},
    },
]


FETCHED = [
    {"type": "text", "text": "[Tool 'fetch' executed.]"},
    {"type": "text", "text": "PAGE", "cache_prompt": False},
]
IMAGE = {"type": "image", "image_urls": ["https://x/y.png"], "cache_prompt": False}
PARTS: list[dict[str, Any]] = [
    {
        "kind": "MessageEvent",
        "source": "user",
        "timestamp": "2025-10-30T03:50:30",
        "llm_message": {"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]},
    },
    {
        "kind": "ActionEvent",
        "source": "agent",
        "thought": [{"type": "text", "text": "First."}, {"type": "text", "text": "Then."}],
        "action": {"kind": "MCPToolAction", "data": {}},
        "tool_name": "fetch",
        "tool_call_id": "t1",
        "tool_call": {"id": "t1", "name": "fetch", "arguments": "{}", "origin": "completion"},
    },
    {
        "kind": "ObservationEvent",
        "source": "environment",
        "tool_name": "fetch",
        "tool_call_id": "t1",
        "action_id": "c",
        "observation": {"content": FETCHED, "is_error": False, "kind": "MCPToolObservation"},
    },
    {"kind": "Condensation", "source": "environment", "forgotten_event_ids": ["1"], "summary": "all so far"},
    {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "x", "value": {}},
    {"kind": "ObservationEvent", "source": "environment", "tool_call_id": "t2", "observation": {"content": [IMAGE]}},
    {"kind": "ObservationEvent", "source": "environment", "tool_call_id": "t3", "observation": {"content": []}},
    {
        "kind": "MessageEvent",
        "source": "agent",
        "llm_message": {"role": "assistant", "content": [{"type": "image", "image_urls": ["a", "b"]}, {"text": "ab"}]},
    },
    {"kind": "CondensationSummaryEvent", "source": "environment", "summary": "all so far"},
]


def output(**changes: Any) -> dict[str, Any]:
    whole = {
        "instance_id": "pony-1",
        "test_result": {"git_patch": "diff"},
        "instruction": "fix it",
        "metadata": {
            "agent_class": "CodeActAgent",
            "llm_config": {"model": "gpt-4o"},
            "git_commit": "b533",
            "dataset": "SWE-bench",
        },
        "history": EVENTS,
        "metrics": {"accumulated_cost": 0.5},
        "error": None,
    }
    return whole | changes


def record(put: Any, content: Any) -> Record:
    path = put(content)
    assert detect(path).name == "openhands"
    assert check(FORMAT, path)
    [found] = FORMAT.read(open_source(path))
    assert isinstance(found, Record)
    return found


@pytest.mark.unit
def test_a_list_of_events_is_one_episode_and_each_event_a_step(put: Any) -> None:
    found = record(put, EVENTS)
    assert (found.started_at, found.begin["agent_name"]) == ("2025-01-27T22:44:56.900854", "OpenHands")
    assert found.end == {"status": "completed", "stop_reason": "finish"}
    user, call, result, state, finish = found.rows.steps
    assert [step["source"] for step in found.steps] == ["user", "agent", "tool", "environment", "agent"]
    assert user["message"] == "fix it"
    assert (call["message"], call["model"], call["cached_tokens"]) == ("I look", "claude", 4)
    [run] = call["tool_calls"]
    arguments = '{"command":"ls","hidden":false}'
    assert run == {"id": "t1", "name": "run", "arguments": arguments, "arguments_kind": "object"}
    assert result["tool_results"] == [{"content": "no such file", "call_id": "t1", "is_error": True}]
    assert json.loads(result["extra"])["tool_call_metadata"] == "as its action"
    response = json.loads(call["extra"])["tool_call_metadata"]["model_response"]
    assert response["choices"] == [{"message": {"tool_calls": []}}]
    assert state["tool_results"] == [{"call_id": None, "content": "", "is_error": None}]
    assert finish["message"] == ""
    assert "patch" not in found.source


@pytest.mark.unit
def test_evaluation_output_says_which_task_agent_and_model(put: Any) -> None:
    found = record(put, output())
    assert {name: value for name, value in found.begin.items() if name != "extra"} == {
        "task_id": "pony-1",
        "group_id": "pony-1",
        "agent_name": "CodeActAgent",
        "agent_version": "b533",
        "policy_name": "gpt-4o",
        "task_family": "SWE-bench",
    }
    assert "instruction" not in found.begin["extra"]
    assert "patch" not in found.source


@pytest.mark.unit
@pytest.mark.parametrize("history", [FLAT, [FLAT[:1], FLAT[1:3], FLAT[3:]]])
def test_the_first_generation_is_flat_or_in_pairs(put: Any, history: list[Any]) -> None:
    issue = {"owner": "neubig", "repo": "pr-viewer", "number": 5}
    found = record(put, {"issue": issue, "history": history, "success": True, "error": None})
    assert found.begin["task_id"] == "neubig/pr-viewer#5"
    assert found.end["success"] is True
    user, call, result, finish = found.rows.steps
    assert [step["source"] for step in found.steps] == ["user", "agent", "tool", "agent"]
    [run] = call["tool_calls"]
    assert run == {"id": None, "name": "run", "arguments": '{"command":"ls"}', "arguments_kind": "object"}
    assert (call["message"], finish["message"], user["message"]) == ("I look", "done", "fix it")
    assert result["tool_results"] == [{"call_id": None, "content": "a", "is_error": False}]


@pytest.mark.unit
def test_the_third_generation_says_by_kind_what_an_event_is(put: Any) -> None:
    metadata = {"llm": {"model": "gpt-4o"}, "dataset": "safety"}
    found = record(put, output(history=V1, metadata=metadata))
    assert (found.begin["policy_name"], found.begin["task_family"]) == ("gpt-4o", "safety")
    assert found.end == {"status": "completed", "stop_reason": "finish"}
    sources = ["system", "user", "agent", "tool", "tool", "tool", "tool", "environment", "agent"]
    assert [step["source"] for step in found.steps] == sources
    system, user, call, *results = found.steps[:-2]
    assert (system["message"], user["message"], call["message"]) == ("You are", "fix it", "I look")
    assert call["reasoning"] == "hm"
    assert call["tool_calls"] == [{"id": "c1", "name": "execute_bash", "arguments": '{"command":  "ls"}'}]
    assert [step["tool_results"] for step in results] == [
        [{"call_id": "c1", "content": "\x1b[?2004lnot found", "is_error": True}],
        [{"call_id": "c2", "content": "ok", "is_error": False}],
        [{"call_id": "c3", "content": "no such tool", "is_error": True}],
        [{"content": "no", "is_error": True}],
    ]
    # Of the last action, whose event does not say its call's id a second time.
    assert found.source["patch"] == [[["history", 8, "tool_call_id"]]]
    assert record(put, V1).end["status"] == "completed"


@pytest.mark.unit
def test_content_of_several_parts_is_in_columns(put: Any) -> None:
    found = record(put, PARTS)
    assert "patch" not in found.source
    user, call, fetched, condensed, _, image, empty, agent, summary = found.rows.steps

    def said(step: Any) -> list[tuple[Any, Any, Any]]:
        return [(part["type"], part["text"], part["uri"]) for part in step["content_parts"]]

    assert said(user) == [("text", "look", None), ("image", None, "https://x/y.png")]
    assert said(call) == [("text", "First.", None), ("text", "Then.", None)]
    assert said(fetched) == [("text", "[Tool 'fetch' executed.]", None), ("text", "PAGE", None)]
    assert fetched["tool_results"] == [{"call_id": "t1", "content": None, "is_error": False}]
    assert said(image) == [("image", None, "https://x/y.png")]
    assert said(agent) == [("image", None, None), (None, "ab", None)]
    assert not empty.get("content_parts")
    assert not condensed.get("message")
    assert summary["message"] == "all so far"


@pytest.mark.unit
def test_events_that_an_earlier_version_imported_are_made_again_of_what_it_kept() -> None:
    for event in PARTS:
        kept: dict[str, Any] = dict.fromkeys(STEPS.names()) | {"extra": json.dumps(event)}
        if event["kind"] == "ObservationEvent":
            kept["tool_results"] = [{"call_id": event["tool_call_id"], "content": None, "is_error": None}]
        assert openhands_v1.event_of(kept) == event


@pytest.mark.unit
@pytest.mark.parametrize(
    ("result", "success"),
    [({"resolved": True}, True), ({"report": {"resolved": False}}, False), ({"git_patch": ""}, None), (None, None)],
)
def test_success_is_what_the_evaluation_reported(put: Any, result: Any, success: bool | None) -> None:
    assert record(put, output(test_result=result)).end.get("success") is success


@pytest.mark.unit
def test_an_error_is_a_failed_episode(put: Any) -> None:
    end = record(put, output(error="AgentRuntimeUnavailableError")).end
    assert end == {"status": "failed", "failure_stage": "other", "failure_detail": "AgentRuntimeUnavailableError"}
    path = put([output(), output(history=None, error="the image could not be pulled")])
    _, failed = check(FORMAT, path)
    assert (failed.steps, failed.end["status"]) == ([], "failed")


LIMIT = {"kind": "ConversationErrorEvent", "source": "environment", "code": "MaxIterationsReached", "detail": "(5)"}
ERROR = "Remote conversation ended with error"
STATE = {"observation": "agent_state_changed", "source": "environment", "content": "", "message": ""}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("history", "error", "detail"),
    [
        (EVENTS, "RuntimeError: Agent reached maximum iteration. Current: 3, max: 3", "RuntimeError: Agent reached"),
        (EVENTS, "Agent reached maximum budget for conversation.", "Agent reached maximum budget"),
        (V1, f"{ERROR}: MaxIterationsReached: Agent reached maximum iterations limit (5).", ERROR),
        ([*V1[:-1], LIMIT, V1[7]], ERROR, "MaxIterationsReached: (5)"),
        (
            [*V1[:-1], {"kind": "ConversationIterationLimitEvent", "detail": "x"}],
            None,
            "ConversationIterationLimitEvent: x",
        ),
        (
            [*EVENTS[:3], {**STATE, "extras": {"reason": "Agent reached maximum iteration."}}],
            None,
            "Agent reached maxi",
        ),
    ],
)
def test_an_agent_that_used_up_its_iterations_is_truncated(put: Any, history: Any, error: Any, detail: Any) -> None:
    end = record(put, output(history=history, error=error)).end
    assert end["failure_detail"].startswith(detail)
    del end["failure_detail"]
    assert end == {"status": "truncated", "truncated": True, "failure_stage": "budget"}


@pytest.mark.unit
def test_an_agent_that_went_on_after_a_limit_is_not_truncated(put: Any) -> None:
    assert record(put, output(history=[*V1[:-1], LIMIT, V1[-1]])).end == {
        "status": "completed",
        "stop_reason": "finish",
    }
    assert record(put, output(history=[{**STATE, "content": "maximum iteration"}])).end == {}


@pytest.mark.unit
def test_output_of_which_every_first_row_failed_is_known(put: Any) -> None:
    failed = output(history=None, error="boom", test_result={}, metadata=None, instruction=None, metrics=None)
    path = put("\n".join([json.dumps(failed)] * 6))
    assert detect(path).name == "openhands"
    found = check(FORMAT, path)
    assert [(one.steps, one.end["status"], one.begin["task_id"]) for one in found] == [([], "failed", "pony-1")] * 6
    assert not any("patch" in one.source for one in found)
    for foreign in (
        {**failed, "error": None},
        {"instance_id": "a", "history": None, "error": "boom"},
        {"history": None, "error": "boom", "test_result": {}},
    ):
        with pytest.raises(FormatError):
            detect(put("\n".join([json.dumps(foreign)] * 6)))


@pytest.mark.unit
def test_tokens_of_an_answer_with_several_calls_are_not_counted_twice(put: Any) -> None:
    twice = {**EVENTS[1], "tool_call_metadata": {**METADATA, "total_calls_in_response": 2}}
    found = record(put, [EVENTS[0], twice, {**twice, "id": 7}])
    assert all("prompt_tokens" not in step for step in found.steps)


@pytest.mark.unit
def test_what_is_no_output_is_refused(put: Any) -> None:
    for content, reason in (
        ([{"history": 5}], "has no `history`, the list of its events"),
        ([5], "not an object: a row of OpenHands' output has history, metadata, test_result, …"),
        ([output(history=[*EVENTS, 5])], "event 6: not an object"),
        ([output(history=[{"id": 1}])], "event 1: neither an action nor an observation"),
    ):
        [found] = FORMAT.read(open_source(put(content)))
        assert isinstance(found, Refused)
        assert found.reason == reason
    path = put(json.dumps(EVENTS)[:-40])
    [found] = FORMAT.read(open_source(path))
    assert isinstance(found, Refused)
    assert "truncated" in found.reason


@pytest.mark.unit
def test_mutated_events_give_records_and_refusals(tmp_path: Path) -> None:
    withstand(FORMAT, [V1, output(history=V1), PARTS, output(history=PARTS)], tmp_path, 150)
    withstand(FORMAT, [EVENTS, output(), [output(history=FLAT)], output(history=[FLAT[:2], FLAT[2:]])], tmp_path, 100)


def test_the_published_files_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "openhands")
    assert len(files) == 6
    for path, episodes, steps in files:
        found = check_real_file(FORMAT, path, episodes, steps, tmp_path)
        assert not any("patch" in record.source for record in found)


def test_mutated_published_files(realdata: Path, tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for path, _, _ in real_files(realdata, "openhands")
        for line in ([path.read_text()] if path.suffix == ".json" else path.read_text().splitlines())
    ]
    withstand(
        FORMAT, [row if isinstance(row, list) else {**row, "history": row["history"][:12]} for row in rows], tmp_path
    )

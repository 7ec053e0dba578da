"""mini-swe-agent trajectories: what its messages say twice is stored once; SWE-bench's reports are no trajectories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import check, check_real_file, real_files, withstand

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.mini_swe_agent import FORMAT

CALLS = [
    {
        "index": 0,
        "function": {"arguments": '{"command": "ls"}', "name": "bash"},
        "id": "c1",
        "type": "function",
    }
]
ANSWER: dict[str, Any] = {
    "content": "I look",
    "role": "assistant",
    "tool_calls": CALLS,
    "function_call": None,
    "provider_specific_fields": None,
    "extra": {
        "actions": [{"command": "ls", "tool_call_id": "c1"}],
        "response": {
            "id": "160e",
            "model": "deepseek-chat",
            "choices": [
                {
                    "finish_reason": "tool_calls",
                    "message": {"content": "I look", "role": "assistant", "tool_calls": CALLS, "function_call": None},
                }
            ],
            "usage": {
                "completion_tokens": 73,
                "prompt_tokens": 2093,
                "prompt_tokens_details": {"cached_tokens": 320},
            },
        },
        "cost": 0.00053606,
        "timestamp": 1775795610.6438997,
    },
}
RESULT = {
    "content": "<returncode>1</returncode>\n<output>\na\n</output>",
    "extra": {"raw_output": "a\n", "returncode": 1, "timestamp": 1775795610.5, "exception_info": ""},
    "tool_call_id": "c1",
    "role": "tool",
}


def trajectory(**changes: Any) -> dict[str, Any]:
    whole = {
        "info": {
            "model_stats": {"instance_cost": 0.05, "api_calls": 1},
            "config": {
                "agent_type": "minisweagent.run.benchmarks.swebench.ProgressTrackingAgent",
                "model": {"model_name": "deepseek/deepseek-chat"},
                "environment": {"image": "docker.io/swebench/x"},
            },
            "mini_version": "2.2.7",
            "exit_status": "Submitted",
            "submission": "diff",
        },
        "messages": [
            {"role": "system", "content": "You are"},
            ANSWER,
            RESULT,
            {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted", "submission": "diff"}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": "pydicom__pydicom-1139",
    }
    return whole | changes


RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "model": "gpt-5",
    "status": "completed",
    "output": [
        {
            "id": "rs_1",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "x",
        },
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        *(
            {"id": f"fc_{c}", "type": "function_call", "call_id": c, "name": "bash", "arguments": '{"command": "ls"}'}
            for c in ("c1", "c2")
        ),
    ],
    "usage": {"input_tokens": 50, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 40}},
    "extra": {
        "actions": [{"command": "ls", "tool_call_id": "c1"}, {"command": "ls", "tool_call_id": "c2"}],
        "cost": 0.25,
        "timestamp": 1775795610.5,
    },
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": RESULT["content"], "extra": RESULT["extra"]}
PICTURE = [
    {"type": "text", "text": "a picture"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
]
RESPONSES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are"},
    {"role": "user", "content": PICTURE},
    RESPONSE,
    OUTPUT,
    {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "No tool calls found."}]},
    {**RESPONSE, "output": [{**RESPONSE["output"][1], "content": RESPONSE["output"][1]["content"] * 2}] * 2},
    {"object": "response", "output": None},
]


REPORT = {"total_instances": 2, "submitted_ids": ["a", "b"], "resolved_ids": ["a"], "unresolved_ids": ["b"]}


def record(put: Any, content: Any) -> Record:
    path = put(content)
    assert detect(path).name == "mini-swe-agent"
    assert check(FORMAT, path)
    [found] = FORMAT.read(open_source(path))
    assert isinstance(found, Record)
    return found


@pytest.mark.unit
def test_each_message_is_a_step(put: Any) -> None:
    found = record(put, trajectory())
    assert {name: value for name, value in found.begin.items() if name != "extra"} == {
        "task_id": "pydicom__pydicom-1139",
        "group_id": "pydicom__pydicom-1139",
        "task_family": "swe-bench",
        "agent_name": "mini-swe-agent",
        "agent_version": "2.2.7",
        "policy_name": "deepseek/deepseek-chat",
        "env_snapshot": "docker.io/swebench/x",
    }
    assert (found.end["status"], found.end["stop_reason"]) == ("completed", "Submitted")
    assert [step["source"] for step in found.steps] == ["system", "agent", "tool", "environment"]
    _, answer, result, _ = found.rows.steps
    assert (answer["model"], answer["cost_usd"]) == ("deepseek-chat", 0.00053606)
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["cached_tokens"]) == (2093, 73, 320)
    assert result["tool_results"] == [{"call_id": "c1", "content": RESULT["content"], "is_error": True}]
    assert "patch" not in found.source


@pytest.mark.unit
def test_what_a_message_says_twice_is_stored_once(put: Any) -> None:
    _, answer, result, _ = record(put, trajectory()).rows.steps
    assert json.loads(answer["extra"]) == {
        "function_call": None,
        "provider_specific_fields": None,
        "extra": {
            "built": ["actions"],
            "response": {
                "id": "160e",
                "choices": [{"finish_reason": "tool_calls", "message": {}}],
                "usage": ANSWER["extra"]["response"]["usage"],
            },
            # Finer than a microsecond, so the column alone would not give it back.
            "timestamp": 1775795610.6438997,
        },
    }
    assert json.loads(result["extra"]) == {"extra": {"returncode": 1, "exception_info": "", "built": ["raw_output"]}}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("exit_status", "status", "stage"),
    [
        ("LimitsExceeded", "truncated", "budget"),
        ("TimeExceeded", "truncated", "timeout"),
        ("ContextWindowExceededError", "failed", "other"),
        (None, None, None),
    ],
)
def test_the_exit_status_gives_the_status(put: Any, exit_status: Any, status: str | None, stage: str | None) -> None:
    end = record(put, trajectory(info={"exit_status": exit_status})).end
    assert (end.get("status"), end.get("failure_stage")) == (status, stage)


@pytest.mark.unit
def test_the_older_messages_without_calls(put: Any) -> None:
    older = trajectory(
        messages=[
            {"role": "user", "content": "fix it"},
            {"role": "assistant", "content": "```bash\nls\n```", "extra": {"response": {"choices": []}}},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    )
    assert [step["source"] for step in record(put, older).steps] == ["user", "agent", "user"]


@pytest.mark.unit
def test_a_response_of_the_responses_api_is_a_step_of_the_agent(put: Any) -> None:
    found = record(put, trajectory(messages=RESPONSES))
    assert "patch" not in found.source
    assert [step["source"] for step in found.steps] == [
        *("system", "user", "agent", "tool", "tool", "user", "agent", "agent"),
    ]
    _, _, agent, result, parts, _, many, nothing = found.rows.steps
    assert (agent["message"], agent["reasoning"], agent["model"], agent["cost_usd"]) == ("I look", "hm", "gpt-5", 0.25)
    assert (agent["prompt_tokens"], agent["completion_tokens"], agent["cached_tokens"]) == (50, 7, 40)
    call = {"name": "bash", "arguments": '{"command": "ls"}', "arguments_kind": "string"}
    assert agent["tool_calls"] == [{"id": "c1", **call}, {"id": "c2", **call}]
    assert "actions" not in json.loads(agent["extra"])["extra"]
    assert result["tool_results"] == [{"call_id": "c1", "content": RESULT["content"], "is_error": True}]
    assert "raw_output" not in json.loads(result["extra"])["extra"]
    assert [part["text"] for part in parts["content_parts"]] == ["a", "b"]
    assert parts["tool_results"] == [{"call_id": "c2", "content": None, "is_error": True}]
    assert [part["text"] for part in many["content_parts"]] == ["I look"] * 4
    assert not nothing.get("message")


@pytest.mark.unit
def test_content_of_parts_is_in_columns(put: Any) -> None:
    picture, text = PICTURE, PICTURE[:1]
    messages = [{"role": role, "content": parts} for role in ("user", "assistant", "tool") for parts in (picture, text)]
    found = record(put, trajectory(messages=[*messages, {"role": "user", "content": []}]))
    assert "patch" in found.source, "a tool's message has an id"
    said = [[part["text"] for part in step.get("content_parts") or ()] for step in found.rows.steps]
    assert said == [["a picture", None], ["a picture"]] * 3 + [[]]
    answer = {"role": "tool", "tool_call_id": "c1", "content": PICTURE, "extra": {"returncode": 0, "raw_output": "x"}}
    found = record(put, trajectory(messages=[{"role": "user", "content": PICTURE}, ANSWER, answer]))
    assert "patch" not in found.source
    assert found.rows.steps[2]["tool_results"] == [{"call_id": "c1", "content": None, "is_error": False}]


@pytest.mark.unit
@pytest.mark.parametrize("built", [5, None, "raw_output", ["raw_output"], {"actions": 1}])
def test_a_key_of_the_source_that_is_named_as_ours_comes_out_again(put: Any, built: Any) -> None:
    messages = [
        {**message, "extra": {"built": built, "returncode": 0}} for message in (RESPONSE, OUTPUT, ANSWER, RESULT)
    ]
    record(put, trajectory(messages=messages))


@pytest.mark.unit
def test_a_report_of_an_evaluation_is_refused_with_what_to_do(put: Any) -> None:
    path = put(REPORT)
    assert detect(path).name == "mini-swe-agent"
    with pytest.raises(FormatError, match=r"SWE-bench evaluation report.*not in which.*\.traj\.json.*\.score"):
        list(FORMAT.read(open_source(path)))


@pytest.mark.unit
def test_what_is_no_trajectory_is_refused(put: Any) -> None:
    for content, reason in (
        ([5], "not an object: a trajectory of mini-swe-agent has info, messages and trajectory_format"),
        ({"info": {}}, "has no `messages`, the list of what was said"),
        (trajectory(messages=[5]), "message 1: not an object"),
        (trajectory(messages=[{"role": "x"}]), "message 1: its role is none of"),
        (trajectory(messages=[{"type": "message", "content": "x"}]), "message 1: its role is none of"),
    ):
        [found] = FORMAT.read(open_source(put(content)))
        assert isinstance(found, Refused)
        assert found.reason.startswith(reason)


@pytest.mark.unit
def test_mutated_trajectories_give_records_and_refusals(tmp_path: Path) -> None:
    withstand(FORMAT, [trajectory(), trajectory(messages=RESPONSES)], tmp_path, 150)


def test_the_published_trajectories_come_in_and_out_whole(realdata: Path, tmp_path: Path) -> None:
    files = real_files(realdata, "mini-swe-agent-pr816")
    assert len(files) == 3
    for path, episodes, steps in files:
        [found] = check_real_file(FORMAT, path, episodes, steps, tmp_path)
        costs = sum(step.get("cost_usd", 0) for step in found.steps)
        assert costs == pytest.approx(json.loads(path.read_text())["info"]["model_stats"]["instance_cost"])
        assert "patch" not in found.source


def test_mutated_published_trajectories(realdata: Path, tmp_path: Path) -> None:
    whole = [json.loads(path.read_text()) for path, _, _ in real_files(realdata, "mini-swe-agent-pr816")]
    withstand(FORMAT, [{**one, "messages": one["messages"][:6] + one["messages"][-2:]} for one in whole], tmp_path)

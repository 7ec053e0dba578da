"""NeMo Gym rollouts: items of the Responses API as steps, token ids and log-probabilities in columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.mutation import check, mutations

from trajlake.formats import format_named

pytestmark = pytest.mark.unit

MADE = {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4, 5], "generation_log_probs": [-0.5, -0.1]}
ROW: dict[str, Any] = {
    "responses_create_params": {
        "input": [
            {"role": "system", "content": "Be brief.", "type": "message"},
            {"role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
            {"role": "user", "content": "Weather?"},
        ],
        "tools": [{"type": "function", "name": "get"}],
        "model": None,
    },
    "response": {
        "id": "resp_1",
        "model": "qwen",
        "output": [
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Ask."}]},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": '{"a": 1}', "id": "fc", **MADE},
            {"type": "function_call_output", "call_id": "c", "output": "sunny", "status": "completed"},
            {
                "type": "message",
                "role": "assistant",
                "id": "m",
                "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}],
                **MADE,
            },
        ],
        "usage": {"input_tokens": 30, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
        "incomplete_details": None,
    },
    "reward": 1.0,
    "_ng_task_index": 12,
    "_ng_rollout_index": 3,
    "agent_ref": {"type": "responses_api_agents", "name": "simple_agent"},
    "num_turns": 2,
}


def test_an_item_is_a_step(put: Any, run_import: Any) -> None:
    imported = run_import(put(json.dumps(ROW) + "\n"))
    assert imported.report.files[0].format == "nemo-gym"
    assert [step["source"] for step in imported.steps] == ["system", "system", "user", *["agent"] * 2, "tool", "agent"]
    reasoning, call, result, answer = imported.steps[3:]
    assert reasoning["reasoning"] == "Ask."
    assert (call["tool_calls"][0]["id"], call["tool_calls"][0]["arguments"]) == ("c", '{"a": 1}')
    assert (result["tool_results"][0]["call_id"], result["tool_results"][0]["content"]) == ("c", "sunny")
    assert answer["content_parts"][0]["text"] == "Sunny."
    assert (list(answer["token_ids"]), list(answer["logprobs"])) == ([4, 5], [-0.5, pytest.approx(-0.1)])
    [tensor] = answer["tensors"]
    assert np.frombuffer(tensor["data"], tensor["dtype"]).tolist() == [1, 2, 3]
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["cached_tokens"]) == (30, 9, 4)
    [begin], [end] = imported.begins, imported.ends
    assert (begin["task_id"], json.loads(begin["restore"])) == ("12", {"task_id": 12})
    assert (begin["trial"], begin["policy_name"], begin["agent_name"]) == (3, "qwen", "simple_agent")
    assert (end["reward"], end["status"]) == (1.0, "completed")
    assert json.loads(begin["extra"])["num_turns"] == 2


def test_a_prompt_may_be_text_and_an_answer_cut_off(put: Any, run_import: Any) -> None:
    response = {**ROW["response"], "incomplete_details": {"reason": "max_output_tokens"}}
    row = {**ROW, "responses_create_params": {"input": "Hi"}, "response": response}
    imported = run_import(put(row))
    assert (imported.steps[0]["source"], imported.steps[0]["message"]) == ("user", "Hi")
    assert (imported.ends[0]["status"], imported.ends[0]["stop_reason"]) == ("truncated", "max_output_tokens")
    assert imported.ends[0]["truncated"] is True


def test_rollouts_of_a_task_are_a_group(put: Any, run_import: Any) -> None:
    other = {**ROW, "agent_ref": {"name": "other"}}
    bare = {name: value for name, value in ROW.items() if name not in {"_ng_task_index", "agent_ref"}}
    rows = [ROW, {**ROW, "_ng_rollout_index": 4}, other, bare, {**bare, "_ng_task_index": 0}]
    groups = [begin["group_id"] for begin in run_import(put(rows)).begins]
    one = "nemo-gym/simple_agent/12"
    assert groups == [one, one, "nemo-gym/other/12", None, "nemo-gym/0"]


def test_ids_and_logprobs_of_different_length_come_in_as_they_are(put: Any, run_import: Any) -> None:
    output = [{**ROW["response"]["output"][3], "generation_log_probs": [-1.0]}]
    imported = run_import(put({**ROW, "response": {"output": output}}))
    assert (list(imported.steps[-1]["token_ids"]), list(imported.steps[-1]["logprobs"])) == ([4, 5], [-1.0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": "good"}, "its `reward` is not a number"),
        ({"response": {"output": "text"}}, "its `output` is neither text nor a list of items"),
        (
            {"responses_create_params": {"input": [{"role": "exit", "content": ""}]}},
            "input item 1: its role is none of",
        ),
        ({"responses_create_params": {"input": [5]}}, "input item 1: it is not an object"),
    ],
)
def test_a_broken_line_is_refused_alone(put: Any, run_import: Any, change: dict[str, Any], reason: str) -> None:
    [file] = run_import(put([ROW, {**ROW, **change}])).report.files
    assert (file.episodes, file.refused) == (1, 1)
    assert file.refusals[0].reason.startswith(reason)


def test_a_rollout_comes_out_as_it_went_in(put: Any) -> None:
    [record] = check(format_named("nemo-gym"), put(json.dumps(ROW) + "\n"))
    patch = record.source.get("patch", [])
    # Log-probabilities are 32-bit in the column; the rest is made again without help.
    assert all("generation_log_probs" in path or path[-1:] == ["type"] for path, *_ in patch)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([ROW]))
def test_mutated_rollouts_come_out_as_they_went_in_or_are_refused(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(ROW) + "\n")
    check(format_named("nemo-gym"), path)

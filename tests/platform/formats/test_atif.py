"""ATIF trajectories: a step of ATIF is a step; metrics, calls and results in columns; every version 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.fuzzing import made_rows
from tests.platform.formats.mutation import check, mutations

from trajlake.errors import FormatError
from trajlake.formats import FORMATS, Record, detect_source, format_named, open_source
from trajlake.formats.exporting import by_columns
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


# -- episodes from elsewhere, by the rules of Harbor's validator (harbor.models.trajectories, 0.26) ------------------

OF_AGENTS = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
IN_STEPS = {"step_id", "timestamp", "source", "message", "observation", "is_copied_context", "llm_call_count", "extra"}
IMAGES = {"image/jpeg", "image/png", "image/gif", "image/webp"}


def broken_rules(trajectory: dict[str, Any]) -> list[str]:
    """What Harbor would refuse of this trajectory."""
    agent, steps = trajectory["agent"], trajectory["steps"]
    found = [name for name in ("name", "version") if not isinstance(agent.get(name), str)]
    if not steps or [step["step_id"] for step in steps] != [*range(1, len(steps) + 1)]:
        found.append("steps are not numbered from 1")
    for step in steps:
        found += [f"step {step['step_id']}: {words}" for words in _broken_in(step)]
    return found


def _broken_in(step: dict[str, Any]) -> Iterator[str]:
    yield from step.keys() - OF_AGENTS - IN_STEPS
    if step["source"] != "agent":
        yield from step.keys() & OF_AGENTS
    calls = step.get("tool_calls", [])
    for call in calls:
        typed = [(str, call["tool_call_id"]), (str, call["function_name"]), (dict, call["arguments"])]
        if not all(isinstance(value, kind) for kind, value in typed):
            yield "a call of other types"
        yield from call.keys() - {"tool_call_id", "function_name", "arguments", "extra"}
    for result in step.get("observation", {"results": []})["results"]:
        if result.get("source_call_id") not in {None, *(call["tool_call_id"] for call in calls)}:
            yield f"a result of {result['source_call_id']}, which is no call of the step"
        if result["content"] is not None and not _is_content(result["content"]):
            yield "a result of other parts"
        yield from result.keys() - {"source_call_id", "content", "extra"}
    if not _is_content(step["message"]):
        yield "a message of other parts"
    metrics = step.get("metrics", {})
    if not all(isinstance(value, float) for value in metrics.get("logprobs", [])):
        yield "logprobs that are no numbers"


def _is_content(content: Any) -> bool:
    if isinstance(content, list):
        return all(
            part.keys() == {"type", "source"} and part["type"] == "image" and part["source"]["media_type"] in IMAGES
            if "source" in part
            else part.keys() == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)
            for part in content
        )
    return isinstance(content, str)


def exported(record: Record) -> dict[str, Any]:
    """The trajectory that an export makes of a record of another format."""
    chosen = format_named("atif")
    episode = stored(replace(record, source={}))
    assert chosen.write is not None
    return dict(json.loads(b"".join(chosen.write([by_columns(episode, chosen)]))))


def recorded(*steps: Any) -> dict[str, Any]:
    trajectory = exported(Record("row 1", {}, steps))
    assert broken_rules(trajectory) == []
    return trajectory


def call_of(identity: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"source": "agent", "tool_calls": [{"id": identity, "name": "f", "arguments": arguments}]}


def result_of(identity: str | None, content: str = "ok", **more: Any) -> dict[str, Any]:
    return {"source": "tool", "tool_results": [{"call_id": identity, "content": content, **more}]}


def test_results_stand_in_the_step_of_their_call() -> None:
    steps = recorded(
        *(call_of("a"), call_of("b"), result_of("a", "1"), {"source": "user", "message": "And?"}),
        *(result_of("b", "2", is_error=True), call_of("a"), result_of("a", "3"), result_of("x", "4")),
    )["steps"]
    found = [(step["source"], [tuple(result.values()) for result in step.get("observation", {}).get("results", [])])
             for step in steps]  # fmt: skip
    assert found == [
        ("agent", [("a", "1")]),
        ("agent", [("b", "2", {"is_error": True})]),
        ("user", []),
        ("agent", [("a", "3")]),
        ("system", [(None, "4", {"source_call_id": "x"})]),
    ]


def test_what_only_agents_have_goes_to_extra_where_a_user_has_it() -> None:
    call = {**call_of("a"), "source": "user", "reasoning": "hm", "model": "m", "cost_usd": 0.5, "message": "Hi"}
    agent, user = recorded(call_of("a"), call, result_of("a", "done"))["steps"]
    assert "observation" not in agent
    assert user["message"] == "Hi"
    assert user["extra"] == {
        "model_name": "m",
        "reasoning_content": "hm",
        "tool_calls": [{"tool_call_id": "a", "function_name": "f", "arguments": {}}],
        "metrics": {"cost_usd": 0.5},
    }
    assert user["observation"] == {
        "results": [{"source_call_id": None, "content": "done", "extra": {"source_call_id": "a"}}]
    }


def test_what_atif_has_no_type_for_goes_to_extra() -> None:
    parts = [
        {"type": "output_text", "text": "See:", "annotations": []},
        {"type": "image", "media_type": "image/png", "data": b"PNG"},
        {"type": "image_url", "image_url": {"url": "https://x/y.jpg"}},
        {"type": "image", "uri": "https://x/y"},
        {"type": "audio", "uri": "https://x/y.mp3"},
    ]
    told, returned = (
        [
            {"type": "text", "text": "See:"},
            {"type": "image", "source": {"media_type": "image/png", "path": "data:image/png;base64,UE5H"}},
            {"type": "image", "source": {"media_type": "image/jpeg", "path": "https://x/y.jpg"}},
        ],
        {"content_parts": [{"type": "image", "uri": "https://x/y"}, {"type": "audio", "uri": "https://x/y.mp3"}]},
    )
    broken = {**call_of("a", "{broken"), "content_parts": parts, "token_ids": [1, 2], "logprobs": [float("nan"), -0.5]}
    nameless = {"tool_calls": [{"id": "b", "arguments": [1]}], "content_parts": parts[3:]}
    image = {"source": "tool", "content_parts": parts, "tool_results": [{"call_id": "b", "content": None}]}
    first, second = recorded(broken, nameless, image)["steps"]
    assert (first["message"], first["extra"], second["message"], second["extra"]) == (told, returned, "", returned)
    assert first["tool_calls"][0]["arguments"] == {}
    assert first["tool_calls"][0]["extra"] == {"arguments": "{broken"}
    assert first["metrics"] == {"completion_token_ids": [1, 2], "extra": {"logprobs": [None, -0.5]}}
    assert second["tool_calls"][0] == {
        "tool_call_id": "b",
        "function_name": "",
        "arguments": {},
        "extra": {"arguments": "[1]"},
    }
    [result] = second["observation"]["results"]
    assert result == {"source_call_id": "b", "content": told, "extra": returned}


def test_an_episode_without_steps_is_no_trajectory_of_atif() -> None:
    with pytest.raises(FormatError, match="has no steps"):
        recorded()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "atif" and made_rows(name)])
def test_rows_of_every_format_become_trajectories_that_harbor_takes(name: str, put: Any) -> None:
    found = [record for row in made_rows(name) for record in check(format_named(name), put(row)) if record.steps]
    assert found
    assert [broken_rules(exported(record)) for record in found] == [[]] * len(found)


REAL_FILES = (
    "tau-bench/historical_trajectories/gpt-4o-airline.json",
    "tau2-bench/pr17/2025-08-10T02_44_06.496849_telecom_llm_agent_gpt-4o_user_simulator_gpt-4o.json",
    "intercode/ctf/ic_ctf_gpt-4_25_turns.json",
    "verifiers/environments/mcp_env/outputs/evals/mcp-env--gpt-4.1-mini/468ee950/results.jsonl",
    "swe-agent/trajectories/demonstrations/ctf/pwn/warmup.traj",
    "mini-swe-agent-pr816/deepseek_chat_dev/pydicom__pydicom-1139/pydicom__pydicom-1139.traj.json",
    "openhands/evaluation/benchmarks/multi_swe_bench/examples/output.jsonl",
    "inspect_ai/tests/log/test_eval_log/log_tool_call_error.json",
    "inspect_ai/tests/log/test_eval_log/log_images.json",
    "kaggle-environments/kaggle_environments/envs/connectx/visualizer/default/replays/test-replay.json",
    "webvoyager/results/examples/taskAmazon--0/interact_messages.json",
)


@pytest.mark.parametrize("name", REAL_FILES)
def test_real_files_become_trajectories_that_harbor_takes(name: str, realdata: Path) -> None:
    source = open_source(realdata / name)
    records = [item for item in detect_source(source).read(source) if isinstance(item, Record) and item.steps]
    assert records
    for record in records:
        trajectory = exported(record)
        assert broken_rules(trajectory) == []
        results = sum(len(step.get("tool_results") or ()) for step in record.steps)
        given = [step["observation"]["results"] for step in trajectory["steps"] if "observation" in step]
        assert sum(map(len, given)) >= results  # some tools answer without a result of their own


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([TRAJECTORY]))
def test_mutated_trajectories_come_out_as_they_went_in_or_are_refused(row: Any, tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(row))
    check(format_named("atif"), path)

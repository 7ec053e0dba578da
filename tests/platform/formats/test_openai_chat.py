"""Chat messages come in with what our own columns mean, and lose nothing that has no column."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.platform.formats.mutation import check

from trajlake.formats import Record, Refused, detect, open_source
from trajlake.formats.openai_chat import FORMAT

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def read(path: Path) -> list[Record | Refused]:
    return list(FORMAT.read(open_source(path)))


def only(found: list[Record | Refused]) -> Record:
    [record] = found
    assert isinstance(record, Record), record
    return record


def step(put: Any, message: dict[str, Any]) -> dict[str, Any]:
    """The step of a message; one that is in its stored form already is given as the others are."""
    found: dict[str, Any] = dict(only(read(put([{"messages": [message]}]))).steps[0])
    if isinstance(found.get("extra"), str):
        found["extra"] = json.loads(found["extra"])
    return found


@pytest.mark.unit
@pytest.mark.parametrize(
    "content",
    [
        [{"messages": HELLO}, {"messages": HELLO}],
        json.dumps({"messages": HELLO}) + "\n" + json.dumps({"messages": HELLO}),
        [HELLO, HELLO],
        json.dumps(HELLO) + "\n" + json.dumps(HELLO),
    ],
)
def test_rows_of_messages_are_episodes(put: Any, content: Any) -> None:
    path = put(content)
    assert detect(path).name == "openai-chat"
    found = read(path)
    assert len(found) == 2
    assert all(isinstance(record, Record) and len(record.steps) == 2 for record in found)


@pytest.mark.unit
@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_that_is_one_list_of_messages_is_one_episode(put: Any, indent: int | None) -> None:
    path = put(json.dumps(HELLO, indent=indent))
    assert detect(path).name == "openai-chat"
    assert [step.get("message") for step in only(read(path)).steps] == ["hi", "hello"]


@pytest.mark.unit
def test_a_conversation_that_was_cut_off_is_not_taken_for_a_whole_one(put: Any) -> None:
    path = put(json.dumps(HELLO)[:-5])
    assert detect(path).name == "openai-chat"
    [found] = read(path)
    assert isinstance(found, Refused)
    assert "message 2 is broken: file ends inside a JSON value" in found.reason


@pytest.mark.unit
def test_keys_that_bear_a_columns_name_go_there_and_others_to_extra(put: Any) -> None:
    row = {
        "messages": HELLO,
        "task_id": 7,
        "group_id": "g",
        "reward": 1,
        "success": True,
        "seed": 3,
        "trial": 0,
        "domain": "retail",
        "policy_name": "p",
        "policy_version": 1200,
        "tags": {"a": "b"},
        "status": "truncated",
        "truncated": True,
        "rewards": {"format": 0.5},
        "started_at": "2025-01-02T03:04:05+00:00",
        "difficulty": None,
        "tools": [{"type": "function"}],
        "id": "row-1",
        "model": "m",
        "source_format": "tau-bench",
    }
    found = only(read(put([row])))
    begin = ("task_id", "group_id", "seed", "trial", "domain", "policy_name", "policy_version", "tags")
    assert found.begin == {name: row[name] for name in begin} | {
        "extra": {name: row[name] for name in ("tools", "id", "model", "source_format")}
    }
    assert found.end == {name: row[name] for name in ("reward", "success", "status", "truncated", "rewards")}
    assert found.started_at == row["started_at"]


@pytest.mark.unit
def test_values_of_another_type_stay_in_extra_as_they_are(put: Any) -> None:
    odd = {
        "reward": {"format": 0.5},
        "success": 1,
        "seed": "three",
        "trial": 1.5,
        "status": "resolved",
        "task_id": [1],
        "tags": ["a"],
        "domain": {},
        "started_at": "yesterday",
        "rewards": 0.5,
        "terminated": "no",
    }
    found = only(read(put([{"messages": HELLO, **odd}])))
    assert found.begin == {"extra": odd}
    assert found.end == {}


@pytest.mark.unit
def test_id_and_model_name_the_task_and_the_policy_where_nothing_else_does(put: Any) -> None:
    assert only(read(put([{"messages": HELLO, "id": 5, "model": "m"}]))).begin == {"task_id": 5, "policy_name": "m"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("role", "source"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "agent"),
        ("environment", "environment"),
    ],
)
def test_roles_become_sources_and_a_role_that_does_not_follow_from_it_is_kept(put: Any, role: str, source: str) -> None:
    found = step(put, {"role": role, "content": "x"})
    assert (found["source"], found["message"]) == (source, "x")
    assert found.get("extra", {}).get("role", role) == role
    assert ("extra" in found) == (role == "developer")


@pytest.mark.unit
def test_tool_and_function_messages_are_results(put: Any) -> None:
    found = step(put, {"role": "tool", "tool_call_id": "c", "content": "42", "name": "add"})
    assert found == {
        "source": "tool",
        "tool_results": [{"call_id": "c", "content": "42", "is_error": None}],
        "extra": {"name": "add"},
    }
    found = step(put, {"role": "function", "name": "add", "content": None, "is_error": True})
    assert found["tool_results"] == [{"call_id": None, "content": None, "is_error": True}]
    assert found["extra"] == {"role": "function", "name": "add"}
    found = step(put, {"role": "tool", "content": {"sum": 42}})
    assert found["tool_results"][0]["content"] == {"sum": 42}
    assert found["extra"] == {"content_kind": "object"}


@pytest.mark.unit
def test_lists_of_content_are_parts(put: Any) -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    assert step(put, {"role": "user", "content": parts}) == {"source": "user", "content_parts": parts}
    found = step(put, {"role": "tool", "content": parts})
    assert found["content_parts"] == parts
    assert found["tool_results"][0]["content"] is None


@pytest.mark.unit
def test_null_content_and_empty_content_are_different(put: Any) -> None:
    assert "message" not in step(put, {"role": "assistant", "content": None, "tool_calls": []})
    assert step(put, {"role": "assistant", "content": ""})["message"] == ""


@pytest.mark.unit
def test_reasoning_is_apart_from_the_message(put: Any) -> None:
    found = step(put, {"role": "assistant", "content": "4", "reasoning_content": "2+2", "reasoning": {"x": 1}})
    assert found["reasoning"] == "2+2"
    assert found["extra"] == {"reasoning": {"x": 1}}


@pytest.mark.unit
def test_what_our_own_export_writes_into_messages_comes_in_again(put: Any) -> None:
    columns = {
        "reward": 0.5,
        "terminated": False,
        "truncated": True,
        "token_ids": [1, 2],
        "loss_mask": [0, 1],
        "logprobs": [-0.5, -1.25],
        "policy_version": "1200",
        "model": "m",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cost_usd": 0.25,
        "latency_ms": 12.5,
        "is_copied_context": False,
        "error": "late",
        "timestamp": "2025-01-02T03:04:05+00:00",
        "parent_step": 0,
    }
    found = step(put, {"role": "assistant", "content": "x", **columns, "extra": {"note": 1}})
    assert found == {"source": "agent", "message": "x", **columns, "extra": {"note": 1}}
    results = [{"call_id": "c", "content": "1", "is_error": False}, {"call_id": "d", "content": "2", "is_error": True}]
    found = step(put, {"role": "tool", "content": None, "tool_results": results})
    assert found == {"source": "tool", "tool_results": results}
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    text = base64.b64encode(array.tobytes()).decode()
    tensor = {"name": "observation", "dtype": "float32", "shape": [2, 3], "data": text}
    found = step(put, {"role": "environment", "content": None, "tensors": [tensor]})
    np.testing.assert_array_equal(found["tensors"]["observation"], array)


@pytest.mark.unit
@pytest.mark.parametrize(
    "odd",
    [
        {"logprobs": {"content": [{"token": "a", "logprob": -1}]}},
        {"token_ids": [[1], [2, 3]]},
        {"token_ids": [2**40]},
        {"reward": "0.5"},
        {"reward": 10**400},
        {"loss_mask": [0.5]},
        {"timestamp": "now"},
        {"error": {"code": 1}},
        {"parent_step": -2},
        {"tensors": [{"name": "a", "dtype": "object", "shape": [1], "data": ""}]},
        {"tensors": [{"name": "a", "dtype": "float32", "shape": [-1], "data": "AAAAAA=="}]},
        {"tensors": [{"name": "a", "dtype": "float32", "shape": [9], "data": "AAAAAA=="}]},
        {"tensors": {"observation": [[1], [1, 2]]}},
        {"tool_results": "none"},
        {"function_call": None},
        {"extra": "text"},
    ],
)
def test_message_keys_that_fit_no_column_stay_in_extra(put: Any, odd: dict[str, Any]) -> None:
    found = step(put, {"role": "assistant", "content": "x", **odd})
    assert found == {"source": "agent", "message": "x", "extra": odd}


@pytest.mark.unit
def test_an_extra_of_the_source_hides_no_key(put: Any) -> None:
    found = step(put, {"role": "user", "content": "x", "name": "a", "extra": {"name": "b"}})
    assert found["extra"] == {"name": "a", "extra": {"name": "b"}}


@pytest.mark.unit
def test_tool_calls_that_are_text_are_read_and_their_text_is_kept(put: Any) -> None:
    text = '{"id": "c1", "function": {"arguments": "{\\"url\\":1}", "name": "fetch"}, "type": "function"}'
    found = step(put, {"role": "assistant", "content": "", "tool_calls": [text]})
    assert found["tool_calls"] == [json.loads(text)]
    assert found["extra"] == {"tool_calls_as_text": True}
    spelled = text.replace(": ", ":")
    found = step(put, {"role": "assistant", "content": "", "tool_calls": [spelled]})
    assert found["tool_calls"] == [json.loads(text)]
    assert found["extra"] == {"tool_calls_as_text": [spelled]}


@pytest.mark.unit
def test_a_function_call_of_the_old_style_is_a_tool_call(put: Any) -> None:
    call = {"name": "add", "arguments": "{}"}
    found = step(put, {"role": "assistant", "content": None, "function_call": call})
    assert found["tool_calls"] == [{"function": call}]
    assert found["extra"] == {"call_key": "function_call"}


AUDIO = {"id": "a", "data": "UE5H", "expires_at": 5, "transcript": "Spoken."}
SAID_ELSEWHERE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"tool_calls": [{"id": None, "name": "f", "arguments": "{}", "arguments_kind": "string"}]},
    ),
    ({"reasoning": "hm"}, {"reasoning": "hm"}),
    ({"reasoning_content": "hm"}, {"reasoning": "hm"}),
    ({"refusal": "No."}, {"message": "No."}),
    ({"audio": AUDIO}, {}),
    ({"audio": {"id": "a"}}, {}),
    ({"audio": {"data": 5, "text": [], "type": None, "transcript": "x"}}, {}),
]


@pytest.mark.unit
@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize(("said", "columns"), SAID_ELSEWHERE)
def test_what_is_said_elsewhere_than_in_content_comes_in_and_out_again(
    put: Any, run_import: Any, content: dict[str, Any], said: dict[str, Any], columns: dict[str, Any]
) -> None:
    messages = [HELLO[0], {"role": "assistant", **content, **said}, {"role": "function", "name": "f", "content": "1"}]
    for rows in ([{"messages": messages}], [messages], messages):
        path = put(rows)
        imported = run_import(path)
        [file] = imported.report.files
        assert (file.format, file.episodes, file.steps) == ("openai-chat", 1, 3)
        found = imported.steps[1]
        assert {name: found[name] for name in columns} == columns
        assert imported.steps[2]["tool_results"] == [{"call_id": None, "content": "1", "is_error": None}]
        check(FORMAT, path)
        if said == {"audio": AUDIO}:
            [part] = found["content_parts"]
            assert (part["type"], part["text"], part["data"]) == ("audio", "Spoken.", b"PNG")
        elif "content" in content and said.keys() != {"audio"}:
            assert "patch" not in json.loads(imported.begins[0]["extra"])["source_row"] or "reasoning" in said


@pytest.mark.unit
def test_what_is_said_in_content_too_stays_there(put: Any) -> None:
    found = step(put, {"role": "assistant", "content": "x", "refusal": "No.", "audio": AUDIO})
    assert found == {"source": "agent", "message": "x", "extra": {"refusal": "No.", "audio": AUDIO}}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "has no `messages`"),
        ("text", "neither an object"),
        ({"messages": "hi"}, "its messages are text"),
        ({"messages": [{"role": "exit", "content": ""}]}, "message 1: the role 'exit' is none of"),
        ({"messages": [{"role": "user", "content": 1}]}, "message 1: its content is a number"),
        ({"messages": [{"role": "assistant", "tool_calls": ["{"]}]}, "text that is not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "a tool call is a number"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "tool_calls are an object"),
    ],
)
def test_rows_that_are_no_conversation_are_refused_with_their_reason(put: Any, row: Any, words: str) -> None:
    good, bad = read(put([{"messages": HELLO}, row]))
    assert isinstance(good, Record)
    assert isinstance(bad, Refused)
    assert bad.row == "row 2"
    assert words in bad.reason


def test_webvoyager_conversations_come_in_with_their_images(realdata: Path, run_import: Any) -> None:
    folder = realdata / "webvoyager"
    paths = sorted(folder.rglob("*.json"))
    imported = run_import(folder)
    report = imported.report
    assert [file.path for file in report.files] == paths
    assert (report.rows_in, report.episodes, report.refused, len(report.failed)) == (4, 4, 0, 0)
    messages = [message for path in paths for message in json.loads(path.read_text())]
    assert report.steps == len(messages) == 52
    for step_, message in zip(imported.steps, messages, strict=True):
        if isinstance(message["content"], str):
            assert step_["message"] == message["content"]
        else:
            texts = [part["text"] for part in message["content"] if part["type"] == "text"]
            assert [part["text"] for part in step_["content_parts"] if part["type"] == "text"] == texts
            [image] = [part for part in step_["content_parts"] if part["type"] == "image_url"]
            assert json.loads(image["extra"]) == {
                "image_url": next(p["image_url"] for p in message["content"] if p["type"] == "image_url")
            }


def test_a_file_that_another_format_is_made_for_is_refused_and_not_mangled(realdata: Path) -> None:
    for path in sorted(realdata.glob("verifiers/**/results.jsonl")):
        if path.stat().st_size > 200:
            assert not FORMAT.detect(open_source(path)), path

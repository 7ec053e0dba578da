"""Inspect logs: samples as episodes, from JSON and from archives; attachments, events, scores; hostile archives."""

from __future__ import annotations

import base64
import io
import json
import zipfile
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.platform.formats.mutation import check, mutations

from trajlake.errors import FormatError
from trajlake.formats import Record, Refused, detect, format_named, open_source
from trajlake.formats import archive as archives
from trajlake.formats.inspect_parts import from_chat
from trajlake.formats.inspect_scores import as_number, outcome
from trajlake.formats.rebuild import SOURCE_ROW, same, stored

pytestmark = pytest.mark.unit

PNG = base64.b64encode(b"\x89PNG....").decode()
LONG = "Use the tool. " * 20


def model_event(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15, "input_tokens_cache_read": 2}
    output = {"model": "m", "choices": [{"message": message, "stop_reason": "stop"}], "usage": usage, "time": 0.25}
    return {"event": "model", "timestamp": "2025-01-02T03:04:05+00:00", "output": output, **more}


CALL = {"id": "c", "function": "bash", "arguments": {"cmd": "ls"}, "type": "function", "view": {"title": "bash"}}
FIRST = {"id": "m2", "role": "assistant", "content": "", "tool_calls": [CALL], "model": "m"}
LAST = {
    "id": "m4",
    "role": "assistant",
    "source": "generate",
    "content": [{"type": "reasoning", "reasoning": "Hm.", "signature": "x"}, {"type": "text", "text": "Done."}],
}
SAMPLE: dict[str, Any] = {
    "id": 7,
    "epoch": 2,
    "input": "List.",
    "target": "Done.",
    "messages": [
        {
            "id": "m1",
            "role": "user",
            "content": [
                {"type": "text", "text": "List."},
                {"type": "image", "image": f"data:image/png;base64,{PNG}", "detail": "auto"},
                {"type": "image", "image": "attachment://abc"},
            ],
        },
        FIRST,
        {
            "id": "m3",
            "role": "tool",
            "content": "attachment://def",
            "tool_call_id": "c",
            "function": "bash",
            "error": {"type": "timeout", "message": "late"},
        },
        LAST,
    ],
    "output": {"model": "m", "choices": [{"message": LAST, "stop_reason": "stop"}]},
    "scores": {"match": {"value": "C", "answer": "Done.", "explanation": "same"}},
    "metadata": {"label": 0.5},
    "store": {},
    "events": [
        {"event": "span_begin", "id": "s", "timestamp": "2025-01-02T03:04:00+00:00"},
        model_event(FIRST, input=[], input_refs=[[0, 1]]),
        {"event": "tool", "id": "c", "result": "attachment://def"},
        model_event(LAST, input=[], input_refs=[[0, 3]]),
        {"event": "score", "timestamp": "2025-01-02T03:04:09+00:00"},
    ],
    "attachments": {"abc": f"data:image/png;base64,{PNG}", "def": LONG},
    "message_pool": [{"role": "user", "content": "attachment://def"}],
}
EVAL = {"task": "popularity", "task_version": 0, "model": "openai/gpt-5", "created": "2025-01-02", "config": {}}
HEADER: dict[str, Any] = {"version": 2, "status": "success", "eval": EVAL, "plan": {}, "results": {"total_samples": 2}}
REDUCTIONS = [{"scorer": "match", "samples": [{"value": 1.0, "sample_id": 7}]}]
LOG = {**HEADER, "samples": [SAMPLE, {**SAMPLE, "epoch": 1}], "reductions": REDUCTIONS}
MEMBERS = {
    "_journal/start.json": {"version": 2, "eval": EVAL},
    "samples/7_epoch_2.json": SAMPLE,
    "samples/7_epoch_1.json": {**SAMPLE, "epoch": 1},
    "summaries.json": [],
    "reductions.json": REDUCTIONS,
    "header.json": HEADER,
}


def archive(members: dict[str, Any], **changes: Any) -> bytes:
    """An .eval archive; a change to None takes the member away, bytes stand as they are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, value in {**members, **changes}.items():
            if value is not None:
                zipped.writestr(name, value if isinstance(value, bytes) else json.dumps(value))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["json", "eval"])
def test_a_sample_is_an_episode_and_a_message_a_step(put: Any, run_import: Any, kind: str) -> None:
    imported = run_import(put(LOG if kind == "json" else archive(MEMBERS)))
    [file] = imported.report.files
    assert (file.format, file.episodes, file.steps, file.refused) == ("inspect", 2, 8, 0)
    first, second = imported.begins
    assert (first["task_family"], first["policy_name"]) == ("popularity", "openai/gpt-5")
    assert (first["task_id"], json.loads(first["restore"])["task_id"]) == ("7", 7)
    assert (first["trial"], second["trial"]) == (1, 0)
    user, call, result, answer = imported.steps[:4]
    assert [part["data"] for part in user["content_parts"][1:]] == [b"\x89PNG....", b"\x89PNG...."]
    assert call["tool_calls"] == [{"id": "c", "name": "bash", "arguments": '{"cmd":"ls"}', "arguments_kind": "object"}]
    assert result["tool_results"] == [{"call_id": "c", "content": LONG, "is_error": True}]
    assert (answer["reasoning"], answer["content_parts"][1]["text"]) == ("Hm.", "Done.")
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["cached_tokens"]) == (10, 5, 2)
    assert (call["latency_ms"], call["model"]) == (250.0, "m")
    assert imported.ends[0]["reward"] == 1.0
    assert imported.ends[0]["success"] is True
    assert imported.ends[0]["stop_reason"] == "stop"


def test_events_stay_beside_the_message_that_they_led_to(put: Any, run_import: Any) -> None:
    steps = run_import(put(LOG)).steps[:4]
    kept = [json.loads(step["extra"]).get("sample", {}) for step in steps]
    assert [[event["event"] for event in more.get("events", [])] for more in kept] == [
        ["span_begin"],
        ["model", "tool"],
        [],
        ["model", "score"],
    ]
    assert set(kept[0]) == {"events", "attachments", "message_pool"}


def test_the_header_is_kept_once_and_a_log_comes_out_as_it_went_in(put: Any) -> None:
    records = check(format_named("inspect"), put(LOG))
    assert ["file" in record.source for record in records] == [True, False]


@pytest.mark.parametrize("separator", [",\n", "\n"])
def test_several_logs_in_a_file_come_out_as_several(put: Any, separator: str) -> None:
    text = separator.join([json.dumps(LOG), json.dumps({**LOG, "version": 3})])
    path = put(f"[{text}]" if "," in separator else text)
    assert len(check(format_named("inspect"), path)) == 4
    layouts = [open_source(each).layout == "array" for each in (path, path.with_name("written"))]
    assert layouts == ["," in separator] * 2


def test_an_archive_comes_out_as_the_same_log(put: Any) -> None:
    chosen = format_named("inspect")
    records = [item for item in chosen.read(open_source(put(archive(MEMBERS)))) if isinstance(item, Record)]
    trajectories = [
        stored(replace(record, begin={**record.begin, "extra": {**record.begin["extra"], SOURCE_ROW: record.source}}))
        for record in records
    ]
    assert chosen.write is not None
    assert same(json.loads(b"".join(chosen.write(trajectories))), LOG)


def test_epochs_of_a_sample_are_a_group(put: Any, run_import: Any) -> None:
    samples = [SAMPLE, {**SAMPLE, "epoch": 1}, {**SAMPLE, "id": "a/b"}]
    begins = run_import(put({**LOG, "samples": samples})).begins
    assert [begin["group_id"] for begin in begins] == [*["inspect/popularity/7"] * 2, "inspect/popularity/a/b"]


def test_what_a_tool_says_of_its_error_is_where_readers_look(put: Any, run_import: Any) -> None:
    error = {"type": "timeout", "message": "too long"}
    tool = {"role": "tool", "tool_call_id": "c", "function": "bash", "error": error}
    messages = [{**tool, "content": content} for content in ("", "half", "too long", [{"type": "text", "text": "x"}])]
    messages += [{**tool, "content": "", "error": None}, {**tool, "content": "", "error": {"type": "unknown"}}]
    path = put({**LOG, "samples": [{**SAMPLE, "messages": messages}]})
    steps = run_import(path).steps
    results = [step["tool_results"][0] for step in steps]
    assert [result["content"] for result in results] == ["too long", "half", "too long", None, "", ""]
    assert [result["is_error"] for result in results] == [True, True, True, True, False, True]
    assert [step["error"] for step in steps] == [None, "too long", None, "too long", None, None]
    [record] = check(format_named("inspect"), path)
    assert "patch" not in record.source


def test_all_that_a_message_reasons_is_its_reasoning(put: Any, run_import: Any) -> None:
    thoughts = [{"type": "reasoning", "reasoning": words, "signature": words} for words in ("One.", "Two.")]
    messages = [
        {"id": "a", "role": "assistant", "content": [*thoughts, {"type": "text", "text": "So."}]},
        {"id": "b", "role": "assistant", "content": [{"type": "text", "text": "So."}, thoughts[1]]},
    ]
    path = put({**LOG, "samples": [{**SAMPLE, "messages": messages}]})
    assert [step["reasoning"] for step in run_import(path).steps] == ["One.\n\nTwo.", "Two."]
    [record] = check(format_named("inspect"), path)
    assert "patch" not in record.source


def test_a_message_with_two_thoughts_that_was_imported_before_comes_out_as_it_went_in() -> None:
    thoughts = [{"type": "reasoning", "reasoning": words} for words in ("One.", "Two.")]
    then = {"role": "assistant", "reasoning_content": "One.", "content": [{"type": "reasoning"}, thoughts[1]]}
    assert from_chat(then) == {"role": "assistant", "content": thoughts}


@pytest.mark.parametrize(
    ("scores", "reward", "success"),
    [
        ({"match": {"value": "I"}}, 0.0, False),
        ({"match": {"value": "C"}}, 1.0, True),
        ({"match": {"value": "P"}}, 0.5, None),
        ({"match": {"value": "N"}}, 0.0, False),
        ({"match": {"value": False}}, 0.0, False),
        ({"match": {"value": True}}, 1.0, True),
        ({"closeness": {"value": 0.25}}, 0.25, None),
        ({"count": {"value": "3"}}, 3.0, None),
        ({"text": {"value": "blue"}}, None, None),
        ({"a": {"value": "C"}, "b": {"value": "I"}}, None, None),
        ({"a": {"value": {"x": 1, "y": "no"}}}, None, None),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_scores(scores: Any, reward: float | None, success: bool | None) -> None:
    end = outcome({"scores": scores})
    assert (end.get("reward"), end.get("success")) == (reward, success)


def test_several_scores_are_named_and_those_of_models_judged() -> None:
    end = outcome({"scores": {"model_graded_qa": {"value": "C"}, "parts": {"value": {"x": 1, "y": "no"}}}})
    assert end["rewards"] == [
        {"name": "model_graded_qa", "value": 1.0, "kind": "judged"},
        {"name": "parts.x", "value": 1.0},
        {"name": "parts.y", "value": 0.0},
    ]
    assert as_number([1]) is None


def test_errors_and_limits() -> None:
    end = outcome({"error": {"message": "boom", "traceback": "…"}})
    assert (end["status"], end["failure_detail"]) == ("failed", "boom")
    end = outcome({"limit": {"type": "token", "limit": 5}})
    assert (end["status"], end["stop_reason"], end["failure_stage"]) == ("truncated", "token", "budget")


def test_a_log_without_samples_has_no_episodes(put: Any, run_import: Any) -> None:
    [file] = run_import(put({**HEADER, "samples": []})).report.files
    assert (file.format, file.rows_in, file.error) == ("inspect", 0, None)


def test_a_log_that_was_never_finished_has_its_start_for_a_header(put: Any, run_import: Any) -> None:
    [file] = run_import(put(archive(MEMBERS, **{"header.json": None, "reductions.json": None}))).report.files
    assert (file.format, file.episodes) == ("inspect", 2)


def test_a_broken_sample_is_refused_by_its_name_and_the_others_come_in(put: Any, run_import: Any) -> None:
    changes: dict[str, Any] = {
        "samples/a_epoch_1.json": b"{",
        "samples/b_epoch_1.json": b"\xff\xfe",
        "samples/c_epoch_1.json": {**SAMPLE, "messages": [{"role": "exit", "content": ""}]},
        "samples/d_epoch_1.json": ("[" * 3000 + "]" * 3000).encode(),
        "samples/e_epoch_1/sample.json": {},
        "samples/e_epoch_1/messages/0.json": [],
    }
    [file] = run_import(put(archive(MEMBERS, **changes))).report.files
    assert file.episodes == 2
    reasons = {refused.row: refused.reason for refused in file.refusals}
    assert list(reasons) == [*list(changes)[:4], "samples/e_epoch_1"]
    assert "not JSON" in reasons["samples/a_epoch_1.json"]
    assert "not UTF-8" in reasons["samples/b_epoch_1.json"]
    assert "the role 'exit'" in reasons["samples/c_epoch_1.json"]
    assert "deeper than" in reasons["samples/d_epoch_1.json"]
    assert "in chunks" in reasons["samples/e_epoch_1"]


def test_ids_of_samples_may_be_paths(put: Any, run_import: Any) -> None:
    ids = [f"HumanEval/{number}" for number in range(3)] + ["a_epoch_1/b", "x.json", "/y"]
    samples = {f"samples/{name}_epoch_{epoch}.json": {**SAMPLE, "id": name, "epoch": epoch}
               for name in ids for epoch in (1, 2)}  # fmt: skip
    chunks = {f"samples/{name}_epoch_{epoch}/{part}.json": {} for name in ("HumanEval/7", "a_epoch_1/c", "d")
              for epoch in (1, 2) for part in ("sample", "messages/0", "events/uuids")}  # fmt: skip
    whole = {name: MEMBERS[name] for name in ("_journal/start.json", "header.json")}
    path = put(archive(whole | samples))
    imported = run_import(path)
    [file] = imported.report.files
    assert (file.rows_in, file.episodes, file.refused) == (12, 12, 0)
    assert [(begin["task_id"], begin["trial"]) for begin in imported.begins] == [
        (name, at) for name in ids for at in (0, 1)
    ]
    assert len(check(format_named("inspect"), path)) == 12
    [file] = run_import(put(archive(whole | samples | chunks))).report.files
    assert (file.rows_in, file.episodes, file.refused) == (18, 12, 6)
    assert [refused.row for refused in file.refusals] == [
        f"samples/{name}_epoch_{epoch}" for name in ("HumanEval/7", "a_epoch_1/c", "d") for epoch in (1, 2)
    ]
    assert all("in chunks" in refused.reason for refused in file.refusals)


# -- hostile archives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../up.json", "/abs.json", "a/../../b.json", "C:\\x.json", "..\\up.json"])
def test_members_that_lead_out_refuse_the_archive(put: Any, run_import: Any, name: str) -> None:
    [file] = run_import(put(archive(MEMBERS, **{name: {}}))).report.files
    assert (file.episodes, "leads out of its folder" in str(file.error)) == (0, True)


def test_a_bomb_is_refused_before_it_is_read(put: Any, run_import: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = b'{"id": 1, "messages": [], "x": "' + b" " * (40 << 20) + b'"}'
    path = put(archive(MEMBERS, **{"samples/9_epoch_1.json": bomb}))
    assert path.stat().st_size < 100_000
    [file] = run_import(path).report.files
    assert (file.episodes, "a bomb?" in str(file.error)) == (0, True)
    monkeypatch.setattr(archives, "MEMBER_BYTES", 500)
    [file] = run_import(put(archive(MEMBERS))).report.files
    assert "its _journal/start.json" in str(file.error) or file.refused == 2


def test_a_member_that_says_less_than_it_holds_is_damaged(put: Any, run_import: Any) -> None:
    data = bytearray(archive(MEMBERS))
    place = data.rindex(b"PK\x01\x02", 0, data.index(b"samples/7_epoch_1", data.index(b"PK\x01\x02")))
    data[place + 24 : place + 28] = (100).to_bytes(4, "little")
    [file] = run_import(put(bytes(data))).report.files
    assert (file.episodes, file.refused) == (1, 1)
    assert "damaged" in file.refusals[0].reason


def test_encrypted_and_twice_named_members(put: Any, run_import: Any) -> None:
    data = bytearray(archive({"header.json": HEADER, "samples/1.json": SAMPLE}))
    central = data.rindex(b"PK\x01\x02")
    data[central + 8] |= 1
    [file] = run_import(put(bytes(data))).report.files
    assert [refused.reason for refused in file.refusals] == ["it is encrypted"]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("_journal/start.json", "{}")
        with pytest.warns(UserWarning, match="Duplicate name"):
            zipped.writestr("_journal/start.json", "{}")
    [file] = run_import(put(buffer.getvalue())).report.files
    assert "twice" in str(file.error)


def test_members_in_zstandard_are_read(put: Any, run_import: Any) -> None:
    """As newer versions of Inspect write them, and Python 3.14 reads them."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as zipped:
        for name, value in MEMBERS.items():
            text = json.dumps(value).encode()
            info = zipfile.ZipInfo(name)
            zipped.writestr(info, pa.Codec("zstd").compress(text, asbytes=True))
    data = bytearray(stored.getvalue())
    position = 0
    sizes = {name: json.dumps(value).encode() for name, value in MEMBERS.items()}
    while (position := data.find(b"PK\x01\x02", position)) >= 0:
        length = int.from_bytes(data[position + 28 : position + 30], "little")
        text = sizes[data[position + 46 : position + 46 + length].decode()]
        data[position + 10 : position + 12] = (93).to_bytes(2, "little")
        data[position + 16 : position + 20] = zlib.crc32(text).to_bytes(4, "little")
        data[position + 24 : position + 28] = len(text).to_bytes(4, "little")
        position += 4
    [file] = run_import(put(bytes(data))).report.files
    assert (file.episodes, file.steps, file.refused) == (2, 8, 0)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(log=mutations([LOG]))
def test_mutated_logs_come_out_as_they_went_in_or_are_refused(log: Any, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log))
    check(format_named("inspect"), path)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_archives_give_samples_and_refusals(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(archive(MEMBERS))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = tmp_path / "log.eval"
    path.write_bytes(bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))]) or b"PK")
    source = open_source(path)
    with suppress(FormatError):
        detect(path)
    with suppress(FormatError):
        assert all(isinstance(item, (Record, Refused)) for item in format_named("inspect").read(source))


def test_real_logs_come_out_as_they_went_in(realdata: Path, tmp_path: Path) -> None:
    paths = sorted((realdata / "inspect_ai" / "tests").rglob("*.json"))
    assert len(paths) == 9
    for path in paths:
        copy = tmp_path / "log.json"
        copy.write_bytes(path.read_bytes())
        check(format_named("inspect"), copy)

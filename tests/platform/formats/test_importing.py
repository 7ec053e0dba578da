"""Importing accounts for every row, is the same every time, and goes through the Writer."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from trajlake.errors import FormatError, UsageError
from trajlake.formats import FORMATS, Format, detect, format_named
from trajlake.formats.importing import KEPT_REFUSALS, episode_id

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
BAD = {"messages": [{"role": "user", "content": "hi"}, {"role": "exit", "content": ""}]}


@pytest.mark.unit
def test_every_format_is_found_under_its_own_name() -> None:
    for name in FORMATS:
        found = format_named(name)
        assert isinstance(found, Format)
        assert found.name == name
        assert found.description
    with pytest.raises(UsageError, match="no format is called 'tau'; known are tau-bench, .*openai-chat"):
        format_named("tau")


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"steps": [], "name": "connectx"}', "its rows have the keys 'steps', 'name'"),
        ("[1, 2]", "its rows are not JSON objects"),
        ("[]", "it holds no rows"),
        ("r l t\n1 2 3\n", "its line 1: not JSON"),
        (json.dumps('[{"messages": []}]'), "text that holds JSON, which was encoded twice"),
        (json.dumps(['{"messages": []}']), "text that holds JSON, which was encoded twice"),
        (f"{json.dumps('{}')}\n{json.dumps('{}')}\n", "text that holds JSON, which was encoded twice"),
    ],
)
def test_a_file_of_no_known_format_says_what_it_is_and_what_to_do(put: Any, content: Any, words: str) -> None:
    with pytest.raises(FormatError, match="not a format that is known") as caught:
        detect(put(content))
    for expected in (words, "tau-bench, ", "openai-chat", "JSON Lines of"):
        assert expected in str(caught.value)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04" + bytes(50), "a damaged ZIP archive: "),
        (zipped({"notes.txt": b"x"}), "not a format that is known: it is a ZIP archive. Known are tau-bench, "),
        (zipped({"header.json": b"{}", "../x": b""}), "the archive's member '../x' leads out of its folder"),
        (zipped({"header.json": b"{}", "samples/a.json": bytes(100 << 20)}), "more than 200 times its size"),
        (b"\x93NUMPY" + bytes(50), "not a format that is known: it is a NumPy array. Known are tau-bench, "),
        (b"\x1f\x8b" + bytes(50), "it is compressed with gzip: unpack it first"),
        ("<!DOCTYPE html>\n<html>", "not imported: a web page (HTML), as a download that failed leaves"),
        ("<HTML lang=en>", "not imported: a web page (HTML)"),
    ],
)
def test_what_cannot_be_a_format_says_so_first(put: Any, content: Any, words: str) -> None:
    path = put(content)
    with pytest.raises(FormatError) as caught:
        detect(path)
    assert words in str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.unit
def test_rows_in_are_episodes_and_refused(put: Any, run_import: Any) -> None:
    lines = [json.dumps(CHAT), "{", json.dumps(BAD), "", json.dumps(CHAT | {"task_id": 4})]
    imported = run_import(put("\n".join(lines)))
    [file] = imported.report.files
    assert (file.rows_in, file.episodes, file.steps, file.refused) == (4, 2, 4, 2)
    assert [refused.row for refused in file.refusals] == ["line 2", "line 3"]
    assert len(imported.begins) == len(imported.ends) == 2
    assert len(imported.steps) == 4


@pytest.mark.unit
def test_a_value_that_the_writer_does_not_take_refuses_the_row_whole(put: Any, run_import: Any) -> None:
    bad = {"messages": [*CHAT["messages"], {"role": "user", "content": ["not a part"]}]}
    imported = run_import(put([CHAT, bad, CHAT]))
    [refused] = imported.report.files[0].refusals
    assert refused.row == "row 2"
    assert refused.reason.startswith("step 3: step field content_parts: must be a list of objects")
    assert len(imported.begins) == 2
    assert len(imported.steps) == 4


@pytest.mark.unit
def test_episode_ids_are_the_same_every_time_and_differ_between_rows_files_and_runs(put: Any, run_import: Any) -> None:
    one, other = put([CHAT, CHAT], "a.json"), put([CHAT, BAD, CHAT], "b.json")
    first = run_import(one, other)
    assert len(set(first.episode_ids)) == 4
    assert all(len(name) == 32 and int(name, 16) for name in first.episode_ids)
    assert run_import(other, one).episode_ids == [*first.episode_ids[2:], *first.episode_ids[:2]]
    assert not set(run_import(one, other, run="another").episode_ids) & set(first.episode_ids)
    assert episode_id("ab", "c", "row 1") != episode_id("a", "bc", "row 1")


@pytest.mark.unit
def test_an_id_does_not_depend_on_the_rows_around_that_are_refused(put: Any, run_import: Any) -> None:
    path = put([CHAT, BAD, CHAT])
    report = run_import(path)
    hashed = report.begins[0]["source_hash"]
    assert report.episode_ids == [episode_id("run", hashed, "row 1"), episode_id("run", hashed, "row 3")]


@pytest.mark.unit
def test_every_episode_says_where_it_is_from(put: Any, run_import: Any) -> None:
    [begin] = run_import(put([CHAT | {"source_format": "elsewhere"}])).begins
    assert begin["source_format"] == "openai-chat"
    assert len(begin["source_hash"]) == 64
    assert json.loads(begin["extra"]) == {
        "source_format": "elsewhere",
        "source_row": {"row": 1, "file": {"layout": "array"}},
    }


@pytest.mark.unit
def test_what_is_said_of_every_episode_does_not_hide_what_the_file_says(put: Any, run_import: Any) -> None:
    path = put([CHAT, CHAT | {"policy_name": "b"}])
    begins = run_import(path, begin={"policy_name": "a", "domain": "d"}).begins
    assert [(begin["policy_name"], begin["domain"]) for begin in begins] == [("a", "d"), ("b", "d")]
    with pytest.raises(UsageError, match="policy"):
        run_import(path, begin={"policy": "a"})


@pytest.mark.unit
def test_folders_are_walked_in_order_and_no_file_in_them_is_fatal(put: Any, run_import: Any) -> None:
    put([CHAT], "b.json")
    put([CHAT, CHAT], "a/chat.jsonl")
    put("version https://git-lfs.github.com/spec/v1\n", "a/lfs.jsonl")
    put(b"", "a/empty")
    put("notes", "c.txt")
    folder = put([CHAT], ".hidden").parent
    os.symlink(folder, folder / "a" / "loop")
    report = run_import(folder, folder / "b.json", folder / "missing.json").report
    names = [(str(file.path.relative_to(folder)), file.episodes, file.error is not None) for file in report.files]
    assert names == [
        ("a/chat.jsonl", 2, False),
        ("a/empty", 0, True),
        ("a/lfs.jsonl", 0, True),
        ("b.json", 1, False),
        ("c.txt", 0, True),
        ("missing.json", 0, True),
    ]
    assert (report.rows_in, report.episodes, report.steps, report.refused, len(report.failed)) == (3, 3, 6, 0, 4)
    assert not any(str(file.path) in str(file.error) for file in report.files)


@pytest.mark.unit
def test_the_same_bytes_under_two_names_come_in_once(put: Any, run_import: Any) -> None:
    first, second = put([CHAT], "a.json"), put([CHAT], "b.json")
    report = run_import(first, first, second).report
    assert [(file.episodes, file.same_as, file.error) for file in report.files] == [(1, None, None), (0, first, None)]
    assert (report.rows_in, report.episodes, report.refused, report.failed) == (1, 1, 0, [])


@pytest.mark.unit
def test_a_format_that_is_named_is_used_and_refuses_row_by_row(put: Any, run_import: Any) -> None:
    [file] = run_import(put([CHAT, BAD]), format="tau-bench").report.files
    assert (file.format, file.rows_in, file.refused) == ("tau-bench", 2, 2)
    [file] = run_import(put(b"PK\x03\x04" + bytes(9)), format="tau-bench").report.files
    assert file.error == "not text; it is a ZIP archive"
    with pytest.raises(UsageError, match="no format is called"):
        run_import(put([CHAT]), format="tau")


@pytest.mark.unit
def test_refusals_are_counted_exactly_and_kept_up_to_a_bound(put: Any, run_import: Any) -> None:
    [file] = run_import(put([CHAT] + [{"messages": [{"role": "x" * 10_000}]}] * 150)).report.files
    assert (file.rows_in, file.episodes, file.refused) == (151, 1, 150)
    assert len(file.refusals) == KEPT_REFUSALS
    assert all(len(refused.reason) < 600 for refused in file.refusals)


@pytest.mark.unit
def test_progress_counts_bytes_and_ends_at_the_size_of_the_file(put: Any, run_import: Any) -> None:
    path = put([CHAT] * 10)
    calls: list[tuple[Path, int, int]] = []
    run_import(path, on_progress=lambda *call: calls.append(call))
    assert {call[0] for call in calls} == {path}
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)
    assert calls[-1][1:] == (path.stat().st_size, path.stat().st_size)


@pytest.mark.unit
def test_hostile_strings_come_in_and_come_back(put: Any, run_import: Any) -> None:
    hostile = 'NUL \x00, ANSI \x1b[31m, lone \ud800 and "\\u0000" {"traj": []}'
    call = {"id": hostile, "type": "function", "function": {"name": hostile, "arguments": hostile}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": hostile, hostile: hostile},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "task_id": hostile,
            "tags": {hostile: hostile},
        }
    ]
    imported = run_import(put(rows))
    assert (imported.report.episodes, imported.report.refused) == (1, 0)
    first, second = imported.steps
    assert first["message"] == hostile.replace("\ud800", "\ufffd")
    assert "message" in json.loads(first["restore"])
    assert json.loads(first["extra"]) == {hostile: hostile}
    assert "tool_calls.0.arguments" in json.loads(second["restore"])
    assert "task_id" in json.loads(imported.begins[0]["restore"])


@pytest.mark.unit
@pytest.mark.parametrize(("text", "expected"), [("null", None), ("0", 0.0), ("1.5", 1.5), ("NaN", "NaN")])
def test_four_different_rewards_stay_different(put: Any, run_import: Any, text: str, expected: Any) -> None:
    row = json.dumps(CHAT | {"reward": "?"}).replace('"?"', text)
    [end] = run_import(put(f"[{row}]")).ends
    assert (end["reward"] if end["reward"] == end["reward"] else "NaN") == expected


@pytest.mark.unit
def test_kinds_that_are_not_text_do_not_reach_the_writer(put: Any, run_import: Any) -> None:
    call = {"name": "x", "arguments": "{}", "arguments_kind": 5}
    rows = [
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        CHAT | {"rewards": [{"name": "a", "value": 1.0, "kind": 5}]},
    ]
    imported = run_import(put(rows))
    assert imported.report.episodes == 2
    assert json.loads(imported.steps[0]["extra"]) == {"tool_calls": {"0": {"arguments_kind": 5}}}
    assert "rewards" in json.loads(imported.begins[1]["extra"])

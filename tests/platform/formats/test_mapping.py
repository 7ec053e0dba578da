"""Mapping files: what they say is done, what they get wrong is said, and what they do not take stays."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from tests.platform.formats.mutation import mutations

from trajlake.errors import FormatError, UsageError
from trajlake.formats import Record, Refused, open_source
from trajlake.formats.mapping import load_mapping
from trajlake.formats.rebuild import stored

pytestmark = pytest.mark.unit

STEPS = """
name = "ours"
rows = "results[*]"

[episode]
task_id = "task.id"
reward = "outcome['final score']"
started_at = "when[0]"
policy_name = { value = "gpt-4o" }

[steps]
each = "trajectory"
source = "who"
message = "text"
reward = "r"

[steps.sources]
human = "user"
model = "agent"
"""
ROW: dict[str, Any] = {
    "task": {"id": 5, "hint": "x"},
    "outcome": {"final score": 0.5},
    "when": [1700000000],
    "trajectory": [{"who": "human", "text": "hi"}, {"who": "model", "text": "ho", "r": 1, "more": [1]}],
    "note": None,
}


@pytest.fixture
def mapping(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "mapping.toml"
        path.write_text(text)
        return path

    return write


def test_columns_come_from_their_paths_and_the_rest_stays(put: Any, run_import: Any, mapping: Any) -> None:
    chosen = load_mapping(mapping(STEPS))
    imported = run_import(put({"results": [ROW, ROW], "title": "t"}), format=chosen)
    assert (imported.report.episodes, imported.report.steps, imported.report.files[0].format) == (2, 4, "ours")
    begin, other = imported.begins
    assert (begin["source_format"], begin["policy_name"], json.loads(begin["restore"])) == (
        "ours",
        "gpt-4o",
        {"task_id": 5},
    )
    extra = json.loads(begin["extra"])
    del extra["source_row"]
    assert extra == {"task": {"hint": "x"}, "outcome": {}, "when": [1700000000], "note": None, "file": {"title": "t"}}
    assert "file" not in json.loads(other["extra"])
    assert [(step["source"], step["message"], step["reward"]) for step in imported.steps[:2]] == [
        ("user", "hi", None),
        ("agent", "ho", 1.0),
    ]
    assert json.loads(imported.steps[1]["extra"]) == {"more": [1], "source": "model"}
    assert imported.ends[0]["reward"] == 0.5


def test_messages_are_those_of_chat(put: Any, run_import: Any, mapping: Any) -> None:
    chosen = load_mapping(mapping('name = "x"\nmessages = "$.a.log"\n[episode]\ntask_id = "id"\n'))
    rows = [{"a": {"log": [{"role": "user", "content": "hi"}]}, "id": "t"}, {"a": {"log": [{"role": "exit"}]}}, {}, 5]
    imported = run_import(put(rows), format=chosen)
    assert (imported.report.episodes, imported.report.steps, imported.report.refused) == (1, 1, 3)
    assert imported.begins[0]["task_id"] == "t"


def test_rows_may_be_the_values_of_an_object(put: Any, mapping: Any) -> None:
    chosen = load_mapping(mapping('name = "x"\nrows = ""\nmessages = "m"\n'))
    path = put({"one": {"m": [{"role": "user", "content": "hi"}]}, "two": {"m": []}})
    assert [item.key for item in chosen.read(open_source(path)) if isinstance(item, Record)] == [
        "row 1 one",
        "row 1 two",
    ]


ALIKE = """
name = "ours"

[episode]
task_id = "id"
group_id = "id"
reward = "out.solved"
policy_name = "out.by['name']"
policy_version = "out.by['name']"

[steps]
each = "events"
message = "text"
reasoning = "text"
tool_calls = { each = "both", name = "tool" }
tool_results = { each = "both", content = "said" }
"""


def test_several_columns_may_be_read_from_one_place(put: Any, run_import: Any, mapping: Any) -> None:
    row = {
        "id": "t1",
        "out": {"solved": 1.0, "by": {"name": "p", "size": 7}},
        "events": [{"text": "x", "both": [{"tool": "f", "said": "y"}], "left": 1}],
    }
    imported = run_import(put(row), format=load_mapping(mapping(ALIKE)))
    [begin], [step] = imported.begins, imported.steps
    assert [begin[name] for name in ("task_id", "group_id", "policy_name", "policy_version")] == ["t1", "t1", "p", "p"]
    assert {name: value for name, value in json.loads(begin["extra"]).items() if name != "source_row"} == {
        "out": {"by": {"size": 7}}
    }
    assert (step["message"], step["reasoning"]) == ("x", "x")
    assert (step["tool_calls"][0]["name"], step["tool_results"][0]["content"]) == ("f", "y")
    assert "text" not in json.loads(step["extra"])
    assert json.loads(step["extra"])["left"] == 1


CALLS = """
name = "ours"

[episode]
started_at = { path = "started", unit = "ms" }

[steps]
each = "events"
timestamp = { path = "t", unit = "us" }
tool_calls = { name = "tool", arguments = "tool_input" }
tool_results = { each = "outputs", content = "out['text']", call_id = "of" }
"""


def test_calls_and_results_of_parts_and_times_in_units(put: Any, run_import: Any, mapping: Any) -> None:
    row = {
        "started": 1764590000123,
        "events": [
            {"t": 1764590000123456, "tool": "search", "tool_input": {"q": "x"}},
            {"outputs": [{"out": {"text": "found", "mime": "t"}, "of": "1"}, {"out": {"text": "more"}}], "tool": None},
            {"t": "2026-01-01T00:00:00Z"},
        ],
    }
    chosen = load_mapping(mapping(CALLS))
    [record] = chosen.read(open_source(put(row)))
    assert isinstance(record, Record)
    assert record.started_at == 1764590000.123
    imported = run_import(put(row), format=chosen)
    call, results, neither = imported.steps
    assert call["timestamp"].isoformat() == "2025-12-01T11:53:20.123456+00:00"
    assert [(one["name"], one["arguments"]) for one in call["tool_calls"]] == [("search", '{"q":"x"}')]
    assert [(one["content"], one["call_id"]) for one in results["tool_results"]] == [("found", "1"), ("more", None)]
    assert json.loads(results["extra"])["tool_results"]["0"] == {"out": {"mime": "t"}}
    assert neither["timestamp"].year == 2026
    assert neither["tool_calls"] is neither["tool_results"] is results["tool_calls"] is None


@pytest.mark.parametrize("outputs", [5, [5], "x", {"a": 1}])
def test_objects_that_are_none_refuse_their_row(put: Any, run_import: Any, mapping: Any, outputs: Any) -> None:
    rows = [{"events": []}, {"events": [{"outputs": outputs}]}]
    [file] = run_import(put(rows), format=load_mapping(mapping(CALLS))).report.files
    assert file.episodes == 1
    assert "tool_results: must be a list of objects" in file.refusals[0].reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "trajectory": None}, "there is no list where the mapping says that the steps are"),
        ({**ROW, "trajectory": [5]}, "step 1 is not an object"),
        ({**ROW, "trajectory": [{"who": "cat"}]}, "step 1: its source 'cat' is none of system"),
        ({**ROW, "outcome": {"final score": "good"}}, "end field reward: must be a number"),
        (5, "not an object"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_alone(
    put: Any, run_import: Any, mapping: Any, row: Any, reason: str
) -> None:
    [file] = run_import(put({"results": [ROW, row]}), format=load_mapping(mapping(STEPS))).report.files
    assert (file.episodes, file.refusals[0].row) == (1, "row 1 2")
    assert file.refusals[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "not TOML"),
        ("[episode]\n", "there is no name"),
        ('name = "tau-bench"\nmessages = "m"\n', "name = 'tau-bench' is a format that is built in"),
        ('name = "x"\n', "say where the steps are"),
        ('name = "x"\nmessages = "m"\n[steps]\neach = "s"\n', "say where the steps are"),
        ('name = "x"\n[steps]\nmessage = "m"\n', "needs each"),
        ('name = "x"\nmessages = "m"\n[episode]\ncolor = "c"\n', "[episode] has no 'color'; there are agent_name"),
        ('name = "x"\nmessages = "m"\ncolor = 1\n', "the file has no 'color'"),
        ('name = "x"\nmessages = 5\n', "a path is text"),
        ('name = "x"\nmessages = "a[b"\n', "is no path"),
        ('name = "x"\nmessages = "m"\n[episode]\nseed = 5\n', "write a path in quotes"),
        ('name = "x"\n[steps]\neach = "s"\n[steps.sources]\na = "cat"\n', "maps what the file says to one of"),
        ('name = "x"\nsteps = 5\n', "are tables"),
        ('name = "x"\n[steps]\neach = "s"\ntimestamp = 5\n', 'or { path = "…", unit = "ms" }'),
        ('name = "x"\n[steps]\neach = "s"\ntimestamp = { path = "t", unit = "h" }\n', "one of s, ms, us, ns, not 'h'"),
        (
            'name = "x"\n[steps]\neach = "s"\ntool_calls = { color = "c" }\n',
            "tool_calls has no 'color'; there are argu",
        ),
        ('name = "x"\n[steps]\neach = "s"\ntool_calls = 5\n', 'or { arguments = "…", id = "…", name = "…" }'),
    ],
)
def test_what_is_wrong_in_a_mapping_is_said(mapping: Any, text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_mapping(mapping(text))
    assert reason in str(caught.value)
    assert "mapping.toml" in str(caught.value)


def test_a_mapping_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        load_mapping(tmp_path / "none.toml")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(row=mutations([{"results": [ROW, ROW]}]))
def test_mutated_rows_are_stored_or_refused(row: Any, tmp_path: Path) -> None:
    text = tmp_path / "mapping.toml"
    text.write_text(STEPS)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(row))
    for item in load_mapping(text).read(open_source(path)):
        assert isinstance(item, (Record, Refused))
        if isinstance(item, Record):
            with suppress(UsageError, FormatError):  # as the import refuses it
                stored(item)

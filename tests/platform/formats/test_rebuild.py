"""The way back: patches make of what is rebuilt what was there, and two formats prove it on any rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.formats.mutation import check, check_real_file, withstand

from trajlake.errors import FormatError, UsageError
from trajlake.formats import Record, format_named, open_source
from trajlake.formats.chat import COLUMNS, chat_steps
from trajlake.formats.json_rows import Layout
from trajlake.formats.messages import chat_messages
from trajlake.formats.openai_chat import FORMAT as CHAT
from trajlake.formats.rebuild import Exact, difference, laid_out, patched, rebuilt, same, stored
from trajlake.formats.tau_bench import FORMAT as TAU
from trajlake_schemas import STEPS

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.unit
@given(wanted=VALUES, given_=VALUES)
def test_a_patch_makes_what_is_wanted_of_what_is_given(wanted: Any, given_: Any) -> None:
    patch = json.loads(json.dumps(difference(wanted, given_)))
    assert same(patched(given_, patch), wanted)


@pytest.mark.unit
def test_what_is_equal_and_what_is_not() -> None:
    for one, other in ((1, 1.0), (math.nan, math.nan), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), (2**70, 2**70)):
        assert same(one, other)
    pairs: list[tuple[Any, Any]] = [
        (1, True),
        (0, False),
        (None, 0),
        ("1", 1),
        ([], {}),
        (math.nan, 0.0),
        (2**70, 2**70 + 1),
    ]
    for one, other in pairs:
        assert not same(one, other)
    assert difference({"a": [1, 2], "b": 3}, {"a": [1, 3], "c": 4}) == [[["c"]], [["a", 1], 2], [["b"], 3]]


@pytest.mark.unit
@pytest.mark.parametrize("layout", ["array", "lines", "values"])
@pytest.mark.parametrize("rows", [[], [{"a": "é"}], [{"a": "\ud800", "b": math.nan}, [1], {"c": math.inf}]])
def test_what_is_laid_out_is_read_again(put: Any, layout: Layout, rows: list[Any]) -> None:
    path = put(b"".join(laid_out(rows, layout)) or b" \n")
    if not rows and layout != "array":
        assert path.read_bytes().strip() == b""
        return
    source = open_source(path)
    assert same([row.value for row in source.rows() if hasattr(row, "value")], rows)
    assert (source.layout == "array") == (layout == "array")


@pytest.mark.unit
def test_what_is_stored_is_what_a_lake_gives_back() -> None:
    steps: Any = [{"token_ids": [1, 2], "logprobs": [-0.5], "timestamp": "2025-01-02T03:04:05.678901"}]
    record = Record(
        "row 1",
        {"task_id": 5, "tags": {"a": "b"}, "extra": {"x": 1, "y": 1}},
        steps,
        {"reward": 1, "extra": {"y": 2}},
        started_at=0,
        source={"mine": 1},
    )
    found = stored(record)
    assert (found.episode["task_id"], found.episode["tags"], found.episode["status"]) == (5, {"a": "b"}, "completed")
    assert json.loads(found.episode["extra"]) == {"x": 1, "y": 2, "source_row": {"mine": 1}}
    assert found.episode["started_at"].isoformat() == "1970-01-01T00:00:00+00:00"
    assert found.episode["ended_at"] is None
    [step] = found.steps
    assert (step["token_ids"], step["logprobs"], step["step_index"]) == ([1, 2], [-0.5], 0)
    assert step["timestamp"].isoformat() == "2025-01-02T03:04:05.678901+00:00"
    with pytest.raises(UsageError, match="step 2: step field source"):
        stored(Record("row 1", {}, [{}, {"source": "narrator"}]))


@pytest.mark.unit
def test_columns_that_the_caller_of_an_import_filled_are_not_the_files(put: Any) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "domain": "d"}
    [record] = CHAT.read(open_source(put([row])))
    assert isinstance(record, Record)
    begin: Any = {**record.begin, "policy_name": "p", "extra": {"source_row": {"row": 1, "added": ["policy_name"]}}}
    found = stored(Record("row 1", begin, record.steps))
    assert same(rebuilt(found, lambda one: {"policy": one.episode["policy_name"]}), {"policy": None})


@pytest.mark.unit
def test_an_episode_that_was_changed_after_its_import_says_so(put: Any) -> None:
    [record] = TAU.read(open_source(put([{**TAU_ROW, "traj": [{"role": "user", "content": "x", "name": None}] * 2}])))
    assert isinstance(record, Record)
    patch = [[["traj", 5, "name"], None]]
    begin: Any = {**record.begin, "extra": {"source_row": {"row": 1, "patch": patch}}}
    assert TAU.write is not None
    with pytest.raises(FormatError, match="not as it was imported"):
        list(TAU.write([stored(Record("row 1", begin, record.steps))]))


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "]"]}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "# Airline Agent Policy"},
    {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image", "data": "AAAA", "alt": None}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "index": 1}], "reasoning_content": "hm"},
    {"role": "tool", "content": "Error: no", "tool_call_id": "c", "name": "f"},
    {"role": "assistant", "tool_calls": [json.dumps(CALL), json.dumps(CALL, indent=1)], "refusal": None},
    {"role": "function", "content": {"a": 1}, "is_error": False},
    {"role": "assistant", "function_call": {"name": "f", "arguments": {}}, "weight": 0, "timestamp": "2024-01-01"},
    {"role": "assistant", "content": "x", "token_ids": [1, 2], "logprobs": [-0.1, "-Infinity"], "reward": "NaN"},
]
ROW = {
    "messages": MESSAGES,
    "id": 7,
    "model": "m",
    "reward": 0.5,
    "rewards": {"a": 1},
    "tags": {"a": "b"},
    "extra": {"x": 1},
    "tools": [],
    "seed": None,
    "status": "completed",
}
TAU_ROW = {"task_id": 1, "reward": 1.0, "info": {"error": "no"}, "traj": MESSAGES[1:6], "trial": 0}


ODD_KEYS = [
    *("name", "refusal", "function_call", "reasoning", "reasoning_content", "extra", "is_error", "tool_results"),
    *("reward", "call_key", "content_kind", "tool_calls_as_text", "tool_call_id", "weight", "timestamp", "source"),
]
CALLS = st.lists(
    st.sampled_from([CALL, {**CALL, "index": 1}, {"id": "c", "name": "f", "arguments": "{}"}, json.dumps(CALL), None])
)
ANY_MESSAGE = st.builds(
    lambda usual, odd: usual | odd,
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])},
        optional={
            "content": st.none() | st.text(max_size=3) | st.just("Error: no") | st.just([]) | st.just({"a": 1}),
            "tool_calls": st.none() | CALLS,
            "tool_call_id": st.none() | st.just("c") | st.just(5),
        },
    ),
    st.dictionaries(st.sampled_from(ODD_KEYS), VALUES | st.just({"name": "f", "arguments": "{}"}), max_size=2),
)


@pytest.mark.unit
@pytest.mark.parametrize(("reports", "columns"), [(True, frozenset()), (False, COLUMNS), (False, frozenset())])
@given(messages=st.lists(ANY_MESSAGE, min_size=1, max_size=4))
def test_a_step_that_is_exact_gives_its_message_again(reports: bool, columns: Any, messages: Any) -> None:
    def is_error(content: str) -> bool:
        return content.startswith("Error")

    for message in messages:
        try:
            [step] = chat_steps([message], is_error=is_error if reports else None, columns=columns, exact=True)
        except FormatError:
            continue
        if type(step) is Exact:
            assert step.source is message
            read = {**dict.fromkeys(STEPS.names()), **step, "step_index": 0}
            [again] = chat_messages([read], columns=columns, tells_errors=not reports)
            assert same(again, message)
            [longer] = chat_steps([message], is_error=is_error if reports else None, columns=columns)
            assert same(nulls_out(Record("row 1", {}, [longer]).rows.steps[0]), nulls_out(step))


def nulls_out(step: Any) -> dict[str, Any]:
    found = {name: value for name, value in step.items() if value is not None}
    return found | ({"extra": json.loads(found["extra"])} if "extra" in found else {})


@pytest.mark.unit
@pytest.mark.parametrize("rows", [[ROW], [ROW, {"messages": MESSAGES, "task_id": "7"}], MESSAGES, [MESSAGES, MESSAGES]])
def test_chat_goes_out_as_it_came_in(put: Any, rows: list[Any]) -> None:
    texts = [json.dumps(rows), json.dumps(rows, indent=1)]
    if rows is not MESSAGES:  # of which each line would be a row
        texts.append("\n".join(map(json.dumps, rows)))
    for text in texts:
        assert check(CHAT, put(text))


@pytest.mark.unit
def test_mutated_chat(tmp_path: Path) -> None:
    withstand(CHAT, [[ROW], ROW, MESSAGES, [MESSAGES]], tmp_path, examples=150)


@pytest.mark.unit
def test_mutated_tau_bench(tmp_path: Path) -> None:
    withstand(TAU, [[TAU_ROW], [TAU_ROW, TAU_ROW]], tmp_path)


def test_the_published_airline_results_go_out_as_they_came_in(realdata: Path, tmp_path: Path) -> None:
    path = realdata / "tau-bench/historical_trajectories/gpt-4o-airline.json"
    records = check_real_file(format_named("tau-bench"), path, 200, 5308, tmp_path)
    assert not any("patch" in record.source for record in records)
    assert records[0].source == {"file": {"layout": "array"}}

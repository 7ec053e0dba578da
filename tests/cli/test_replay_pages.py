"""How steps and headers look, from plain dicts."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from trajlake_cli.replay.header import add_header, policy, reward_of, task, verdict
from trajlake_cli.replay.json_view import pretty_json
from trajlake_cli.replay.page import Page
from trajlake_cli.replay.steps import add_step, searchable, summary, tool_names
from trajlake_cli.replay.tensors import describe

pytestmark = pytest.mark.unit


def drawn(step: dict[str, Any], width: int = 80, max_chars: int = 0, names: dict[str, str] | None = None) -> str:
    page = Page(width, max_chars)
    add_step(page, {"step_index": 0, "source": "agent", **step}, names or {})
    assert all(line.cell_len <= width for line in page.lines)
    return "\n".join(line.plain.rstrip() for line in page.lines)


def header(**episode: Any) -> str:
    page = Page(80)
    add_header(page, {"episode_id": "e1", "status": "completed", **episode}, "2 of 17")
    return "\n".join(line.plain.rstrip() for line in page.lines)


def tensor(name: str, value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    return {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def test_a_step_with_everything() -> None:
    step = {
        "step_index": 7,
        "model": "m1",
        "latency_ms": 1250.0,
        "completion_tokens": 1200,
        "reasoning": "think first",
        "message": "Hello\nthere",
        "tool_calls": [{"id": "c", "name": "find", "arguments": '{"q":1}', "arguments_kind": "string"}],
        "reward": -1.0,
        "terminated": True,
        "error": "timeout",
    }
    assert drawn(step, 64) == (
        "  7  agent  m1 · 1.25 s · 1,200 tokens     reward -1  terminated\n"
        "    │ think first\n"
        "    │ Hello\n"
        "    │ there\n"
        '    │ → find {"q": 1}\n'
        "    │ error: timeout"
    )


def test_a_result_is_named_after_its_call() -> None:
    names = tool_names([{"tool_calls": [{"id": "c", "name": "old"}]}, {"tool_calls": [{"id": "c", "name": "find"}]}])
    assert names == {"c": "find"}, "sources use an id again: the last call counts"
    step = {"source": "tool", "tool_results": [{"call_id": "c", "content": "[1, 2]", "is_error": True}]}
    assert drawn(step, names=names) == "  0  tool  ← find  error\n    │ [1, 2]"
    assert "← unknown" in drawn({"tool_results": [{"call_id": "unknown", "content": "x"}]})
    assert "(empty text)" in drawn({"tool_results": [{"call_id": "c", "content": ""}]})
    assert "(nothing returned)" in drawn({"tool_results": [{"call_id": "c", "content": None}]})


def test_parts_that_a_tool_returned_are_its_result() -> None:
    parts = [{"type": "text", "text": "a cat"}, {"type": "image", "media_type": "image/png"}]
    step = {"source": "tool", "content_parts": parts, "tool_results": [{"call_id": "c", "content": None}]}
    assert drawn(step, names={"c": "look"}) == "  0  tool  ← look\n    │ a cat\n    │ [image] image/png"
    assert summary(step) == "← a cat"


def test_the_summary_of_a_message_of_parts_is_what_they_say() -> None:
    assert (
        summary({"source": "user", "content_parts": [{"text": "look"}, {"type": "image"}, {}]}) == "look [image] [part]"
    )


def test_several_results_in_one_step() -> None:
    results = [{"call_id": "a", "content": "1"}, {"call_id": "b", "content": "2"}]
    text = drawn({"source": "tool", "tool_results": results}, names={"a": "f", "b": "g"})
    assert text.splitlines()[1:] == ["    │ ← f", "    │   1", "    │ ← g", "    │   2"]


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    broken = {"name": "run", "arguments": '{"code": "x', "arguments_kind": "string"}
    assert drawn({"tool_calls": [broken]}).splitlines()[1:] == [
        "    │ → run  (arguments are not valid JSON)",
        '    │   {"code": "x',
    ]
    text = {"name": "bash", "arguments": "ls -l\npwd", "arguments_kind": "string"}
    assert drawn({"tool_calls": [text]}).splitlines()[1:] == ["    │ → bash", "    │   ls -l", "    │   pwd"]
    assert drawn({"tool_calls": [{"name": "stop", "arguments": None}]}).endswith("→ stop")


def test_long_texts_are_cut_with_a_note() -> None:
    text = drawn({"message": "word " * 1000}, max_chars=300)
    assert "… 4,701 more characters" in text
    assert len(text) < 500
    assert "more characters" not in drawn({"message": "word " * 1000})
    assert "more characters" not in drawn({"message": "x" * 310}, max_chars=300), "hardly longer: whole"


def test_nothing_steers_the_terminal() -> None:
    hostile = "\x1b[2J\x9b \u202e [bold]x[/bold] :smile: \x00\r"
    step = {
        "source": hostile,
        "model": hostile,
        "message": hostile,
        "reasoning": hostile,
        "tool_calls": [{"id": hostile, "name": hostile, "arguments": json.dumps({hostile: hostile}) + hostile}],
        "tool_results": [{"call_id": hostile, "content": hostile, "is_error": None}],
        "content_parts": [{"type": hostile, "uri": hostile, "media_type": hostile}, {"type": "text", "text": hostile}],
        "tensors": [{"name": hostile, "dtype": hostile, "shape": [1], "data": b"x"}],
        "error": hostile,
    }
    page = Page(80)
    add_step(page, {"step_index": 0, **step}, tool_names([step]))
    fields = ("episode_id", "task_id", "run_id", "policy_name", "status", "failure_detail", "stop_reason", "retracted")
    add_header(page, dict.fromkeys(fields, hostile))
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system="truecolor", width=80, markup=False, emoji=False)
    page.print_to(console)
    text = written.getvalue()
    assert "\x1b[2J" not in text
    assert not set("\x9b\u202e\x00\r") & set(text)
    assert "[bold]x[/bold] :smile:" in text


@given(st.text(), st.integers(20, 120))
def test_every_text_fits_every_width(text: str, width: int) -> None:
    page = Page(width)
    page.add_text(text, gutter=None)
    assert all(cell_len(line.plain) <= width for line in page.lines)
    assert "".join("".join(line.plain.split()) for line in page.lines).count("a") == text.count("a")


def test_wrapped_lines_keep_their_indentation() -> None:
    page = Page(30)
    page.add_text("  - a point that is longer than the line")
    assert [line.plain for line in page.lines] == ["  - a point that is longer", "  than the line"]


def test_classic_steps_are_compact() -> None:
    step = {"reward": 1.0, "truncated": True, "tensors": [tensor("observation", [0.5, -1.0]), tensor("action", 1)]}
    assert drawn(step, 60) == (
        "  0  agent                               reward 1  truncated\n"
        "    │ observation  float64[2]  0.5 -1\n"
        "    │ action       int64       1"
    )
    assert summary(step) == "observation 0.5 -1  action 1"


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (tensor("t", np.zeros((2, 3), "uint8")), ("uint8[2,3]", "0 0 0 0 0 0")),
        (tensor("t", np.arange(100, dtype="float32")), ("float32[100]", "0 … 99, mean 49.5")),
        (tensor("t", np.array([True, False] * 8)), ("bool[16]", "8 of 16 true")),
        (tensor("t", np.array([np.nan, np.inf] * 5)), ("float64[10]", "NaN … NaN, mean NaN")),
        (tensor("t", np.zeros((0, 4))), ("float64[0,4]", "empty")),
        (tensor("t", np.zeros(9, "complex64")), ("complex64[9]", "9 values")),
        ({"name": "t", "dtype": "object", "shape": [1], "data": b"12345678"}, ("object[1]", "8 bytes")),
        (
            {"name": "t", "dtype": "float32", "shape": [3], "data": b"1"},
            ("float32[3]", "1 bytes, which do not fill this shape"),
        ),
        (
            {"name": "t", "dtype": "float32", "shape": [2**62, 2**62], "data": b""},
            (f"float32[{2**62},{2**62}]", "0 bytes, which do not fill this shape"),
        ),
        ({"name": "t", "dtype": None, "shape": None, "data": None}, ("?", "no data")),
    ],
)
def test_tensors(value: dict[str, Any], described: tuple[str, str]) -> None:
    assert describe(value) == described


@pytest.mark.parametrize(
    ("text", "pretty"),
    [
        ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'),
        ('{"a":{"b":"' + "x" * 30 + '"}}', '{\n  "a": {\n    "b": "' + "x" * 30 + '"\n  }\n}'),
        (
            '{"code":"a = 1\\nb = 2\\nprint(a)","n":1}',
            '{\n  "code": |\n    a = 1\n    b = 2\n    print(a)\n  "n": 1\n}',
        ),
        ("[]", "[]"),
        ("plain text", None),
        ("3", None),
        ('{"a": 1, "a": 2}', None),
        ('{"a": ', None),
        ("[" * 100_000, None),
    ],
)
def test_json(text: str, pretty: str | None) -> None:
    assert pretty_json(text, 40) == pretty


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('ab\n\\"'),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("xy"), inner, max_size=4),
        max_leaves=20,
    )
)
def test_pretty_json_shows_every_leaf(value: Any) -> None:
    shown = pretty_json(json.dumps({"v": value}), 30)
    assert shown is not None
    for character in "ab":
        assert shown.count(character) >= json.dumps({"v": value}).count(character) - shown.count("null")


def test_header() -> None:
    text = header(
        run_id="r",
        task_family="airline",
        task_id="airline/17",
        trial=1,
        policy_name="gpt",
        policy_version=0,
        success=False,
        reward=0.0,
        n_steps=12,
        n_tool_calls=3,
        n_tool_errors=1,
        failure_stage="tool_call",
        failure_detail="wrong\nflight",
    )
    assert text.splitlines()[1:-1] == [
        "✗ failed  airline/17 · trial 1                                           2 of 17",
        "episode    e1",
        "run        r   policy gpt @0",
        "reward     0   status completed   size 12 steps, 3 tool calls (1 error)",
        "failure    tool_call: wrong↵flight",
    ]


@pytest.mark.parametrize(
    ("episode", "mark"),
    [
        ({"success": True, "status": "completed"}, "✓ solved"),
        ({"success": False, "status": "completed"}, "✗ failed"),
        ({"success": None, "status": "completed"}, "○ not judged"),
        ({"success": None, "status": "aborted"}, "○ aborted"),
        ({"success": False, "status": "aborted"}, "✗ failed"),
        ({"success": True, "status": "aborted"}, "✓ solved"),
        ({"success": True, "status": "failed"}, "✗ failed"),
    ],
)
def test_verdict(episode: dict[str, Any], mark: str) -> None:
    assert verdict(episode)[0] == mark


def test_names() -> None:
    assert task({"task_family": "tau", "domain": "air", "task_id": 0, "trial": 2}) == "tau/air/0 · trial 2"
    assert task({"env_name": "CartPole-v1", "seed": 3}) == "CartPole-v1 · seed 3"
    assert task({}) == "no task named"
    assert policy({}) == ""
    assert policy({"policy_version": "7"}) == "@7"
    assert reward_of({"reward": None}) == "not scored"
    assert reward_of({"reward": float("nan")}) == "NaN"
    assert reward_of({"reward": 0.5, "rewards": [{"name": "format", "value": 1.0}]}) == "0.5 (format 1)"
    late = [{"name": "tests", "value": 0.0}, {"name": "reward", "value": 0.0}, {"name": "success", "value": 0.0}]
    assert reward_of({"reward": 0.0, "success": False, "rewards": late}) == "0 (tests 0)"
    assert reward_of({"reward": 1.0, "success": None, "rewards": late[1:]}) == "1 (reward 0, success 0)"


def test_search_and_summary() -> None:
    call = {"tool_calls": [{"name": "find", "arguments": "{}"}]}
    assert summary(call) == "→ find {}"
    assert "find" in searchable(call)
    assert searchable({"message": None}) == ""

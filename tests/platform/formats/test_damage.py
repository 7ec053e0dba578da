"""Whatever is done to a file, reading it gives records and refusals, never a traceback."""

from __future__ import annotations

import json
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trajlake.errors import FormatError, UsageError
from trajlake.formats import FORMATS, Record, Refused, detect_source, format_named, open_source
from trajlake.ingest.segment import Event, encode_batch

pytestmark = pytest.mark.unit

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "]"]}'}}
MESSAGES = [
    {"role": "system", "content": "# Airline Agent Policy"},
    {"role": "user", "content": [{"type": "text", "text": "é😀\\"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "token_ids": [1, 2], "logprobs": [-0.5, -1e-9]},
    {"role": "tool", "content": "Error: no", "tool_call_id": "c"},
]
TAU = [{"task_id": n, "reward": 1.0, "info": {"x": {}}, "traj": MESSAGES, "trial": 0} for n in range(3)]
CHAT = [{"messages": MESSAGES, "reward": 0.5, "rewards": {"a": 1}, "tags": {"a": "b"}} for _ in range(3)]
FILES = [
    text.encode()
    for rows in (TAU, CHAT, MESSAGES)
    for text in (json.dumps(rows), json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows)))
]


NOT_JSON = {"monitor-csv", "minari"}  # which refuse a file of JSON whole
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def read_all(path: Path) -> None:
    """Read the file as every format, and make Arrow of each record: in the writer's thread an error would be too
    late."""
    try:
        source = open_source(path)
    except FormatError:
        return
    with suppress(FormatError):
        detect_source(source)
    events: list[Event] = []
    for name in FORMATS:
        keys = []
        try:
            for item in format_named(name).read(source):
                assert isinstance(item, (Record, Refused))
                if isinstance(item, Refused):
                    assert item.row
                    assert item.reason
                    continue
                keys.append(item.key)
                with suppress(UsageError):
                    rows = item.rows
                    for kind, row in (
                        ("begin", rows.begin),
                        *(("step", step) for step in rows.steps),
                        ("end", rows.end),
                    ):
                        events.append(Event(kind, "id", 0, len(events), 0, row))
        except FormatError:
            assert source.kind or name in NOT_JSON
        assert len(keys) == len(set(keys))
    encode_batch(events)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from(FILES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(0, 40)))
        tokens = st.sampled_from(
            [b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\0", b"\n", b"\xff", b"null", b"1"]
        )
        middle = draw(st.one_of(tokens, st.binary(max_size=4)))
        data = data[:start] + middle + data[stop:]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


@settings(max_examples=200, deadline=None, suppress_health_check=CHECKS)
@given(data=damaged())
@example(data=b"[" * 3000)
@example(data=b'{"a":' * 3000)
@example(data=b'[{"messages": ' + b"[" * 150 + b"]" * 150 + b"}]")
@example(data=b"\xff\xfe[\0{\0")
@example(data=b"-")
@example(data=b'["')
def test_damaged_files_give_records_and_refusals(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    read_all(path)


NAMES = [
    "messages", "traj", "role", "content", "tool_calls", "function", "arguments", "tool_results", "reward", "rewards",
    "task_id", "info", "error", "trial", "extra", "tensors", "token_ids", "loss_mask", "logprobs", "timestamp", "tags",
    "started_at", "name", "value", "kind", "id", "type", "text", "data", "shape", "dtype", "function_call", "is_error",
    "reasoning", "model", "source", "parent_step", "content_parts", "arguments_kind", "status", "success",
]  # fmt: skip
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(2**63), 2**63]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["user", "assistant", "tool", "system", "agent", "float32", "AAAA", "completed", "{}", "[]", "\ud800"]
    ),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES) | st.text(string.ascii_letters), inner, max_size=4),
    ),
    max_leaves=8,
)
ROLES = st.sampled_from(["user", "assistant", "tool", "function", "developer"])
MESSAGE = st.builds(
    lambda role, rest: {**rest, "role": role}, ROLES, st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
)


@settings(max_examples=150, deadline=None, suppress_health_check=CHECKS)
@given(
    messages=st.lists(MESSAGE, max_size=3) | VALUES,
    rest=st.dictionaries(
        st.sampled_from([*NAMES, "status", "seed", "group_id", "ended_at", "n_steps"]), VALUES, max_size=5
    ),
)
def test_rows_of_any_values_are_stored_or_refused(messages: Any, rest: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    rows = [{**rest, "messages": messages}, {**rest, "traj": messages}]
    path.write_text(json.dumps(rows))
    read_all(path)

"""Our own JSON Lines record comes in again: what was imported, exported and imported again is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trajlake.formats.base import Record
from trajlake.ingest.segment import Event, encode_batch
from trajlake.read.record import json_line, record
from trajlake.read.trajectory import Trajectory, restored
from trajlake_schemas import EPISODES, STEPS

COLUMNS = [column.name for column in STEPS if column.name not in {"episode_id", "step_index"}]


def exported(begin: dict[str, Any], steps: list[dict[str, Any]], end: dict[str, Any]) -> str:
    """The line of an export, from the events of one episode."""
    episode = {name: begin.get(name) if end.get(name) is None else end[name] for name in EPISODES.names()}
    restore = {**json.loads(begin["restore"] or "{}"), **json.loads(end["restore"] or "{}")}
    episode |= {"extra": begin["extra"], "restore": json.dumps(restore), "episode_id": "e", "n_steps": len(steps)}
    rows = [{"episode_id": "e", "step_index": index, **step} for index, step in enumerate(steps)]
    return json_line(record(Trajectory(restored(episode), [restored(row) for row in rows])))


def comparable(step: dict[str, Any]) -> dict[str, Any]:
    """The step with JSON text as values, so that the spelling of the text does not matter."""
    whole = {name: step[name] for name in COLUMNS}
    for name in ("extra", "restore"):
        whole[name] = json.loads(whole[name]) if whole[name] else None
    return whole


@pytest.mark.unit
def test_every_column_of_a_step_comes_in_again(put: Any, run_import: Any) -> None:
    steps: Any = [
        {"source": "system", "message": "be\ud800", "extra": {"role": "developer"}},
        {
            "source": "user",
            "content_parts": [
                {"type": "text", "text": "see"},
                {"type": "image", "media_type": "image/png", "data": b"\x89PNG", "alt": "x"},
                {"type": "image_url", "image_url": {"url": "https://x"}},
            ],
        },
        {
            "source": "agent",
            "message": None,
            "reasoning": "hm",
            "tool_calls": [
                {"id": "1", "name": "f", "arguments": '{"a":  1}'},
                {"id": "2", "name": "g", "arguments": {"b": [1.5, "é"]}},
            ],
            "reward": float("nan"),
            "token_ids": [1, 2, 3],
            "loss_mask": [0, 1],
            "logprobs": [-0.5, float("-inf")],
            "policy_version": "1200",
            "model": "m",
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "cost_usd": 0.5,
            "latency_ms": 1.5,
            "timestamp": "2025-01-02T03:04:05.678901+00:00",
            "is_copied_context": False,
            "error": "e",
            "extra": {"tool_calls": {"0": {"index": 0}}, "name": "a"},
        },
        {"source": "tool", "tool_results": [{"call_id": "1", "content": "ok", "is_error": False}], "reward": 0.0},
        {
            "source": "environment",
            "parent_step": 1,
            "observation": np.arange(6, dtype=np.float32).reshape(2, 3),
            "tensors": {"mask": np.array([True, False]), "when": np.array(["2025-01-02"], dtype="M8[ns]")},
            "action": np.int64(3),
            "terminated": True,
            "truncated": False,
        },
    ]
    rows = Record("row 1", {"task_id": 5, "tags": {"a": "b"}}, steps, {"reward": float("inf")}).rows
    originals = through_arrow(rows.steps)
    empty = dict.fromkeys([*COLUMNS, *EPISODES.names()])
    line = exported(
        empty | rows.begin,
        originals,
        empty | rows.end,
    )
    again = run_import(put(line))
    assert (again.report.episodes, again.report.refused) == (1, 0)
    for found, original in zip(again.steps, originals, strict=True):
        np.testing.assert_equal(comparable(found), comparable(original))
    begin, end = again.begins[0], again.ends[0]
    assert json.loads(begin["restore"]) == {"task_id": 5}
    assert dict(begin["tags"]) == {"a": "b"}
    assert end["reward"] == float("inf")
    assert (end["terminated"], end["truncated"], end["status"]) == (True, False, "completed")
    extra = json.loads(begin["extra"])
    assert extra.pop("source_row")["row"] == 1
    assert extra == {"episode_id": "e", "n_steps": 5}


def through_arrow(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as a reader of landing gets them."""
    batch = encode_batch([Event("step", "e", 0, number, 0, row) for number, row in enumerate(rows)])
    return [event["step"] for event in batch.to_pylist()]


def test_the_airline_results_are_the_same_after_an_export_and_an_import(
    realdata: Path, put: Any, run_import: Any
) -> None:
    first = run_import(realdata / "tau-bench/historical_trajectories/gpt-4o-airline.json")
    steps = iter(first.steps)
    counts = [len(row["traj"]) for row in json.loads(first.report.files[0].path.read_text())]
    lines = [
        exported(begin, [next(steps) for _ in range(count)], end)
        for begin, end, count in zip(first.begins, first.ends, counts, strict=True)
    ]
    second = run_import(put("\n".join(lines)))
    assert (second.report.episodes, second.report.steps, second.report.refused) == (200, 5308, 0)
    assert [comparable(step) for step in second.steps] == [comparable(step) for step in first.steps]
    kept = {"source_format", "source_hash", "extra"}
    for before, after in zip(first.begins, second.begins, strict=True):
        assert {name: after[name] for name in after if name not in kept} == {
            name: before[name] for name in before if name not in kept
        }
        extra = json.loads(after["extra"])
        assert extra["info"] == json.loads(before["extra"])["info"]
        assert (extra["source_format"], extra["source_hash"]) == ("tau-bench", before["source_hash"])
    assert second.ends == first.ends

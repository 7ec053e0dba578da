"""`score`: an evaluation report of SWE-bench becomes scores of the episodes that it is about, once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trajlake
from trajlake.errors import FormatError
from trajlake.formats.swe_bench import read_report
from trajlake_pipelines.compact import compact

REPORT = {
    "submitted_ids": ["a", "b", "c", "d", "e"],
    "resolved_ids": ["a"],
    "unresolved_ids": ["b", "c"],
    "error_ids": ["d"],
    "empty_patch_ids": ["e"],
    "incomplete_ids": ["f"],
}


def record(lake: trajlake.Lake, run: str, tasks: str) -> None:
    with lake.writer(run=run, worker=run) as writer:
        for task in tasks:
            with writer.episode(episode_id=f"{run}-{task}", task_id=task) as episode:
                episode.step(message="patched")


def rewards(lake: trajlake.Lake) -> dict[str, list[Any]]:
    compact(lake)
    rows = lake.snapshot().episodes.collect().iter_rows(named=True)
    return {
        row["episode_id"]: [
            *(
                (part["name"], part["value"], part["kind"])
                for part in row["rewards"] or ()
                if part["name"] != "success"
            ),
            row["success"],
        ]
        for row in rows
    }


@pytest.mark.beam
def test_each_instance_is_scored_once_or_named(run: Any, tmp_path: Path) -> None:
    lake = trajlake.create(tmp_path / "lake")
    record(lake, "one", "abdf")
    record(lake, "two", "aad")
    compact(lake)
    report = tmp_path / "report.json"
    report.write_text(json.dumps(REPORT))

    def score(*args: object, code: int) -> tuple[dict[str, Any], str]:
        result = run("score", report, "--lake", lake.uri, "-o", "json", *args, code=code)
        [row] = json.loads(result.stdout)
        return row, result.stderr

    row, said = score("--dry-run", code=1)
    assert (row["resolved"], row["unresolved"], row["unmatched"], row["ambiguous"]) == (0, 1, 2, 2)
    assert "report.json: a: several episodes have this task: name their run (--run)" in said
    assert "report.json: c: no episode has this task" in said
    assert "nothing was written" in said
    row, said = score("--run", "one", code=1)
    assert {name: row[name] for name in ("instances", "resolved", "unresolved", "unmatched", "already")} == {
        "instances": 5,
        "resolved": 1,
        "unresolved": 2,
        "unmatched": 2,
        "already": 0,
    }
    assert "5 instances = 1 resolved + 2 not resolved + 0 scored before + 2 left out" in said
    expected = {
        "one-a": [("resolved", 1.0, "verifiable"), True],
        "one-b": [("resolved", 0.0, "verifiable"), False],
        "one-d": [("resolved", 0.0, "verifiable"), False],
        "one-f": [None],
        "two-a": [None],
        "two-d": [None],
    }
    assert rewards(lake) == expected
    row, said = score("--run", "one", code=1)
    assert (row["resolved"], row["unresolved"], row["already"]) == (0, 0, 3)
    report.write_text(json.dumps({**REPORT, "resolved_ids": ["a", "b"], "unresolved_ids": []}))
    row, said = score("--run", "one", code=1)
    assert "report.json: b: was scored otherwise before, and is left so" in said
    assert rewards(lake) == expected


@pytest.mark.unit
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"resolved_ids": []}, "not an evaluation report"),
        ([REPORT, REPORT], "not an evaluation report"),
        ({**REPORT, "unresolved_ids": "a"}, "its `unresolved_ids` is not a list of names"),
        ({**REPORT, "error_ids": ["a"]}, "says of a that it was resolved, and that it was not"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=words):
        read_report(path)


@pytest.mark.beam
def test_the_real_reports_score_the_real_trajectories(run: Any, realdata: Path, tmp_path: Path) -> None:
    lake = trajlake.create(tmp_path / "lake")
    folder = realdata / "mini-swe-agent-pr816"
    for name in ("deepseek_chat_dev", "deepseek_chat_dev_rerun"):
        run("import", folder / name, "--lake", lake.uri, "--run", name)
    run("compact", "--lake", lake.uri)
    for name in ("deepseek_chat_dev", "deepseek_chat_dev_rerun"):
        report = folder / "eval-reports" / f"deepseek__deepseek-chat.{name}.json"
        result = run("score", report, "--lake", lake.uri, "--run", name, "-o", "json", code=1)
        [row] = json.loads(result.stdout)
        said = json.loads(report.read_text())
        assert row["instances"] == said["submitted_instances"]
        assert (row["resolved"] + row["unresolved"], row["unmatched"]) == (1, row["instances"] - 1)
    found = {key: value[0][1] for key, value in rewards(lake).items()}
    assert len(found) == 2

"""`trajlake certify`: a table of files, and an exit code that a script can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.beam

ROW = {"task_id": 1, "reward": 1.0, "info": {}, "traj": [{"role": "user", "content": "hi"}], "trial": 0}


def test_files_that_come_out_as_they_went_in(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([ROW]))
    (tmp_path / "b.txt").write_text("notes")
    result = run("certify", tmp_path, "--output", "jsonl")
    good, unknown = map(json.loads, result.stdout.splitlines())
    assert (good["format"], good["episodes"], good["steps"], good["equal"]) == ("tau-bench", 1, 1, True)
    assert 0 < good["typed"] < 1
    assert (unknown["equal"], unknown["typed"]) == (None, None)
    assert "not a format that is known" in unknown["reason"]
    assert "1 files are equal, 0 differ, 1 have no verdict" in result.stderr


def test_a_file_that_does_not_come_in_whole_fails(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([ROW, {**ROW, "reward": "high"}]))
    result = run("certify", path, "--format", "tau-bench", "--output", "jsonl", code=1)
    row = json.loads(result.stdout)
    assert row["equal"] is False
    assert "`reward` is not a number" in row["reason"]
    assert "no format is called" in run("certify", path, "--format", "tau", code=1).stderr

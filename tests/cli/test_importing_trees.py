"""`import` of trees, by mapping files, and on from where it was; `stats` by the conventions of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trajlake

ROWS = [{"messages": [{"role": "user", "content": str(number)}], "task_id": "t", "reward": number} for number in (0, 1)]


@pytest.fixture
def lake(tmp_path: Path) -> str:
    trajlake.create(tmp_path / "lake")
    return str(tmp_path / "lake")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "rows.json").write_text(json.dumps(ROWS))
    (folder / "b.md").write_text("# Notes\n")
    return folder


@pytest.mark.unit
def test_a_tree_is_told_file_by_file_and_not_read_twice(run: Any, lake: str, tree: Path) -> None:
    def states(*args: object) -> list[str]:
        return [row["state"] for row in json.loads(run("import", tree, "--lake", lake, "-o", "json", *args).stdout)]

    assert states() == ["read", "left out"]
    assert states() == ["in already", "left out"]
    assert states("--again") == ["read", "left out"]
    assert states("--run", "another", "--processes", "1") == ["read", "left out"]
    result = run("import", tree, "--lake", lake)
    assert "b.md: not imported: Markdown, a text for people" in result.stderr
    assert "1 files were in already and were not read (--again reads them)" in result.stderr
    assert "2 rows in = 2 episodes + 0 refused" in result.stderr


@pytest.mark.unit
def test_a_mapping_file_reads_what_is_unknown(run: Any, lake: str, tmp_path: Path) -> None:
    mapping, file = tmp_path / "ours.toml", tmp_path / "ours.json"
    mapping.write_text('name = "ours"\n[steps]\neach = "log"\nmessage = "said"\n')
    file.write_text(json.dumps({"log": [{"said": "hi"}]}))
    for more in (["--dry-run"], []):
        [row] = json.loads(run("import", file, "--lake", lake, "--mapping", mapping, "-o", "json", *more).stdout)
        assert (row["format"], row["episodes"], row["steps"], row["state"]) == ("ours", 1, 1, "read")
    mapping.write_text("name = 5")
    assert "there is no name" in run("import", file, "--lake", lake, "--mapping", mapping, code=1).stderr
    assert "not both" in run("import", file, "--mapping", mapping, "--format", "verl", code=2).stderr


@pytest.mark.beam
def test_stats_by_the_conventions_of_others(run: Any, lake: str, tree: Path) -> None:
    run("import", tree / "a", "--lake", lake)
    run("compact", "--lake", lake)

    def stats(*args: object) -> dict[str, Any]:
        [row] = json.loads(run("stats", "--lake", lake, "-o", "json", *args).stdout)
        return dict(row)

    assert stats()["reward_stderr"] == pytest.approx(0.5)
    assert stats("--convention", "inspect")["reward_stderr"] == 0.0
    assert stats("--ddof", "0", "--distribution")["reward_std"] == 0.5
    assert stats("--nulls", "failures")["success_rate"] == 0.0
    assert stats("--per", "task", "--confidence", "0.95")["reward_low"] is None
    assert stats("--bootstrap")["reward_high"] == 1.0
    assert "reward_std" in run("stats", "--lake", lake, "--distribution").stdout
    assert run("stats", "--lake", lake, "--confidence", "2", code=2).stderr

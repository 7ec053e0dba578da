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
    assert "1 file was in already, with 2 episodes, and was not read (--again reads it)" in result.stderr


@pytest.mark.unit
def test_what_was_in_already_is_not_counted_as_read(run: Any, lake: str, tree: Path) -> None:
    assert "next: `trajlake compact`" in run("import", tree, "--lake", lake).stderr
    second = run("import", tree, "--lake", lake).stderr
    assert second.splitlines()[-1] == "there is nothing new"
    assert "rows in =" not in second
    assert "compact" not in second
    (tree / "c.json").write_text(json.dumps([ROWS[1]]))
    third = run("import", tree, "--lake", lake).stderr
    assert "1 file was in already, with 2 episodes" in third
    assert "1 row in = 1 episode + 0 refused\n" in third
    assert "next: `trajlake compact`" in third
    assert (
        "2 files were in already, with 3 episodes, and were not read (--again reads them)"
        in run("import", tree, "--lake", lake).stderr
    )


@pytest.mark.unit
def test_the_table_names_files_below_the_folder_and_many_by_folder(run: Any, tree: Path) -> None:
    names = [line.split()[0] for line in run("import", tree, "--dry-run").stdout.splitlines()[2:]]
    assert names == ["a/rows.json", "b.md"]
    names = [line.split()[0] for line in run("import", tree / "a", tree, "--dry-run").stdout.splitlines()[2:]]
    assert names == ["a/rows.json", "tree/b.md"]
    for number in range(30):
        folder = tree / "many" / str(number % 2) / str(number)
        folder.mkdir(parents=True)
        (folder / "rows.json").write_text(json.dumps([{**ROWS[0], "task_id": number}]))
    (tree / "many" / "1" / "1" / "cut.json").write_text('[{"messages"')
    many = run("import", tree, "--dry-run", code=1)
    table = [line.split() for line in many.stdout.splitlines()]
    assert table[0] == ["folder", "format", "state", "files", "episodes", "steps", "refused"]
    assert table[2:] == [
        ["a", "openai-chat", "read", "1", "2", "2", "0"],
        [".", "–", "left", "out", "1", "0", "0", "0"],
        ["many/0", "openai-chat", "read", "15", "15", "15", "0"],
        ["many/1", "–", "refused", "1", "0", "0", "1"],
        ["many/1", "openai-chat", "read", "15", "15", "15", "0"],
    ]
    assert "33 files: --verbose shows one line each" in many.stderr
    assert len(run("import", tree, "--dry-run", "--verbose", code=1).stdout.splitlines()) == 2 + 33
    assert len(json.loads(run("import", tree, "--dry-run", "-o", "json", code=1).stdout)) == 33


@pytest.mark.unit
def test_a_file_that_is_refused_whole_counts_and_the_sum_says_so(run: Any, tree: Path) -> None:
    (tree / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    result = run("import", tree, "--dry-run", "-o", "json", code=1)
    assert [row["refused"] for row in json.loads(result.stdout)] == [0, 0, 1]
    assert (
        "2 rows in = 2 episodes + 0 refused; 1 file refused as a whole, or from some row on: rows not counted"
        in result.stderr
    )


@pytest.mark.unit
def test_a_copy_is_named_and_left_out_and_is_no_failure(run: Any, lake: str, tree: Path) -> None:
    copy = tree / "c.json"
    copy.write_text(json.dumps(ROWS))
    for more in (["--dry-run"], []):
        result = run("import", tree / "a", copy, "--lake", lake, "-o", "json", *more)
        assert [(row["state"], row["episodes"]) for row in json.loads(result.stdout)] == [("read", 2), ("left out", 0)]
        assert f"{copy}: left out: it holds the same bytes as {tree / 'a' / 'rows.json'}\n" in result.stderr
        assert "2 rows in = 2 episodes + 0 refused\n" in result.stderr
        assert "no trajectories" not in result.stderr


@pytest.mark.unit
def test_files_that_were_imported_with_another_set_are_named_once(run: Any, lake: str, tree: Path) -> None:
    (tree / "c.json").write_text(json.dumps([ROWS[1]]))
    run("import", tree, "--lake", lake)
    error = run("import", tree, "--lake", lake, "--set", "policy_name=late").stderr
    assert f"{tree / 'a' / 'rows.json'} and 1 more file: imported before with other --set or --mapping" in error
    assert error.count("imported before") == 1
    assert "imported before" not in run("import", tree, "--lake", lake).stderr


@pytest.mark.unit
def test_rows_that_were_refused_before_are_counted_again_but_are_no_failure(run: Any, lake: str, tree: Path) -> None:
    rows = tree / "a" / "rows.json"
    rows.write_text(json.dumps([*ROWS, {"messages": 5}, *[{"messages": 6}] * 2]))
    assert "row 3: " in run("import", tree, "--lake", lake, code=1).stderr
    second = run("import", tree, "--lake", lake, "-o", "json")
    assert [row["refused"] for row in json.loads(second.stdout)] == [3, 0]
    assert f"{rows}: 3 rows of it were refused when it was imported (--again shows why)\n" in second.stderr
    assert "as said above" not in second.stderr
    assert "more row" not in second.stderr
    again = run("import", tree, "--lake", lake, "--again", code=1).stderr
    assert "row 3: " in again
    assert "3 rows refused, as said above; the others are in" in again


@pytest.mark.unit
@pytest.mark.parametrize("what", ["reward=1", "nonsense=1", "extra=5", "tags=a"])
def test_set_says_what_can_be_said_of_all_episodes(run: Any, tree: Path, what: str) -> None:
    error = run("import", tree, "--dry-run", "--set", what, code=2).stderr
    assert f"{what.split('=')[0]!r} is not what can be said of all episodes: that is agent_name, " in error
    assert "a mapping file (--mapping) finds in it" in error


@pytest.mark.unit
def test_a_tag_needs_a_name(run: Any, tree: Path) -> None:
    error = run("import", tree, "--dry-run", "--set", "tags.=x", code=2).stderr
    assert "'tags.=x': a tag needs a name, such as tags.team=a" in error


@pytest.mark.beam
def test_set_takes_tags(run: Any, lake: str, tree: Path) -> None:
    run("import", tree, "--lake", lake, "--set", "tags.team=a", "--set", "tags.sweep=b=1")
    run("compact", "--lake", lake)
    [first, *_] = trajlake.connect(lake).snapshot().episodes.collect()["tags"].to_list()
    assert dict(first) == {"team": "a", "sweep": "b=1"}


@pytest.mark.beam
def test_an_export_comes_in_again_and_its_manifest_is_left_out(run: Any, lake: str, tree: Path, tmp_path: Path) -> None:
    run("import", tree, "--lake", lake)
    run("compact", "--lake", lake)
    result = run("export", tmp_path / "out", "--lake", lake, "--format", "openai-chat")
    assert "2 as they were imported from openai-chat + 0 made of their columns" in result.stderr
    again = run("import", tmp_path / "out", "--dry-run")
    assert "manifest.json: not imported: the manifest of an export" in again.stderr
    assert "2 rows in = 2 episodes + 0 refused" in again.stderr
    error = run("export", tmp_path / "csv", "--lake", lake, "--format", "csv", code=1).stderr
    assert "format must be one of parquet, jsonl, tau-bench" in error


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

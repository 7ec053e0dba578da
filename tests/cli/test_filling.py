"""The commands that fill a lake, and the whole path of the README on real data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trajlake

TAU = {
    "task_id": 7,
    "reward": 1.0,
    "trial": 0,
    "info": {"task": {"user_id": "mia"}},
    "traj": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
}


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """An empty lake."""
    return trajlake.create(tmp_path / "lake").uri


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.unit
def test_init(run: Any, tmp_path: Path) -> None:
    assert "next: trajlake --lake" in run("--lake", tmp_path / "new", "init").stderr
    assert "is a lake already" in run("--lake", tmp_path / "new", "init", code=1).stderr
    run("--lake", tmp_path / "new", "init", "--if-missing")


@pytest.mark.unit
def test_import_says_what_went_in(run: Any, lake: str, tmp_path: Path) -> None:
    file = write(tmp_path / "results.json", [TAU, {**TAU, "trial": 1}])
    result = run("import", file, "--lake", lake, "--set", "policy_name=gpt", "-o", "json")
    assert json.loads(result.stdout) == [
        {"file": str(file), "format": "tau-bench", "episodes": 2, "steps": 4, "refused": 0, "state": "read"}
    ]
    assert "2 rows in = 2 episodes + 0 refused" in result.stderr


@pytest.mark.unit
def test_import_refuses_rows_one_by_one(run: Any, lake: str, tmp_path: Path) -> None:
    rows = [TAU, {"task_id": 8, "reward": 0.0}, {**TAU, "task_id": 9}]
    result = run("import", write(tmp_path / "results.json", rows), "--lake", lake, code=1)
    assert f"{tmp_path}/results.json: row 2: " in result.stderr
    assert "3 rows in = 2 episodes + 1 refused" in result.stderr
    assert result.stderr.splitlines()[-1] == "trajlake: 1 row refused, as said above; the others are in"
    assert list(Path(lake).glob("landing/imported/*/*/*.arrow"))


@pytest.mark.unit
@pytest.mark.parametrize("content", ['[{"task_id": 1, "traj": [', "", "no JSON at all", None], ids=str)
def test_import_of_what_is_no_file_of_ours(run: Any, lake: str, tmp_path: Path, content: str | None) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        write(bad, content)
    good = write(tmp_path / "good.json", [TAU])
    result = run("import", bad, good, "--lake", lake, code=1)
    assert f"{bad}: " in result.stderr
    assert "1 row in = 1 episode + 0 refused" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.unit
def test_dry_run_writes_nothing(run: Any, lake: str, tmp_path: Path) -> None:
    result = run("import", write(tmp_path / "results.json", [TAU]), "--dry-run")
    assert "1 row in = 1 episode + 0 refused" in result.stderr
    assert "nothing was written" in result.stderr
    assert not list(Path(lake).glob("landing/**/*.arrow"))


@pytest.mark.unit
def test_unknown_format(run: Any, lake: str, tmp_path: Path) -> None:
    result = run("import", write(tmp_path / "x.json", [TAU]), "--lake", lake, "--format", "nope", code=1)
    assert result.stderr.startswith("trajlake: no format is called 'nope'; known are tau-bench, ")
    assert result.stderr.endswith(", openai-chat\n")


@pytest.mark.beam
def test_compact_in_words(run: Any, lake: str, tmp_path: Path) -> None:
    assert run("compact", "--lake", lake).stdout == "nothing new has landed\n"
    file = write(tmp_path / "results.json", [TAU, {**TAU, "trial": 1}])
    run("import", file, "--lake", lake)
    assert run("compact", "--lake", lake).stdout.splitlines() == [
        "1 segment read",
        "8 events in = 4 steps + 4 begins and ends",
        "2 episodes added",
    ]
    again = run("import", file, "--lake", lake)
    assert "1 file was in already, with 2 episodes, and was not read (--again reads it)" in again.stderr
    assert run("compact", "--lake", lake).stdout == "nothing new has landed\n"
    run("import", file, "--lake", lake, "--again")
    assert run("compact", "--lake", lake).stdout.splitlines() == [
        "1 segment read",
        "8 events in = 8 duplicates",
        "0 episodes added",
        "2 duplicates were recognised",
    ]
    (row,) = json.loads(run("compact", "--lake", lake, "-o", "json").stdout)
    assert row["events"] == 0


@pytest.mark.beam
def test_compact_names_what_was_scored_and_is_no_episode(run: Any, lake: str, tmp_path: Path) -> None:
    with trajlake.connect(lake).writer(run="r", worker="w", spool=tmp_path / "spool") as writer:
        writer.episode(episode_id="begun").score("judge", 1.0)
        writer.score("typo", "judge", 1.0)
        writer.retract("mistake", "leaked")
    said = run("compact", "--lake", lake, "--stale-after", "1h").stdout.splitlines()
    assert "1 episode has not ended yet" in said
    assert "2 ids have scores or retractions, and no episode yet: mistake, typo" in said
    (row,) = json.loads(run("compact", "--lake", lake, "--stale-after", "0s", "-o", "json").stdout)
    assert (row["sealed_episodes"], row["unknown"]) == (1, ["mistake", "typo"])
    said = run("compact", "--lake", lake).stdout
    assert "nothing new has landed" in said or "2 ids have scores" in said
    assert "seals them" not in said


@pytest.mark.beam
def test_compact_seals_what_is_stale(run: Any, lake: str, tmp_path: Path) -> None:
    with trajlake.connect(lake).writer(run="r", worker="w", spool=tmp_path / "spool") as writer:
        writer.episode(task_id="t").step(message="and then the machine died")
    assert "1 episode has not ended yet" in run("compact", "--lake", lake).stdout
    assert "1 stale episode was sealed as aborted" in run("compact", "--lake", lake, "--stale-after", "0s").stdout
    assert len(json.loads(run("episodes", "--status", "aborted", "--lake", lake, "-o", "json").stdout)) == 1


@pytest.mark.e2e
@pytest.mark.beam
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # fastparquet
def test_the_whole_path_on_real_data(run: Any, lake_uri: str, realdata: Path, tmp_path: Path) -> None:
    """What the README promises, on a folder and on a real S3 server."""

    def ask(*args: object) -> Any:
        return run("--lake", lake_uri, *args)

    def rows(*args: object) -> Any:
        return json.loads(ask(*args, "--output", "json").stdout)

    file = realdata / "tau-bench/historical_trajectories/gpt-4o-airline.json"
    ask("init")
    ask("import", file, "--run", "tau")
    ask("compact")
    assert rows("query", "SELECT count(*) AS n, avg(reward) AS r FROM episodes") == [{"n": 200, "r": 0.42}]
    assert rows("query", "SELECT count(*) AS n FROM steps") == [{"n": 5308}]
    (stats,) = rows("stats", "--pass-k", "1,2,3,4")
    assert [round(stats[f"pass^{k}"], 5) for k in (1, 2, 3, 4)] == [0.42, 0.27333, 0.22, 0.2]
    assert [round(stats[f"pass@{k}"], 5) for k in (1, 2, 3, 4)] == [0.42, 0.56667, 0.66, 0.72]
    assert "→ " in ask("replay", "--failed", "--limit", "1").stdout
    drawn = rows("sample", "-n", "32", "--seed", "7")
    ask("import", file, "--run", "tau", "--again")
    assert "200 duplicates were recognised" in ask("compact").stdout
    assert rows("query", "SELECT count(*) AS n FROM episodes") == [{"n": 200}]
    assert rows("sample", "-n", "32", "--seed", "7") == drawn
    assert sum(row["rows"] for row in rows("export", tmp_path / "out", "--shards", "4")) == 200


@pytest.mark.s3
@pytest.mark.e2e
def test_a_local_server_by_command(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "server"
    line = f'eval "$(trajlake dev up --folder {folder})"'
    assert line in run("dev", "status", "--folder", folder, code=1).stderr
    started = run("dev", "up", "--folder", folder, "--bucket", "mine")
    assert "next: trajlake init" in started.stderr
    assert line in run("dev", "status", "--folder", folder).stderr, "the shell does not lead to it yet"
    try:
        for line in started.stdout.splitlines():
            name, _, value = line.removeprefix("export ").partition("=")
            monkeypatch.setenv(name, value)
        (row,) = json.loads(run("dev", "status", "--folder", folder, "-o", "json").stdout)
        assert row["lake"] == "s3://mine/lake"
        assert "next: trajlake init" in run("dev", "status", "--folder", folder).stderr
        run("init")
        assert "no episodes yet" in run("runs").stderr
    finally:
        stopped = run("dev", "down", "--folder", folder).stderr
        assert stopped == (f"stopped the S3 server at {row['url']} (pid {row['pid']}); its data stays in {folder}\n")
    assert "no server runs" in run("dev", "down", "--folder", folder).stderr


@pytest.mark.unit
def test_files_of_a_folder_that_hold_no_trajectories_are_left_out_and_are_no_failure(
    run: Any, lake: str, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (folder / "notes.md").write_text("# What this is\n")
    result = run("import", folder, "--lake", lake, "--output", "json")
    states = {Path(row["file"]).name: row["state"] for row in json.loads(result.stdout)}
    assert states["chat.jsonl"] == "read"
    assert states["notes.md"] == "left out"
    assert "1 file could not be imported" in run("import", folder / "notes.md", "--lake", lake, code=1).stderr

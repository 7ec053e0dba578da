"""The complete path as a user walks it: the installed command, real data, a folder and a real S3 server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas
import polars as pl
import pytest

from trajlake.storage import open_store

pytestmark = pytest.mark.e2e

COMMAND = Path(sys.executable).with_name("trajlake")
README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def run(lake_uri, tmp_path):
    """Runs `trajlake …` on the lake, and returns the finished process; `ok` wants exit code 0."""

    def call(*arguments, ok=True):
        done = subprocess.run(
            [COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env={**os.environ, "TRAJLAKE_LAKE": lake_uri},
        )
        assert "Traceback" not in done.stderr
        if ok:
            assert done.returncode == 0, done.stderr
        return done

    return call


def rows(done):
    return json.loads(done.stdout)


def test_a_published_file_goes_in_at_one_end_and_its_published_numbers_come_out(run, realdata, lake_uri, tmp_path):
    source = realdata / "tau-bench/historical_trajectories/gpt-4o-airline.json"
    run("init")
    run("import", source, "--run", "tau")
    run("compact")

    assert rows(run("query", "SELECT count(*) AS n, avg(reward) AS r FROM episodes", "--output", "json")) == [
        {"n": 200, "r": pytest.approx(0.42)}
    ]
    assert rows(run("query", "SELECT count(*) AS n FROM steps", "--output", "json")) == [{"n": 5308}]
    (stats,) = rows(run("stats", "--pass-k", "1,2,3,4", "--output", "json"))
    assert [stats[f"pass^{k}"] for k in (1, 2, 3, 4)] == pytest.approx([0.42, 0.27333, 0.22, 0.20], abs=1e-5)
    assert [stats[f"pass@{k}"] for k in (1, 2, 3, 4)] == pytest.approx([0.42, 0.56667, 0.66, 0.72], abs=1e-5)

    replay = run("replay", "--failed", "--limit", "1").stdout
    for part in ("failed", "system", "user", "agent", "→ get_"):
        assert part in replay

    sample = run("sample", "-n", "32", "--seed", "7", "--output", "json").stdout
    assert len(rows(run("sample", "-n", "32", "--seed", "7", "--output", "json"))) == 32
    again = run("import", source, "--run", "tau", "--again")
    assert "200 rows in = 200 episodes" in again.stdout + again.stderr
    compacted = run("compact")
    assert "200 duplicates were recognised" in compacted.stdout + compacted.stderr
    assert rows(run("query", "SELECT count(*) AS n FROM episodes", "--output", "json")) == [{"n": 200}]
    assert run("sample", "-n", "32", "--seed", "7", "--output", "json").stdout == sample

    run("export", tmp_path / "out", "--format", "parquet", "--shards", "4")
    shards = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(shards) == 4
    assert sum(len(pandas.read_parquet(shard)) for shard in shards) == 200
    assert pl.read_parquet(shards)["episode_id"].n_unique() == 200

    store = open_store(lake_uri)
    frame = pl.scan_delta(store.location("episodes"), storage_options=store.storage_options())
    assert frame.select(pl.len()).collect().item() == 200


def test_bad_input_is_one_clear_line_and_the_good_rows_of_the_same_file_are_in(run, tmp_path):
    good = {"task_id": 1, "reward": 1.0, "info": {}, "traj": [{"role": "user", "content": "hi"}], "trial": 0}
    files = {
        "truncated.json": json.dumps([{**good, "task_id": number} for number in range(3)])[:-30],
        "without.json": json.dumps([good, {"task_id": 2, "reward": 0.0}, {**good, "task_id": 3}]),
        "unknown.json": '[{"foo": 1}]',
        "empty.json": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run("init")
    for name, reason in {
        "truncated.json": "truncated.json: row 3: .* truncated; fetch it again",
        "without.json": "without.json: row 2: has no `traj`",
        "unknown.json": "unknown.json: not a format that is known",
        "empty.json": "empty.json: empty",
        "missing.json": "missing.json: no such file",
    }.items():
        done = run("import", name, "--run", "bad", ok=False)
        assert done.returncode == 1
        assert re.search(reason, done.stderr), done.stderr
    run("compact")
    assert rows(run("query", "SELECT count(*) AS n FROM episodes", "--output", "json")) == [{"n": 4}]


@pytest.mark.s3
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"TRAJLAKE_LAKE": "s3://no-such-bucket/lake"}, "bucket 'no-such-bucket' does not exist at http"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "cannot reach http://127.0.0.1:1: Connection refused"),
        ({"TRAJLAKE_LAKE": ""}, "which lake\\? Give --lake ADDRESS or set TRAJLAKE_LAKE"),
    ],
)
@pytest.mark.parametrize("command", [["init"], ["compact"], ["episodes"], ["import", "rows.jsonl", "--run", "r"]])
def test_a_store_that_cannot_be_used_is_one_clear_line(s3_uri, tmp_path, change, reason, command):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    environment = {**os.environ, "TRAJLAKE_LAKE": s3_uri, **change}
    done = subprocess.run(
        [COMMAND, *command], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment
    )
    assert done.returncode in {1, 2}
    assert re.search(reason, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert environment["AWS_ACCESS_KEY_ID"] not in done.stderr


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.S)


def test_the_python_of_the_readme_runs_as_it_stands(tmp_path):
    subprocess.run([COMMAND, "--lake", "lake", "init"], cwd=tmp_path, check=True, capture_output=True)
    write, read = blocks("python")
    compact = "from trajlake_pipelines.compact import compact\ncompact(lake)\n"
    read = read.replace("domain = 'airline'", "success")  # the little lake of the README has no domain
    script = "\n".join(
        [write, compact, read, "assert snapshot.query('SELECT count(*) AS n FROM steps')['n'].item() == 3"]
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_command_that_the_readme_names_is_there():
    text = README.read_text()
    helped = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"(?:^    |`|&& |\$\()trajlake (?:--\S+ \S+ )?([a-z]+)", text, flags=re.M))
    assert {"init", "compact", "import", "stats", "episodes", "replay", "query", "sample", "export"} <= named
    assert named <= set(re.findall(r"^  ([a-z]+) ", helped, flags=re.M))


def test_the_documented_names_are_there_after_a_plain_import():
    script = "import trajlake; trajlake.gym.record, trajlake.errors.LakeMissing, trajlake.connect, trajlake.Writer"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

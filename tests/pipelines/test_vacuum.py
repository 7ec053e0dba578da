"""A vacuum beside what is going on, and beside what was left half done."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.pipelines.test_crashes import Crash, crash_at
from tests.rollouts import assert_sound, record, record_episode

import trajlake
from trajlake.errors import SnapshotExpired, StoreError, UsageError
from trajlake.table.commit import active_files
from trajlake.table.retention import vacuum
from trajlake.table.tables import open_table
from trajlake_cli.main import cli
from trajlake_pipelines import optimize_job, plan, publish
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.beam


def age(lake, days=30, pattern="*"):
    """Everything was written long ago, as far as the file system knows."""
    then = time.time() - days * 86400
    for path in Path(lake.uri).rglob(pattern):
        if path.is_file():
            os.utime(path, (then, then))


@pytest.fixture
def lake(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(5))
    compact(lake)
    return lake


@pytest.mark.parametrize("table", ["steps", "episodes", "segments"])
def test_a_compaction_that_was_left_for_a_month_is_finished_after_a_vacuum(lake, monkeypatch, table):
    record(lake, range(5, 10), worker="w2")
    record(lake, [2], worker="w3", attempt=1, steps=4)
    with monkeypatch.context() as patch:
        crash_at(patch, table, "before", module=publish)
        with pytest.raises(Crash):
            compact(lake)
    age(lake)
    vacuum(lake, older_than_hours=1, force=True)
    compact(lake)
    assert_sound(lake)
    assert len(lake.snapshot().episodes.collect()) == 10


@pytest.mark.parametrize("table", ["steps", "episodes"])
def test_so_is_an_optimize(lake, monkeypatch, table):
    record(lake, range(5, 10), worker="w2")
    compact(lake)
    with monkeypatch.context() as patch:
        crash_at(patch, table, "before", module=optimize_job)
        with pytest.raises(Crash):
            optimize(lake)
    age(lake)
    vacuum(lake, older_than_hours=1, force=True)
    record(lake, range(10, 12), worker="w4")
    compact(lake)
    assert_sound(lake)
    assert len(lake.snapshot().episodes.collect()) == 12


def test_segments_of_episodes_that_have_not_ended_are_spared(lake):
    with lake.writer(run="run", worker="open") as writer:
        episode = record_episode(writer, 50, end=False)
        writer.flush()
        compact(lake)
        age(lake)
        vacuum(lake, older_than_hours=1, force=True)
        episode.end(reward=1.0)
    compact(lake)
    assert lake.snapshot().episode("e0050").episode["n_steps"] == 3
    assert_sound(lake)


def seal_one(lake, writer, number):
    """An episode that its worker has left open, sealed; it could still go on."""
    episode = record_episode(writer, number, end=False)
    writer.flush()
    compact(lake, stale_after=0)
    return episode


def assert_waits_for_a_week(lake, worker, monkeypatch):
    """The worker's one segment is left alone and costs no pass; after a week it is given up, said, and removed."""
    landing = lambda: list(lake.store.list(f"landing/run/{worker}/"))  # noqa: E731
    assert compact(lake, stale_after=0).compactions == 0
    vacuum(lake, older_than_hours=0, force=True)
    assert len(landing()) == 1
    monkeypatch.setattr(plan, "KEEP_SEALED_SECONDS", 0)
    assert compact(lake, stale_after=0).released_episodes == 1
    vacuum(lake, older_than_hours=0, force=True)
    assert landing() == []
    assert compact(lake, stale_after=0).compactions == 0


def test_segments_of_sealed_episodes_wait_for_their_writer_for_a_week_and_go_then(lake, monkeypatch):
    with lake.writer(run="run", worker="gone") as writer:
        seal_one(lake, writer, 50)
        assert_waits_for_a_week(lake, "gone", monkeypatch)
        assert lake.snapshot().episode("e0050").episode["n_steps"] == 3
        assert_sound(lake)


def test_what_such_a_writer_records_after_that_is_kept_and_replaces_nothing(lake, monkeypatch):
    monkeypatch.setattr(plan, "KEEP_SEALED_SECONDS", 0)
    with lake.writer(run="run", worker="back") as writer:
        episode = seal_one(lake, writer, 50)
        compact(lake, stale_after=0)
        vacuum(lake, older_than_hours=0, force=True)
        episode.step(message="back after a month")
        episode.end(reward=1.0)
    for _ in range(3):
        report = compact(lake, stale_after=0)
        vacuum(lake, older_than_hours=0, force=True)
    assert report.compactions == 0
    assert lake.snapshot().episode("e0050").episode["n_steps"] == 3
    assert len(list(lake.store.list("landing/run/back/"))) == 1
    assert_sound(lake)


def test_a_later_attempt_that_goes_nowhere_waits_as_long_and_leaves_the_complete_one(lake, monkeypatch):
    record(lake, [50])
    with lake.writer(run="run", worker="again") as writer:
        episode = record_episode(writer, 50, attempt=1, end=False)
        writer.flush()
        assert compact(lake, stale_after=0).pending_events == 4
        assert_waits_for_a_week(lake, "again", monkeypatch)
        assert lake.snapshot().episode("e0050").episode["attempt"] == 0
        assert_sound(lake)
        episode.end()
    compact(lake)
    assert lake.snapshot().episode("e0050").episode["attempt"] == 0


def test_scores_of_an_episode_that_never_comes_wait_as_long_and_cost_no_compactions(lake, monkeypatch):
    with lake.writer(run="run", worker="judge") as writer:
        writer.score("e0099", "style", 1.0)
    compact(lake, stale_after=0)
    assert_waits_for_a_week(lake, "judge", monkeypatch)


@pytest.mark.parametrize("hours", [0, 0.9, 2, 167.9])
def test_less_than_the_retention_period_is_refused_unless_it_is_forced(lake, hours):
    before = sorted(info.key for info in lake.store.list())
    with pytest.raises(UsageError, match="less than the retention period of 7 d, .*; give at least that, or force it"):
        vacuum(lake, older_than_hours=hours)
    assert vacuum(lake, older_than_hours=168).files == []
    listed = vacuum(lake, older_than_hours=0, force=True, dry_run=True).files
    assert sorted(info.key for info in lake.store.list()) == before
    assert vacuum(lake, older_than_hours=0, force=True).files == listed
    assert not {info.key for info in lake.store.list()} & {file.key for file in listed}


def test_versions_younger_than_what_is_kept_stay_readable_and_what_is_gone_is_said_to_have_expired(lake):
    for number in range(5, 17):  # past a checkpoint, from which on a log is cut
        record(lake, [number], worker=f"w{number}")
        compact(lake)
    early = lake.snapshot("e2.s2")
    then = f'"timestamp":{int((time.time() - 20 * 86400) * 1000)}'
    for log in Path(lake.uri).glob("*/_delta_log/*.json"):
        log.write_text(re.sub(r'"timestamp":\d+', then, log.read_text()))
    age(lake, days=20)
    vacuum(lake, older_than_hours=30 * 24)
    assert lake.snapshot("e2.s2").episodes.collect().equals(early.episodes.collect())
    vacuum(lake, older_than_hours=7 * 24)
    with pytest.raises(SnapshotExpired):
        lake.snapshot("e2.s2")
    assert_sound(lake)


@pytest.mark.parametrize("table", ["steps", "episodes"])
def test_a_file_of_the_newest_snapshot_that_is_lost_is_damage_and_not_retention(lake, table):
    path = active_files(open_table(lake.store, table))["path"][0].as_py()
    lake.store.delete(f"{table}/{path}")
    with pytest.raises(StoreError, match=rf"damaged: {table}/{path} is not there"):
        lake.snapshot().query(f"SELECT * FROM {table}")
    result = CliRunner().invoke(cli, ["--lake", lake.uri, "doctor"])
    assert result.exit_code == 1
    assert path in result.output


@pytest.mark.parametrize("content", ["", '{"a":', "[]", '{"number": 2}'])
def test_damaged_records_of_changes_are_named_or_made_again(lake, content):
    frontier = next(Path(lake.uri).glob("jobs/compact/*/frontier.json"))
    frontier.write_text(content)
    record(lake, range(5, 7), worker="w2")
    assert compact(lake).episodes == 2
    record(lake, [9], worker="w3")
    plan.propose(lake.store, plan.load_or_make_plan(lake.store, stale_after=None))
    (Path(lake.uri) / "jobs/compact/00000003/plan.json").write_text(content)
    with pytest.raises(StoreError, match=r"jobs/compact/00000003/plan.json.* is damaged"):
        compact(lake)
    assert "00000003/plan.json" in CliRunner().invoke(cli, ["--lake", lake.uri, "doctor"]).output
    shutil.rmtree(Path(lake.uri) / "jobs/compact/00000003")
    assert compact(lake).episodes == 1
    assert_sound(lake)


def test_a_damaged_marker_is_told_alike_by_all_with_what_to_do(lake):
    marker = Path(lake.uri) / "lake.json"
    marker.write_text("{")
    for command in (["init"], ["init", "--if-missing"], ["runs"], ["doctor"]):
        result = CliRunner().invoke(cli, ["--lake", lake.uri, *command])
        assert result.exit_code == 1, command
        assert "restore it from a backup, or remove it and run" in " ".join(result.output.split()), command
    marker.unlink()
    assert CliRunner().invoke(cli, ["--lake", lake.uri, "init"]).exit_code == 0
    assert_sound(lake)


def test_what_was_replaced_goes(lake):
    record(lake, [2], worker="w3", attempt=1, steps=4)
    compact(lake)
    report = vacuum(lake, older_than_hours=0, force=True)
    assert {file.key.partition("/")[0] for file in report.files} == {"steps", "episodes", "ids", "landing", "jobs"}
    assert all(file.bytes for file in report.files)
    assert_sound(lake)
    assert vacuum(lake, older_than_hours=0, force=True).files == []


def test_a_snapshot_can_be_read_for_as_long_as_older_than_says_and_then_it_is_expired(lake):
    """The log, too: it has a checkpoint after each ten versions."""
    first = lake.snapshot()
    for number in range(5, 20):
        record(lake, [number], worker=f"w{number}")
        compact(lake)
    optimize(lake)
    age(lake, 20, "_delta_log/*")
    record(lake, [20], worker="w20")
    compact(lake)
    before = sorted(info.key for info in lake.store.list())
    assert vacuum(lake, older_than_hours=30 * 24).files == []
    assert sorted(info.key for info in lake.store.list()) == before
    assert lake.snapshot(first.token).episode("e0003").steps == first.episode("e0003").steps
    current = lake.snapshot()
    listed = vacuum(lake, dry_run=True).files
    assert sorted(info.key for info in lake.store.list()) == before
    done = vacuum(lake).files
    assert done == listed
    assert sorted({*before} - {info.key for info in lake.store.list()}) == sorted(file.key for file in done)
    logs = [file.key for file in done if file.reason == "it is the log of versions that have expired"]
    assert {key.split("/")[0] for key in logs} == {"steps", "episodes", "segments"}
    with pytest.raises(SnapshotExpired, match="no longer has snapshot .*: take a newer one"):
        lake.snapshot(first.token)
    assert lake.snapshot(current.token).episode("e0003").steps == current.episode("e0003").steps
    assert_sound(lake)


def test_files_that_left_before_the_retention_period_stay_for_as_long_as_older_than_says(lake, monkeypatch):
    """By then the checkpoints of the table have forgotten them."""
    first = lake.snapshot()
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - 10 * 86400)
        record(lake, [2], worker="w3", attempt=1, steps=4)
        compact(lake)
    age(lake, 40)
    then = real() - 10 * 86400
    for path in Path(lake.uri).glob("*/_delta_log/*2.json"):
        os.utime(path, (then, then))
    for number in range(5, 17):
        record(lake, [number], worker=f"w{number}")
        compact(lake)
    vacuum(lake, older_than_hours=30 * 24)
    assert len(lake.snapshot(first.token).episode("e0002").steps) == 3
    vacuum(lake)
    with pytest.raises(SnapshotExpired):
        lake.snapshot(first.token).episode("e0002")
    assert_sound(lake)


def test_between_the_commits_of_a_change_that_was_left_the_newest_snapshot_can_be_read(lake, monkeypatch):
    record(lake, range(5, 10), worker="w2")
    compact(lake)
    with monkeypatch.context() as patch:
        crash_at(patch, "episodes", "before", module=optimize_job)
        with pytest.raises(Crash):
            optimize(lake)
    vacuum(lake, older_than_hours=0, force=True)
    assert len(lake.snapshot().episode("e0007").steps) == 3
    optimize(lake)
    assert_sound(lake)


def test_a_lake_that_has_lost_a_table_is_damaged_and_not_to_be_made_again(lake):
    shutil.rmtree(Path(lake.uri) / "episodes" / "_delta_log")
    with pytest.raises(StoreError, match="is damaged: objects of episodes/_delta_log/ are gone; restore them"):
        lake.snapshot()

"""A vacuum beside what is going on, and beside what was left half done."""

import os
import time
from pathlib import Path

import pytest
from tests.pipelines.test_crashes import Crash, crash_at
from tests.rollouts import assert_sound, record, record_episode

import trajlake
from trajlake.errors import UsageError
from trajlake.table.retention import vacuum
from trajlake_pipelines import optimize_job, plan, publish
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.beam


def age(lake, days=30):
    """Everything was written long ago, as far as the file system knows."""
    then = time.time() - days * 86400
    for path in Path(lake.uri).rglob("*"):
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
    vacuum(lake, older_than_hours=1)
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
    vacuum(lake, older_than_hours=1)
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
        vacuum(lake, older_than_hours=1)
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


def test_less_than_an_hour_is_refused_unless_it_is_forced(lake):
    before = sorted(info.key for info in lake.store.list())
    with pytest.raises(UsageError, match="would take files from under readers and running compactions"):
        vacuum(lake, older_than_hours=0.9)
    listed = vacuum(lake, older_than_hours=0, force=True, dry_run=True).files
    assert sorted(info.key for info in lake.store.list()) == before
    assert vacuum(lake, older_than_hours=0, force=True).files == listed
    assert not {info.key for info in lake.store.list()} & {file.key for file in listed}


def test_what_was_replaced_goes(lake):
    record(lake, [2], worker="w3", attempt=1, steps=4)
    compact(lake)
    report = vacuum(lake, older_than_hours=0, force=True)
    assert {file.key.partition("/")[0] for file in report.files} == {"steps", "episodes", "ids", "landing", "jobs"}
    assert all(file.bytes for file in report.files)
    assert_sound(lake)
    assert vacuum(lake, older_than_hours=0, force=True).files == []

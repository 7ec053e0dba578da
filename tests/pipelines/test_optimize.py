"""`optimize`: other files, the same rows, beside everything else that goes on."""

import multiprocessing
import os
import random
import shutil
import time
from pathlib import Path

import polars as pl
import pytest
from tests.rollouts import assert_same_rows, assert_sound, record, record_episode

import trajlake
from trajlake.errors import SnapshotExpired, UsageError
from trajlake.table.commit import active_files
from trajlake.table.retention import vacuum
from trajlake.table.tables import open_table
from trajlake_pipelines import optimize_job
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.beam


def files(lake, table="steps"):
    return sorted(active_files(open_table(lake.store, table))["path"].to_pylist())


def fill(lake, parts=4):
    for part in range(parts):
        record(lake, range(part * 10, part * 10 + 10), worker=f"w{part}")
        compact(lake)


@pytest.fixture
def lake(lake_uri):
    lake = trajlake.create(lake_uri)
    fill(lake)
    return lake


def test_small_files_become_one_and_the_rows_stay(lake):
    before = lake.snapshot()
    report = optimize(lake)
    assert (report.files_before, report.files_after, report.episodes) == (4, 1, 40)
    assert report.bytes_after < report.bytes_before
    assert len(files(lake, "episodes")) == 1
    assert len(files(lake, "segments")) == 1
    assert_sound(lake)
    assert_same_rows(lake, before)
    assert optimize(lake).episodes == 0
    assert before.episode("e0003").steps == lake.snapshot().episode("e0003").steps  # the old files are still there


def test_rollouts_of_a_task_are_neighbours(lake):
    optimize(lake)
    (path,) = files(lake)
    order = pl.read_parquet(lake.store.get(f"steps/{path}"), columns=["episode_id"])["episode_id"].unique(
        maintain_order=True
    )
    tasks = dict(lake.snapshot().episodes.select("episode_id", "task_id").collect().iter_rows())
    assert [tasks[episode] for episode in order] == sorted(tasks.values())


def test_neighbours_that_share_a_prompt_take_fewer_bytes(tmp_path, monkeypatch):
    """Trial after trial arrives, as from workers that go through all tasks: rollouts of one task are far apart."""
    chance = random.Random(3)
    prompts = [" ".join(chance.choices([f"{word:x}" for word in range(5_000)], k=600)) for _ in range(150)]
    arrived = trajlake.create(tmp_path / "arrived")
    for trial in range(3):
        with arrived.writer(run="run", worker=f"w{trial}") as writer:
            for task, prompt in enumerate(prompts):
                with writer.episode(episode_id=f"{trial}-{task:03d}", task_id=task) as episode:
                    episode.step(source="user", message=prompt)
                    episode.step(source="agent", message=f"{chance.random()}")
        compact(arrived)
    sizes = {}
    for order in (["episode_id"], ["task_id", "episode_id"]):
        shutil.copytree(arrived.uri, tmp_path / order[0])
        monkeypatch.setattr(optimize_job, "_ORDER", order)
        sizes[order[0]] = optimize(trajlake.connect(tmp_path / order[0])).bytes_after
    assert sizes["task_id"] < 0.6 * sizes["episode_id"]


def test_rows_of_older_steps_than_those_that_are_merged_are_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("trajlake_pipelines.optimize.LEAST_TARGET_BYTES", 1)
    monkeypatch.setattr(optimize_job, "SMALL_EPISODES_FILE", 1)
    lake = trajlake.create(tmp_path / "lake")
    fill(lake, parts=3)
    size = min(int(size) for size in active_files(open_table(lake.store, "steps"))["size_bytes"].to_pylist())
    record(lake, [90], worker="w90", steps=1)
    compact(lake)
    record(lake, [91], worker="w91", steps=1)
    compact(lake)
    looked = []
    real = optimize_job.scan_files
    monkeypatch.setattr(optimize_job, "scan_files", lambda *what: looked.extend(what[2]) or real(*what))
    assert optimize(lake, target_bytes=2 * size - 2).episodes == 2
    assert [path[:8] for path in looked] == ["00000004", "00000005"]
    assert_sound(lake)


def test_compaction_goes_on_after_it(lake):
    optimize(lake)
    record(lake, range(40, 50))
    record(lake, [2], worker="again", attempt=1, steps=5, message="again")
    with lake.writer(run="run", worker="judge") as writer:
        writer.score("e0005", "style", 0.5)
    report = compact(lake)
    assert (report.episodes, report.replaced_episodes, report.duplicate_episodes) == (11, 1, 0)
    assert_sound(lake)
    assert lake.snapshot().episode("e0002").episode["n_steps"] == 5
    assert lake.snapshot().episode("e0005").episode["rewards"][0]["value"] == 0.5
    optimize(lake)
    assert_sound(lake)


def test_units_of_any_size(lake, monkeypatch):
    monkeypatch.setattr(optimize_job, "EPISODES_A_FILE", 7)
    monkeypatch.setattr(optimize_job, "_BATCH", 3)
    before = lake.snapshot()
    plan = optimize_job.make_plan(lake.store, 5, target_bytes=3_000, everything=True)
    assert len(plan.details["units"]) > 2
    monkeypatch.setattr("trajlake_pipelines.optimize.LEAST_TARGET_BYTES", 1)
    assert optimize(lake, target_bytes=3_000, everything=True).episodes == 40
    assert len(files(lake, "episodes")) == 6
    assert_sound(lake)
    assert_same_rows(lake, before)


def test_many_small_episodes_are_put_together_and_not_held_one_by_one(lake, monkeypatch):
    chunks = []
    real = optimize_job.put_steps

    def put_steps(store, prefix, parts, schema):
        parts = list(parts)
        chunks.extend(steps["message"].num_chunks for steps, _ in parts)
        return real(store, prefix, parts, schema)

    monkeypatch.setattr(optimize_job, "put_steps", put_steps)
    monkeypatch.setattr(optimize_job, "_BATCH", 10)
    assert optimize(lake).episodes == 40
    assert chunks == [4]
    assert_sound(lake)


def _optimize_here(uri):
    optimize(trajlake.connect(uri))


def _compact_here(uri):
    compact(trajlake.connect(uri))


def test_beside_compactors(lake):
    before = lake.snapshot()
    with lake.writer(run="run", worker="new") as writer:
        for number in range(60, 70):
            record_episode(writer, number)
    context = multiprocessing.get_context("spawn")
    work = (_compact_here, _optimize_here, _compact_here)
    processes = [context.Process(target=target, args=(lake.uri,)) for target in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    compact(lake)
    assert_sound(lake)
    assert len(lake.snapshot().episodes.collect()) == 50
    assert len(before.episodes.collect()) == 40


def test_a_vacuum_spares_files_that_were_replaced_a_moment_ago_however_old_they_are(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    fill(lake, parts=2)
    old = time.time() - 30 * 86400
    for path in Path(lake.uri).rglob("*.parquet"):
        os.utime(path, (old, old))
    before = lake.snapshot()
    optimize(lake)
    vacuum(lake, older_than_hours=1, force=True)
    assert len(before.episode("e0003").steps) == 3
    assert_sound(lake)
    vacuum(lake, older_than_hours=0, force=True)
    assert_sound(lake)
    with pytest.raises(SnapshotExpired):
        trajlake.connect(lake.uri).snapshot(before.token).episode("e0003")


def test_a_target_that_is_too_small_is_refused(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with pytest.raises(UsageError, match="too small"):
        optimize(lake, target_bytes=1000)


def test_a_file_that_is_lost_ends_it_without_a_change_and_holds_up_nothing(lake):
    lost = sorted(active_files(open_table(lake.store, "steps"))["path"].to_pylist())[0]
    lake.store.delete(f"steps/{lost}")
    before = lake.snapshot().token
    report = optimize(lake)
    assert (report.episodes, len(report.unreadable)) == (0, 1)
    assert lost in report.unreadable[0]
    assert lake.snapshot().token == before
    record(lake, [77], worker="later")
    assert compact(lake).episodes == 1
    assert len(lake.snapshot().episode("e0077").steps) == 3
    assert optimize(lake).unreadable == report.unreadable

"""Small rollouts that tests record, and the tables that must come of them."""

from __future__ import annotations

import polars as pl

import trajlake
from trajlake.storage import ObjectStore, Won


def record_episode(writer, number, *, steps=3, end=True, attempt=0, task=None, message="step"):
    """Record one episode `e<number>` with `steps` steps; without `end` it stays open."""
    episode = writer.episode(
        episode_id=f"e{number:04d}", attempt=attempt, task_id=number % 5 if task is None else task, task_family="toy"
    )
    for step in range(steps):
        calls = [{"id": f"c{step}", "name": "look", "arguments": {"n": number}}] if step % 2 else None
        episode.step(
            message=f"{message} {number}/{step}", tool_calls=calls, token_ids=[number, step], logprobs=[-0.5, 0]
        )
    if end:
        episode.end(reward=float(number % 2), success=number % 2 == 1)
    return episode


def record(lake, numbers, *, run="run", worker="w", **how):
    """Record these episodes with a writer of their own."""
    with lake.writer(run=run, worker=worker) as writer:
        for number in numbers:
            record_episode(writer, number, **how)


def rows(lake_or_snapshot):
    """The episodes and the steps, ordered, without what differs from one compaction to another."""
    snapshot = lake_or_snapshot.snapshot() if isinstance(lake_or_snapshot, trajlake.Lake) else lake_or_snapshot
    places = ["steps_path", "row_group", "row_offset"]
    episodes = snapshot.episodes.drop(places).sort("episode_id").collect()
    return episodes, snapshot.steps.sort("episode_id", "step_index").collect()


def assert_same_rows(one, other):
    """Both lakes (or snapshots) hold the same episodes and steps."""
    for left, right in zip(rows(one), rows(other), strict=True):
        assert left.equals(right)


def assert_sound(lake):
    """Every place leads to the steps of its episode; no step is missing, double, or without an episode."""
    snapshot = lake.snapshot()
    episodes, steps = rows(snapshot)
    assert episodes["episode_id"].is_unique().all()
    counted = steps.group_by("episode_id").len()
    joined = episodes.join(counted, on="episode_id", how="full", coalesce=True)
    assert joined["n_steps"].to_list() == joined["len"].fill_null(0).to_list()
    assert steps.select(pl.struct("episode_id", "step_index").is_unique().all()).item()
    for trajectory in snapshot.trajectories(episodes["episode_id"]):
        assert [step["step_index"] for step in trajectory.steps] == list(range(trajectory.episode["n_steps"]))
        assert {step["episode_id"] for step in trajectory.steps} <= {trajectory.episode_id}


def copy_landing(source: ObjectStore, target: ObjectStore):
    """Bring the same segments into another lake."""
    for info in source.list("landing/"):
        assert isinstance(target.put_if_absent(info.key, source.get(info.key)), Won)

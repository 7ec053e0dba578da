"""An episode that is more than an Arrow array holds, at its real size: 2.4 GB of frames that are small on disk."""

import numpy as np
import polars as pl
import pytest

import trajlake
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.soak

STEPS = 800


def test_an_episode_of_more_than_two_gigabytes_of_frames_is_stored_and_read(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    frame = np.zeros((1000, 1000, 3), np.uint8)
    with lake.writer(run="run", worker="w", spool=tmp_path / "spool") as writer, writer.episode() as episode:
        for step in range(STEPS):
            frame[0, 0, 0] = step % 251
            episode.step(tensors={"frame": frame}, reward=float(step))
    assert compact(lake).episodes == 1
    for _ in range(2):
        (steps,) = lake.snapshot().steps_of(lake.snapshot().episodes.collect())
        assert steps["reward"].to_pylist() == [float(step) for step in range(STEPS)]
        firsts = [tensors[0]["data"].as_buffer()[0] for tensors in steps["tensors"]]
        assert firsts == [step % 251 for step in range(STEPS)]
        optimize(lake, everything=True)
    assert lake.snapshot().steps.select(pl.col("reward").sum()).collect().item() == sum(range(STEPS))

"""Two compactors, an optimizer and a vacuum against a stream of writers, with readers that check a pinned snapshot.

`make soak` runs it for TRAJLAKE_SOAK_SECONDS (600); CI a short form. What is acknowledged must be in the tables at the
end, once; and a reader must never meet an error before the retention period.
"""

import json
import multiprocessing
import os
import time
from pathlib import Path

import polars as pl
import pytest

import trajlake
from tests.rollouts import assert_sound
from trajlake.errors import TrajlakeError
from trajlake_pipelines.compact import compact

LONG = float(os.environ.get("TRAJLAKE_SOAK_SECONDS", "600"))
SHORT = 15.0


def begin(start):
    """The time at which all processes are there: on a busy machine that takes longer than the short form."""
    start.wait(180)
    return time.time()


def write(start, seconds, uri, worker, folder):
    """Episodes until the time is over; every second worker life is cut off in the middle. Notes what is durable."""
    lake = trajlake.connect(uri)
    number = 0
    until = begin(start) + seconds
    while time.time() < until:
        with lake.writer(run="soak", worker=worker, spool=Path(folder, "spool"), segment_seconds=0.3) as writer:
            for _ in range(20):
                episode_id = f"{worker}-{number:06d}"
                with writer.episode(episode_id=episode_id, task_id=str(number % 7)) as episode:
                    for step in range(3):
                        episode.step(source="agent", message=f"{episode_id} {step} " + "word " * 50, reward=0.0)
                    episode.end(reward=1.0)
                number += 1
                time.sleep(0.02)
            if number % 40 == 0:  # sent again by itself, as after a lost acknowledgement
                with writer.episode(episode_id=f"{worker}-{number - 1:06d}", attempt=1) as episode:
                    for step in range(3):
                        episode.step(source="agent", message=f"again {step}")
                    episode.end(reward=1.0)
            writer.flush()
        with Path(folder, f"{worker}.ids").open("a") as acknowledged:
            acknowledged.write("".join(f"{worker}-{each:06d}\n" for each in range(number - 20, number)))


def repeat(start, seconds, uri, what, folder):
    """compact, optimize or vacuum again and again; errors are counted, since a busy server may refuse."""
    from trajlake.table.retention import vacuum
    from trajlake_pipelines.optimize import optimize

    work = {
        "compact": compact,
        "optimize": optimize,
        "vacuum": lambda lake: vacuum(lake, older_than_hours=1, force=True),
    }[what]
    lake = trajlake.connect(uri)
    done, errors = 0, []
    until = begin(start) + seconds
    while time.time() < until:
        try:
            work(lake)
            done += 1
        except TrajlakeError as error:
            errors.append(str(error))
        time.sleep(3.0 if what != "compact" else 0.2)
    Path(folder, f"{what}-{os.getpid()}.json").write_text(json.dumps({"what": what, "done": done, "errors": errors}))


def read(start, seconds, uri, folder):
    """Pin a snapshot, read it whole again and again; what it holds must not change."""
    lake = trajlake.connect(uri)
    rounds, errors = 0, []
    until = begin(start) + seconds
    while time.time() < until:
        try:
            snapshot = lake.snapshot()
            first = None
            for _ in range(5):
                steps = snapshot.steps.select("episode_id", "step_index").collect()
                episodes = snapshot.episodes.select("episode_id", "n_steps").sort("episode_id").collect()
                wanted = steps.filter(pl.col("episode_id").is_in(episodes["episode_id"].implode()))
                counted = wanted.group_by("episode_id").len().sort("episode_id")
                if counted["len"].to_list() != episodes["n_steps"].to_list():
                    errors.append(f"{snapshot.token}: steps do not fit the episodes")
                if first is not None and not first.equals(episodes):
                    errors.append(f"{snapshot.token}: another content than before")
                first = episodes
                for episode in episodes["episode_id"].sample(min(3, len(episodes))):
                    snapshot.episode(episode)
                rounds += 1
                time.sleep(0.3)
        except Exception as error:  # every error of a reader counts
            errors.append(f"{type(error).__name__}: {error}")
    Path(folder, f"reader-{os.getpid()}.json").write_text(
        json.dumps({"what": "read", "done": rounds, "errors": errors})
    )


def soak(uri, folder, seconds):
    lake = trajlake.create(uri)
    context = multiprocessing.get_context("spawn")
    jobs = [(write, (uri, f"w{number}", str(folder))) for number in range(2)]
    jobs += [(repeat, (uri, what, str(folder))) for what in ("compact", "compact", "optimize", "vacuum")]
    jobs += [(read, (uri, str(folder)))]
    start = context.Barrier(len(jobs))
    processes = [context.Process(target=target, args=(start, seconds, *arguments)) for target, arguments in jobs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds + 240)
    assert [process.exitcode for process in processes] == [0] * len(processes)
    compact(lake)
    assert_sound(lake)
    told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    acknowledged = {line for path in Path(folder).glob("*.ids") for line in path.read_text().split()}
    stored = set(lake.snapshot().episodes.collect()["episode_id"])
    figures = {
        each["what"]: each["done"] + sum(o["done"] for o in told if o is not each and o["what"] == each["what"])
        for each in told
    }
    print(f"soak {seconds:.0f} s: {len(acknowledged)} episodes acknowledged, {len(stored)} stored; {figures}")
    print("refused:", [error for each in told if each["what"] != "read" for error in each["errors"]][:5])
    assert acknowledged
    assert acknowledged <= stored
    assert [error for each in told if each["what"] == "read" for error in each["errors"]] == []
    assert all(each["done"] for each in told)


@pytest.mark.beam
@pytest.mark.timeout(400)
def test_a_short_stream(lake_uri, tmp_path):
    soak(lake_uri, tmp_path, SHORT)


@pytest.mark.soak
@pytest.mark.timeout(LONG + 600)
def test_a_long_stream(lake_uri, tmp_path):
    soak(lake_uri, tmp_path, LONG)

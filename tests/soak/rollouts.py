"""Workers under load that are killed, and what must be true afterwards of what was acknowledged to them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from trajlake.ingest.recovery import recover
from trajlake.ingest.writer import Writer
from trajlake.lake import Lake
from trajlake.storage import ObjectStore

THREADS = 2
WORKERS = 4


def work(store: ObjectStore, spool: Path, worker: str, name: str, choices: dict[str, Any], acks: Path) -> None:
    """Record until killed. Each line of `acks` is an episode, its steps, and whether it had ended, all of which a
    flush has acknowledged before the line is written."""
    log = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = Writer(store, "soak", worker, spool=spool, segment_seconds=0.3, segment_bytes=200_000, **choices)

    def rollout(thread: int) -> None:
        draw = random.Random(f"{name}/{thread}")
        ended: list[tuple[str, int]] = []
        number = 0
        while True:
            episode_id = f"{name}-{thread}-{number:05d}"
            number += 1
            episode = writer.episode(episode_id=episode_id, task_id=number % 7, task_family="soak")
            steps = draw.randrange(1, 12)
            for step in range(steps):
                episode.step(
                    message=f"{episode_id}/{step}", token_ids=list(range(step)), reasoning="x" * draw.randrange(2_000)
                )
                if draw.random() < 0.03:
                    writer.flush()
                    os.write(log, f"{episode_id} {step + 1} open\n".encode())
            episode.end(reward=1.0)
            ended.append((episode_id, steps))
            if draw.random() < 0.2:
                writer.flush()
                os.write(log, "".join(f"{one} {count} ended\n" for one, count in ended).encode())
                ended.clear()

    for thread in range(THREADS):
        threading.Thread(target=rollout, args=(thread,), daemon=True).start()
    threading.Event().wait()


@dataclass(frozen=True)
class Killed:
    """What the workers were promised: steps by episode that had ended, and at least so many of those that had not."""

    ended: dict[str, int]
    open: dict[str, int]


def kill_workers(store: ObjectStore, folder: Path, kills: int, *, seed: int) -> Killed:
    """Start workers, kill each with SIGKILL at a random moment, and start it again, `kills` times in all."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trajlake.ingest.writer", "trajlake.storage", "tests.soak.rollouts"])
    draw = random.Random(seed)
    choices = [{}, {"durability": "spool"}, {"durability": "memory"}, {"durability": "spool", "on_full": "block"}]

    def start(number: int) -> tuple[Any, Path]:
        how = choices[number % len(choices)]
        # What `memory` acknowledges does not survive a kill: such a worker only disturbs the others.
        acks = folder / f"{'ignored' if how.get('durability') == 'memory' else 'acks'}-{number}"
        arguments = (store, folder / "spool", f"w{number % WORKERS}", f"k{number:03d}", how, acks)
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process, acks

    running = [start(number) for number in range(min(WORKERS, kills))]
    for number in range(kills):
        process, acks = running.pop(0)
        # One of five dies at its start, the others while work goes on: from their first promise on.
        at_start = draw.random() < 0.2
        deadline = time.monotonic() + 120
        while not (acks.exists() and (at_start or acks.stat().st_size)) and time.monotonic() < deadline:
            assert process.is_alive(), "a worker ended by itself"
            time.sleep(0.01)
        time.sleep(draw.random() * (0.2 if at_start else 1.0))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if number + WORKERS < kills:
            running.append(start(number + WORKERS))
    ended: dict[str, int] = {}
    unfinished: dict[str, int] = {}
    for file in folder.glob("acks-*"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                episode_id, steps, state = line.split()
                (ended if state == "ended" else unfinished)[episode_id] = int(steps)
    return Killed(ended, {one: steps for one, steps in unfinished.items() if one not in ended})


@dataclass(frozen=True)
class Figures:
    """What was found after compaction."""

    promised_episodes: int
    promised_steps: int
    events: int
    steps: int
    episodes: int
    sealed: int
    segments: int


def check_promises(lake: Lake, spool: Path, killed: Killed) -> Figures:
    """Bring in what lies in the spool, compact, and compare: nothing promised is missing, nothing is there twice, and
    the counts add up."""
    from trajlake_pipelines.compact import compact

    found = recover(lake.store, spool)
    assert (found.stopped, found.unreadable) == ("", ())
    assert not [*spool.glob("*/*.arrow"), *spool.glob("*/*.open")]
    report = compact(lake, stale_after=0)
    assert report.quarantined_segments == 0
    assert report.events == (
        report.steps
        + report.begins_and_ends
        + report.scores
        + report.retractions
        + report.duplicate_events
        + report.pending_events
    )
    snapshot = lake.snapshot()
    rows = snapshot.episodes.select("episode_id", "n_steps", "status").collect()
    table = {episode: (steps, status) for episode, steps, status in rows.rows()}
    for episode, steps in killed.ended.items():
        assert table.get(episode) == (steps, "completed"), f"{episode} was promised with {steps} steps"
    for episode, steps in killed.open.items():
        assert episode in table, f"{episode} was promised with {steps} steps"
        assert table[episode][0] >= steps
    steps = snapshot.steps.select("episode_id", "step_index", "message").collect()
    assert steps.select(pl.struct("episode_id", "step_index").is_unique().all()).item()
    wrong = steps.filter(pl.col("message") != pl.col("episode_id") + "/" + pl.col("step_index").cast(pl.String))
    assert wrong.is_empty(), [
        (row, table[row[0]], row[0] in killed.ended, row[0] in killed.open) for row in wrong.rows()
    ]
    counted = dict(steps.group_by("episode_id").len().rows())
    assert {one: row[0] for one, row in table.items() if row[0]} == counted
    assert len(table) == len(rows)
    assert report.steps == len(steps)
    states = Counter(row[1] for row in table.values())
    return Figures(
        promised_episodes=len(killed.ended) + len(killed.open),
        promised_steps=sum(killed.ended.values()) + sum(killed.open.values()),
        events=report.events,
        steps=len(steps),
        episodes=len(table),
        sealed=states["aborted"],
        segments=report.segments,
    )

"""The planner alone: millions of episode descriptors into units, without a store; and a pass after a long history."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.harness import Options, Result, alone, median

TITLE = "Planner"
_HERE = "tests.benchmarks.planner"

SEGMENT_BYTES = 4 << 20
EPISODES_A_SEGMENT = 100
SPANNING = 8  # one episode of so many goes on in the next segment
SIZES = (1_000, 10_000, 100_000)  # segments
HISTORIES = (50, 500)  # compactions before the one that is timed


def run(options: Options) -> list[Result]:
    small = options.repeats == 1
    results: list[Result] = []
    for segments in SIZES[:2] if small else SIZES:
        done = alone(f"{_HERE}:plan", segments=segments)
        results.append(
            Result(
                "episode descriptors into units (no store)",
                f"{segments * EPISODES_A_SEGMENT:,} episodes in {segments:,} segments",
                done.seconds,
                processor=done.processor,
                memory=done.memory,
                note=f"{done.value['units']:,} units, the plan is {done.value['bytes'] / 1e6:,.1f} MB of JSON",
            )
        )
    for history in (5, 20) if small else HISTORIES:
        folder = options.scratch("history")
        value = alone(f"{_HERE}:after_history", folder=str(folder), history=history).value
        results += [
            Result(f"planning 5 new segments, {ids} ids", f"after {history:,} compactions", seconds)
            for ids, seconds in value.items()
        ]
    return results


def descriptors(segments: int) -> Iterator[tuple[Any, Any]]:
    """Made-up segments: each of EPISODES_A_SEGMENT new episodes, some of which end in the next one."""
    from trajlake.ingest.segment import Descriptor, EpisodePart, SegmentName
    from trajlake_pipelines.units import PlannedSegment

    chance = random.Random(1)
    going_on: list[str] = []
    for number in range(segments):
        worker, place = divmod(number, 500)
        if place == 0:
            going_on = []
        ids = [f"{number:08x}-{each:04x}-7000-8000-{chance.getrandbits(48):012x}" for each in range(EPISODES_A_SEGMENT)]
        last = place == 499 or number == segments - 1
        parts = [EpisodePart(episode, 0, 10, False, True) for episode in going_on]
        parts += [EpisodePart(episode, 0, 10, True, last or each % SPANNING != 0) for each, episode in enumerate(ids)]
        going_on = [] if last else ids[::SPANNING]
        key = SegmentName("run", f"w{worker:04d}", 0, place).key
        yield PlannedSegment(key, SEGMENT_BYTES, number), Descriptor(10 * len(parts), 0, tuple(parts))


def plan(segments: int) -> Callable[[], dict[str, int]]:
    import json
    from dataclasses import asdict

    from trajlake_pipelines.plan import UNIT_BYTES
    from trajlake_pipelines.units import Parts, assign_units, involved

    def action() -> dict[str, int]:
        parts = Parts()
        for segment, descriptor in descriptors(segments):
            parts.add(segment, descriptor)
        frame, seal = involved(parts.frame(), parts.segments, {}, None, time.time())
        units = assign_units(frame, parts.segments, {}, seal, UNIT_BYTES)
        assert sum(len(unit.segments) for unit in units) >= segments
        return {"units": len(units), "bytes": len(json.dumps([asdict(unit) for unit in units]))}

    return action


def after_history(folder: str, history: int) -> Callable[[], dict[str, float]]:
    """Lakes whose tables hold `history` compactions of 1,000 episodes; the time to plan five more segments."""
    import trajlake

    lakes = {}
    for kind in ("time-ordered", "random"):
        lakes[kind] = trajlake.create(Path(folder) / kind)
        make_history(lakes[kind].store, history, kind)

    def action() -> dict[str, float]:
        return {
            kind: median(_planning_seconds(lake.store, history, kind) for _ in range(5)) for kind, lake in lakes.items()
        }

    return action


def ids_of(compaction: int, kind: str, count: int = 1_000) -> list[str]:
    """Ids of the episodes of one compaction, made up: in the order of time, or at random."""
    chance = random.Random(f"{compaction}")
    if kind == "random":
        return [f"{chance.getrandbits(128):032x}" for _ in range(count)]
    return [f"{compaction:08x}-{each:04x}-7000-8000-{chance.getrandbits(48):012x}" for each in range(count)]


def make_history(store: Any, history: int, kind: str, count: int = 1_000) -> None:
    """The tables, the index and the frontier as `history` compactions of `count` episodes leave them; and five new
    segments."""
    from tests.pipelines.landed import land
    from trajlake.ingest.segment import SegmentName
    from trajlake.table import id_index
    from trajlake.table.commit import Change, commit
    from trajlake.table.layout import put_episodes, put_segments
    from trajlake_pipelines.frontier import Frontier, put_frontier
    from trajlake_pipelines.plan import APPLICATION, job_folder
    from trajlake_schemas import EPISODES, SEGMENTS

    required = {"run_id": "run", "worker_id": "w", "attempt": 0, "epoch": 0, "n_steps": 1}
    required |= {"n_tool_calls": 0, "n_tool_errors": 0, "stop_reason": "done"}
    runs: Any = ()
    paths: list[str] = []
    for number in range(1, history + 1):
        rows = [{"episode_id": each, **required} for each in ids_of(number, kind, count)]
        keys = [SegmentName("run", "w", 0, (number - 1) * 10 + each).key for each in range(10)]
        ledger = pa.Table.from_pylist(
            [
                {"path": key, "run_id": "run", "worker_id": "w", "epoch": 0, "number": at, "bytes": 1, "events": 1}
                | {"modified_at": time.time_ns() // 1000, "state": "consumed", "compaction": number}
                for at, key in enumerate(keys)
            ],
            SEGMENTS.arrow,
        )
        file = put_episodes(store, f"{number:08d}", pa.Table.from_pylist(rows, EPISODES.arrow))
        record = put_segments(store, f"{number:08d}", ledger, "consumed")
        commit(store, "episodes", APPLICATION, number, lambda _, file=file: Change([file]))  # type: ignore[misc]
        commit(store, "segments", APPLICATION, number, lambda _, record=record: Change([record]))  # type: ignore[misc]
        paths.append(file.path)
        runs = id_index.after(store, runs, paths, number)
    everything = [SegmentName("run", "w", 0, number).key for number in range(history * 10)]
    put_frontier(store, job_folder(history), Frontier(runs=runs).with_keys(everything))
    for key in everything[:: max(1, len(everything) // 1000)]:
        path = Path(store.uri) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    land(store, range(history * 10, history * 10 + 5), ids=lambda each: ids_of(history + 1, kind)[each % 1000])


def _planning_seconds(store: Any, history: int, kind: str) -> float:
    from trajlake_pipelines.plan import UNIT_BYTES, _make_plan, next_number

    began = time.perf_counter()
    made = _make_plan(store, next_number(store), None, UNIT_BYTES)
    assert made is not None
    assert len(made.units) == 1
    return time.perf_counter() - began

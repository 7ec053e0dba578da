"""What a trainer waits for: batches by a sampler, a shuffled epoch, the index of a million episodes and draws from it.

Peers: Lance `take` by row numbers that are known from elsewhere; a sequential scan of our own files; the prioritized
buffers of cpprb and TorchRL where they are installed (extra `bench-torch`); a cumulative sum in numpy.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import trajlake
from tests.benchmarks.corpus import Corpus, step_files
from tests.benchmarks.harness import OURS, Alone, Options, Result, alone, in_turns, latencies, median, percentile, timed
from tests.benchmarks.readers import LanceByRow, Place, Sizes, local_place, s3_place, same_table
from trajlake.read.sampler import Sampler
from trajlake.read.snapshot import CACHE_BYTES
from trajlake.storage import open_store
from trajlake.table.commit import Change, commit
from trajlake.table.layout import put_episodes
from trajlake_schemas import EPISODES

TITLE = "Sampling for a trainer"
BATCH = 256
DRAWS = 1_000_000
_AT_ONCE = 4_096
_HERE = "tests.benchmarks.sample"


def run(options: Options) -> list[Result]:
    small = options.repeats == 1
    results = _batches(local_place(options.corpus), options.corpus, options.batches)
    results += _epoch(options.corpus, options.repeats)
    if options.s3:
        results += _batches(s3_place(options.corpus, options), options.corpus, max(2, options.batches // 2))
    return results + _million(options.scratch("million"), 20_000 if small else 1_000_000, options.repeats)


# -- batches and epochs --------------------------------------------------------------------------------------------


class OurSampler:
    """A uniform sampler without repetition within an epoch. `keeps` row groups that it decoded for later batches, as
    samplers do, or reads each batch as if it were the only one."""

    def __init__(self, place: Place, size: int, keeps: bool) -> None:
        self.size = size
        self._keeps = keeps
        self.sampler: Sampler = trajlake.connect(place.lake_uri).snapshot().sampler("epochs", seed=3)
        self.batch(None)

    def ids(self) -> list[str]:
        """The ids of the next batch, for the peers, without drawing it."""
        state = self.sampler.state_dict()
        drawn = [sample.episode_id for sample in self.sampler.take(self.size)]
        self.sampler.load_state_dict(state)
        return drawn

    def batch(self, _: Any) -> pa.Table:
        if self._keeps:
            return self.sampler.batch(self.size).steps
        rows = self.sampler.population.rows[self.sampler.draw(self.size).pieces.row]
        return pa.concat_tables(self.sampler.snapshot.steps_of(rows))


def _batches(place: Place, corpus: Corpus, batches: int) -> list[Result]:
    return [each for keeps in (False, True) for each in _batches_of(place, corpus, batches, keeps)]


def _batches_of(place: Place, corpus: Corpus, batches: int, keeps: bool) -> list[Result]:
    """Of one epoch: no episode comes twice, so that a peer that decodes episodes alone could keep none for later."""
    size = min(BATCH, corpus.episodes // (batches + 2))
    ours, lance = OurSampler(place, size, keeps), LanceByRow(place)
    lance.batch(random.Random(1).sample(corpus.episode_ids, size))
    warm, *drawn = _sequence(ours, batches + 1)
    ours = OurSampler(place, size, keeps)
    contenders: dict[str, Callable[[Any], Any]] = {OURS: ours.batch, "Lance, take by row": lance.batch}
    found = latencies(contenders, drawn, [warm], same_table)
    sizes = Sizes(corpus)
    case = f"a batch of {size} by a sampler, {place.name}, {'row groups kept' if keeps else 'nothing kept'}"
    return [
        Result(
            f"{case} (median of {len(seconds)})",
            name,
            median(seconds),
            p95=percentile(seconds, 95),
            size=sizes.of(name),
            time_goal=1.0 if name != OURS else None,
            size_goal=1 / 0.65 if name != OURS else None,
            note=f"keeps up to {CACHE_BYTES >> 20} MiB of decoded row groups, in which this lake fits whole or in part"
            if keeps and name == OURS
            else "",
        )
        for name, seconds in found.items()
    ]


def _sequence(ours: OurSampler, count: int) -> list[list[str]]:
    found = []
    for _ in range(count):
        found.append(ours.ids())
        ours.sampler.take(ours.size)
    return found


def _epoch(corpus: Corpus, repeats: int) -> list[Result]:
    """Every episode once: shuffled, against the files one after another as they lie."""
    lake = corpus.compacted
    steps = sum(pq.read_metadata(path).num_rows for path in step_files(lake))

    def shuffled() -> float:
        sampler = trajlake.connect(lake.uri).snapshot().sampler("epochs", epochs=1, seed=1)

        def read() -> None:
            assert sum(len(table) for batch in sampler.batches(BATCH) for table in batch.tables) == steps

        return timed(read)

    def sequential() -> float:
        def read() -> None:
            assert sum(len(pq.read_table(path, use_threads=False)) for path in step_files(lake)) == steps

        return timed(read)

    found = in_turns({OURS: shuffled, "sequential scan": sequential}, 3 * repeats)
    return [
        Result(
            f"a full epoch of {corpus.episodes} episodes",
            name,
            median(seconds),
            time_goal=0.7 if name != OURS else None,
            note="shuffled, in batches of 256, two read ahead" if name == OURS else "pyarrow, a file after the other",
        )
        for name, seconds in found.items()
    ]


# -- a million episodes --------------------------------------------------------------------------------------------


def _million(folder: Path, episodes: int, repeats: int) -> list[Result]:
    make_index(folder, episodes)
    opened = [alone(f"{_HERE}:by_opening", lake=str(folder / "lake")) for _ in range(repeats)]
    contenders: dict[str, Callable[[], Alone]] = {
        OURS: lambda: alone(f"{_HERE}:by_sampler", lake=str(folder / "lake")),
        "numpy, cumulative sum": lambda: alone(f"{_HERE}:by_cumulative_sum", episodes=episodes),
    }
    if importlib.util.find_spec("cpprb"):
        contenders["cpprb"] = lambda: alone(f"{_HERE}:by_cpprb", episodes=episodes)
    if importlib.util.find_spec("torchrl"):
        contenders["TorchRL"] = lambda: alone(f"{_HERE}:by_torchrl", episodes=episodes)
    missing = [
        Result(f"{DRAWS:,} prioritized draws of {episodes:,} episodes, {_AT_ONCE} at a time", name, None,
               note="not installed: pip install -e '.[bench-torch]'")
        for name in ("cpprb", "TorchRL")
        if name not in contenders
    ]  # fmt: skip
    found = in_turns(contenders, repeats, warm_up=False)
    notes = {
        OURS: "sum tree; ids, importance weights and counts included; a function of seed and position",
        "numpy, cumulative sum": "indexes alone; each change of a priority costs the whole sum again",
        "cpprb": "C++ segment tree; the stored items with indexes and importance weights",
        "TorchRL": "C++ sum tree, storage in memory; the stored items with indexes and importance weights",
    }
    first = Result(
        f"open the index of {episodes:,} episodes for prioritized draws",
        OURS,
        median(each.seconds for each in opened),
        memory=max(each.memory for each in opened),
        note="snapshot, filter, sort, sum tree; local folder; goal: at most 2 s",
    )
    return (
        [first]
        + [
            Result(
                f"{DRAWS:,} prioritized draws of {episodes:,} episodes, {_AT_ONCE} at a time",
                name,
                median(each.value for each in runs),
                note=notes[name],
            )
            for name, runs in found.items()
        ]
        + missing
    )


def make_index(folder: Path, episodes: int) -> None:
    """A lake of `episodes` rows in `episodes`, and no steps."""
    store = open_store(trajlake.create(folder / "lake").uri)
    rng = np.random.default_rng(0)
    files = []
    for start in range(0, episodes, 125_000):
        count = min(125_000, episodes - start)
        task = rng.integers(0, 5_000, count)
        columns: dict[str, Any] = {
            "episode_id": [rng.bytes(16).hex() for _ in range(count)],
            "attempt": np.zeros(count, np.int32),
            "run_id": ["run"] * count,
            "worker_id": ["w"] * count,
            "epoch": np.zeros(count, np.int32),
            "task_id": [f"task/{number}" for number in task],
            "group_id": [f"group/{number}" for number in task],
            "domain": [("airline", "retail", "telecom")[number % 3] for number in task],
            "policy_version": [str(number) for number in rng.integers(0, 100, count)],
            "reward": rng.random(count),
            "success": rng.random(count) > 0.5,
            "n_steps": rng.integers(1, 60, count).astype(np.int32),
            "n_tool_calls": np.zeros(count, np.int32),
            "n_tool_errors": np.zeros(count, np.int32),
            "content_hash": [rng.bytes(16).hex() for _ in range(count)],
        }
        arrays = [
            pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(count, field.type)
            for field in EPISODES.arrow
        ]
        files.append(put_episodes(store, "bench", pa.Table.from_arrays(arrays, schema=EPISODES.arrow)))
    commit(store, "episodes", "bench", 1, lambda table: Change(files))


def by_opening(lake: str) -> Callable[[], int]:
    import trajlake

    return lambda: len(trajlake.connect(lake).snapshot().sampler("prioritized"))


def by_sampler(lake: str) -> Callable[[], float]:
    sampler = trajlake.connect(lake).snapshot().sampler("prioritized")
    return lambda: _seconds(lambda: sampler.draw(_AT_ONCE))


def by_cumulative_sum(episodes: int) -> Callable[[], float]:
    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.random(episodes) ** 0.6)
    return lambda: _seconds(lambda: np.searchsorted(ends, rng.random(_AT_ONCE) * ends[-1]))


def by_cpprb(episodes: int) -> Callable[[], float]:
    import cpprb

    buffer = cpprb.PrioritizedReplayBuffer(episodes, {"item": {"dtype": np.int64}}, alpha=0.6)
    rng = np.random.default_rng(0)
    for start in range(0, episodes, 10_000):
        count = min(10_000, episodes - start)
        buffer.add(item=np.arange(start, start + count), priorities=rng.random(count))
    return lambda: _seconds(lambda: buffer.sample(_AT_ONCE, beta=0.4))


def by_torchrl(episodes: int) -> Callable[[], float]:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(episodes), batch_size=_AT_ONCE
    )
    torch.manual_seed(0)
    buffer.extend(TensorDict({"item": torch.arange(episodes), "td_error": torch.rand(episodes)}, [episodes]))
    return lambda: _seconds(buffer.sample)


def _seconds(draw: Callable[[], Any]) -> float:
    """Of DRAWS draws."""
    draw()
    began = time.perf_counter()
    for _ in range(DRAWS // _AT_ONCE):
        draw()
    return (time.perf_counter() - began) * DRAWS / (DRAWS // _AT_ONCE * _AT_ONCE)

"""The lake that the benchmarks share, made once a run: what landed, the same compacted, and the peers' copies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.parquet as pq

import trajlake
from tests.benchmarks.data import Rollout, rollouts
from tests.benchmarks.harness import folder_bytes
from trajlake.lake import Lake
from trajlake.storage import open_store
from trajlake.table.layout import with_nulls
from trajlake.table.tables import open_table
from trajlake_schemas import STEPS

AT_ONCE = 16  # episodes that a worker has open at a time
RESENT = 20  # one of so many episodes is sent a second time by another worker
_ROUND = 2_000


def record(lake: Lake, spool: Path, worker: str, episodes: Iterable[Rollout]) -> None:
    """Write episodes as a rollout worker does: several open at once, a step of each in turn."""
    with lake.writer("bench", worker, spool=spool, segment_seconds=600.0, linger_seconds=600.0) as writer:
        waiting = iter(episodes)
        while group := list(islice(waiting, AT_ONCE)):
            handles = [writer.episode(episode_id=each.episode_id, **each.begin) for each in group]
            for number in range(max(len(each.steps) for each in group)):
                for handle, each in zip(handles, group, strict=True):
                    if number < len(each.steps):
                        handle.step(**each.steps[number])
                    elif number == len(each.steps):
                        handle.end(**each.end)
            for handle, each in zip(handles, group, strict=True):
                if number < len(each.steps):
                    handle.end(**each.end)


@dataclass(frozen=True)
class LanceCopy:
    """The steps as a Lance dataset with a scalar index, in the order of our table; `rows` is where episodes are."""

    path: Path
    rows: dict[str, tuple[int, int]]  # first row and number of rows


@dataclass(frozen=True)
class Corpus:
    """`source` are the episodes; everything is made below `folder` when it is first asked for."""

    folder: Path
    name: str
    episodes: int
    source: tuple[Rollout, ...] | None = None  # None: made up, never all in memory
    full_precision: bool = False  # of log-probabilities that are made up

    @cached_property
    def landed(self) -> Path:
        """A lake in which the episodes have landed, one of RESENT of them twice."""
        path, spool = self.folder / "landed", self.folder / "spool"
        lake = trajlake.create(path)
        made = self.source or rollouts(self.episodes, full_precision=self.full_precision)
        waiting, round_number = iter(made), 0
        while part := list(islice(waiting, _ROUND)):
            half = len(part) // 2
            record(lake, spool, f"w{round_number}a", part[:half])
            record(lake, spool, f"w{round_number}b", part[half:])
            record(lake, spool, f"w{round_number}c", part[::RESENT])
            round_number += 1
        return path

    def copy_of_landed(self, target: Path) -> Path:
        """Another lake with the same content; immutable files are shared."""
        return Path(shutil.copytree(self.landed, target, copy_function=os.link, dirs_exist_ok=True))

    @cached_property
    def compacted(self) -> Lake:
        """The lake after one compaction."""
        from trajlake_pipelines.compact import compact

        lake = trajlake.connect(self.copy_of_landed(self.folder / "compacted"))
        report = compact(lake)
        assert report.episodes == self.episodes, report
        return lake

    @property
    def path(self) -> Path:
        return Path(self.compacted.uri)

    @cached_property
    def episode_ids(self) -> list[str]:
        return sorted(self.lance.rows)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables `steps` and `episodes`, their logs included."""
        return folder_bytes(self.path / "steps") + folder_bytes(self.path / "episodes")

    @cached_property
    def lance(self) -> LanceCopy:
        tables = [with_nulls(pq.read_table(path), STEPS.arrow) for path in step_files(self.compacted)]
        steps = pa.concat_tables(tables).combine_chunks()
        path = self.folder / "steps.lance"
        dataset = lance.write_dataset(steps, path)
        dataset.create_scalar_index("episode_id", "BTREE")
        rows: dict[str, tuple[int, int]] = {}
        for row, episode in enumerate(steps["episode_id"].to_pylist()):
            first, count = rows.get(episode, (row, 0))
            rows[episode] = (first, count + 1)
        return LanceCopy(path, rows)


def step_files(lake: Lake) -> list[str]:
    """Addresses of the Parquet files of `steps`, for peers that read them."""
    table = open_table(lake.store, "steps")
    paths = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    return [lake.store.location(f"steps/{path}") for path in sorted(paths)]


def upload(folder: Path, uri: str) -> None:
    """Put every file of a folder below an address."""
    store = open_store(uri)
    for file in sorted(folder.rglob("*")):
        key = file.relative_to(folder).as_posix()
        if file.is_file() and not key.startswith((".tmp/", "landing/")):
            store.put_if_absent(key, file.read_bytes())

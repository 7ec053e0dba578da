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
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import trajlake
from tests.benchmarks.data import TOKEN_VOCABULARY, Rollout, rollouts
from tests.benchmarks.harness import folder_bytes
from trajlake.ingest.segment import EVENT_SCHEMA, SegmentName, describe, encode_descriptor, stream_options
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
    hardest: bool = False  # of made-up ones

    @cached_property
    def landed(self) -> Path:
        """A lake in which the episodes have landed, one of RESENT of them twice."""
        path, spool = self.folder / "landed", self.folder / "spool"
        lake = trajlake.create(path)
        made = self.source or rollouts(self.episodes, hardest=self.hardest)
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


def reissue(landed: Path, target: Path, copies: int) -> Path:
    """A lake in `target` with the segments of `landed` and `copies - 1` times as many, of other workers: the same sizes
    and the same statistics, but every id, word and token is another one. Gigabytes in a minute."""
    shutil.copytree(landed, target, copy_function=os.link, dirs_exist_ok=True)
    for path in sorted((landed / "landing").rglob("*.arrow")):
        name = SegmentName.parse(path.relative_to(landed).as_posix())
        with pa.OSFile(str(path)) as file:
            batches = list(pa.ipc.open_stream(file))
        for copy in range(1, copies):
            other = [_Reissue(copy)(batch) for batch in batches]
            key = SegmentName(name.run_id, f"{name.worker_id}-{copy}", name.epoch, name.number).key
            (target / key).parent.mkdir(parents=True, exist_ok=True)
            with (target / key).open("wb") as sink:
                with pa.ipc.new_stream(sink, EVENT_SCHEMA, options=stream_options()) as stream:
                    for batch in other:
                        stream.write_batch(batch)
                sink.write(encode_descriptor(describe(pa.Table.from_batches(other))))
    return target


class _Reissue:
    """Works on Arrow's buffers. Letters are exchanged (vowels by vowels), ids get a number of the copy, tokens are
    permuted and log-probabilities moved to other tokens."""

    _IDS = frozenset({"episode_id", "task_id", "group_id", "id", "call_id"})
    _TEXTS = frozenset({"message", "reasoning", "content", "arguments"})

    def __init__(self, copy: int) -> None:
        rng = np.random.default_rng(copy)
        self._id = np.frombuffer(f"{copy:04x}".encode(), np.uint8)
        self._letters = np.arange(256, dtype=np.uint8)
        for kind in (b"aeiou", b"bcdfghjklmnpqrstvwxyz"):
            letters = np.frombuffer(kind, np.uint8)
            self._letters[letters] = rng.permutation(letters)
        self._tokens = rng.permutation(TOKEN_VOCABULARY).astype(np.int32)
        self._shift = int(rng.integers(1 << 30))

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [self._array(array, field.name) for array, field in zip(batch.columns, batch.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)

    def _array(self, array: pa.Array, name: str) -> pa.Array:
        kind, buffers = array.type, array.buffers()
        if array.null_count == len(array):
            return array
        if pa.types.is_struct(kind):
            children = [self._array(array.field(place), field.name) for place, field in enumerate(kind)]
            return pa.Array.from_buffers(kind, len(array), buffers[:1], children=children)
        if pa.types.is_list(kind):
            return pa.Array.from_buffers(kind, len(array), buffers[:2], children=[self._array(array.values, name)])
        if name == "token_ids":
            return pa.array(self._tokens[array.to_numpy()])
        if name == "logprobs":
            return pa.array(np.roll(array.to_numpy(), self._shift))
        if name in self._TEXTS:
            text = self._letters[np.frombuffer(buffers[2], np.uint8)]
        elif name in self._IDS:
            bounds = np.frombuffer(buffers[1], np.int32, len(array) + 1)
            starts = bounds[:-1][np.diff(bounds) >= len(self._id)]
            text = np.frombuffer(buffers[2], np.uint8).copy()
            text[starts[:, None] + np.arange(len(self._id))] = self._id
        else:
            return array
        return pa.Array.from_buffers(kind, len(array), [*buffers[:2], pa.py_buffer(text)])


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

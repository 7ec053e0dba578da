"""Landing segments into tables: ours with commits and index, beside engines that only dedupe, sort and write."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.benchmarks.corpus import reissue
from tests.benchmarks.harness import OURS, Alone, Options, Result, alone, folder_bytes, in_turns, median
from trajlake_schemas import STEPS

TITLE = "Compact"
MOST_FOR_ENGINES = 2.0  # gigabytes: they hold all of it in memory several times
NOTES = {
    OURS: "plans, reads, dedupes, sorts, hashes, writes and commits; the index of episodes is part of it",
    "DuckDB": "2 threads; distinct over the keys alone (DISTINCT ON over whole rows takes 1.8 times its processor "
    "time), ORDER BY, COPY to zstd Parquet; one file, no commit, no index",
    "Polars": "the same; distinct and order over the keys, then a gather (over whole rows: 4 times as long)",
    "DeltaTable.optimize": "compact() of a small file a segment: no dedupe, no order; decoding was done before",
}
_HERE = "tests.benchmarks.compact"


def run(options: Options) -> list[Result]:
    small = _Case(options, options.corpus.landed)
    copies = max(2, math.ceil(options.gigabytes * 1e9 / small.arrow))
    large = _Case(options, reissue(options.corpus.landed, options.scratch("large"), copies))
    with_engines = options.gigabytes <= MOST_FOR_ENGINES
    if not with_engines:
        large.repeats = 1  # minutes each
    found = [*small.results(with_optimize=True), *large.results(with_engines=with_engines)]
    found += large.processes()
    # Each copy has the lengths of the first, and other texts.
    assert large.content[:-1] == tuple(copies * value for value in small.content[:-1])
    shutil.rmtree(large.landed)
    return found


class _Case:
    """What landed in one lake, and who brings it into tables."""

    def __init__(self, options: Options, landed: Path) -> None:
        self._options = options
        self.landed = landed
        self.repeats = options.repeats
        self.arrow = sum(table.nbytes for table in segment_tables(landed))
        self.content: tuple[int, ...] = ()
        self._outputs: dict[str, Path] = {}
        self._title = (
            f"{folder_bytes(landed / 'landing') / 1e6:,.0f} MB of segments ({self.arrow / 1e6:,.0f} MB of Arrow)"
        )

    def results(self, *, with_engines: bool = True, with_optimize: bool = False) -> list[Result]:
        contenders: dict[str, Callable[[], Alone]] = {OURS: lambda: self._ours(OURS)}
        if with_engines:
            contenders["DuckDB"] = lambda: self._engine("DuckDB", "by_duckdb")
            contenders["Polars"] = lambda: self._engine("Polars", "by_polars")
        if with_optimize:
            small_files = self._options.scratch("delta")
            write_small_files(self.landed, small_files)
            contenders["DeltaTable.optimize"] = lambda: self._optimize(small_files)
        goals = {"DuckDB": 1.0}
        return self._measured(contenders, f"{self._title} into tables", goals, NOTES)

    def processes(self) -> list[Result]:
        """Ours in two processes, and in one that does one unit at a time."""
        contenders = {
            OURS: lambda: self._ours(OURS, processes=2),
            "one process": lambda: self._ours("one process", processes=1),
        }
        notes = {OURS: "two processes, the default at this size", "one process": "one unit at a time"}
        return self._measured(contenders, f"{self._title}, two processes and one", {"one process": 1.7}, notes)

    def _ours(self, name: str, processes: int | None = None) -> Alone:
        lake = Path(shutil.copytree(self.landed, self._target(name), copy_function=os.link, dirs_exist_ok=True))
        self._outputs[name] = lake / "steps"
        return alone(f"{_HERE}:by_trajlake", lake=str(lake), processes=processes)

    def _engine(self, name: str, function: str) -> Alone:
        target = self._target(name)
        self._outputs[name] = target
        return alone(f"{_HERE}:{function}", landed=str(self.landed), target=str(target / "steps.parquet"))

    def _optimize(self, small_files: Path) -> Alone:
        target = shutil.copytree(small_files, self._target("optimize"), dirs_exist_ok=True)
        return alone(f"{_HERE}:by_optimize", table=str(target))

    def _target(self, name: str) -> Path:
        """A new folder in the place of the contender's last, since gigabytes add up."""
        shutil.rmtree(self._options.folder / f"compact {name}", ignore_errors=True)
        target = self._options.folder / f"compact {name}"
        target.mkdir()
        return target

    def _measured(
        self, contenders: dict[str, Callable[[], Alone]], case: str, goals: dict[str, float], notes: dict[str, str]
    ) -> list[Result]:
        self._outputs.clear()
        found = in_turns(contenders, self.repeats, warm_up=False)  # processes of their own
        contents = {name: content(path) for name, path in self._outputs.items()}
        assert len(set(contents.values())) == 1, contents
        self.content = contents[OURS]
        for name in contenders:
            shutil.rmtree(self._target(name))
        return [
            Result(
                case,
                name,
                median(each.seconds for each in runs),
                work=self.arrow,
                size=runs[0].value["bytes"],
                processor=median(each.processor for each in runs),
                memory=max(each.memory for each in runs),
                time_goal=goals.get(name),
                note=notes[name],
            )
            for name, runs in found.items()
        ]


def segment_tables(landed: Path) -> Iterator[pa.Table]:
    """The events of each segment, in the order of the names."""
    for path in sorted((landed / "landing").rglob("*.arrow")):
        with pa.OSFile(str(path)) as file:
            yield pa.ipc.open_stream(file).read_all()


def read_events(landed: Path) -> pa.Table:
    """All events with row and number of writer, for engines that cannot read Arrow streams themselves."""
    tables = []
    writers: dict[Path, int] = {}
    for path in sorted((landed / "landing").rglob("*.arrow")):
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        writer = writers.setdefault(path.parent, len(writers))
        tables.append(table.append_column("writer", pa.repeat(pa.scalar(writer, pa.int32()), len(table))))
    events = pa.concat_tables(tables)
    return events.append_column("row", pa.array(np.arange(len(events), dtype=np.uint32)))


def by_trajlake(lake: str, processes: int | None = None) -> Callable[[], dict[str, Any]]:
    import trajlake
    from trajlake_pipelines.compact import compact
    from trajlake_pipelines.runners import Runner

    def action() -> dict[str, Any]:
        compact(trajlake.connect(lake), runner=Runner(processes=processes))
        return {"bytes": folder_bytes(Path(lake) / "steps") + folder_bytes(Path(lake) / "episodes")}

    return action


def by_duckdb(landed: str, target: str) -> Callable[[], dict[str, Any]]:
    import duckdb

    connection = duckdb.connect(config={"threads": 2})

    def action() -> dict[str, Any]:
        connection.register("events", read_events(Path(landed)))
        connection.execute(f"""
            COPY (
                WITH takes AS (SELECT episode_id, min(writer) AS writer FROM events WHERE kind = 'end' GROUP BY 1),
                keys AS MATERIALIZED (
                    SELECT min(row) AS row FROM events SEMI JOIN takes USING (episode_id, writer)
                    WHERE kind = 'step' GROUP BY episode_id, sequence
                )
                SELECT episode_id, sequence, step.* FROM events SEMI JOIN keys USING (row)
                ORDER BY episode_id, sequence
            ) TO '{target}' (FORMAT parquet, COMPRESSION zstd)
        """)
        return {"bytes": Path(target).stat().st_size}

    return action


def by_polars(landed: str, target: str) -> Callable[[], dict[str, Any]]:
    import polars as pl

    def action() -> dict[str, Any]:
        events = pl.from_arrow(read_events(Path(landed)))
        keys = events.select("kind", "episode_id", "sequence", "writer", "row").lazy()
        takes = keys.filter(pl.col("kind") == "end").group_by("episode_id").agg(pl.col("writer").min())
        chosen = (
            keys.filter(pl.col("kind") == "step")
            .join(takes, on=["episode_id", "writer"], how="semi")
            .unique(["episode_id", "sequence"], keep="any")
            .sort("episode_id", "sequence")
            .collect()["row"]
        )
        steps = events.select("episode_id", "sequence", "step")[chosen].unnest("step")
        steps.write_parquet(target, compression="zstd", compression_level=3)
        return {"bytes": Path(target).stat().st_size}

    return action


def write_small_files(landed: Path, target: Path) -> None:
    """A Delta table of the steps with one file a segment, as a stream of appends leaves it."""
    from deltalake import WriterProperties, write_deltalake

    for path in sorted((landed / "landing").rglob("*.arrow")):
        with pa.OSFile(str(path)) as file:
            events = pa.ipc.open_stream(file).read_all()
        steps = events.filter(pa.compute.equal(events["kind"], "step"))
        content = pa.concat_arrays(steps["step"].chunks)
        names = [field.name for field in content.type]
        keys = ["episode_id", "sequence"]
        table = pa.Table.from_arrays([*(steps[name] for name in keys), *content.flatten()], [*keys, *names])
        write_deltalake(str(target), table, mode="append", writer_properties=WriterProperties(compression="ZSTD"))


def by_optimize(table: str) -> Callable[[], dict[str, Any]]:
    from deltalake import DeltaTable, WriterProperties

    def action() -> dict[str, Any]:
        delta = DeltaTable(table)
        delta.optimize.compact(max_concurrent_tasks=2, writer_properties=WriterProperties(compression="ZSTD"))
        return {"bytes": sum(pa.table(delta.get_add_actions())["size_bytes"].to_pylist())}

    return action


def content(path: Path) -> tuple[int, ...]:
    """What the steps below `path` hold, in numbers that do not depend on their order or layout."""
    import polars as pl

    texts = pl.col("message", "reasoning", "extra").str.len_bytes().sum()
    lists = pl.col("tool_calls", "tool_results", "token_ids", "logprobs").list.len().sum()
    results = pl.col("tool_results").list.eval(pl.element().struct.field("content").str.len_bytes()).list.sum()
    hashes = pl.struct("episode_id", "message", "timestamp", "token_ids").hash(seed=1).reinterpret(signed=True)
    schema = pl.DataFrame(STEPS.arrow.empty_table()).schema
    schema.pop("step_index")  # the others have the sequence instead
    frame = pl.scan_parquet(
        sorted(path.rglob("*.parquet")), schema=schema, missing_columns="insert", extra_columns="ignore"
    )
    found = frame.select(
        pl.len().alias("rows"),
        pl.col("episode_id").n_unique(),
        texts,
        lists,
        results.sum().alias("content"),
        (hashes // 1_000_000).sum().alias("hash"),
    )
    return found.collect(engine="streaming").row(0)

"""Landing segments into tables: ours with commits and index, beside engines that only dedupe, sort and write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.benchmarks.harness import OURS, Alone, Options, Result, alone, folder_bytes, in_turns, median
from trajlake_schemas import STEPS

TITLE = "Compact"
_HERE = "tests.benchmarks.compact"


def run(options: Options) -> list[Result]:
    landed = options.corpus.landed
    segments = folder_bytes(landed / "landing")
    arrow = read_events(landed).nbytes
    outputs: dict[str, Path] = {}

    def ours() -> Alone:
        lake = options.corpus.copy_of_landed(options.scratch("compact"))
        outputs[OURS] = lake / "steps"
        return alone(f"{_HERE}:by_trajlake", lake=str(lake))

    def engine(name: str, function: str) -> Callable[[], Alone]:
        def action() -> Alone:
            outputs[name] = options.scratch("compact")
            return alone(f"{_HERE}:{function}", landed=str(landed), target=str(outputs[name] / "steps.parquet"))

        return action

    def optimize() -> Alone:
        target = options.scratch("compact")
        shutil.copytree(small_files, target, dirs_exist_ok=True)
        return alone(f"{_HERE}:by_optimize", table=str(target))

    small_files = options.scratch("delta")
    write_small_files(landed, small_files)
    contenders = {
        OURS: ours,
        "DuckDB": engine("DuckDB", "by_duckdb"),
        "Polars": engine("Polars", "by_polars"),
        "DeltaTable.optimize": optimize,
    }
    found = in_turns(contenders, options.repeats, warm_up=False)  # processes of their own
    contents = {name: content(path) for name, path in outputs.items()}
    assert len(set(contents.values())) == 1, contents
    notes = {
        OURS: "plans, reads, dedupes, sorts, hashes, writes and commits; the index of episodes is part of it",
        "DuckDB": "2 threads; distinct over the keys alone (DISTINCT ON over whole rows takes 1.8 times its processor "
        "time), ORDER BY, COPY to zstd Parquet; one file, no commit, no index",
        "Polars": "the same; distinct and order over the keys, then a gather (over whole rows: 4 times as long)",
        "DeltaTable.optimize": "compact() of a small file a segment: no dedupe, no order; decoding was done before",
    }
    case = f"{segments / 1e6:,.0f} MB of segments ({arrow / 1e6:,.0f} MB of Arrow) into tables"
    return [
        Result(
            case,
            name,
            median(each.seconds for each in runs),
            work=arrow,
            size=runs[0].value["bytes"],
            processor=median(each.processor for each in runs),
            memory=max(each.memory for each in runs),
            time_goal=1.0 if name == "DuckDB" else None,
            note=notes[name],
        )
        for name, runs in found.items()
    ]


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
    return events.append_column("row", pa.array(range(len(events)), pa.uint32()))


def by_trajlake(lake: str) -> Callable[[], dict[str, Any]]:
    import trajlake
    from trajlake_pipelines.compact import compact

    def action() -> dict[str, Any]:
        compact(trajlake.connect(lake))
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

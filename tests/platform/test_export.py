"""Export: shards that look finished only when they are, and that any reader opens."""

import contextlib
import hashlib
import io
import json
import math
import shutil

import fastparquet
import pandas
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.rollouts import record

import trajlake
from trajlake.errors import ExportError, StoreUnavailable, UsageError
from trajlake.read import lineage, steps_reader
from trajlake.read import shards as shards_module
from trajlake.read.lineage import uses_of
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="run", spool=folder / "spool") as writer:
        for number in range(20):
            with writer.episode(episode_id=f"e{number:02d}", task_id=number, tags={"k": "v"}, seed=number) as episode:
                episode.step(source="user", message=f"hello \0 \x1b[31m 😀 {number}")
                episode.step(message=None, tool_calls=[{"id": "c", "name": "f", "arguments": {"a": [1, None]}}])
                episode.step(source="tool", tool_results=[{"call_id": "c", "content": "ok", "is_error": False}])
                episode.step(message="\ud800 lone", token_ids=[1, 2], logprobs=[-0.5, math.nan], reward=math.nan)
                episode.step(observation=[[1.0, 2.0]], action=3, terminated=True)
                rewards = {0: None, 1: 0.0, 2: math.nan, 3: -0.0, 4: math.inf}
                episode.end(reward=rewards.get(number, 1.5), success=number % 3 == 0 if number else None)
    compact(lake)
    return lake.snapshot()


def files(folder):
    return sorted(path for path in folder.iterdir() if path.name.startswith("shard"))


def test_shards_hold_every_episode_once_and_open_in_four_readers(snapshot, tmp_path):
    import duckdb

    snapshot.export(tmp_path / "out", shards=4)
    paths = files(tmp_path / "out")
    assert [path.name for path in paths] == [f"shard-{number:05d}-of-00004.parquet" for number in range(4)]
    expected = {f"e{number:02d}" for number in range(20)}
    readers = {
        "pandas": lambda path: pandas.read_parquet(path)["episode_id"].tolist(),
        "fastparquet": lambda path: (
            fastparquet.ParquetFile(io.BytesIO(path.read_bytes())).to_pandas()["episode_id"].tolist()
        ),
        "polars": lambda path: pl.read_parquet(path)["episode_id"].to_list(),
        "pyarrow": lambda path: pq.read_table(path)["episode_id"].to_pylist(),
        "duckdb": lambda path: [row[0] for row in duckdb.sql(f"SELECT episode_id FROM '{path}'").fetchall()],
    }
    for name, read in readers.items():
        ids = [episode_id for path in paths for episode_id in read(path)]
        assert len(ids) == 20, name
        assert set(ids) == expected, name


def test_the_manifest_says_what_was_exported_and_sums_up(snapshot, tmp_path):
    report = snapshot.export(tmp_path / "out", shards=3, seed=5, where="success")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == report.manifest
    assert (manifest["snapshot"], manifest["seed"], manifest["where"]) == (snapshot.token, 5, "success")
    assert manifest["episodes"] == sum(file["rows"] for file in manifest["files"]) == 6
    assert manifest["steps"] == sum(file["steps"] for file in manifest["files"]) == 30
    for file in manifest["files"]:
        data = (tmp_path / "out" / file["name"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_same_export_gives_the_same_bytes_and_another_seed_another_order(snapshot, tmp_path, format):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        snapshot.export(tmp_path / name, format=format, shards=2, seed=seed)
    read = {name: [path.read_bytes() for path in files(tmp_path / name)] for name in "abc"}
    assert read["a"] == read["b"] != read["c"]


def test_null_nan_and_zero_rewards_stay_apart_in_parquet(snapshot, tmp_path):
    snapshot.export(tmp_path / "out")
    rows = {row["episode_id"]: row["reward"] for row in pq.read_table(files(tmp_path / "out")[0]).to_pylist()}
    assert rows["e00"] is None
    assert math.isnan(rows["e02"])
    assert (rows["e01"], math.copysign(1, rows["e03"]), rows["e04"]) == (0.0, -1.0, math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_in_json_is_text_wherever_it_stands(tmp_path, value):
    text = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        episode = writer.episode(episode_id="e", extra={"deep": [{"x": value}], "lone": "\ud800"})
        call = {"id": "c", "name": "f", "arguments": {"a": [value]}}
        episode.step(source="agent", message="m", tool_calls=[call], extra={"x": value}, logprobs=[value])
        part = {"type": "text", "text": "t", "x": value}
        episode.step(source="user", content_parts=[part, {"type": "image", "data": b"\0"}])
        episode.end(reward=value, rewards=[{"name": "r", "value": value}])
    compact(lake)
    snapshot = lake.snapshot()
    record = json.loads(lines(snapshot.export(tmp_path / "jsonl", format="jsonl"))[0])
    row = pl.read_parquet(files(snapshot.export(tmp_path / "parquet").destination)[0]).to_dicts()[0]
    assert record["extra"] == {"deep": [{"x": text}], "lone": "\ud800"}
    assert record["reward"] == text
    assert record["rewards"] == json.loads(row["rewards"])
    assert record["rewards"][0]["value"] == text
    assert record["messages"] == json.loads(row["messages"])
    agent, user = record["messages"]
    assert agent["tool_calls"][0]["function"]["arguments"] == {"a": [text]}
    assert (agent["extra"], agent["logprobs"], user["content"][0]["x"]) == ({"x": text}, [text], text)
    pytest.importorskip("datasets")
    from trajlake.adapters.datasets import to_iterable

    (given,) = to_iterable(snapshot.sampler("epochs", epochs=1))
    assert json.loads(given["messages"][0]["tool_calls"][0]["function"]["arguments"]) == {"a": [text]}


def test_messages_are_chat_messages_with_the_rest_beside(snapshot, tmp_path):
    snapshot.export(tmp_path / "out", format="jsonl")
    lines = files(tmp_path / "out")[0].read_text().splitlines()
    record_of = {json.loads(line)["episode_id"]: json.loads(line) for line in lines}
    row = record_of["e07"]
    assert (row["task_id"], row["seed"], row["tags"], row["reward"]) == (7, 7, {"k": "v"}, 1.5)
    user, call, result, lone, classic = row["messages"]
    assert user == {"role": "user", "content": "hello \0 \x1b[31m 😀 7"}
    assert call["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
    ]
    assert result == {"role": "tool", "tool_call_id": "c", "content": "ok", "is_error": False}
    assert lone["content"] == "\ud800 lone"
    assert (lone["token_ids"], lone["logprobs"], lone["reward"]) == ([1, 2], [-0.5, "NaN"], "NaN")
    assert [tensor["name"] for tensor in classic["tensors"]] == ["observation", "action"]


def test_an_export_reads_each_row_group_once_however_it_is_shuffled_and_batched(tmp_path, monkeypatch):
    monkeypatch.setattr("trajlake.table.layout.ROW_GROUP_ARROW_BYTES", 1_000)
    monkeypatch.setattr(steps_reader, "BATCH", 8)
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(64))
    compact(lake)
    snapshot = lake.snapshot()
    groups = len(snapshot.episodes.select("steps_path", "row_group").unique().collect())
    assert groups > 10
    read = []
    real = steps_reader.decode
    monkeypatch.setattr(steps_reader, "decode", lambda parts, wanted: read.extend(parts) or real(parts, wanted))
    snapshot.export(tmp_path / "all", seed=1)
    assert groups <= len(read) <= groups + 64 // 8  # a batch ends within a row group
    order = [
        json.loads(line)["episode_id"] for line in lines(snapshot.export(tmp_path / "lines", format="jsonl", seed=1))
    ]
    assert pl.read_parquet(files(tmp_path / "all")[0])["episode_id"].to_list() == order
    assert order != sorted(order)


def test_an_episode_that_is_too_large_for_a_value_of_parquet_is_named(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(3))
    record(lake, [3], worker="long", steps=40)
    compact(lake)

    def table(columns, *what, **how):
        if "messages" in columns and max(map(len, columns["messages"])) > 3_000:
            raise pa.ArrowCapacityError("array cannot contain more than 3000 bytes")
        return real(columns, *what, **how)

    real = pa.table
    monkeypatch.setattr(shards_module.pa, "table", table)
    with pytest.raises(ExportError, match="episode e0003 is as JSON more than a value .* leave it out .* jsonl"):
        lake.snapshot().export(tmp_path / "all")
    assert lake.snapshot().export(tmp_path / "others", where="episode_id != 'e0003'").episodes == 3


def lines(report):
    return [line for path in files(report.destination) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("together", "resumed"), [(1, 2), (7, 2), (256, 0)])
def test_an_interrupted_export_looks_unfinished_and_goes_on_where_it_was(
    snapshot, tmp_path, monkeypatch, together, resumed
):
    """Small files are noted as written when as many of them are as make a batch."""
    monkeypatch.setattr("trajlake.read.export.BATCH", together)
    real = shards_module.SHARD_WRITERS["parquet"]
    written = []

    def write(batches, path):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        return real(batches, path)

    with monkeypatch.context() as patch:
        patch.setitem(shards_module.SHARD_WRITERS, "parquet", write)
        with pytest.raises(KeyboardInterrupt):
            snapshot.export(tmp_path / "out", shards=4)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("manifest.json"))
    report = snapshot.export(tmp_path / "out", shards=4)
    assert report.resumed_shards == resumed
    snapshot.export(tmp_path / "undisturbed", shards=4)
    assert [path.read_bytes() for path in files(tmp_path / "out")] == [
        path.read_bytes() for path in files(tmp_path / "undisturbed")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "undisturbed"]


def test_an_unfinished_export_of_something_else_is_begun_anew(snapshot, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(shards_module.SHARD_WRITERS, "parquet", stop)
        with pytest.raises(KeyboardInterrupt):
            snapshot.export(tmp_path / "out", seed=1)
    (tmp_path / "out.incomplete" / "shard-junk").write_text("x")
    snapshot.export(tmp_path / "out", seed=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "shard-00000-of-00001.parquet",
    ]


def test_a_shard_that_reads_back_differently_is_an_error_that_names_the_column(snapshot, tmp_path, monkeypatch):
    class Reader(fastparquet.ParquetFile):
        def iter_row_groups(self, *args, **kwargs):
            for frame in super().iter_row_groups(*args, **kwargs):
                frame.loc[3, "messages"] = "not what was written"
                yield frame

    monkeypatch.setattr(fastparquet, "ParquetFile", Reader)
    with pytest.raises(ExportError, match="column messages of row group 0 does not read back as written"):
        snapshot.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_finished_export_is_recognised_and_a_changed_one_refused(snapshot, tmp_path):
    snapshot.export(tmp_path / "out", shards=2)
    assert snapshot.export(tmp_path / "out", shards=2).resumed_shards == 2
    with pytest.raises(ExportError, match="holds another export"):
        snapshot.export(tmp_path / "out", shards=3)
    files(tmp_path / "out")[0].write_bytes(b"changed")
    with pytest.raises(ExportError, match="missing or was changed"):
        snapshot.export(tmp_path / "out", shards=2)


def made_anew(folder, message, count=4):
    shutil.rmtree(folder, ignore_errors=True)
    lake = trajlake.create(folder)
    record(lake, range(count), message=message)
    compact(lake)
    return lake


def as_first_written(path):
    """A plan or a manifest as earlier versions wrote it."""
    text = json.loads(path.read_text())
    del text["lake_id"]
    path.write_text(json.dumps(text))


def test_an_export_of_a_lake_that_was_made_anew_since_is_not_taken_for_this_one(tmp_path):
    made_anew(tmp_path / "lake", "old").snapshot().export(tmp_path / "out", format="jsonl")
    snapshot = made_anew(tmp_path / "lake", "new").snapshot()
    with pytest.raises(UsageError, match=f"lake at {snapshot.lake.uri} was made anew after the export to"):
        snapshot.export(tmp_path / "out", format="jsonl")
    as_first_written(tmp_path / "out" / "manifest.json")
    assert snapshot.export(tmp_path / "out", format="jsonl").resumed_shards == 1


@pytest.mark.parametrize("first_written", [False, True])
def test_only_shards_of_the_same_lake_are_gone_on_with(tmp_path, monkeypatch, first_written):
    monkeypatch.setattr("trajlake.read.export.BATCH", 1)
    real = shards_module.SHARD_WRITERS["jsonl"]

    def export(lake, shards_until_killed):
        left = iter(range(shards_until_killed))

        def write(batches, path):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(batches, path)

        with monkeypatch.context() as patch:
            patch.setitem(shards_module.SHARD_WRITERS, "jsonl", write)
            return lake.snapshot().export(tmp_path / "out", format="jsonl", shards=4)

    lake = made_anew(tmp_path / "lake", "old")
    with pytest.raises(KeyboardInterrupt):
        export(lake, 1)
    lake = made_anew(tmp_path / "lake", "new")
    with pytest.raises(KeyboardInterrupt):
        export(lake, 2)
    if first_written:
        as_first_written(tmp_path / "out.incomplete" / "plan.json")
    report = export(lake, 2)
    assert (report.resumed_shards, report.episodes) == (2, 4)
    assert all("new" in line for line in lines(report))


def uses(lake, folder, episode_id="e0001"):
    return [(use.part, use.position) for use in uses_of(lake, episode_id) if use.name == str(folder)]


@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai-chat", "atif"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreUnavailable("503")])
def test_an_export_that_was_killed_before_it_was_registered_is_by_the_next_run(tmp_path, monkeypatch, format, error):
    lake = made_anew(tmp_path / "lake", "x")
    choices = {"format": format} if format == "atif" else {"format": format, "shards": 3}
    lake.snapshot().export(tmp_path / "whole", **choices)

    def fails(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("trajlake.read.export.register", fails)
        with contextlib.suppress(KeyboardInterrupt):
            lake.snapshot().export(tmp_path / "out", **choices)
    assert uses(lake, tmp_path / "out") == []
    for _ in range(2):
        assert lake.snapshot().export(tmp_path / "out", **choices).resumed_shards
        assert uses(lake, tmp_path / "out") == uses(lake, tmp_path / "whole")


def test_an_export_of_an_earlier_version_is_not_registered_twice(tmp_path, monkeypatch):
    lake = made_anew(tmp_path / "lake", "x")
    real = lineage.register

    def register(lake, kind, name, what, rows):
        return real(lake, kind, name, {key: value for key, value in what.items() if key != "lake_id"}, rows)

    with monkeypatch.context() as patch:
        patch.setattr("trajlake.read.export.register", register)
        lake.snapshot().export(tmp_path / "out")
    as_first_written(tmp_path / "out" / "manifest.json")
    lake.snapshot().export(tmp_path / "out")
    assert len(uses(lake, tmp_path / "out")) == 1


@pytest.mark.parametrize("destination", [".", "", "here"])
def test_the_folder_that_an_export_runs_in_is_refused(snapshot, tmp_path, monkeypatch, destination):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="cannot take the place of the folder that it runs in"):
        snapshot.export(tmp_path / "here" if destination == "here" else destination)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", '"files"'])
def test_what_is_no_manifest_is_left_alone_and_what_is_no_plan_begun_anew(snapshot, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text(text)
    with pytest.raises(ExportError, match="exists and is no export"):
        snapshot.export(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "new.incomplete").mkdir()
    (tmp_path / "new.incomplete" / "plan.json").write_text(text)
    assert snapshot.export(tmp_path / "new").episodes == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_a_folder_with_something_else_in_it_is_left_alone(snapshot, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(ExportError, match="exists and is no export"):
        snapshot.export(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    snapshot.export(tmp_path / "empty")


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "csv"},
        {"shards": 0},
        {"seed": -1},
        {"where": "seed > 99"},
        {"destination": "s3://bucket/out"},
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(snapshot, tmp_path, wrong):
    with pytest.raises(UsageError):
        snapshot.export(**{"destination": tmp_path / "out", **wrong})
    assert not list(tmp_path.iterdir()) or [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_more_shards_than_episodes_are_made_and_are_empty(snapshot, tmp_path):
    report = snapshot.export(tmp_path / "out", shards=25)
    assert sorted(file["rows"] for file in report.manifest["files"]) == [0] * 5 + [1] * 20


def test_retracted_episodes_are_left_out_and_counted(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(5))
    with lake.writer(run="run", worker="x") as writer:
        writer.retract("e0002", "contaminated")
    compact(lake)
    manifest = lake.snapshot().export(tmp_path / "out").manifest
    assert (manifest["episodes"], manifest["left_out_retracted"]) == (4, 1)


def test_episodes_that_repeat_another_are_left_out_where_only_unique_ones_are_wanted(tmp_path):
    from trajlake_pipelines.dedupe import dedupe

    lake = trajlake.create(tmp_path / "lake")
    for number, worker in enumerate("ab"):
        with lake.writer(run="run", worker=worker) as writer:
            for episode_id in (f"same{number}", f"own{number}"):
                with writer.episode(episode_id=episode_id, task_id=1) as episode:
                    episode.step(message="hello" if "same" in episode_id else f"only {number}")
                    episode.end(reward=1.0)
    compact(lake)
    dedupe(lake)
    snapshot = lake.snapshot()
    assert snapshot.export(tmp_path / "all").episodes == 4
    report = snapshot.export(tmp_path / "unique", unique=True)
    assert (report.episodes, report.manifest["left_out_repeated"]) == (3, 1)
    assert len(snapshot.sampler(unique=True)) == 3
    for name, unique in (("all", True), ("unique", False)):
        with pytest.raises(ExportError, match="another export"):
            snapshot.export(tmp_path / name, unique=unique)

"""Export in foreign formats: what was imported comes out as it was, what was not becomes valid rows of columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.platform.formats import (
    test_atif,
    test_inspect,
    test_intercode,
    test_kaggle,
    test_mini_swe_agent,
    test_nemo_gym,
    test_openhands,
    test_rebuild,
    test_swe_agent,
    test_tau2_bench,
    test_verifiers,
    test_verl,
)

import trajlake
from trajlake.errors import ExportError, UsageError
from trajlake.formats import FORMATS, detect, format_named, open_source
from trajlake.formats.exporting import parts_of
from trajlake.formats.importing import import_files
from trajlake.formats.json_rows import Row
from trajlake.formats.rebuild import same
from trajlake.read.lineage import uses_of
from trajlake.read.snapshot import Snapshot
from trajlake_pipelines.compact import compact
from trajlake_schemas import EPISODES, STEPS

pytestmark = pytest.mark.beam

Imports = Callable[..., Snapshot]

TAU2 = test_tau2_bench.results(test_tau2_bench.simulation(), test_tau2_bench.simulation(trial=3))
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
CHAT_ROW = {"messages": CHAT, "task_id": 5, "tags": {"a": "b"}, "reward": 1, "custom": {"x": None}}
INTERCODE = {"0": test_intercode.log(), "1": test_intercode.log()}
FILES: dict[str, list[tuple[str, Any]]] = {
    "tau-bench": [("a.json", [test_rebuild.TAU_ROW, {**test_rebuild.TAU_ROW, "task_id": 2}])],
    "tau2-bench": [("a.json", TAU2)],
    "intercode": [
        ("a.json", {"0": test_intercode.log(), "1": test_intercode.log()}),
        ("b.json", {"809": test_intercode.HUMAN}),
    ],
    "verifiers": [("a.jsonl", test_verifiers.row())],
    "swe-agent": [
        ("p-1458.traj", test_swe_agent.trajectory()),
        ("b/p-1458.traj", [test_swe_agent.trajectory(info={})]),
    ],
    "mini-swe-agent": [("a.traj.json", test_mini_swe_agent.trajectory())],
    "openhands": [("a.json", test_openhands.EVENTS), ("b.jsonl", test_openhands.output())],
    "inspect": [("a.json", test_inspect.LOG)],
    "atif": [("a.json", test_atif.TRAJECTORY)],
    "nemo-gym": [("a.jsonl", test_nemo_gym.ROW)],
    "verl": [("a.jsonl", test_verl.ROW)],
    "kaggle": [("a.json", test_kaggle.REPLAY)],
    "openai-chat": [("a.json", [CHAT_ROW]), ("b.json", CHAT)],
}
PLACES = {
    *("episode_id", "run_id", "worker_id", "epoch", "attempt", "source_format", "source_hash", "extra", "restore"),
    *("steps_path", "row_group", "row_offset", "row_count", "group_id", "content_hash", "duplicate_of", "parent_step"),
    *("recorded_at", "timestamp"),
}


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    """`imports(*paths, record=…)` gives a snapshot of a new lake with what these files and the function hold."""
    count = 0

    def imports(*paths: Path, record: Callable[[Any], None] | None = None) -> Snapshot:
        nonlocal count
        count += 1
        lake = trajlake.create(tmp_path / f"lake-{count}")
        with lake.writer(run="run", worker="w", spool=tmp_path / f"spool-{count}") as writer:
            report = import_files(writer, paths)
            assert [file.error for file in report.files if file.error] == []
            assert report.refused == 0
            if record is not None:
                record(writer)
        compact(lake)
        return lake.snapshot()

    return imports


def values(paths: list[Path], name: str) -> list[Any]:
    chosen = format_named(name)
    found = []
    for path in paths:
        source = open_source(path)
        rows = source.rows() if chosen.values is None else chosen.values(source)
        for row in rows:
            assert isinstance(row, Row)
            found.append(row.value)
    return found


def exported(folder: Path) -> list[Path]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [folder / file["name"] for file in manifest["files"]]


def typed(snapshot: Snapshot) -> list[Any]:
    """What the typed columns say, by episode, without ids, places and hashes."""
    episodes = snapshot.collect(snapshot.episodes)
    names = [column.name for column in STEPS if column.name not in PLACES]
    found = [
        (
            {name: value for name, value in one.episode.items() if name in EPISODES and name not in PLACES},
            [{name: step[name] for name in names} for step in one.steps],
        )
        for one in snapshot.trajectories(episodes["episode_id"])
    ]
    return sorted(found, key=str)


@pytest.mark.parametrize("name", FILES)
def test_what_was_imported_comes_out_as_it_went_in(name: str, put: Any, imports: Imports, tmp_path: Path) -> None:
    paths = [put(content, file) for file, content in FILES[name]]
    snapshot = imports(*paths)
    report = snapshot.export(tmp_path / "out", format=name)
    assert (report.manifest["as_imported"], report.manifest["of_columns"]) == (report.episodes, 0)
    assert sum(file["rows"] for file in report.manifest["files"]) == report.episodes
    out = exported(tmp_path / "out")
    assert {detect(path).name for path in out} == {name}
    wanted, given = values(paths, name), values(out, name)
    if format_named(name).one_file_each:
        assert len(out) == len(paths)
    key = lambda value: json.dumps(value, sort_keys=True)  # noqa: E731
    if name == "openai-chat":  # of two files whose rows are laid out differently one of rows is made
        wanted = [CHAT_ROW, CHAT]
    assert same(sorted(wanted, key=key), sorted(given, key=key))
    again = imports(*out)
    assert typed(again) == typed(snapshot)
    for episode_id in snapshot.collect(snapshot.episodes)["episode_id"]:
        [use] = uses_of(snapshot.lake, episode_id)
        assert use.part in {file["name"] for file in report.manifest["files"]}


def test_every_format_with_a_way_back_is_offered_and_the_others_say_what_is(imports: Imports, tmp_path: Path) -> None:
    snapshot = imports(record=conversations)
    assert {name for name in FORMATS if format_named(name).write is not None} == set(FILES)
    for name in ("minari", "monitor-csv", "csv"):
        with pytest.raises(UsageError, match=r"format must be one of parquet, jsonl, tau-bench, .*, openai-chat: "):
            snapshot.export(tmp_path / "out", format=name)
    with pytest.raises(UsageError, match=r"2 of 2 episodes, e.g. e1, were not imported from inspect.*atif, nemo-gym"):
        snapshot.export(tmp_path / "out", format="inspect")
    with pytest.raises(UsageError, match="leave the seed out"):
        snapshot.export(tmp_path / "out", format="verl", seed=1)
    with pytest.raises(UsageError, match="is one document"):
        snapshot.export(tmp_path / "out", format="atif", shards=2)
    assert not list(tmp_path.glob("out*"))


def conversations(writer: Any) -> None:
    """Two episodes as a worker records them: with calls whose results stand beside them, and in steps of their own."""
    with writer.episode(episode_id="e1", task_id=7, policy_name="p", trial=0, extra={"mine": 1}) as episode:
        episode.step(source="system", message="Be brief.")
        episode.step(source="user", message="What is 1+1?")
        episode.step(
            message="Let me see.",
            reasoning="hm",
            tool_calls=[{"id": "c", "name": "add", "arguments": '{"a": [1, 1]}'}],
            tool_results=[{"call_id": "c", "content": "2", "is_error": False}],
            extra={"tool_calls": {"0": {"x": 1}}, "role": "developer"},
        )
        episode.step(message="Two.", token_ids=[1, 2], logprobs=[-0.5, -0.25])
        episode.end(reward=1.0, success=True, rewards=[{"name": "exact", "value": 1.0}])
    with writer.episode(episode_id="e2", task_id=8, policy_name="p", trial=1) as episode:
        episode.step(source="system", observation=None)
        episode.step(source="user", message="Look.")
        episode.step(reasoning="I look.")
        episode.step(tool_calls=[{"id": None, "name": "look", "arguments": None}, {"name": "wait", "arguments": {}}])
        episode.step(source="tool", tool_results=[{"content": "a cat"}, {"content": "ok"}])
        episode.step(source="environment", message="Time is up.")
        episode.end(reward=0.0, success=False)


def rows_of(folder: Path) -> list[Any]:
    return [row.value for path in exported(folder) for row in open_source(path).rows() if isinstance(row, Row)]


@pytest.mark.parametrize("name", [name for name in FILES if format_named(name).takes_any])
def test_episodes_of_a_worker_come_in_again_with_what_they_say(name: str, imports: Imports, tmp_path: Path) -> None:
    snapshot = imports(record=conversations)
    report = snapshot.export(tmp_path / "out", format=name)
    assert (report.manifest["as_imported"], report.manifest["of_columns"]) == (0, 2)
    again = imports(*exported(tmp_path / "out"))
    assert again.query("SELECT count(*) AS n, sum(reward) AS r FROM episodes").row(0)[0] == 2
    text = json.dumps(rows_of(tmp_path / "out"))
    assert all(words in text for words in ("1+1?", "Two.", "a cat", "Time is up."))
    assert ("I look." in text) == (name != "verl")
    assert "mine" not in text  # `extra` is no column
    if name != "atif":  # which has no place for an outcome but its own `extra`
        assert sorted(again.collect(again.episodes)["reward"].to_list()) == [0.0, 1.0]


@pytest.mark.parametrize("name", [name for name in FILES if format_named(name).takes_any])
def test_numbers_that_json_does_not_have_become_null(name: str, imports: Imports, tmp_path: Path) -> None:
    def record(writer: Any) -> None:
        with writer.episode(episode_id="e") as episode:
            episode.step(source="user", message="Look.")
            episode.step(message="A cat.", token_ids=[1, 2], logprobs=[float("nan"), -0.5], reward=float("inf"))
            episode.end(reward=float("-inf"))

    imports(record=record).export(tmp_path / "out", format=name)
    [path] = exported(tmp_path / "out")
    text = path.read_text()
    refuse = lambda constant: pytest.fail(f"{constant} is no JSON")  # noqa: E731
    for line in [text] if name in {"tau-bench", "atif"} else text.splitlines():
        json.loads(line, parse_constant=refuse)
    assert "A cat." in text


def test_openai_chat_keeps_the_typed_columns_of_a_conversation(imports: Imports, tmp_path: Path) -> None:
    snapshot = imports(record=conversations)
    snapshot.export(tmp_path / "out", format="openai-chat")
    again = imports(*exported(tmp_path / "out"))
    snapshot.export(tmp_path / "once", format="openai-chat", where="task_id = '7'")
    second = imports(*exported(tmp_path / "once"))
    again.export(tmp_path / "twice", format="openai-chat", where="task_id = '7'")
    assert typed(imports(*exported(tmp_path / "twice"))) == typed(second)
    [row] = rows_of(tmp_path / "once")
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["messages"][2]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 1]}'}}
    ]
    assert (row["messages"][3]["tool_call_id"], row["messages"][4]["token_ids"]) == ("c", [1, 2])
    assert (row["task_id"], row["policy_name"], row["reward"], row["success"]) == (7, "p", 1.0, True)


def test_calls_without_ids_get_some_and_their_results_find_them(imports: Imports, tmp_path: Path) -> None:
    snapshot = imports(record=conversations)
    snapshot.export(tmp_path / "out", format="tau-bench", where="task_id = '8'")
    [row] = rows_of(tmp_path / "out")
    system, user, thought, agent, first, second, last = row["traj"]
    assert (system["content"], thought["content"], thought["reasoning_content"]) == ("", "", "I look.")
    ids = [call["id"] for call in agent["tool_calls"]]
    assert len(set(ids)) == 2
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert [call["function"]["arguments"] for call in agent["tool_calls"]] == ["{}", "{}"]
    assert (user["role"], last["role"], row["info"]) == ("user", "user", {})


@pytest.mark.parametrize("name", ["openai-chat", "tau-bench", "verifiers"])
def test_answers_in_chat_are_directly_behind_the_message_with_their_call(
    name: str, imports: Imports, tmp_path: Path
) -> None:
    def record(writer: Any) -> None:
        with writer.episode(episode_id="e", task_id=1) as episode:
            for words in ("a b", "a"):
                for identity in words.split():
                    episode.step(tool_calls=[{"id": identity, "name": "f", "arguments": "{}"}], reward=0.5)
                episode.step(source="user", message="Wait.")
                for identity in words.split():
                    episode.step(source="tool", tool_results=[{"call_id": identity, "content": f"of {identity}"}])
            episode.step(source="tool", tool_results=[{"call_id": "x", "content": "stray"}])
            episode.end(reward=1.0)

    imports(record=record).export(tmp_path / "out", format=name)
    [row] = rows_of(tmp_path / "out")
    messages = row.get("messages") or row.get("traj") or row["prompt"] + row["completion"]
    said = [
        (message["role"], "".join(call["id"] for call in message.get("tool_calls") or ()) or message["content"])
        for message in messages
    ]
    once = [("assistant", "a"), ("tool", "of a")]
    assert said == [
        *(*once, ("assistant", "b"), ("tool", "of b"), ("user", "Wait.")),
        *(*once, ("user", "Wait."), ("user", "stray")),
    ]
    if name == "openai-chat":
        assert [message["reward"] for message in messages if message["role"] == "assistant"] == [0.5] * 3


def test_tau_bench_keeps_verdicts_that_are_not_its_own(imports: Imports, tmp_path: Path) -> None:
    said: list[tuple[float | None, bool | None]] = [
        (reward, success) for reward in (None, 0.0, 0.5, 1.0, float("nan")) for success in (None, False, True)
    ]

    def record(writer: Any) -> None:
        for number, (reward, success) in enumerate(said):
            with writer.episode(episode_id=f"e{number:02}", task_id=number) as episode:
                episode.step(message="x")
                episode.end(reward=reward, success=success)

    imports(record=record).export(tmp_path / "out", format="tau-bench")
    written = {row["task_id"]: row.get("success", "as the reward says") for row in rows_of(tmp_path / "out")}
    assert [written[number] for number in range(3, 6)] == [None, "as the reward says", True]
    assert [written[number] for number in range(9, 12)] == [None, False, "as the reward says"]
    again = imports(*exported(tmp_path / "out"))
    found = again.query("SELECT task_id, success FROM episodes").rows()
    assert {int(task): success for task, success in found} == {n: success for n, (_, success) in enumerate(said)}
    again.export(tmp_path / "twice", format="tau-bench")
    key = lambda row: row["task_id"]  # noqa: E731
    assert sorted(rows_of(tmp_path / "twice"), key=key) == sorted(rows_of(tmp_path / "out"), key=key)


def test_images_are_as_openai_has_them(imports: Imports, tmp_path: Path) -> None:
    def images(writer: Any) -> None:
        with writer.episode(episode_id="e") as episode:
            parts = [{"type": "text", "text": "see"}, {"type": "image", "media_type": "image/png", "data": b"PNG"}]
            episode.step(source="user", content_parts=[*parts, {"type": "image", "uri": "https://x/y.png"}])

    imports(record=images).export(tmp_path / "out", format="openai-chat")
    [row] = rows_of(tmp_path / "out")
    assert row["messages"][0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}},
        {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
    ]


@pytest.mark.parametrize("name", ["atif", "tau-bench", "verifiers", "nemo-gym", "verl", "openai-chat"])
def test_content_of_several_parts_is_in_exports(name: str, put: Any, imports: Imports, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "go"}, *test_mini_swe_agent.RESPONSES[1:5]]
    paths = [put(test_openhands.PARTS[:5]), put(test_mini_swe_agent.trajectory(messages=messages), "b.json")]
    imports(*paths).export(tmp_path / "out", format=name)
    text = json.dumps(rows_of(tmp_path / "out"))
    assert [text.count(words) for words in ("look", "executed.", "PAGE", "a picture")] == [2, 1, 1, 1]  # and "I look"
    assert name == "verl" or "https://x/y.png" in text


def test_what_an_environment_logged_without_a_word_is_no_message(put: Any, imports: Imports, tmp_path: Path) -> None:
    silent, state = test_openhands.PARTS[3:5], test_openhands.EVENTS[3]
    recalled = {**state, "observation": "recall", "content": "Mind the gap."}
    user, call, result = test_openhands.PARTS[:3]
    third = [user, *silent, call, *silent, result, *silent]
    user, call, result = test_openhands.EVENTS[:3]
    second = [state, user, recalled, call, state, result, state]
    snapshot = imports(put(third, "a.json"), put(second, "b.json"))
    snapshot.export(tmp_path / "own", format="openhands")
    found = values(exported(tmp_path / "own"), "openhands")
    key = lambda value: json.dumps(value, sort_keys=True)  # noqa: E731
    assert same(sorted(found, key=key), sorted([*third, *second], key=key))
    snapshot.export(tmp_path / "out", format="openai-chat")
    rows = sorted(([*map(said, row["messages"])] for row in rows_of(tmp_path / "out")), key=len)
    assert rows == [
        [("user", None), ("assistant", None), ("tool", "t1")],
        [("user", None), ("user", None), ("assistant", None), ("tool", "t1")],
    ]
    assert [message["content"] for row in rows_of(tmp_path / "out") for message in row["messages"]].count("") == 0


def said(message: Any) -> tuple[str, str | None]:
    return message["role"], message.get("tool_call_id")


def test_an_environment_answers_calls_that_nothing_else_does(imports: Imports, tmp_path: Path) -> None:
    def record(writer: Any) -> None:
        with writer.episode(episode_id="e") as episode:
            episode.step(tool_calls=[{"id": "c", "name": "look", "arguments": "{}"}])
            episode.step(source="environment", tool_results=[{"content": ""}], reward=1.0)
            episode.step(source="environment", reward=0.5)

    imports(record=record).export(tmp_path / "out", format="openai-chat")
    [row] = rows_of(tmp_path / "out")
    assert ("tool", "c") in map(said, row["messages"])
    assert [message.get("reward") for message in row["messages"] if message["role"] == "user"] == [1.0, 0.5]


def test_what_one_format_kept_for_itself_is_not_used_by_another(put: Any, imports: Imports, tmp_path: Path) -> None:
    tau = {**test_rebuild.TAU_ROW, "reward": 1, "odd": None}  # kept as a patch
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "score": None}
    snapshot = imports(put([tau], "a.json"), put([chat], "b.json"))
    report = snapshot.export(tmp_path / "out", format="openai-chat")
    assert (report.manifest["as_imported"], report.manifest["of_columns"]) == (1, 1)
    first, second = rows_of(tmp_path / "out")
    assert same(first, chat)  # as it was; what is from elsewhere comes behind it
    assert "odd" not in second
    assert "traj" not in second
    assert (second["task_id"], second["reward"]) == (1, 1.0)


def test_a_part_of_a_file_keeps_what_the_file_says_once(put: Any, imports: Imports, tmp_path: Path) -> None:
    log = test_inspect.LOG
    snapshot = imports(put(log))
    snapshot.export(tmp_path / "out", format="inspect", where="trial = 0")
    [row] = rows_of(tmp_path / "out")
    assert [sample["epoch"] for sample in row["samples"]] == [1]
    assert same({**row, "samples": []}, {**log, "samples": []})


def test_files_bear_the_names_of_their_tasks(put: Any, imports: Imports, tmp_path: Path) -> None:
    paths = [put(content, file) for file, content in FILES["swe-agent"]]
    report = imports(*paths).export(tmp_path / "out", format="swe-agent")
    names = sorted(file["name"] for file in report.manifest["files"])
    assert names == ["2/p-1458.traj", "p-1458.traj"]


def test_rows_are_split_into_shards_in_the_order_of_their_file(put: Any, imports: Imports, tmp_path: Path) -> None:
    rows = [{**test_verl.ROW, "input": f"{number}?"} for number in range(7)]
    report = imports(put("\n".join(map(json.dumps, rows)))).export(tmp_path / "out", format="verl", shards=3)
    assert [(file["name"], file["rows"]) for file in report.manifest["files"]] == [
        *(("shard-00000-of-00003.jsonl", 3), ("shard-00001-of-00003.jsonl", 2), ("shard-00002-of-00003.jsonl", 2)),
    ]
    assert same(rows_of(tmp_path / "out"), rows)


@pytest.mark.parametrize("name", [name for name in FORMATS if not format_named(name).one_file_each])
def test_more_shards_than_episodes_are_made_and_are_empty(
    put: Any, imports: Imports, tmp_path: Path, name: str
) -> None:
    def record(writer: trajlake.Writer) -> None:
        with writer.episode(episode_id="column", task_id="1") as episode:
            episode.step(source="user", message="hi")
            episode.step(source="agent", message="ho")
            episode.end(reward=1.0)

    snapshot = imports(*(put(content, file) for file, content in FILES[name]), record=record)
    where = f"source_format = '{name}' OR source_format IS NULL"
    report = snapshot.export(tmp_path / "out", format=name, shards=7, where=where)
    counts = [file["rows"] for file in report.manifest["files"]]
    assert len(counts) == 7
    assert sum(counts) == report.episodes == report.manifest["as_imported"] + report.manifest["of_columns"] > 1
    for path, count in zip(exported(tmp_path / "out"), counts, strict=True):
        text = path.read_text()
        assert len(json.loads(text) if path.suffix == ".json" else text.splitlines()) == count


def test_files_of_many_episodes_are_planned_without_a_frame_for_each(
    imports: Imports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer("run", "w") as writer:
        for number in range(30):
            with writer.episode(task_id=f"t{number}") as episode:
                episode.step(message="a")
    compact(lake)
    snapshot = lake.snapshot()
    rows = snapshot.collect(snapshot.episodes.sort("episode_id"))
    monkeypatch.setattr(pl.DataFrame, "__getitem__", lambda *_: pytest.fail("something was looked up once an episode"))
    parts, _ = parts_of(snapshot, rows, format_named("atif"), 1)
    assert [list(part.rows) for part in parts] == [[number] for number in range(30)]


def test_steps_of_arrays_are_no_conversation(imports: Imports, tmp_path: Path) -> None:
    def arrays(writer: Any) -> None:
        with writer.episode(episode_id="e") as episode:
            episode.step(observation=np.zeros(2), action=1, reward=1.0)

    with pytest.raises(ExportError, match="episode e has steps of arrays and no text"):
        imports(record=arrays).export(tmp_path / "out", format="verl")
    assert not (tmp_path / "out").exists()


def test_an_export_that_was_interrupted_goes_on_with_the_files_that_are_done(
    put: Any, imports: Imports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [put(content, file) for file, content in FILES["intercode"]]
    snapshot = imports(*paths)
    stop = iter([False, True])

    def stopping(*_: Any) -> Iterator[Any]:
        if next(stop, False):
            raise KeyboardInterrupt
        return original(*_)

    original = trajlake.read.export._write_durably
    monkeypatch.setattr("trajlake.read.export._write_durably", lambda path, text: stopping(path, text))
    with pytest.raises(KeyboardInterrupt):
        snapshot.export(tmp_path / "out", format="intercode")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert snapshot.export(tmp_path / "out", format="intercode").episodes == 3

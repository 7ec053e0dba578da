"""A tree comes in by one process or several, on from where it was stopped, and nothing twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import trajlake
from trajlake.errors import StoreUnavailable, UsageError
from trajlake.formats import parallel
from trajlake.formats.importing import FileReport, import_files
from trajlake.formats.ledger import Ledger
from trajlake.formats.parallel import import_tree
from trajlake.ingest.segment import decode_segment


def row(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six files in three folders, of which one is a copy, one no trajectory, and one good in part."""
    folder = tmp_path / "tree"
    for name, content in {
        "a/1.jsonl": "\n".join(json.dumps(row(f"a{n}")) for n in range(3)),
        "a/2.json": json.dumps([row("b"), {"messages": 5}]),
        "b/copy.jsonl": "\n".join(json.dumps(row(f"a{n}")) for n in range(3)),
        "b/notes.md": "# Notes\n\nNothing.\n",
        "c/d/3.json": json.dumps([row("c")] * 2),
        "c/d/bad.json": "{",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def told(files: list[FileReport]) -> list[tuple[str, int, int, bool, bool]]:
    return [(file.path.name, file.episodes, file.refused, file.error is not None, file.already) for file in files]


def landed(lake: trajlake.Lake) -> list[str]:
    """The text of every message in landing."""
    keys = [info.key for info in lake.store.list("landing/") if info.key.endswith(".arrow")]
    events = [event for key in keys for event in decode_segment(lake.store.get(key), key).to_pylist()]
    return sorted(event["step"]["message"] for event in events if event["kind"] == "step")


FIRST = [
    ("1.jsonl", 3, 0, False, False),
    ("2.json", 1, 1, False, False),
    ("copy.jsonl", 0, 0, False, False),
    ("notes.md", 0, 0, True, False),
    ("3.json", 2, 0, False, False),
    ("bad.json", 0, 0, True, False),
]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_tree_comes_in_once(tree: Path, tmp_path: Path, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_BATCH_BYTES", 1)
    lake = trajlake.create(tmp_path / "lake")
    calls: list[Path] = []
    first = import_tree(lake, "r", [tree], processes=processes, on_progress=lambda path, done, size: calls.append(path))
    assert told(first.files) == FIRST
    assert [file.same_as for file in first.files if file.same_as] == [tree / "a" / "1.jsonl"]
    assert landed(lake) == ["a0", "a1", "a2", "b", "c", "c"]
    assert set(calls) >= {file.path for file in first.files if file.episodes}
    second = import_tree(lake, "r", [tree], processes=processes)
    assert [file.already for file in second.files] == [True, True, False, False, True, False]
    assert (second.episodes, second.refused, second.rows_in) == (6, 1, 7)
    assert landed(lake) == ["a0", "a1", "a2", "b", "c", "c"]
    assert not any(file.already for file in import_tree(lake, "another", [tree / "a"]).files)
    assert not any(file.already for file in import_tree(lake, "r", [tree / "a"], again=True).files)


def test_an_import_that_was_stopped_goes_on(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajlake.formats.importing._FLUSH_BYTES", 1)
    lake = trajlake.create(tmp_path / "lake")

    def stop(path: Path, done: int, size: int) -> None:
        if path.name == "3.json":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_tree(lake, "r", [tree], on_progress=stop)
    report = import_tree(lake, "r", [tree])
    assert [file.path.name for file in report.files if file.already] == ["1.jsonl", "2.json"]
    assert report.episodes == 6


def test_a_file_is_put_down_only_when_it_is_durable(tree: Path, tmp_path: Path) -> None:
    lake = trajlake.create(tmp_path / "lake")
    ledger = Ledger(lake.store, "r")

    class Failing:
        run = "r"

        def record_all(self, *events: Any) -> None: ...

        def flush(self) -> None:
            raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        import_files(Failing(), [tree / "a"], ledger=ledger)  # type: ignore[arg-type]
    assert not list(lake.store.list("imports/"))


def test_a_file_of_another_format_is_read_again(tree: Path, tmp_path: Path) -> None:
    lake = trajlake.create(tmp_path / "lake")
    import_tree(lake, "r", [tree / "a"])
    assert [file.already for file in import_tree(lake, "r", [tree / "a"], format="openai-chat").files] == [True, True]
    again = import_tree(lake, "r", [tree / "a"], format="tau-bench").files
    assert [(file.already, file.refused) for file in again] == [(False, 3), (False, 2)]


def test_a_ledger_that_was_damaged_knows_nothing(tree: Path, tmp_path: Path) -> None:
    lake = trajlake.create(tmp_path / "lake")
    import_tree(lake, "r", [tree / "a" / "1.jsonl"])
    [info] = lake.store.list("imports/r/")
    for content in (b"{", b"[]", b'{"format": "openai-chat", "episodes": "many"}'):
        lake.store.delete(info.key)
        lake.store.put_if_absent(info.key, content)
        assert [file.already for file in import_tree(lake, "r", [tree / "a" / "1.jsonl"]).files] == [False]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_that_grew_says_that_its_rows_are_in_twice(tree: Path, tmp_path: Path, processes: int) -> None:
    lake = trajlake.create(tmp_path / "lake")
    grown = tree / "a" / "1.jsonl"

    def notes(run: str = "r", **options: Any) -> dict[str, list[str]]:
        report = import_tree(lake, run, [tree / "a", tree / "c" / "d" / "3.json"], processes=processes, **options)
        return {file.path.name: file.notes for file in report.files if file.notes}

    assert notes() == {}
    assert notes(again=True) == {}
    grown.write_text("\n".join(json.dumps(row(f"a{n}")) for n in range(4)))
    [(name, [note])] = notes().items()
    assert name == "1.jsonl"
    assert note.startswith("a file of this path was imported with other content before: rows that are in both are")
    assert "`trajlake dedupe` marks them, and --unique counts each once" in note
    assert notes() == {}, "it is in, and was not read"
    assert list(notes(again=True)) == ["1.jsonl"]
    assert notes("another") == {}


def test_a_ledger_of_before_knows_files_all_the_same(tree: Path, tmp_path: Path) -> None:
    lake, file = trajlake.create(tmp_path / "lake"), tree / "a" / "1.jsonl"
    import_tree(lake, "r", [file])
    [info] = lake.store.list("imports/r/")
    said = json.loads(lake.store.get(info.key))
    for each in said.values():
        del each["path"], each["asked"]
    lake.store.delete(info.key)
    lake.store.put_if_absent(info.key, json.dumps(said).encode())
    found = import_tree(lake, "r", [file], begin={"policy_name": "new"}).files
    assert [(each.already, each.notes) for each in found] == [(True, [])]
    file.write_text(json.dumps(row("new")))
    assert [(each.already, each.notes) for each in import_tree(lake, "r", [file]).files] == [(False, [])]


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_said_of_files_that_are_in_says_that_it_changes_nothing(tmp_path: Path, processes: int) -> None:
    lake, mapping = trajlake.create(tmp_path / "lake"), tmp_path / "m.toml"
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        file.write_text(json.dumps({"log": row(file.name)["messages"]}))

    def notes(run: str = "r", text: str = "", **begin: Any) -> list[list[str]]:
        mapping.write_text('name = "ours"\nmessages = "log"\n' + text)
        report = import_tree(lake, run, files, mapping=mapping, begin=begin, processes=processes)  # type: ignore[arg-type]
        return [file.notes for file in report.files]

    assert notes(policy_name="a", tags={"x": "1", "y": "2"}) == [[], []]
    assert notes(policy_name="a", tags={"y": "2", "x": "1"}) == [[], []]
    for [note] in notes(policy_name="b") + notes(text='[episode]\ntask_id = "t"\n', policy_name="a"):
        assert note.startswith("imported before with other --set or --mapping")
        assert note.endswith("another --run takes it with these")
    assert notes("another", policy_name="b") == [[], []]


def test_a_format_that_is_named_as_it_was_found_is_the_same(tree: Path, tmp_path: Path) -> None:
    lake, file = trajlake.create(tmp_path / "lake"), tree / "a" / "1.jsonl"
    for format in (None, "openai-chat", None):
        [report] = import_tree(lake, "r", [file], format=format).files
        assert report.notes == []


def test_a_mapping_reads_in_every_process(tmp_path: Path) -> None:
    mapping = tmp_path / "m.toml"
    mapping.write_text('name = "ours"\nmessages = "log"\n')
    for number in range(3):
        (tmp_path / f"{number}.json").write_text(json.dumps({"log": row(str(number))["messages"]}))
    lake = trajlake.create(tmp_path / "lake")
    files = [tmp_path / f"{number}.json" for number in range(3)]
    report = import_tree(lake, "r", files, mapping=mapping, processes=2)
    assert [(file.format, file.episodes) for file in report.files] == [("ours", 1)] * 3
    with pytest.raises(UsageError, match="not both"):
        import_tree(lake, "r", files, mapping=mapping, format="verl")
    with pytest.raises(UsageError, match="processes"):
        import_tree(lake, "r", files, processes=0, again=True)


def test_a_process_that_is_killed_loses_only_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake, marker, folder = trajlake.create(tmp_path / "lake"), tmp_path / "killed", tmp_path / "tree"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.json").write_text(json.dumps(row(str(number))))
    read_here = parallel._reader

    def kill(batch: list[Path]) -> list[FileReport]:  # inside the test, so that it travels by value
        marker.touch()
        os._exit(9)

    def after_it_was_killed(*arguments: Any) -> Any:
        deadline = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return read_here(*arguments)

    monkeypatch.setattr(parallel, "_BATCH_BYTES", 1)
    monkeypatch.setattr(parallel, "_read", kill)
    monkeypatch.setattr(parallel, "_reader", after_it_was_killed)
    report = import_tree(lake, "r", [folder], processes=2)
    assert marker.exists()
    lost = [file for file in report.files if file.error]
    assert ["was killed" in str(file.error) for file in lost] == [True]
    assert (len(report.files), report.episodes) == (8, 7)
    monkeypatch.undo()
    again = import_tree(lake, "r", [folder], processes=2)
    assert [file.path for file in again.files if not file.already] == [lost[0].path]
    assert not any(file.error for file in again.files)
    assert landed(lake) == [str(number) for number in range(8)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_hold_every_file_once_in_order_and_become_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(parallel, "_BATCH_BYTES", 100)
    files = [tmp_path / f"{number:03}" for number in range(200)]
    for file in files:
        file.write_bytes(b"x" * 50)
    batches = parallel._batches(dict.fromkeys(files), count)
    assert [file for batch in batches for file in batch] == files
    sizes = [len(batch) for batch in batches]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[0] > sizes[-2] == 2
    assert parallel._batches({}, count) == []

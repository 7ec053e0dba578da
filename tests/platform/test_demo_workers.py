"""The demo's worker: what it records comes out of a lake as it was, and its notes are worth what they promise."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import trajlake
from trajlake.demo import acks, board, worker
from trajlake.demo.acks import AckFile, EpisodeAck
from trajlake.demo.board import Board, Progress
from trajlake.demo.check import check
from trajlake.demo.workers import DemoIngest, WorkerState
from trajlake.demo.workers import run as run_workers
from trajlake.errors import NotDurable, TrajlakeError, UsageError
from trajlake_pipelines.compact import compact

TINY = worker.Size(cartpole=2, frozenlake=4, desk_tasks=2, desk_trials=1, gym_pause=0.0, desk_pause=0.0)


def played(assignment):
    steps = []
    play = assignment.play()
    while True:
        try:
            steps.append(next(play))
        except StopIteration as end:
            return steps, end.value


def record(lake, tmp_path, name, **how):
    worker.run(lake, "run", name, TINY, spool=tmp_path / "spool", folder=tmp_path, **how)


@pytest.mark.beam
@pytest.mark.parametrize("name", sorted(worker.SOURCES))
def test_episodes_come_out_of_the_lake_as_they_were_played(tmp_path, name):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, tmp_path, name)
    compact(lake)
    snapshot = lake.snapshot()
    assignments = worker.SOURCES[name](TINY)
    ids = snapshot.episodes.sort("started_at", "episode_id").select("episode_id").collect()["episode_id"]
    by_seed = {
        (t.episode["task_id"], t.episode["seed"], t.episode["policy_version"]): t for t in snapshot.trajectories(ids)
    }
    assert len(by_seed) == len(assignments)
    for assignment in assignments:
        begin = assignment.begin
        found = by_seed[begin["task_id"], begin["seed"], begin["policy_version"]]
        steps, outcome = played(assignment)
        assert {key: found.episode[key] for key in begin} == begin
        assert found.episode["token_audit"] is None
        assert {key: found.episode[key] for key in outcome if key != "rewards"} == {
            key: value for key, value in outcome.items() if key != "rewards"
        }
        assert found.episode["n_steps"] == len(found.steps) == len(steps)
        for index, (row, step) in enumerate(zip(found.steps, steps, strict=True)):
            assert_same(found, index, row, step)


def assert_same(found, index, row, step):
    tensors = dict(step.get("tensors", {}))
    tensors |= {name: step[name] for name in ("observation", "action") if name in step}
    assert {tensor["name"] for tensor in row["tensors"] or ()} == set(tensors)
    for name, value in tensors.items():
        stored = found.tensor(index, name)
        assert (stored.dtype, stored.shape) == (np.asarray(value).dtype, np.asarray(value).shape)
        np.testing.assert_array_equal(stored, value)
    for name in ("source", "message", "reward", "terminated", "truncated", "error", "tool_results", "prompt_tokens"):
        assert row[name] == step.get(name)
    for name in ("token_ids", "loss_mask", "logprobs"):
        np.testing.assert_array_equal(row[name], step.get(name))
    assert [call["name"] for call in row["tool_calls"] or ()] == [call["name"] for call in step.get("tool_calls", ())]
    assert (row["latency_ms"] is None) == ("latency_ms" not in step)


@pytest.mark.unit
def test_a_restarted_worker_goes_on_after_what_it_had_ended(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, tmp_path, "frozenlake", process=1, skip=3)
    assert len(acks.read(worker.ack_path(tmp_path, "frozenlake", 1)).episodes) == 1
    assert board.read(worker.board_path(tmp_path, "frozenlake", 1)).ended == 4


@pytest.mark.unit
def test_a_worker_ends_when_whoever_started_it_is_gone(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with pytest.raises(UsageError, match="is gone"):
        record(lake, tmp_path, "frozenlake", parent=1 + os.getppid())


@pytest.mark.unit
def test_notes_are_read_back_without_a_torn_last_line(tmp_path):
    path = tmp_path / "acks"
    notes = AckFile(path)
    notes.write(5, [EpisodeAck("a", 3, "completed"), EpisodeAck("b", 1)])
    notes.write(9, [EpisodeAck("b", 4, "failed")])
    notes.close()
    with path.open("ab") as file:
        file.write(b'{"events": 12, "epis')
    found = acks.read(path)
    assert found.events == 9
    assert found.episodes == {"a": EpisodeAck("a", 3, "completed"), "b": EpisodeAck("b", 4, "failed")}
    assert acks.read(tmp_path / "none").episodes == {}


@pytest.mark.unit
def test_a_board_shows_the_last_progress(tmp_path):
    shown = Board(tmp_path / "board")
    assert board.read(tmp_path / "board") == Progress()
    shown.show(Progress(1, 2, 3, 4, 5, 6))
    shown.show(Progress(7, 2, 3, 4, 5, 6))
    shown.close()
    assert board.read(tmp_path / "board") == Progress(7, 2, 3, 4, 5, 6)


@pytest.mark.unit
def test_nothing_is_noted_that_flush_did_not_promise(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    notes, shown = AckFile(tmp_path / "acks"), Board(tmp_path / "board")
    with lake.writer("run", "w", spool=tmp_path / "spool") as writer:
        recorder = worker.Recorder(writer, notes, shown, Progress())
        recorder.record(worker.SOURCES["desk-1"](TINY)[0])
        with monkeypatch.context() as patch:
            patch.setattr(writer, "flush", lambda timeout: (_ for _ in ()).throw(NotDurable("not yet")))
            recorder.acknowledge()
        assert acks.read(tmp_path / "acks").events == 0
        recorder.acknowledge()
    found = acks.read(tmp_path / "acks")
    assert found.events == board.read(tmp_path / "board").events > 0
    assert [episode.status is not None for episode in found.episodes.values()] == [True]


@pytest.mark.beam
def test_the_check_sees_what_is_missing(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    for name in worker.SOURCES:
        record(lake, tmp_path, name)
    compact(lake)
    promises = {name: [acks.read(worker.ack_path(tmp_path, name, 0))] for name in worker.SOURCES}
    workers = tuple(WorkerState(name, processes=1) for name in worker.SOURCES)
    ingest = DemoIngest("run", tmp_path / "spool", 1.0, workers, promises)

    def failed():
        return [one.claim for one in check(lake, lake.snapshot(), ingest).checks if not one.holds]

    killed = "the interrupted episode is kept, as aborted"  # nobody was killed here, which the demo has to notice
    assert failed() == [killed]
    some = next(iter(promises["cartpole"][0].episodes.values()))
    some.steps += 1
    assert failed() == ["every acknowledged episode is in the tables, with all its steps", killed]
    some.steps -= 1
    promises["desk-1"][0].episodes["never"] = EpisodeAck("never")
    assert failed() == ["every acknowledged episode is in the tables, with all its steps", killed]
    del promises["desk-1"][0].episodes["never"]
    promises["frozenlake"][0].events += 1
    assert failed() == ["every acknowledged event has arrived", killed]


@pytest.mark.e2e
def test_a_worker_that_fails_ends_the_others_and_is_quoted(tmp_path):
    with pytest.raises(TrajlakeError, match=r"worker \S+ ended with 1: .*there is no lake"):
        run_workers(str(tmp_path / "none"), "run", size="small", spool=tmp_path / "spool", folder=tmp_path / "runs")
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _runs_in(name, tmp_path)]


def _runs_in(pid, folder):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return str(folder).encode() in file.read()
    except OSError:
        return False

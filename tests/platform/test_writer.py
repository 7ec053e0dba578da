"""The Writer: what was acknowledged is there, whatever happens to the process or to the store."""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest
from tests.rollouts import record, record_episode

import trajlake
from trajlake.errors import AccessRefused, LakeMissing, NotDurable, StoreUnavailable, UsageError, WriterClosed
from trajlake.ingest import encoder, upload
from trajlake.ingest.recovery import recover
from trajlake.ingest.segment import decode_segment, read_descriptor
from trajlake.ingest.writer import Writer, new_episode_id
from trajlake.storage import LocalStore
from trajlake.storage.wrappers import Fault, FaultyStore, Moment


@pytest.fixture
def lake(lake_uri):
    return trajlake.create(lake_uri)


def landed(store):
    """All events that are in landing, in the order of keys."""
    events = []
    for info in store.list("landing/"):
        events += decode_segment(store.get(info.key), info.key).to_pylist()
    return events


def test_what_was_flushed_is_in_the_store_and_in_order(lake):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1)
        writer.flush()
        events = landed(lake.store)
        assert [event["kind"] for event in events] == ["begin", "step", "step", "step", "end"]
        assert [event["sequence"] for event in events] == list(range(5))
        record_episode(writer, 2)
    assert [event["sequence"] for event in landed(lake.store)] == list(range(10))
    assert writer.stats.durable_events == 10


def test_nothing_is_left_in_the_spool_after_a_close_in_order(lake, tmp_path):
    record(lake, range(3))
    assert not list((tmp_path / "spool").iterdir())


def test_an_exception_ends_the_episode_as_failed_with_the_error(lake):
    with lake.writer(run="run") as writer:
        with pytest.raises(ZeroDivisionError), writer.episode(task_id="t") as episode:
            episode.step(message="before")
            _ = 1 / 0
        writer.flush()
        end = landed(lake.store)[-1]["end"]
        assert (end["status"], end["stop_reason"]) == ("failed", "ZeroDivisionError")
        assert "division by zero" in end["failure_detail"]
        with pytest.raises(KeyboardInterrupt), writer.episode() as episode:
            raise KeyboardInterrupt
    assert landed(lake.store)[-1]["end"]["status"] == "aborted"


def test_every_end_says_how_many_steps_there_are_however_it_came(lake):
    async def at_once(writer):
        async with writer.episode(episode_id="async") as episode:
            for _ in range(4):
                await episode.astep(message="x")

    with lake.writer(run="run", durability="memory") as writer:
        with writer.episode(episode_id="plain") as episode:
            for _ in range(3):
                episode.step(message="x")
            child = episode.sub_episode(episode_id="child")
            child.step(message="x")
        child.end()
        with pytest.raises(ZeroDivisionError), writer.episode(episode_id="error") as episode:
            episode.step(message="x")
            _ = 1 / 0
        episode = writer.episode(episode_id="discarded")
        episode.step(message="x")
        episode.discard()
        with writer.episode(episode_id="call") as episode:
            episode.call([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "c")
        with writer.episode(episode_id="empty"):
            pass
        asyncio.run(at_once(writer))
        writer.record_all("at once", 0, [("begin", {}), ("step", {}), ("step", {}), ("end", {"status": "completed"})])
    said = {event["episode_id"]: event["end"]["n_steps"] for event in landed(lake.store) if event["kind"] == "end"}
    assert said == {
        "plain": 3, "child": 1, "error": 1, "discarded": 1, "call": 3, "empty": 0, "async": 4, "at once": 2,
    }  # fmt: skip


def test_terminated_and_truncated_of_the_last_step_are_those_of_the_episode(lake):
    with lake.writer(run="run") as writer:
        for terminated, truncated in [(True, False), (False, True), (True, True)]:
            with writer.episode() as episode:
                episode.step(terminated=terminated, truncated=truncated)
    ends = [event["end"] for event in landed(lake.store) if event["kind"] == "end"]
    assert [(end["terminated"], end["truncated"], end["status"]) for end in ends] == [
        (True, False, "completed"),
        (False, True, "truncated"),
        (True, True, "completed"),
    ]


def test_an_episode_takes_nothing_after_its_end_and_a_writer_nothing_after_its_close(lake):
    with lake.writer(run="run") as writer:
        with writer.episode() as episode:
            episode.end(reward=1.0)
        with pytest.raises(WriterClosed, match="has ended"):
            episode.step(message="late")
        with pytest.raises(WriterClosed, match="ended already"):
            episode.end()
        open_one = writer.episode()
    with pytest.raises(WriterClosed, match="closed"):
        open_one.step(message="late")


def test_many_threads_record_at_once_and_every_event_has_its_own_sequence(lake):
    with lake.writer(run="run", segment_bytes=20_000) as writer:
        threads = [
            threading.Thread(target=lambda first=first: [record_episode(writer, first + n) for n in range(20)])
            for first in range(0, 200, 20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = landed(lake.store)
    assert sorted(event["sequence"] for event in events) == list(range(200 * 5))


def test_a_slow_run_is_visible_within_the_age_of_a_segment(lake):
    with lake.writer(run="run", segment_seconds=0.2) as writer:
        writer.episode().step(message="alone")
        deadline = time.monotonic() + 20
        while not landed(lake.store) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(landed(lake.store)) == 2


@pytest.mark.parametrize("awaited", ["end", "score", "retract"])
def test_what_others_wait_for_waits_for_no_segment_to_fill(lake, awaited):
    with lake.writer(run="run", segment_seconds=3600) as writer:
        episode = writer.episode()
        if awaited == "end":
            episode.end(reward=1.0)
        elif awaited == "score":
            episode.score("judge", 0.5)
        else:
            writer.retract(episode.episode_id, "leaked")
        deadline = time.monotonic() + 60
        while not landed(lake.store) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [event["kind"] for event in landed(lake.store)] == ["begin", awaited]


def test_two_writers_with_one_worker_name_get_their_own_epochs_and_the_second_is_told(lake, caplog):
    with lake.writer(run="run", worker="w") as first:
        record_episode(first, 1)
        first.flush()
        with caplog.at_level(logging.WARNING, "trajlake"), lake.writer(run="run", worker="w") as second:
            record_episode(second, 2)
            second.flush()
        assert "was in use before and did not close" in caplog.text
    assert len({info.key.split("/")[3] for info in lake.store.list("landing/")}) == 2


def test_a_worker_that_closed_in_order_is_followed_without_a_warning(lake, caplog):
    record(lake, [1])
    with caplog.at_level(logging.WARNING, "trajlake"):
        record(lake, [2])
    assert "in use" not in caplog.text


@pytest.mark.unit
def test_an_attempt_is_any_whole_number_from_zero_on(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer("run", "w") as writer:
        writer.episode(episode_id="e", attempt=np.int64(3)).end()
        for attempt in (True, -1, 1.0, "1", 2**31):
            with pytest.raises(UsageError, match="attempt must be 0, 1, 2"):
                writer.episode(episode_id="e", attempt=attempt)
        assert writer.stats.episodes == 1


@pytest.mark.unit
@pytest.mark.parametrize("durability", ["remote", "memory"])
def test_a_segment_ends_when_it_is_large_without_compression_however_small_it_is_with_it(tmp_path, durability):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer("run", "w", durability=durability, segment_bytes=50_000, segment_seconds=60.0) as writer:
        for _ in range(3):
            with writer.episode() as episode:
                for _ in range(100):
                    episode.step(tensors={"frame": np.zeros(100_000, np.uint8)})
    descriptors = [read_descriptor(lake.store.get(info.key), info.key) for info in lake.store.list("landing/")]
    assert len(descriptors) > 5
    sizes = [descriptor.arrow_bytes for descriptor in descriptors]
    assert max(sizes) < 16 * 50_000 + (2 << 20)  # of the last batch, more than that
    assert sum(sizes) > 30_000_000


@pytest.mark.unit
def test_a_lost_answer_and_failed_puts_lose_and_double_nothing(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    faults = [Fault("put_if_absent", "", moment) for moment in (Moment.AFTER, Moment.BEFORE) * 3]
    store = FaultyStore(lake.store, faults)
    with Writer(store, "run", "w", segment_bytes=2000) as writer:
        for number in range(20):
            record_episode(writer, number)
            if number % 5 == 0:
                writer.flush()
    assert len(store.struck) == len(faults)
    assert [event["sequence"] for event in landed(lake.store)] == list(range(100))
    assert writer.stats.retries >= len(faults)


@pytest.mark.unit
def test_while_the_store_is_down_the_rollout_goes_on_and_close_says_what_remains(tmp_path, caplog):
    lake = trajlake.create(tmp_path / "lake")
    store = FaultyStore(lake.store, probability=1.0)
    writer = Writer(store, "run", "w")
    record_episode(writer, 1)
    with pytest.raises(NotDurable, match=r"5 events are not in .* yet \(.*injected.*\); they are safe in"):
        writer.flush(timeout=0.3)
    report = writer.close(timeout=0.5)
    assert (report.complete, report.remaining_events) == (False, 5)
    assert "injected" in report.reason
    assert "5 events wait in" in caplog.text
    # The next writer of any run on this machine brings them in.
    record(lake, [2])
    assert len(landed(lake.store)) == 10


@pytest.mark.unit
def test_a_store_that_refuses_for_good_is_reported_at_once(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")

    def refuse(*_):
        raise AccessRefused("wrong credentials")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_if_absent", refuse)
        writer = lake.writer(run="run")
        record_episode(writer, 1)
        with pytest.raises(AccessRefused):
            writer.flush(timeout=30)
    writer.flush(timeout=30)  # credentials came back: nothing was lost
    writer.close()
    assert len(landed(lake.store)) == 5


@pytest.mark.unit
def test_a_disk_that_refuses_for_a_while_loses_nothing(tmp_path, monkeypatch):
    from trajlake.ingest import spool

    lake = trajlake.create(tmp_path / "lake")
    monkeypatch.setattr(encoder, "_RETRY_SECONDS", 0.01)
    real = spool.SpoolSegment.write
    failures = iter([True, False, True, True] + [False] * 1000)

    def write(self, batch, *, sync):
        if next(failures):
            self._file.append(b"torn", sync=False)
            raise OSError(28, "No space left on device")
        real(self, batch, sync=sync)

    monkeypatch.setattr(spool.SpoolSegment, "write", write)
    with lake.writer(run="run", worker="w") as writer:
        for number in range(10):
            record_episode(writer, number)
            writer.flush()
    assert [event["sequence"] for event in landed(lake.store)] == list(range(50))


def _record_and_die(uri, spool, acknowledged):
    """Record until killed; write each acknowledged count into a file."""
    lake = trajlake.connect(uri)
    writer = lake.writer(run="run", worker="w", spool=spool, durability="spool")
    number = 0
    while True:
        record_episode(writer, number)
        number += 1
        if number % 7 == 0:
            writer.flush()
            with open(acknowledged, "a") as file:
                file.write(f"{number}\n")


@pytest.mark.parametrize("wait", [0.4, 0.9])
def test_what_was_acknowledged_survives_a_kill(lake, tmp_path, wait):
    acknowledged = tmp_path / "acknowledged"
    process = multiprocessing.get_context("spawn").Process(
        target=_record_and_die, args=(lake.uri, tmp_path / "spool", acknowledged)
    )
    process.start()
    deadline = time.monotonic() + 60
    while not acknowledged.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(wait)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    recover(lake.store, tmp_path / "spool")
    events = landed(lake.store)
    ended = {event["episode_id"] for event in events if event["kind"] == "end"}
    assert {f"e{number:04d}" for number in range(int(acknowledged.read_text().split()[-1]))} <= ended
    assert sorted(event["sequence"] for event in events) == list(range(len(events)))
    assert not list((tmp_path / "spool").iterdir())


def test_the_spool_of_a_living_writer_is_left_alone(lake, tmp_path):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1)
        assert recover(lake.store, tmp_path / "spool").segments == 0


def test_an_episode_that_has_not_ended_cannot_be_begun_again(lake):
    with lake.writer(run="run", worker="w") as writer:
        first = writer.episode(episode_id="same")
        with pytest.raises(UsageError, match="has not ended"):
            writer.episode(episode_id="same")
        second = writer.episode(episode_id="same", attempt=1)
        for episode in (first, second):
            episode.end()


def test_a_lake_that_does_not_exist_is_told_at_once(tmp_path):
    with pytest.raises(LakeMissing, match="trajlake --lake .* init"):
        trajlake.connect(tmp_path / "nowhere").writer(run="run")


@pytest.mark.unit
def test_a_store_that_does_not_answer_is_no_reason_not_to_begin(tmp_path, monkeypatch, caplog):
    lake = trajlake.create(tmp_path / "lake")

    def down(self, key):
        raise StoreUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "stat", down)
        writer = lake.writer(run="run")
    record_episode(writer, 1)
    writer.close()
    assert "recording into the spool until it answers" in caplog.text
    assert len(landed(lake.store)) == 5


@pytest.mark.unit
@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", ".hidden", "ä", "x" * 129])
def test_names_that_cannot_be_part_of_a_key_are_refused(tmp_path, name):
    lake = trajlake.create(tmp_path / "lake")
    with pytest.raises(UsageError, match="run must be of letters"):
        lake.writer(run=name)


@pytest.mark.unit
def test_an_option_that_a_writer_does_not_have_is_told_with_those_it_has(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with pytest.raises(TypeError, match="a writer has no option segment_size; it has .*segment_bytes"):
        lake.writer(run="run", segment_size=1)


@pytest.mark.unit
def test_a_spool_that_cannot_be_written_is_told_at_once(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="set TRAJLAKE_SPOOL or spool="):
        lake.writer(run="run", spool=tmp_path / "file")


@pytest.mark.unit
def test_episode_ids_are_unique_and_sort_by_time():
    ids = [new_episode_id()]
    for _ in range(5):
        time.sleep(0.002)
        ids.append(new_episode_id())
    assert ids == sorted(set(ids))
    assert all(len(episode_id) == 32 and episode_id[12] == "7" for episode_id in ids)


@pytest.mark.unit
def test_a_damaged_spool_file_is_kept_and_never_called_durable(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    real = upload.read_spooled

    def read(path):
        path.write_bytes(b"damaged by the disk")
        return real(path)

    monkeypatch.setattr(upload, "read_spooled", read)
    writer = lake.writer(run="run")
    record_episode(writer, 1)
    with pytest.raises(NotDurable, match="damaged on disk"):
        writer.flush(timeout=10)
    assert not writer.close(timeout=1).complete
    assert list((tmp_path / "spool").rglob("*.damaged"))


@pytest.mark.unit
def test_an_event_that_arrow_does_not_take_is_named_and_the_others_are_kept(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    writer = lake.writer(run="run")
    record_episode(writer, 1)
    writer.record("step", "e0001", 0, {"prompt_tokens": "many"})  # past the checks of Episode.step
    with pytest.raises(NotDurable, match=r"1 events could not be stored, first event 5 \(step of e0001\)"):
        writer.flush(timeout=10)
    assert writer.close().remaining_events == 1
    assert len(landed(lake.store)) == 5

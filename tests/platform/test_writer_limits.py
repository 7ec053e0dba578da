"""Durability and bounds: what is promised with each choice, and what happens when disk, memory and store are full."""

import errno
import shutil
import subprocess
import time

import numpy as np
import pytest
from tests.rollouts import assert_sound, record, record_episode

import trajlake
from trajlake.errors import NotDurable, UsageError, WriterClosed
from trajlake.ingest import encoder, spool
from trajlake.ingest.recovery import recover, spool_status
from trajlake.ingest.segment import decode_segment
from trajlake.ingest.spool import read_spooled
from trajlake.ingest.writer import Writer
from trajlake.storage import Unknown
from trajlake.storage.wrappers import FaultyStore
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.unit
BIG = "x" * 20_000


@pytest.fixture
def lake(tmp_path):
    return trajlake.create(tmp_path / "lake")


@pytest.fixture
def outage(lake):
    """A store that is down until `up()` is called."""

    class Outage(FaultyStore):
        def up(self):
            self._probability = 0.0

        def down(self):
            self._probability = 1.0

    return Outage(lake.store, probability=1.0)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only who may mount can have a disk that is full")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def landed(store):
    return [
        event for info in store.list("landing/") for event in decode_segment(store.get(info.key), info.key).to_pylist()
    ]


def sequences(store):
    return sorted(event["sequence"] for event in landed(store))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_with_durability_spool_a_flush_needs_no_store_and_what_it_covers_is_on_the_disk(outage, tmp_path):
    writer = Writer(outage, "run", "w", durability="spool")
    record_episode(writer, 1)
    writer.flush(timeout=30)
    (file,) = writer.spool.glob("*.open")
    assert read_spooled(file)[0]["sequence"].to_pylist() == list(range(5))
    record_episode(writer, 2)
    writer.flush(timeout=30)
    assert len(read_spooled(file)[0]) == 10, "a flush to the disk does not end the segment"
    assert writer.stats.spooled_events == 10
    outage.up()
    assert writer.close().complete
    assert sequences(outage) == list(range(10))


def test_with_durability_memory_no_disk_is_touched_and_close_brings_everything_to_the_store(outage, tmp_path):
    writer = Writer(outage, "run", "w", durability="memory", on_full="block")
    record_episode(writer, 1)
    writer.flush(timeout=0)
    wait_for(lambda: writer.stats.memory_bytes > 0)
    outage.up()
    assert writer.close().complete
    assert sequences(outage) == list(range(5))
    assert not (tmp_path / "spool").exists()
    assert writer.spool is None


def test_what_only_memory_has_is_called_lost_when_close_runs_out_of_time(outage):
    writer = Writer(outage, "run", "w", durability="memory", on_full="block")
    record_episode(writer, 1)
    report = writer.close(timeout=0.5)
    assert (report.complete, report.remaining_events, report.memory_events, report.spool) == (False, 5, 5, None)
    assert "in memory only and die with this process" in report.reason


def test_when_memory_is_full_and_the_store_is_down_segments_spill_to_the_disk(outage, lake, tmp_path):
    writer = Writer(outage, "run", "w", durability="memory", memory_bytes=200_000, segment_bytes=50_000)
    for number in range(60):
        record_episode(writer, number, message=BIG)
    wait_for(lambda: writer.stats.queued_events < 200)
    assert writer.stats.spool_bytes > 0
    assert writer.stats.memory_bytes < 400_000
    report = writer.close(timeout=0.5)
    assert (report.complete, report.memory_events) == (False, 0), "at the close everything is brought to the disk"
    recover(lake.store, tmp_path / "spool")
    assert sequences(lake.store) == list(range(300))


def test_what_is_left_of_a_worker_that_dies_while_segments_spill_has_no_hole(outage, lake, tmp_path):
    writer = Writer(outage, "run", "w", durability="memory", memory_bytes=200_000, segment_bytes=50_000)
    number = 0
    while writer.stats.spilled_segments < 2:
        record_episode(writer, number, message=BIG)
        number += 1
    # As it is on the disk at a moment at which the worker is killed; its own files are locked by this process.
    wait_for(lambda: any((tmp_path / "spool").glob("*/*.open")) or writer.stats.spool_bytes > 0)
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "spool", left)
    writer.close(timeout=0.1)
    recover(lake.store, left)
    found = sequences(lake.store)
    assert found
    assert found == list(range(len(found)))


def test_a_full_disk_is_passed_by_on_the_way_to_the_store(lake, small_disk):
    with lake.writer("run", "w", spool=small_disk, segment_bytes=100_000) as writer:
        (small_disk / "others").write_bytes(bytes(400_000))  # the rest of the disk belongs to somebody else
        for number in range(100):
            record_episode(writer, number, message=BIG.replace("x", f"{number * 7919}"))
        writer.flush(timeout=60)
        assert writer.stats.durable_events == 500
    assert writer.stats.spilled_segments > 0
    assert sequences(lake.store) == list(range(500))
    assert not list(small_disk.glob("*/*.open"))


def test_a_full_disk_and_a_store_that_is_down_hold_the_rollout_up_and_lose_nothing(outage, small_disk, monkeypatch):
    monkeypatch.setattr(encoder, "_RETRY_SECONDS", 0.05)
    writer = Writer(outage, "run", "w", spool=small_disk, memory_bytes=300_000, segment_bytes=50_000)
    import threading

    def rollout():
        for number in range(150):
            record_episode(writer, number, message=BIG.replace("x", f"{number * 7919}"))

    thread = threading.Thread(target=rollout)
    thread.start()
    wait_for(lambda: writer.stats.waits > 0)
    assert writer.stats.memory_bytes < 500_000
    with pytest.raises(NotDurable):
        writer.flush(timeout=0.1)
    outage.up()
    thread.join(60)
    report = writer.close()
    assert (report.complete, report.dropped_events) == (True, 0)
    assert sequences(outage) == list(range(750))


def test_a_rollout_that_waits_is_set_free_by_close(outage):
    writer = Writer(outage, "run", "w", durability="memory", on_full="block", memory_bytes=10_000)
    import threading

    refused = []

    def rollout():
        try:
            for number in range(100):
                record_episode(writer, number, message=BIG)
        except WriterClosed as error:
            refused.append(error)

    thread = threading.Thread(target=rollout)
    thread.start()
    wait_for(lambda: writer.stats.waits > 0)
    began = time.monotonic()
    report = writer.close(timeout=0.5)
    assert time.monotonic() - began < 20
    thread.join(20)
    assert refused
    assert report.memory_events == report.remaining_events > 0


def test_drop_and_count_never_waits_and_never_leaves_a_hole(outage, lake, caplog):
    writer = Writer(outage, "run", "w", durability="memory", on_full="drop_and_count", memory_bytes=150_000)
    for number in range(40):
        record_episode(writer, number, message=BIG, steps=4)
    stats = writer.stats
    assert (stats.waits, stats.dropped_events > 0, stats.dropped_episodes > 0) == (0, True, True)
    outage.up()
    report = writer.close()
    assert report.complete
    assert report.dropped_events == stats.dropped_events
    assert "events were dropped because memory was full" in caplog.text
    assert stats.events + stats.dropped_events == 40 * 6
    compact(lake, stale_after=0)
    assert_sound(lake)
    episodes = lake.snapshot().episodes.collect()
    assert len(episodes) < 40
    for row in episodes.iter_rows(named=True):
        if row["n_steps"] < 4:
            assert (row["status"], row["stop_reason"]) == ("aborted", "steps were dropped")
            assert f"{4 - row['n_steps']} steps were not recorded" in row["failure_detail"]
    whole = episodes.filter(status="completed")
    assert len(whole) + stats.dropped_episodes == 40


def noise(number):
    """Text that does not become smaller: 6,000 bytes."""
    return "".join(map(chr, np.random.default_rng(number).integers(0x4E00, 0x9FFF, 2_000)))


def test_the_spool_has_a_limit_too(outage):
    writer = Writer(outage, "run", "w", spool_bytes=250_000, segment_bytes=20_000, memory_bytes=1_200_000)
    for number in range(30):
        record_episode(writer, number, message=noise(number))
    wait_for(lambda: writer.stats.spilled_segments > 0)
    assert 0 < writer.stats.spool_bytes <= 320_000
    outage.up()
    assert writer.close().complete
    assert sequences(outage) == list(range(150))


def test_a_disk_that_became_read_only_is_passed_by(lake, monkeypatch):
    writer = lake.writer("run", "w")
    record_episode(writer, 1)
    writer.flush(timeout=30)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(spool._WholeFile, "append", refuse)
    record_episode(writer, 2)
    writer.flush(timeout=30)
    monkeypatch.undo()
    assert writer.close().complete
    assert sequences(lake.store) == list(range(10))


def test_a_spool_that_is_read_only_at_the_start_is_told_at_once(lake, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UsageError, match="cannot be used .Read-only file system.: set TRAJLAKE_SPOOL or spool="):
        lake.writer("run", spool=small_disk)


def test_a_write_of_which_the_disk_takes_a_part_is_finished_or_fails(tmp_path, monkeypatch):
    file = spool._WholeFile(tmp_path / "file")

    class Reluctant:
        def __init__(self, inner):
            self.inner = inner

        def write(self, data):
            return self.inner.write(data[:7])

    real, file._file = file._file, Reluctant(file._file)
    file.append(b"0123456789" * 5, sync=False)
    file._file = real
    assert file.bytes == 50
    file.let_go()
    assert (tmp_path / "file").read_bytes() == b"0123456789" * 5


def test_the_epoch_can_be_kept_on_a_disk_that_is_full(lake, small_disk):
    with lake.writer("run", "w", spool=small_disk) as writer:
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "others").write_bytes(bytes(1 << 20))
        record_episode(writer, 1)
        writer.flush(timeout=60)
        assert (writer.spool / "epoch").read_text().strip() == "0"


def test_a_clock_that_is_set_back_changes_neither_order_nor_durations(lake, monkeypatch):
    real = time.time_ns
    with lake.writer("run", "w") as writer:
        episode = writer.episode(episode_id="e")
        episode.step(message="before")
        monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600_000_000_000)
        episode.step(message="after")
        episode.end()
    compact(lake)
    trajectory = lake.snapshot().episode("e")
    assert [step["message"] for step in trajectory.steps] == ["before", "after"]
    assert 0 <= trajectory.episode["wall_ms"] < 60_000


def test_a_lost_acknowledgement_of_the_epoch_and_of_segments_doubles_nothing(lake):
    class Forgetful:
        """Every first answer to a put is lost."""

        def __init__(self, store):
            self.inner, self.seen = store, set()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def put_if_absent(self, key, data):
            outcome = self.inner.put_if_absent(key, data)
            if key in self.seen:
                return outcome
            self.seen.add(key)
            return Unknown(OSError("the answer was lost"))

    store = Forgetful(lake.store)
    with Writer(store, "run", "w", segment_bytes=2_000) as writer:
        for number in range(10):
            record_episode(writer, number)
    assert sequences(lake.store) == list(range(50))


def test_the_status_of_a_spool_says_who_writes_and_what_waits(outage, lake, tmp_path):
    living = lake.writer("run", "w1")
    left = Writer(outage, "run", "w2")
    record_episode(left, 1)
    left.close(timeout=0.3)
    (tmp_path / "spool" / "junk").mkdir()
    entries = {entry.meta.worker_id if entry.meta else "junk": entry for entry in spool_status(tmp_path / "spool")}
    assert {name: (entry.state, entry.segments) for name, entry in entries.items()} == {
        "w1": ("in use", 0),
        "w2": ("left", 1),
        "junk": ("unreadable", 0),
    }
    assert entries["w2"].bytes > 0
    living.close()
    record(lake, [2])
    assert sequences(lake.store) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("on_full", ["block", "drop_and_count"])
def test_at_the_end_what_the_disk_refuses_goes_to_the_store(lake, monkeypatch, on_full):
    def refuse(*_, **__):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(spool._WholeFile, "append", refuse)
    writer = Writer(lake.store, "run", "w", on_full=on_full)
    record_episode(writer, 1)
    report = writer.close()
    assert (report.complete, report.dropped_events) == (True, 0)
    assert sequences(lake.store) == list(range(5))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"durability": "disk"}, "durability must be one of remote, spool, memory"),
        ({"on_full": "drop"}, "on_full must be one of spill, block, drop_and_count"),
        ({"memory_bytes": 0}, "memory_bytes must be more than 0"),
    ],
)
def test_choices_that_do_not_exist_are_refused(lake, choices, reason):
    with pytest.raises(UsageError, match=reason):
        lake.writer("run", **choices)


def test_the_folder_of_a_writer_that_was_killed_at_its_birth_goes_away(lake, tmp_path):
    import os

    young, old, foreign = (tmp_path / "spool" / name for name in ("young", "old", "foreign"))
    for folder in (young, old, foreign):
        folder.mkdir(parents=True)
        (folder / "lock").touch()
    (foreign / "notes.txt").touch()
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    recover(lake.store, tmp_path / "spool")
    assert (young.exists(), old.exists(), foreign.exists()) == (True, False, True)


def test_a_closed_spool_file_is_the_segment_itself_unless_it_is_damaged(outage, lake, tmp_path):
    def left(worker):
        writer = Writer(outage, "run", worker, segment_seconds=60)
        for number in range(100):
            record_episode(writer, number, message=noise(number))
        assert not writer.close(timeout=0.3).complete
        wait_for(lambda: all(entry.state == "left" for entry in spool_status(tmp_path / "spool")))
        return sorted(writer_folder(worker).glob("*.arrow"))

    def writer_folder(worker):
        return next(e.path for e in spool_status(tmp_path / "spool") if e.meta.worker_id == worker)

    whole, damaged = left("whole"), left("damaged")
    sizes = [file.stat().st_size for file in whole]
    assert all(spool.read_ready(file) for file in whole)
    (file, *_) = damaged
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    assert spool.read_ready(file) is None
    outage.up()
    found = recover(outage, tmp_path / "spool")
    assert len(found.unreadable) == 1, "a checksum finds what lz4 does not"
    assert [info.size for info in lake.store.list("landing/run/whole/")] == sizes
    events = [
        event
        for info in lake.store.list("landing/run/whole/")
        for event in decode_segment(lake.store.get(info.key), info.key).to_pylist()
    ]
    assert [event["sequence"] for event in events] == list(range(500))
    compact(lake, stale_after=0)
    assert_sound(lake)


def test_a_live_writer_uploads_what_is_left_of_a_damaged_segment_and_says_so(outage, lake, tmp_path):
    writer = Writer(outage, "run", "w", linger_seconds=1.5)
    record_episode(writer, 1)
    time.sleep(0.5)  # so that it is a batch
    record_episode(writer, 2, message="other")
    wait_for(lambda: writer.stats.retries)
    (file,) = writer.spool.glob("*.arrow")
    data = bytearray(file.read_bytes())
    data[data.rindex(b"other 2/0")] = ord("O")
    file.write_bytes(data)
    outage.up()
    with pytest.raises(NotDurable, match="5 of its 10 events cannot be read"):
        writer.flush(timeout=30)
    report = writer.close()
    assert (report.complete, report.durable_events, report.remaining_events) == (False, 5, 5)
    assert sequences(outage) == list(range(5))
    assert [entry.damaged for entry in spool_status(tmp_path / "spool")] == [1]


def test_a_damaged_segment_that_the_store_has_whole_already_disturbs_nobody(outage, lake, tmp_path):
    """Its upload was done, the answer was lost, the process died, and then the disk damaged the file."""
    outage.up()
    writer = Writer(outage, "run", "w", linger_seconds=60)
    record_episode(writer, 0)
    writer.flush()
    outage.down()
    record_episode(writer, 1)
    time.sleep(0.5)  # so that it is a batch
    record_episode(writer, 2, message="other")
    assert not writer.close(timeout=0.3).complete
    wait_for(lambda: all(entry.state == "left" for entry in spool_status(tmp_path / "spool")))
    shutil.copytree(tmp_path / "spool", tmp_path / "copy")
    assert recover(lake.store, tmp_path / "copy").segments == 1
    (file,) = (tmp_path / "spool").glob("*/*.arrow")
    data = bytearray(file.read_bytes())
    data[data.rindex(b"other 2/0")] = ord("O")
    file.write_bytes(data)
    found = recover(lake.store, tmp_path / "spool")
    assert (found.stopped, len(found.unreadable)) == ("", 1)
    assert sequences(lake.store) == list(range(15))

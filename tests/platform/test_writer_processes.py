"""Writers in processes that fork, are spawned, are told to end, or just end; and in an event loop."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.rollouts import assert_sound, record_episode

import trajlake
from trajlake.errors import UsageError
from trajlake.ingest.segment import decode_segment
from trajlake.ingest.writer import Writer
from trajlake.storage.wrappers import Fault, FaultyStore, Moment
from trajlake_pipelines.compact import compact

# Python warns of what these tests are about.
pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")]


@pytest.fixture
def lake(tmp_path):
    return trajlake.create(tmp_path / "lake")


def epochs(store):
    """The identities of the episodes that began in each epoch."""
    found = {}
    for info in store.list("landing/"):
        for event in decode_segment(store.get(info.key), info.key).to_pylist():
            if event["kind"] == "begin":
                found.setdefault(info.key.split("/")[3], set()).add(event["episode_id"])
    return found


def _in_a_child(writer, number, inherited=None):
    if inherited is not None:
        with pytest.raises(UsageError, match="begun in the process that this one was forked from"):
            inherited.step(message="from the child")
    record_episode(writer, number)


def test_a_forked_child_records_under_an_epoch_of_its_own_and_closes_at_its_end(lake, tmp_path):
    with lake.writer("run", "w") as writer:
        open_one = writer.episode(episode_id="e0000")
        children = [
            multiprocessing.get_context("fork").Process(target=_in_a_child, args=(writer, number, open_one))
            for number in (1, 2)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0]
        open_one.step(message="from the parent")
        open_one.end()
    assert sorted(map(sorted, epochs(lake.store).values())) == [["e0000"], ["e0001"], ["e0002"]]
    assert not list((tmp_path / "spool").iterdir())
    compact(lake)
    assert_sound(lake)


def test_a_fork_right_after_the_first_step_does_not_hang_the_child(tmp_path):
    """Arrow imports pandas with the first array of a process, and holds a lock meanwhile."""
    (tmp_path / "pandas.py").write_text("import time\ntime.sleep(1)\nraise ImportError\n")
    program = """
import os, sys, time
import trajlake

writer = trajlake.create(sys.argv[1]).writer("run", "w")
writer.episode().step(message="one")
time.sleep(0.3)  # the encoder has it
child = os.fork()
if child == 0:
    try:
        writer.episode().step(message="two")
        os._exit(0 if writer.close(timeout=20).complete else 1)
    finally:
        os._exit(2)
status = os.waitpid(child, 0)[1]
writer.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "TRAJLAKE_SPOOL": str(tmp_path / "spool")}
    command = [sys.executable, "-c", program, str(tmp_path / "lake")]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0


def test_a_fork_in_the_middle_of_recording_neither_hangs_the_child_nor_doubles_anything(lake):
    with lake.writer("run", "w", segment_bytes=20_000) as writer:
        stop = threading.Event()

        def rollout():
            number = 0
            while not stop.is_set():
                record_episode(writer, number)
                number += 1

        thread = threading.Thread(target=rollout)
        thread.start()
        for number in range(8):
            child = os.fork()
            if child == 0:
                # Nothing but an exit code may come of a child of the test runner.
                try:
                    record_episode(writer, 9_000 + number)
                    os._exit(0 if writer.close(timeout=30).complete else 1)
                finally:
                    os._exit(2)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
    begun = [episode for episodes in epochs(lake.store).values() for episode in episodes]
    assert len(begun) == len(set(begun)) == writer.stats.episodes + 8


def test_a_child_that_leaves_the_parents_blocks_ends_nothing_of_the_parents(lake):
    with lake.writer("run", "w") as writer:
        with writer.episode(episode_id="e0000"):
            child = os.fork()
        if child == 0:
            writer.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert epochs(lake.store) == {"000000": {"e0000"}}
    compact(lake)
    assert lake.snapshot().episode("e0000").episode["status"] == "completed"


def test_a_writer_can_be_given_to_a_spawned_process(lake):
    with lake.writer("run", "w") as writer:
        record_episode(writer, 1)
        child = multiprocessing.get_context("spawn").Process(target=_in_a_child, args=(writer, 2))
        child.start()
        child.join(120)
        assert child.exitcode == 0
    assert sorted(map(sorted, epochs(lake.store).values())) == [["e0001"], ["e0002"]]


SCRIPT = """
import os, signal, sys, time, trajlake
writer = trajlake.connect(sys.argv[1]).writer("run", "w")
whole = writer.episode(episode_id="whole")
whole.step(message="x")
whole.end()
{rest}
"""


def _run(lake, rest):
    return subprocess.run([sys.executable, "-c", SCRIPT.format(rest=rest), lake.uri], timeout=120, check=False)


def test_an_interpreter_that_ends_without_a_close_flushes(lake):
    assert _run(lake, "").returncode == 0
    assert epochs(lake.store) == {"000000": {"whole"}}


def test_sigterm_ends_episodes_as_aborted_and_flushes(lake):
    rest = "with writer.episode(episode_id='open'):\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)"
    assert _run(lake, rest).returncode == 143
    compact(lake)
    open_one = lake.snapshot().episode("open").episode
    assert (open_one["status"], open_one["stop_reason"]) == ("aborted", "SystemExit")
    assert lake.snapshot().episode("whole").episode["status"] == "completed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in the garbage collector
def test_a_signal_in_the_middle_of_a_step_neither_hangs_the_writer_nor_loses_an_event(lake):
    class Interruption(Exception):
        pass

    def interrupt(*_):
        raise Interruption

    returned = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with lake.writer("run", "w") as writer, writer.episode(episode_id="e") as episode:
            for turn in range(200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 20e-6 + turn * 2e-6)
                    for _ in range(2_000):  # an exception in a callback of the garbage collector comes to nothing
                        episode.step(message="x")
                        returned += 1
                except Interruption:
                    pass
            recorded = writer.stats.events
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    events = [
        event
        for info in lake.store.list("landing/")
        for event in decode_segment(lake.store.get(info.key), info.key).to_pylist()
    ]
    assert sorted(event["sequence"] for event in events) == list(range(recorded + 1))
    assert events[-1]["end"]["n_steps"] == recorded - 1, "all but the begin"
    assert recorded > returned, "the begin, and what was recorded before the signal came"


def test_sigterm_is_left_to_who_handles_it(lake):
    rest = "writer.close()\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    rest += "writer = trajlake.connect(sys.argv[1]).writer('run', 'w2')\nos.kill(os.getpid(), signal.SIGTERM)"
    assert _run(lake, rest).returncode == 7


def test_the_handler_of_sigterm_goes_with_the_last_writer(lake):
    before = signal.getsignal(signal.SIGTERM)
    with lake.writer("run", "w"):
        assert signal.getsignal(signal.SIGTERM) != before or before != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_event_loop_goes_on_while_a_writer_flushes_and_closes(lake):
    store = FaultyStore(lake.store, [Fault("put_if_absent", "landing", Moment.NEVER, delay=0.5)] * 2)

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = asyncio.create_task(tick())
        async with Writer(store, "run", "w") as writer:
            async with writer.episode(episode_id="good") as episode:
                await episode.astep(message="x")
            await writer.aflush()
            assert writer.stats.durable_events == 3
            with pytest.raises(ZeroDivisionError):
                async with writer.episode(episode_id="bad"):
                    _ = 1 / 0
        ticker.cancel()
        return ticks

    assert asyncio.run(main()) >= 10
    assert len(store.struck) == 2
    compact(lake)
    assert [lake.snapshot().episode(name).episode["status"] for name in ("good", "bad")] == ["completed", "failed"]


def test_a_step_that_has_to_wait_for_room_does_not_stop_the_loop(lake):
    store = FaultyStore(lake.store, probability=1.0)

    async def main():
        writer = Writer(store, "run", "w", durability="memory", on_full="block", memory_bytes=20_000)
        episode = writer.episode(episode_id="e")

        async def rollout():
            for _ in range(30):
                await episode.astep(message="x" * 2_000)

        task = asyncio.create_task(rollout())
        while not writer.stats.waits:
            await asyncio.sleep(0.01)
        store._probability = 0.0
        await task
        await episode.aend()
        return await writer.aclose()

    assert asyncio.run(main()).complete
    compact(lake)
    assert lake.snapshot().episode("e").episode["n_steps"] == 30


def test_a_thousand_episodes_are_open_at_once(lake):
    async def rollout(writer, number):
        async with writer.episode(episode_id=f"e{number:04d}") as episode:
            for step in range(3):
                await episode.astep(message=f"{number}/{step}")
                await asyncio.sleep(0)

    async def main():
        async with lake.writer("run", "w") as writer:
            tasks = [asyncio.create_task(rollout(writer, number)) for number in range(1_000)]
            await asyncio.sleep(0)
            assert writer.stats.open_episodes == 1_000
            await asyncio.gather(*tasks)

    asyncio.run(main())
    compact(lake)
    snapshot = lake.snapshot()
    assert snapshot.episodes.filter(n_steps=3, status="completed").collect().height == 1_000
    assert [step["message"] for step in snapshot.episode("e0317").steps] == ["317/0", "317/1", "317/2"]


def test_two_threads_may_record_one_episode(lake):
    with lake.writer("run", "w") as writer, writer.episode(episode_id="e") as episode:
        found = []
        threads = [
            threading.Thread(
                target=lambda name=name: [found.append((episode.step(message=name), name)) for _ in range(200)]
            )
            for name in "abcd"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    compact(lake)
    steps = lake.snapshot().episode("e").steps
    assert [(step["step_index"], step["message"]) for step in steps] == sorted(found)


def test_a_close_returns_in_time_although_the_store_hangs(lake):
    release = threading.Event()

    class Hanging:
        def __getattr__(self, name):
            return getattr(lake.store, name)

        def put_if_absent(self, key, data):
            release.wait(60)
            return lake.store.put_if_absent(key, data)

    writer = Writer(Hanging(), "run", "w")
    record_episode(writer, 1)
    began = time.monotonic()
    report = writer.close(timeout=0.5)
    assert time.monotonic() - began < 10
    assert (report.complete, report.remaining_events, report.memory_events) == (False, 5, 0)
    assert report.spool is not None
    assert writer.close() is report
    release.set()

"""Exactly once: after a crash at any commit point the next compaction leaves what an undisturbed one leaves."""

import multiprocessing
import os
import signal

import pytest
from tests.rollouts import assert_same_rows, assert_sound, copy_landing, record, record_episode

import trajlake
from trajlake.errors import StoreUnavailable, TrajlakeError
from trajlake.storage.wrappers import Fault, FaultyStore, Moment
from trajlake_pipelines import dedupe_job, kinds, optimize_job, publish, retract_job
from trajlake_pipelines.compact import compact
from trajlake_pipelines.dedupe import dedupe
from trajlake_pipelines.optimize import optimize
from trajlake_pipelines.retract import retract

pytestmark = pytest.mark.beam

COMMITS = ("steps", "episodes", "segments")


class Crash(Exception):
    """The process ends here, as far as the lake can tell."""


def prepare(lake):
    """First compacted: ten episodes, one of them sealed. Then landed: new ones, one sent again, a later attempt,
    the end of the sealed one, a score. So every kind of change is in the compaction that is disturbed."""
    record(lake, range(10))
    with lake.writer(run="run", worker="late") as writer:
        late = record_episode(writer, 50, end=False)
        writer.flush()
        compact(lake, stale_after=0)
        late.step(message="after all")
        late.end(reward=1.0)
        writer.score("e0004", "style", 0.5)
    record(lake, range(8, 14), worker="b")
    record(lake, [2], worker="c", attempt=1, steps=5, message="again")


@pytest.fixture
def disturbed(lake_uri):
    lake = trajlake.create(lake_uri)
    prepare(lake)
    return lake


@pytest.fixture
def undisturbed(disturbed, tmp_path):
    """A lake with the same segments, compacted in peace in the same two steps."""
    lake = trajlake.create(tmp_path / "undisturbed")
    first = list(disturbed.segments().collect()["path"])
    for key in first:
        lake.store.put_if_absent(key, disturbed.store.get(key))
    compact(lake, stale_after=0)
    later = [info.key for info in disturbed.store.list("landing/") if info.key not in first]
    for key in later:
        lake.store.put_if_absent(key, disturbed.store.get(key))
    compact(lake)
    return lake


def crash_at(monkeypatch, table, when, module=None):
    """Let the commit to `table` fail before it is made, or after it without an answer."""
    module = module or publish
    real = module.commit

    def commit(store, name, *rest):
        if name == table and when == "before":
            raise Crash
        done = real(store, name, *rest)
        if name == table:
            raise Crash
        return done

    monkeypatch.setattr(module, "commit", commit)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("table", COMMITS)
def test_an_exception_at_a_commit_is_made_good_by_the_next_compaction(disturbed, undisturbed, monkeypatch, table, when):
    with monkeypatch.context() as patch:
        crash_at(patch, table, when)
        with pytest.raises(Crash):
            compact(disturbed)
    compact(disturbed)
    assert_sound(disturbed)
    assert_same_rows(disturbed, undisturbed)


def _killed(uri, table, when):
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, table, when)
        try:
            compact(trajlake.connect(uri))
        except Crash:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("table", COMMITS)
def test_a_kill_at_a_commit_is_made_good_by_the_next_compaction(disturbed, undisturbed, table, when):
    process = multiprocessing.get_context("spawn").Process(target=_killed, args=(disturbed.uri, table, when))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    compact(disturbed)
    assert_sound(disturbed)
    assert_same_rows(disturbed, undisturbed)


def test_a_snapshot_during_a_crash_shows_all_or_nothing(disturbed, undisturbed, monkeypatch):
    before = disturbed.snapshot()
    with monkeypatch.context() as patch:
        crash_at(patch, "steps", "after")
        with pytest.raises(Crash):
            compact(disturbed)
    assert disturbed.snapshot().token == before.token
    assert_sound(disturbed)


def test_a_compaction_that_died_in_its_units_goes_on_with_those_it_has(lake_uri, monkeypatch):
    lake = trajlake.create(lake_uri)
    record(lake, range(10))
    done = []
    real = kinds.run_unit

    def run_unit(store, number, unit):
        real(store, number, unit)
        done.append(unit.number)
        raise Crash("Crash")

    with monkeypatch.context() as patch:
        patch.setattr(kinds, "run_unit", run_unit)
        with pytest.raises(TrajlakeError, match=r"the pipeline failed: .*Crash"):
            compact(lake)
    assert done == [0]
    monkeypatch.setattr(kinds, "run_unit", lambda *_: pytest.fail("a unit was done twice"))
    assert compact(lake).episodes == 10
    assert_sound(lake)


@pytest.mark.parametrize("moment", [Moment.BEFORE, Moment.AFTER])
@pytest.mark.parametrize("key", ["plan.json", "units/", "steps/", "episodes/", "segments/"])
def test_a_put_that_fails_or_whose_answer_is_lost_is_an_error_and_the_next_compaction_makes_it_good(
    lake_uri, tmp_path, key, moment
):
    lake = trajlake.create(lake_uri)
    record(lake, range(10))
    expected = trajlake.create(tmp_path / "expected")
    copy_landing(lake.store, expected.store)
    compact(expected)
    faulty = trajlake.Lake(FaultyStore(lake.store, [Fault("put_if_absent", key, moment)]))
    with pytest.raises(StoreUnavailable, match=key):
        compact(faulty)
    compact(lake)
    assert_sound(lake)
    assert_same_rows(lake, expected)


def _compact_here(uri):
    compact(trajlake.connect(uri))


def test_two_compactors_at_once_leave_what_one_leaves(disturbed, undisturbed):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compact_here, args=(disturbed.uri,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert_sound(disturbed)
    assert_same_rows(disturbed, undisturbed)


def _retract(lake, number):
    retract(lake, [f"e{number:04d}"], reason="licence", for_good=True)


# What is done to a lake for the n-th time, the module that commits it, and the tables to which it commits.
OTHERS = {
    "optimize": (lambda lake, _: optimize(lake), optimize_job, COMMITS),
    "dedupe": (lambda lake, _: dedupe(lake), dedupe_job, COMMITS[1:]),
    "retract": (_retract, retract_job, COMMITS),
}


def disturb(uri, change, number, table, when, patch):
    """Let a change crash at a commit."""
    work, module, _ = OTHERS[change]
    crash_at(patch, table, when, module=publish if table == "segments" else module)
    with pytest.raises(Crash):
        work(trajlake.connect(uri), number)


def _killed_in(*what):
    with pytest.MonkeyPatch.context() as patch:
        disturb(*what, patch)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["exception", "kill"])
@pytest.mark.parametrize("change", OTHERS)
def test_every_other_change_is_finished_by_whatever_comes_next(lake_uri, tmp_path, change, how):
    lake, peaceful = trajlake.create(lake_uri), trajlake.create(tmp_path / "peaceful")
    work, _, tables = OTHERS[change]

    def land_and_compact(number):
        with lake.writer(run="run", worker=f"w{number}") as writer:
            for episode_id in (f"e{number}", f"e{number + 1}"):  # duplicates of each other
                with writer.episode(episode_id=episode_id, task_id="same") as episode:
                    episode.step(message=f"same {number}")
        for each in (lake, peaceful):
            copy_landing(lake.store, each.store)
            compact(each)

    record(lake, range(6))
    land_and_compact(90)
    land_and_compact(92)
    points = [(table, when) for table in tables for when in ("before", "after") if how != "kill" or when == "after"]
    for number, (table, when) in enumerate(points):
        arguments = (lake.uri, change, number, table, when)
        if how == "kill":
            process = multiprocessing.get_context("spawn").Process(target=_killed_in, args=arguments)
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL, (table, when)
        else:
            with pytest.MonkeyPatch.context() as patch:
                disturb(*arguments, patch)
        work(peaceful, number)
        land_and_compact(1000 + 2 * number)  # and it has finished the other change first
        assert_sound(lake)
        assert_same_rows(lake, peaceful)
    assert change != "dedupe" or lake.snapshot().episodes.collect()["duplicate_of"].count() >= len(points)
    if change == "retract":
        gone = [f"e{number:04d}" for number in range(len(points))]
        retract(lake, gone, reason="licence", for_good=True)
        assert retract_job.objects_that_hold(lake.store, gone, also_active=True) == ([], [])

"""`compact`: what landed becomes rows, once and only once, whatever is sent twice, late, or not to its end."""

import json
import math
import time

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import QueryBuilder
from tests.rollouts import assert_same_rows, assert_sound, record, record_episode, rows

import trajlake
from trajlake.errors import StoreUnavailable, UsageError
from trajlake.ingest.segment import Descriptor, EpisodePart, SegmentName
from trajlake.read.steps_reader import StepsReader
from trajlake.storage import open_store
from trajlake.storage.local import LocalStore
from trajlake.table.commit import active_files
from trajlake.table.retention import vacuum
from trajlake.table.tables import open_table
from trajlake_pipelines.compact import compact
from trajlake_pipelines.dedupe import dedupe
from trajlake_pipelines.optimize import optimize
from trajlake_pipelines.retract import retract
from trajlake_pipelines.units import Parts, PlannedSegment, assign_units
from trajlake_schemas import STEPS

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(lake_uri):
    return trajlake.create(lake_uri)


def states(lake):
    return dict(lake.segments().group_by("state").len().collect().iter_rows())


def test_episodes_and_steps_come_out_as_they_were_recorded(lake):
    record(lake, range(20))
    report = compact(lake)
    assert (report.episodes, report.steps, report.events) == (20, 60, 100)
    assert_sound(lake)
    episodes, steps = rows(lake)
    assert episodes["reward"].to_list() == [number % 2 for number in range(20)]
    assert episodes["n_tool_calls"].to_list() == [1] * 20
    assert steps.filter(pl.col("episode_id") == "e0007")["message"].to_list() == [f"step 7/{step}" for step in range(3)]
    assert lake.snapshot().episode("e0007").episode["task_id"] == 2  # an integer, as it was given


def test_an_address_may_hold_spaces_and_any_letters(lake_uri):
    lake = trajlake.create(f"{lake_uri} of ünï+{{'1'}}/a b&c")
    for run in ("one", "two"):
        record(lake, range(3) if run == "one" else range(3, 6), worker=run)
        compact(lake)
    dedupe(lake)
    optimize(lake)
    retract(lake, ["e0000"], reason="names a customer", for_good=True)
    assert vacuum(lake, older_than_hours=0, force=True).files
    assert_sound(lake)
    snapshot = lake.snapshot()
    assert snapshot.query("SELECT count(*) AS n FROM steps")["n"].item() == 15
    assert len(snapshot.episode("e0004").steps) == 3
    assert len(list(snapshot.sampler("epochs").take(5))) == 5


@pytest.mark.parametrize("sign", [*"#?%=*[]", "\n"], ids=ascii)
def test_an_address_that_libraries_would_mistake_is_refused_before_anything_is_made(lake_uri, sign):
    with pytest.raises(UsageError, match="mistake|not the address"):
        trajlake.create(f"{lake_uri}/a{sign}b")
    assert list(open_store(lake_uri).list()) == []


def test_a_column_without_a_value_is_in_no_file_and_in_every_answer(lake):
    for worker, steps in {
        "words": [{"message": "a"}, {"message": "b"}],
        "tools": [{"tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]}, {"tensors": {"x": np.zeros((2, 3))}}],
    }.items():
        with lake.writer("run", worker) as writer, writer.episode(episode_id=worker) as episode:
            for step in steps:
                episode.step(**step)
        compact(lake)
    table = open_table(lake.store, "steps")
    files = [
        pq.ParquetFile(pa.BufferReader(lake.store.get(f"steps/{path}")))
        for path in active_files(table)["path"].to_pylist()
    ]
    some = {"message", "tool_calls", "tensors", "error"}
    found = sorted(sorted(some.intersection(file.schema_arrow.names)) for file in files)
    assert found == [["message"], ["tensors", "tool_calls"]]
    places = lake.snapshot().episodes.sort("episode_id").collect()
    expected = pa.concat_tables(StepsReader(lake.store).read(places))
    assert expected["message"].to_pylist() == [None, None, "a", "b"]
    order = [("episode_id", "ascending"), ("step_index", "ascending")]
    by_arrow = table.to_pyarrow_table().sort_by(order)
    assert by_arrow.equals(expected)
    assert by_arrow.schema.equals(STEPS.arrow)
    by_polars = pl.scan_delta(table).sort("episode_id", "step_index")
    assert by_polars.collect().equals(pl.DataFrame(expected))
    assert by_polars.filter(pl.col("message") == "b", pl.col("error").is_null()).collect()["step_index"].to_list() == [
        1
    ]
    sql = "SELECT * FROM steps ORDER BY episode_id, step_index"
    by_sql = pa.table(QueryBuilder().register("steps", table).execute(sql).read_all())
    assert by_sql.to_pylist() == expected.to_pylist()


def test_a_second_compaction_changes_nothing(lake):
    record(lake, range(5))
    compact(lake)
    before = lake.snapshot()
    report = compact(lake)
    assert (report.compactions, report.events) == (0, 0)
    assert lake.snapshot().token == before.token


def test_an_episode_that_is_sent_again_is_counted_and_not_kept_twice(lake):
    record(lake, range(5))
    compact(lake)
    expected = lake.snapshot()
    record(lake, range(5), worker="other")
    report = compact(lake)
    assert (report.duplicate_episodes, report.duplicate_events, report.episodes) == (5, 25, 0)
    assert_same_rows(lake, expected)


def test_an_episode_that_is_sent_twice_before_the_first_compaction_is_kept_once(lake):
    record(lake, range(5))
    record(lake, range(5), worker="other")
    report = compact(lake)
    assert (report.episodes, report.duplicate_episodes) == (5, 5)
    assert report.events == report.steps + report.begins_and_ends + report.duplicate_events
    assert_sound(lake)


def test_a_segment_that_is_uploaded_twice_is_read_once(lake):
    record(lake, range(5))
    (segment,) = lake.store.list("landing/")
    name = SegmentName.parse(segment.key)
    twin = SegmentName(name.run_id, name.worker_id, name.epoch, name.number + 1)
    lake.store.put_if_absent(twin.key, lake.store.get(segment.key))
    report = compact(lake)
    assert (report.episodes, report.duplicate_events) == (5, 25)
    assert_sound(lake)


def test_the_complete_attempt_wins_over_a_later_one_that_was_cut_off(lake):
    with lake.writer(run="run", worker="a") as writer:
        record_episode(writer, 1, message="complete")
    with lake.writer(run="run", worker="b") as writer:
        record_episode(writer, 1, attempt=1, end=False, message="cut off")
    compact(lake, stale_after=0)
    assert lake.snapshot().episode("e0001").steps[0]["message"] == "complete 1/0"


def test_of_two_takes_that_were_cut_off_the_longer_one_is_sealed(lake):
    for worker, steps in (("a", 4), ("b", 5), ("c", 2)):
        with lake.writer(run="run", worker=worker) as writer:
            record_episode(writer, 1, end=False, steps=steps, message=worker)
    compact(lake, stale_after=0)
    assert [step["message"] for step in lake.snapshot().episode("e0001").steps] == [f"b 1/{n}" for n in range(5)]


def test_the_later_of_two_complete_attempts_wins_also_in_a_later_compaction(lake):
    record(lake, range(5), message="first")
    compact(lake)
    old = lake.snapshot()
    record(lake, [2], worker="b", attempt=1, message="second", steps=4)
    report = compact(lake)
    assert report.replaced_episodes == 1
    assert_sound(lake)
    assert lake.snapshot().episode("e0002").steps[3]["message"] == "second 2/3"
    assert lake.snapshot().episode("e0003").steps[0]["message"] == "first 3/0"
    assert len(old.episode("e0002").steps) == 3  # the old snapshot still reads what it had


def test_an_earlier_attempt_that_arrives_late_changes_nothing(lake):
    record(lake, [1], attempt=1)
    compact(lake)
    expected = lake.snapshot()
    record(lake, [1], worker="b", attempt=0)
    assert compact(lake).duplicate_episodes == 1
    assert_same_rows(lake, expected)


def test_an_episode_without_an_end_waits_and_is_finished_by_a_later_segment(lake):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1)
        open_one = record_episode(writer, 2, end=False)
        writer.flush()
        report = compact(lake)
        assert (report.episodes, report.pending_episodes, report.pending_events) == (1, 1, 4)
        assert states(lake) == {"pending": 1}
        open_one.step(message="last")
        open_one.end(reward=1.0)
    report = compact(lake)
    assert (report.episodes, report.pending_episodes) == (1, 0)
    assert_sound(lake)
    assert states(lake) == {"consumed": 2}
    assert lake.snapshot().episode("e0002").episode["n_steps"] == 4


def test_an_episode_that_never_ends_is_sealed_as_aborted_with_its_steps(lake):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1, end=False)
    assert compact(lake, stale_after=3600).sealed_episodes == 0
    report = compact(lake, stale_after=0)
    assert (report.sealed_episodes, report.steps) == (1, 3)
    sealed = lake.snapshot().episode("e0001")
    assert (sealed.episode["status"], sealed.episode["reward"], len(sealed.steps)) == ("aborted", None, 3)
    assert compact(lake, stale_after=0).compactions == 0


def test_a_sealed_episode_whose_worker_goes_on_after_all_is_replaced_by_the_whole(lake):
    with lake.writer(run="run", worker="w") as writer:
        late = record_episode(writer, 1, end=False)
        record_episode(writer, 2)
        writer.flush()
        compact(lake, stale_after=0)
        late.step(message="after all")
        late.end(reward=1.0)
    report = compact(lake)
    assert report.replaced_episodes == 1
    assert_sound(lake)
    assert lake.snapshot().episode("e0001").episode["status"] == "completed"
    assert lake.snapshot().episode("e0001").episode["n_steps"] == 4


def test_scores_that_arrive_late_are_on_the_row_and_a_repeated_one_corrects_itself(lake):
    record(lake, range(3))
    compact(lake)
    assert lake.snapshot().episode("e0002").episode["success"] is False
    with lake.writer(run="run", worker="judge") as writer:
        writer.score("e0001", "style", 0.25, kind="judged")
        writer.score("e0001", "style", 0.75, kind="judged")
        writer.score("e0002", "reward", 0.5)
        writer.score("e0002", "success", 1.0)
        # As older writers let through: no verdict, so a component only.
        writer.record("score", "e0000", 0, {"name": "success", "value": 0.5})
        writer.score("e9999", "style", 1.0)
    report = compact(lake)
    assert (report.scores, report.pending_events) == (5, 1)
    assert_sound(lake)
    snapshot = lake.snapshot()
    assert snapshot.episode("e0001").episode["rewards"] == [
        {"name": "style", "value": 0.75, "weight": None, "kind": "judged"}
    ]
    assert snapshot.episode("e0001").episode["reward"] == 1.0
    assert snapshot.episode("e0002").episode["reward"] == 0.5
    verdicts = [snapshot.episode(f"e000{number}").episode["success"] for number in range(3)]
    assert verdicts == [False, True, True]
    record(lake, [9999])
    report = compact(lake)
    assert lake.snapshot().episode("e9999").episode["rewards"][0]["name"] == "style"
    assert states(lake) == {"consumed": 3}


def test_a_time_that_an_older_writer_let_through_holds_up_no_other_episode(lake):
    with lake.writer("run", "w") as writer:
        writer.record("begin", "odd", 0, {"occurred_at": -(9 * 10**16)})
        writer.record("end", "odd", 0, {"status": "completed", "n_steps": 0})
        writer.episode(episode_id="good").end()
    assert compact(lake).episodes == 2
    optimize(lake)
    assert lake.snapshot().episode("good").episode["status"] == "completed"


def attempted(lake, attempt, **outcome):
    with lake.writer("run", f"w{attempt}") as writer:
        episode = writer.episode(episode_id="e", attempt=attempt)
        episode.step(message="m")
        episode.end(**outcome)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_later_attempt_keeps_what_it_was_judged_itself(lake, at_once):
    attempted(lake, 0, reward=0.0, success=False, rewards={"success": 0.0, "reward": 0.0, "format": 0.2})
    if not at_once:
        compact(lake)
    attempted(lake, 1, reward=1.0, success=True, rewards={"success": 1.0, "format": 0.9})
    compact(lake)
    row = lake.snapshot().episode("e").episode
    assert (row["attempt"], row["reward"], row["success"]) == (1, 1.0, True)
    assert {part["name"]: part["value"] for part in row["rewards"]} == {"success": 1.0, "format": 0.9}


def test_a_later_attempt_keeps_the_scores_that_it_has_none_of(lake):
    attempted(lake, 0)
    with lake.scores("run") as scores:
        scores.add("e", "reward", 0.5)
        scores.add("e", "judge", 0.7)
    compact(lake)
    attempted(lake, 1)
    compact(lake)
    row = lake.snapshot().episode("e").episode
    assert (row["attempt"], row["reward"]) == (1, 0.5)
    assert {part["name"]: part["value"] for part in row["rewards"]} == {"reward": 0.5, "judge": 0.7}


@pytest.mark.parametrize("corrector", ["a", "z"])
def test_the_score_that_landed_last_counts_whoever_sent_it(lake, corrector):
    writer = lake.writer("run", "m")
    episode = writer.episode(episode_id="open")
    episode.step(message="a")
    writer.score("open", "judge", 0.3)
    writer.score("unknown", "judge", 0.3)
    writer.flush()
    compact(lake, stale_after=0.0)
    time.sleep(1.1)  # servers tell times in seconds
    with lake.writer("run", corrector) as other:
        other.score("open", "judge", 0.9)
        other.score("unknown", "judge", 0.9)
    compact(lake)
    episode.end()
    writer.episode(episode_id="unknown").end()
    writer.close()
    compact(lake)
    snapshot = lake.snapshot()
    for episode_id in ("open", "unknown"):
        assert [part["value"] for part in snapshot.episode(episode_id).episode["rewards"]] == [0.9], episode_id


def test_scores_of_a_sealed_episode_move_to_its_successor(lake):
    with lake.writer(run="run", worker="w") as writer:
        late = record_episode(writer, 1, end=False)
        writer.flush()
        compact(lake, stale_after=0)
        writer.score("e0001", "style", 0.5)
        writer.flush()
        compact(lake)
        late.end(reward=1.0)
    compact(lake)
    assert lake.snapshot().episode("e0001").episode["rewards"][0]["value"] == 0.5


def test_a_retracted_episode_is_kept_marked_and_never_sampled(lake):
    record(lake, range(3))
    with lake.writer(run="run", worker="w2") as writer:
        writer.retract("e0001", "contaminated")
    compact(lake)
    snapshot = lake.snapshot()
    assert snapshot.episode("e0001").episode["retracted"] == "contaminated"
    assert {sample.episode_id for sample in snapshot.sampler().take(100)} == {"e0000", "e0002"}


def test_an_unreadable_segment_is_quarantined_with_its_reason_and_the_rest_goes_on(lake):
    record(lake, range(3))
    (segment,) = lake.store.list("landing/")
    whole = lake.store.get(segment.key)
    broken = {
        SegmentName("run", "w", 7, 0).key: b"",
        SegmentName("run", "w", 7, 1).key: b"not arrow at all",
        SegmentName("run", "w", 7, 2).key: whole[: len(whole) // 3],
        SegmentName("run", "w", 7, 3).key: bytes(len(whole) // 2) + whole[len(whole) // 2 :],
        "landing/run/odd.arrow": whole,
    }
    for key, data in broken.items():
        lake.store.put_if_absent(key, data)
    report = compact(lake)
    assert report.quarantined_segments == len(broken)
    assert report.episodes == 3
    quarantined = lake.segments().filter(pl.col("state") == "quarantined").collect()
    assert set(quarantined["path"]) == set(broken)
    assert all(quarantined["reason"])
    assert compact(lake).compactions == 0


def test_units_of_any_size_give_the_same_rows(lake, tmp_path, monkeypatch):
    with lake.writer(run="run", worker="w", segment_seconds=0.05) as writer:
        for start in range(0, 40, 8):
            open_ones = [record_episode(writer, number, end=False) for number in range(start, start + 8)]
            writer.flush()
            for episode in open_ones:
                episode.end(reward=0.0)
    from tests.rollouts import copy_landing

    other = trajlake.create(tmp_path / "other")
    copy_landing(lake.store, other.store)
    compact(lake)
    import trajlake_pipelines.plan as plan

    monkeypatch.setattr(plan.load_or_make_plan, "__kwdefaults__", {"unit_bytes": 2000})
    compact(other)
    assert len({info.key for info in other.store.list("jobs/compact/00000001/units/")}) > 8
    assert_same_rows(lake, other)
    assert_sound(other)


def test_steps_that_are_more_than_an_array_holds_come_in_and_stay_readable(lake, tmp_path, monkeypatch):
    """With limits that are a millionth of the real ones, in every place that has one."""
    from tests.rollouts import copy_landing

    with lake.writer(run="run", worker="w", segment_seconds=0.05) as writer:
        for number in range(6):
            with writer.episode(episode_id=f"e{number}", task_id=number) as episode:
                for step in range(40 if number == 3 else 2 * number):  # one has several row groups, one has no step
                    episode.step(message=f"{step}", tensors={"frame": np.full((20, 10), step, np.uint8)})
                    writer.flush()
    other = trajlake.create(tmp_path / "other")
    copy_landing(lake.store, other.store)
    compact(other)
    for name, limit in {
        "trajlake_pipelines.unit_steps._LARGE": 512,
        "trajlake_pipelines.unit_steps._PART_BYTES": 1_000,
        "trajlake.table.layout.LARGEST_GROUP": 2_000,
        "trajlake.table.rewrite._PART_BYTES": 1_000,
        "trajlake.read.stitch._MOST_DECODED": 1_000,
        "trajlake.read.steps_reader._BATCH_BYTES": 1_000,
        "trajlake_pipelines.optimize_job._PART_BYTES": 1_000,
    }.items():
        monkeypatch.setattr(name, limit)
    compact(lake)
    groups = [
        pq.ParquetFile(pa.BufferReader(lake.store.get(f"steps/{path}"))).num_row_groups
        for path in active_files(open_table(lake.store, "steps"))["path"].to_pylist()
    ]
    assert sum(groups) > 6
    assert_sound(lake)
    assert_same_rows(lake, other)
    optimize(lake, everything=True)
    assert_sound(lake)
    assert_same_rows(lake, other)
    retract(lake, ["e4"], reason="leaked", for_good=True)
    retract(other, ["e4"], reason="leaked", for_good=True)
    assert_sound(lake)
    assert_same_rows(lake, other)
    batch = lake.snapshot().sampler("epochs", where="episode_id = 'e3'").batch(1)
    assert batch.array("frame")[0, :, 0, 0].tolist() == list(range(40))
    report = lake.snapshot().export(tmp_path / "shards")
    assert (report.episodes, report.manifest["steps"]) == (5, 2 + 4 + 40 + 10)


def test_a_large_input_is_taken_in_several_plans_and_gives_the_same_rows(tmp_path, monkeypatch):
    from tests.rollouts import copy_landing

    import trajlake_pipelines.plan as plan

    lake, other = trajlake.create(tmp_path / "lake"), trajlake.create(tmp_path / "other")
    with lake.writer(run="run", worker="w") as writer:
        for start in range(0, 12, 3):
            open_ones = [record_episode(writer, number, end=False) for number in range(start, start + 3)]
            writer.flush()  # so that plans end in the middle of episodes
            for episode in open_ones:
                episode.end(reward=0.0)
    copy_landing(lake.store, other.store)
    compact(lake)
    monkeypatch.setattr(plan, "PLAN_BYTES", 1)
    report = compact(other)
    assert (report.compactions, report.episodes) == (5, 12)
    assert_same_rows(lake, other)
    assert_sound(other)


def test_plans_of_a_large_input_share_it_evenly(tmp_path, monkeypatch):
    import trajlake_pipelines.plan as plan

    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        for number in range(10):
            record_episode(writer, number)
            writer.flush()
    size = sum(info.size for info in lake.store.list("landing/"))
    monkeypatch.setattr(plan, "PLAN_BYTES", int(0.9 * size))
    assert compact(lake).compactions == 2
    plans = [plan.load_plan(lake.store, number) for number in (1, 2)]
    assert [sum(len(unit.segments) for unit in each.units) for each in plans] in ([5, 5], [6, 4])


def test_where_a_segment_cannot_be_had_the_unit_does_not_wait_for_all_others(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w") as writer:
        for number in range(40):
            record_episode(writer, number)
            writer.flush()
    asked: list[str] = []
    real = LocalStore.get

    def get(store: LocalStore, key: str) -> bytes:
        if key.endswith(".arrow"):
            asked.append(key)
            if key.endswith("/00000000.arrow"):
                raise StoreUnavailable("down")
            time.sleep(0.1)
        return real(store, key)

    monkeypatch.setattr(LocalStore, "get", get)
    with pytest.raises(StoreUnavailable, match="down"):
        compact(lake)
    assert 0 < len(asked) < 40


def test_the_last_units_of_many_are_halves_so_that_workers_end_together():
    def unit_sizes(count: int) -> list[int]:
        parts = Parts()
        for number in range(count):
            part = EpisodePart(f"e{number:04d}", 0, 10, True, True)
            parts.add(PlannedSegment(f"landing/r/w/000001/{number:08d}.arrow", 10, 0), Descriptor(10, 0, (part,)))
        units = assign_units(parts.frame(), parts.segments, {}, (), 100)
        assert [unit.number for unit in units] == list(range(len(units)))
        assert sorted(each.key for unit in units for each in unit.segments) == [each.key for each in parts.segments]
        return [len(unit.segments) for unit in units]

    assert unit_sizes(30) == [10, 10, 10]
    assert unit_sizes(80) == [10] * 6 + [5] * 4


def test_segments_of_what_compresses_well_are_shared_out_by_what_they_are_without_compression():
    parts = Parts()
    for number in range(6):
        part = EpisodePart(f"e{number:04d}", 0, 10, True, True)
        segment = PlannedSegment(f"landing/r/w/000001/{number:08d}.arrow", 10, 0)
        parts.add(segment, Descriptor(10, 0, (part,), arrow_bytes=400 if number < 4 else 0))
    units = assign_units(parts.frame(), parts.segments, {}, (), 100)
    assert [len(unit.segments) for unit in units] == [2, 2, 2]


def test_events_in_are_the_sum_of_what_became_of_them(lake):
    record(lake, range(10))
    record(lake, range(5), worker="again")
    with lake.writer(run="run", worker="x") as writer:
        record_episode(writer, 77, end=False)
        writer.score("e0001", "a", 1.0)
        writer.retract("e0002", "no")
    report = compact(lake)
    parts = ("steps", "begins_and_ends", "scores", "retractions", "duplicate_events", "pending_events")
    assert report.events == sum(getattr(report, part) for part in parts) == 50 + 25 + 4 + 2
    assert report.duplicate_events == 25


def test_two_readers_without_this_library_see_the_same_tables(lake):
    record(lake, range(10))
    compact(lake)
    options = lake.store.storage_options()
    frame = pl.scan_delta(lake.store.location("episodes"), storage_options=options).collect()
    assert len(frame) == 10
    assert pl.scan_delta(lake.store.location("steps"), storage_options=options).select(pl.len()).collect().item() == 30


def test_rewards_that_json_does_not_know_do_no_harm_to_the_log(lake):
    rewards = [math.nan, math.inf, -math.inf, 0.0, None]
    with lake.writer(run="run") as writer:
        for number, reward in enumerate(rewards):
            with writer.episode(episode_id=f"e{number}") as episode:
                episode.end(reward=reward)
    compact(lake)
    found = lake.snapshot().episodes.sort("episode_id").collect()["reward"].to_list()
    assert [repr(reward) for reward in found] == [repr(reward) for reward in rewards]
    assert (
        lake.snapshot().query("SELECT count(*) AS n FROM episodes WHERE reward > 5")["n"].item() == 2
    )  # NaN is greatest


def test_an_empty_lake_compacts_to_nothing(lake):
    assert compact(lake).compactions == 0
    assert lake.snapshot().episodes.collect().is_empty()


@pytest.mark.parametrize(
    "times",
    [{"started_at": "0001-01-01T00:00:00Z"}, {"ended_at": "9999-12-31T23:59:59Z"}, {"started_at": "1700-01-01"}],
)
def test_an_episode_of_centuries_stops_no_other(lake, times):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1)
        episode = writer.episode(episode_id="long", started_at=times.get("started_at"))
        episode.end(ended_at=times.get("ended_at"))
    assert compact(lake).episodes == 2
    assert lake.snapshot().episode("long").episode["wall_ms"] > 2e12


@pytest.mark.parametrize(
    ("begin", "end", "merged"),
    [
        ('"a note"', '{"a":1}', {"extra": '"a note"', "a": 1}),
        ('{"a":1}', "[1]", {"a": 1, "extra": "[1]"}),
        ('{"a":1}', "no JSON", {"a": 1, "extra": "no JSON"}),
        ("[" * 5000 + "]" * 5000, '{"a":1}', None),
        ('{"a":' + "[" * 900 + "]" * 900 + "}", '{"b":1}', None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_extra_that_is_no_object_stops_no_other_episode(lake, begin, end, merged):
    with lake.writer(run="run", worker="w") as writer:
        record_episode(writer, 1)
        writer.record("begin", "odd", 0, {"task_id": "t", "extra": begin})
        writer.record("end", "odd", 0, {"status": "completed", "extra": end})
    [live] = [found for found in lake.sampler("fifo", live=True, empty=True).batch(2) if found.episode_id == "odd"]
    assert compact(lake).episodes == 2
    found = lake.snapshot().episode("odd").episode["extra"]
    assert live.episode["extra"] == found
    assert json.loads(found) == merged or (merged is None and "extra" in found) or '"b"' in found

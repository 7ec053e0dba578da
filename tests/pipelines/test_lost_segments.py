"""An episode of which a segment was lost never looks complete, whoever reads it; when the segment comes, it does."""

import os

import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.pipelines.landed import episode_id, events_of, segment_bytes
from tests.rollouts import assert_sound, record, record_episode

import trajlake
from trajlake.ingest.segment import EVENT_SCHEMA, SegmentName
from trajlake.read.landing import LandingTail
from trajlake.storage import Won
from trajlake.table.retention import vacuum
from trajlake_cli.main import cli
from trajlake_pipelines import plan as planning
from trajlake_pipelines.compact import compact
from trajlake_pipelines.requeue import retry

pytestmark = pytest.mark.beam

OUTCOME = {"reward": 1.0, "success": True, "stop_reason": "solved"}


@pytest.fixture
def lake(lake_uri):
    return trajlake.create(lake_uri)


def record_in_segments(lake, parts, *, episode_id="long", worker="w", attempt=0, **outcome):
    """One episode whose begin, steps (so many in each of `parts`) and end have segments of their own; their keys."""
    with lake.writer("run", worker) as writer:
        episode = writer.episode(episode_id=episode_id, attempt=attempt, task_id="t")
        writer.flush()
        number = 0
        for steps in parts:
            for _ in range(steps):
                episode.step(message=f"{worker} {number}")
                number += 1
            writer.flush()
        episode.end(**OUTCOME | outcome)
    return sorted(info.key for info in lake.store.list(f"landing/run/{worker}/") if info.key.endswith(".arrow"))


def lose(lake, key):
    """The segment is gone; what it held."""
    data = lake.store.get(key)
    lake.store.delete(key)
    return data


def deliver(lake, key, data):
    assert isinstance(lake.store.put_if_absent(key, data), Won)


def row(lake, episode_id="long"):
    return lake.snapshot().episode(episode_id).episode


def live_ids(lake):
    return [each.row["episode_id"] for each in LandingTail(lake.store).poll().ended]


@pytest.mark.parametrize(
    ("lost", "reason", "messages"),
    [
        ([0], "its beginning did not arrive", [0, 1, 2, 3, 4]),
        ([2], "2 of 5 steps did not arrive", [0, 3, 4]),
        ([0, 3], "its beginning and 2 of 5 steps did not arrive", [0, 1, 2]),
        ([4], "no end was recorded", [0, 1, 2, 3, 4]),
        ([0, 4], "its beginning did not arrive, and no end was recorded", [0, 1, 2, 3, 4]),
    ],
)
def test_it_waits_then_is_sealed_with_what_is_missing_and_the_whole_replaces_it(lake, lost, reason, messages):
    keys = record_in_segments(lake, [1, 2, 2])
    kept = {keys[number]: lose(lake, keys[number]) for number in lost}
    record(lake, [1], worker="other")

    report = compact(lake)
    assert (report.episodes, report.pending_episodes) == (1, 1)
    assert report.incomplete == (() if lost == [4] else ("long",))
    assert lake.snapshot().episodes.collect()["episode_id"].to_list() == ["e0001"]
    assert compact(lake, stale_after=3600).sealed_episodes == 0

    assert compact(lake, stale_after=0).sealed_episodes == 1
    sealed = row(lake)
    assert (sealed["status"], sealed["stop_reason"], sealed["n_steps"]) == ("aborted", reason, len(messages))
    assert sealed["task_id"] == (None if 0 in lost else "t")
    assert (sealed["reward"], sealed["success"]) == ((None, None) if 4 in lost else (1.0, True)), "facts stay facts"
    assert [step["message"] for step in lake.snapshot().episode("long").steps] == [f"w {each}" for each in messages]
    assert_sound(lake)
    assert compact(lake, stale_after=0).compactions == 0, "a second pass does not seal it again"
    vacuum(lake, older_than_hours=0, force=True)

    for key, data in kept.items():
        deliver(lake, key, data)
    assert compact(lake).replaced_episodes == 1
    assert (row(lake)["status"], row(lake)["stop_reason"], row(lake)["n_steps"]) == ("completed", "solved", 5)
    assert row(lake)["task_id"] == "t"
    assert_sound(lake)
    assert set(lake.segments().collect()["state"]) == {"consumed"}


@pytest.mark.parametrize("lost", [[0], [2], [4]])
def test_an_episode_of_which_steps_were_lost_is_never_drawn(lake, lost):
    keys = record_in_segments(lake, [1, 2, 2])
    record(lake, [1], worker="other")
    for number in lost:
        lose(lake, keys[number])
    compact(lake, stale_after=0)
    sampler = lake.sampler(strategy="epochs", epochs=1)
    no_end = lost == [4]  # what there is of it has no hole
    assert {sample.episode_id for sample in sampler} == {"e0001", *(["long"] if no_end else [])}
    assert sampler.left_out == ({} if no_end else {"steps of it were lost": 1})


def test_it_is_whole_as_soon_as_the_segment_comes_before_it_is_sealed(lake):
    keys = record_in_segments(lake, [1, 2, 2])
    data = lose(lake, keys[1])
    assert compact(lake).incomplete == ("long",)
    deliver(lake, keys[1], data)
    report = compact(lake, stale_after=0)
    assert (report.episodes, report.sealed_episodes, report.incomplete) == (1, 0, ())
    assert row(lake)["status"] == "completed"
    assert_sound(lake)


def test_what_was_quarantined_makes_it_whole_when_it_was_mended(lake):
    keys = record_in_segments(lake, [1, 2, 2])
    data = lose(lake, keys[2])
    deliver(lake, keys[2], data[: len(data) // 2])
    report = compact(lake, stale_after=0)
    assert (report.quarantined_segments, report.sealed_episodes) == (1, 1)
    assert row(lake)["stop_reason"] == "2 of 5 steps did not arrive"
    lake.store.delete(keys[2])
    deliver(lake, keys[2], data)
    retry(lake)
    assert compact(lake).replaced_episodes == 1
    assert row(lake)["status"] == "completed"
    assert_sound(lake)


def test_another_complete_take_wins_over_a_later_attempt_with_a_hole(lake):
    keys = record_in_segments(lake, [1, 2, 2], attempt=1)
    data = lose(lake, keys[2])
    record_in_segments(lake, [3], worker="again")
    compact(lake)
    assert (row(lake)["attempt"], row(lake)["n_steps"]) == (0, 3)
    deliver(lake, keys[2], data)
    compact(lake)
    assert (row(lake)["attempt"], row(lake)["n_steps"]) == (1, 5), "as soon as it is whole it wins"
    assert_sound(lake)


def test_more_of_what_has_no_beginning_takes_the_place_of_less(lake):
    keys = record_in_segments(lake, [2, 2, 2])
    kept = {key: lose(lake, key) for key in (keys[0], keys[2], keys[4])}
    compact(lake, stale_after=0)
    assert row(lake)["stop_reason"] == "its beginning did not arrive, and no end was recorded"
    deliver(lake, keys[4], kept[keys[4]])
    compact(lake)
    assert row(lake)["stop_reason"] == "its beginning and 2 of 6 steps did not arrive"
    assert row(lake)["reward"] == 1.0
    deliver(lake, keys[2], kept[keys[2]])
    deliver(lake, keys[0], kept[keys[0]])
    compact(lake)
    assert (row(lake)["status"], row(lake)["n_steps"]) == ("completed", 6)
    assert_sound(lake)


@pytest.mark.parametrize("lost", [0, 2])
def test_segments_of_a_sealed_episode_are_free_after_a_week(lake, monkeypatch, lost):
    keys = record_in_segments(lake, [1, 2, 2])
    lose(lake, keys[lost])
    compact(lake, stale_after=0)
    assert set(lake.segments().collect()["state"]) == {"pending"}
    monkeypatch.setattr(planning, "KEEP_SEALED_SECONDS", 0.0)
    record(lake, [1], worker="other")
    compact(lake)
    assert set(lake.segments().collect()["state"]) == {"consumed"}
    assert row(lake)["status"] == "aborted"


@pytest.mark.parametrize("lost", [0, 2])
def test_a_live_reader_does_not_draw_it(lake, lost):
    keys = record_in_segments(lake, [1, 2, 2])
    record_in_segments(lake, [2], episode_id="whole", worker="other")
    data = lose(lake, keys[lost])
    deliver(lake, keys[lost], b"damaged")
    assert live_ids(lake) == ["whole"]
    compact(lake, stale_after=0)
    drawn = lake.sampler("fifo", where="status = 'completed'", live=True, poll_seconds=0)
    assert [sample.episode_id for sample in drawn.take(1)] == ["whole"]
    with pytest.raises(TimeoutError):
        drawn.take(1, timeout=0.1)
    lake.store.delete(keys[lost])
    deliver(lake, keys[lost], data)
    retry(lake)
    compact(lake)
    drawn = lake.sampler("fifo", where="status = 'completed'", live=True, poll_seconds=0)
    assert sorted(sample.episode_id for sample in drawn.take(2)) == ["long", "whole"]


def test_an_end_that_says_nothing_of_steps_is_believed(lake):
    """Segments of writers before the field was there, which an update finds in landing."""
    events = pa.ipc.open_stream(segment_bytes(events_of(episode_id(1), steps=3))).read_all()
    fields = [field for field in EVENT_SCHEMA.field("end").type if field.name != "n_steps"]
    ends = events["end"].combine_chunks()
    older = pa.StructArray.from_arrays([ends.field(field.name) for field in fields], fields=fields, mask=ends.is_null())
    events = events.set_column(events.schema.get_field_index("end"), "end", older)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, events.schema) as stream:
        stream.write_table(events)
    deliver(lake, SegmentName("run", "old", 0, 0).key, sink.getvalue().to_pybytes())
    assert live_ids(lake) == [episode_id(1)]
    compact(lake)
    assert (row(lake, episode_id(1))["status"], row(lake, episode_id(1))["n_steps"]) == ("completed", 3)


def test_an_episode_that_one_writer_recorded_twice_is_complete_with_the_steps_of_both(lake):
    with lake.writer("run", "w") as writer:
        for _ in range(2):
            record_episode(writer, 1)
    compact(lake)
    assert (row(lake, "e0001")["status"], row(lake, "e0001")["n_steps"]) == ("completed", 6)


def test_surplus_steps_are_no_complete_episode_either(lake):
    events = events_of(episode_id(1), steps=3)
    events[-1] = events[-1]._replace(row=events[-1].row | {"n_steps": 2})
    deliver(lake, SegmentName("run", "w", 0, 0).key, segment_bytes(events))
    assert live_ids(lake) == []
    compact(lake, stale_after=0)
    assert row(lake, episode_id(1))["stop_reason"] == "3 steps arrived and its end says 2"


def test_compact_says_which_episodes_wait_for_lost_steps(lake):
    keys = record_in_segments(lake, [1, 2, 2])
    lose(lake, keys[2])
    with lake.writer("run", "open") as writer:
        record_episode(writer, 7, end=False)
    result = CliRunner().invoke(cli, ["--lake", lake.uri, "compact"], prog_name="trajlake")
    assert result.exit_code == 0, result.output
    assert "1 episode has not ended yet" in result.stdout
    assert "1 episode waits for events that were recorded and have not arrived: long" in result.stdout
    result = CliRunner().invoke(cli, ["--lake", lake.uri, "segments", "--pending", "-o", "json"], prog_name="trajlake")
    assert '"long"' in result.stdout


def test_failed_episodes_and_rates_count_what_its_end_said(lake):
    keys = record_in_segments(lake, [1, 2, 2], success=False, reward=0.0)
    lose(lake, keys[2])
    record_in_segments(lake, [1], episode_id="whole", worker="other")
    compact(lake, stale_after=0)
    frame = lake.snapshot().episodes.filter(pl.col("success")).collect()
    assert frame["episode_id"].to_list() == ["whole"]
    result = CliRunner().invoke(cli, ["--lake", lake.uri, "episodes", "--failed", "-o", "json"], prog_name="trajlake")
    assert '"long"' in result.stdout
    assert '"whole"' not in result.stdout


def test_what_comes_of_a_sealed_episode_is_added_though_it_is_still_not_whole(lake):
    with lake.writer("run", "w") as writer:
        episode = record_episode(writer, 1, end=False)
        writer.flush()
        compact(lake, stale_after=0)
        episode.step(message="after all")
    compact(lake, stale_after=3600)
    assert (row(lake, "e0001")["status"], row(lake, "e0001")["n_steps"]) == ("aborted", 4)
    assert_sound(lake)


def doctor(lake):
    return CliRunner().invoke(cli, ["--lake", lake.uri, "doctor"], env=dict(os.environ))


def test_doctor_counts_segments_that_vanished_before_they_were_compacted(lake):
    keys = record_in_segments(lake, [1, 1])
    others = record_in_segments(lake, [1], episode_id="other", worker="other")
    assert doctor(lake).exit_code == 0
    data = lose(lake, keys[-1])
    for _ in range(2):
        lost = doctor(lake)
        assert lost.exit_code == 1
        assert "1 vanished before they were compacted: 1 of landing/run/w/000000" in lost.stderr
        compact(lake)
    deliver(lake, keys[-1], data)
    assert doctor(lake).exit_code == 0
    compact(lake)
    for key in keys + others:  # as vacuum does, later
        lake.store.delete(key)
    assert doctor(lake).exit_code == 0

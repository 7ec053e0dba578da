"""Quarantine and another try."""

from pathlib import Path

import polars as pl
import pytest
from tests.pipelines.landed import episode_id, events_of, land, segment_bytes
from tests.rollouts import assert_sound

import trajlake
from trajlake.errors import UsageError
from trajlake.ingest.segment import Event, SegmentName, read_tail
from trajlake_pipelines.compact import compact
from trajlake_pipelines.requeue import retry

pytestmark = pytest.mark.beam


def quarantined(lake):
    return lake.segments().filter(pl.col("state") == "quarantined").collect()


@pytest.fixture
def lake(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    land(lake.store, range(3))
    for number in (3, 4):
        path = Path(lake.uri) / SegmentName("run", "w", 0, number).key
        path.write_bytes(segment_bytes(events_of(episode_id(number)))[:300])
    compact(lake)
    assert len(quarantined(lake)) == 2
    return lake


def test_a_segment_that_was_mended_is_read_by_the_next_compaction(lake):
    key = SegmentName("run", "w", 0, 3).key
    (Path(lake.uri) / key).write_bytes(segment_bytes(events_of(episode_id(3))))
    assert retry(lake, [key]) == [key]
    assert len(quarantined(lake)) == 1
    report = compact(lake)
    assert (report.episodes, report.quarantined_segments) == (1, 0)
    assert len(lake.segments().collect()) == 5
    assert_sound(lake)


def test_one_that_is_still_broken_is_quarantined_again(lake):
    assert len(retry(lake)) == 2
    assert compact(lake).quarantined_segments == 2
    assert len(quarantined(lake)) == 2
    assert retry(lake) != []


@pytest.mark.parametrize("with_descriptor", [True, False])
def test_a_segment_with_an_event_of_no_episode_stops_nothing_else(lake, with_descriptor):
    """Writers refuse such events, and did not always."""
    with lake.writer("run", "open") as writer:
        writer.episode(episode_id="open").step(message="m")  # waits, so that ids are put in order
    score = Event("score", None, 0, 4, 0, {"name": "judge", "value": 1.0})
    data = segment_bytes([*events_of(episode_id(9)), score])
    if not with_descriptor:
        data = data[: read_tail(data)["stream_bytes"]]
    path = Path(lake.uri) / SegmentName("run", "w", 0, 9).key
    path.write_bytes(data)
    land(lake.store, [10], worker="other")
    report = compact(lake)
    assert (report.episodes, report.quarantined_segments) == (1, 1)
    assert "names no episode" in quarantined(lake).filter(pl.col("path").str.ends_with(path.name))["reason"][0]
    assert_sound(lake)


def test_a_key_that_is_not_in_quarantine_is_refused(lake):
    with pytest.raises(UsageError, match="is not in quarantine"):
        retry(lake, [SegmentName("run", "w", 0, 0).key])

"""What a writer says about itself."""

import logging

import pytest
from tests.rollouts import record_episode

import trajlake
from trajlake.ingest.writer import Writer
from trajlake.storage.wrappers import FaultyStore

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path):
    return FaultyStore(trajlake.create(tmp_path / "lake").store)


def test_the_counts_follow_the_events(store):
    writer = Writer(store, "run", "w")
    record_episode(writer, 1)
    record_episode(writer, 2, end=False)
    assert (writer.stats.episodes, writer.stats.open_episodes, writer.stats.events) == (2, 1, 9)
    writer.flush()
    stats = writer.stats
    assert (stats.durable_events, stats.spooled_events, stats.queued_events) == (9, 0, 0)
    assert (stats.segments, stats.retries, stats.dropped_events, stats.waits) == (1, 0, 0, 0)
    assert (stats.waiting_segments, stats.spool_bytes, stats.memory_bytes, stats.lag_seconds) == (0, 0, 0, 0.0)
    assert stats.bytes == sum(info.size for info in store.list("landing/"))
    writer.close()


def test_while_the_store_is_down_the_lag_grows_and_the_spool_fills(store):
    store._probability = 1.0
    writer = Writer(store, "run", "w", segment_seconds=0.1)
    record_episode(writer, 1)
    while writer.stats.retries < 2 or writer.stats.spooled_events < 5:
        pass
    stats = writer.stats
    assert (stats.durable_events, stats.waiting_segments) == (0, 1)
    assert stats.spool_bytes > 0
    assert writer.stats.lag_seconds > stats.lag_seconds > 0
    store._probability = 0.0
    assert writer.close().complete
    assert writer.stats.lag_seconds == 0.0


def test_a_line_is_logged_from_time_to_time_and_not_when_nothing_happened(store, caplog):
    with caplog.at_level(logging.INFO, "trajlake"), Writer(store, "run", "w", log_seconds=0.05) as writer:
        record_episode(writer, 1)
        writer.flush()
        while not any("5 durable in 1 segments" in line for line in caplog.messages):
            pass
        count = len(caplog.messages)
        for _ in range(5):
            writer.flush()
    lines = [line for line in caplog.messages if line.startswith("run run worker w: 5 events of 1 episodes")]
    assert lines
    assert len(caplog.messages) <= count + 1


def test_prometheus_reads_the_same_numbers(store):
    client = pytest.importorskip("prometheus_client")
    from trajlake.ingest.prometheus import register

    registry = client.CollectorRegistry()
    with Writer(store, "run", "w") as writer:
        collector = register(writer, registry)
        record_episode(writer, 1)
        writer.flush()
        labels = {"run": "run", "worker": "w"}
        assert registry.get_sample_value("trajlake_writer_durable_events_total", labels) == 5
        assert registry.get_sample_value("trajlake_writer_lag_seconds", labels) == 0
        text = client.generate_latest(registry).decode()
        assert 'trajlake_writer_segments_total{run="run",worker="w"} 1.0' in text
        registry.unregister(collector)

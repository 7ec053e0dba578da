"""A Writer's metrics for Prometheus. Needs the extra `prometheus`; nothing is started here, and nothing is sent.

from prometheus_client import start_http_server
from trajlake.ingest.prometheus import register

register(writer)
start_http_server(9090)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trajlake.errors import UsageError

if TYPE_CHECKING:
    from trajlake.ingest.writer import Writer

# Name in Prometheus, field of WriterStats, and what it says.
_COUNTERS = (
    ("trajlake_writer_episodes", "episodes", "Episodes that were begun"),
    ("trajlake_writer_events", "events", "Events that were recorded"),
    ("trajlake_writer_durable_events", "durable_events", "Events that the object store has"),
    ("trajlake_writer_dropped_events", "dropped_events", "Events that were dropped because memory was full"),
    ("trajlake_writer_segments", "segments", "Segments that were uploaded"),
    ("trajlake_writer_sent_bytes", "bytes", "Bytes that were uploaded"),
    ("trajlake_writer_retries", "retries", "Uploads that failed and were tried again"),
    ("trajlake_writer_waits", "waits", "Times that a rollout waited for room in memory"),
    ("trajlake_writer_wait_seconds", "wait_seconds", "Seconds that rollouts waited for room in memory"),
    ("trajlake_writer_damaged_segments", "damaged_segments", "Segments that were damaged on the local disk"),
    ("trajlake_writer_spilled_segments", "spilled_segments", "Segments that went another way because one was full"),
)
_GAUGES = (
    ("trajlake_writer_open_episodes", "open_episodes", "Episodes that have not ended"),
    ("trajlake_writer_spooled_events", "spooled_events", "Events that wait on local disk"),
    ("trajlake_writer_queued_events", "queued_events", "Events that are in memory only"),
    ("trajlake_writer_waiting_segments", "waiting_segments", "Closed segments that the store does not have yet"),
    ("trajlake_writer_spool_bytes", "spool_bytes", "Bytes that wait on local disk"),
    ("trajlake_writer_memory_bytes", "memory_bytes", "Bytes that wait in memory"),
    ("trajlake_writer_lag_seconds", "lag_seconds", "Seconds since everything was durable"),
)


class WriterCollector:
    """Gives the metrics of one writer whenever Prometheus asks, labelled with run and worker."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Any]:
        """The metric families, as prometheus_client wants them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._writer.stats
        for family, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, field, text in metrics:
                metric = family(name, text, labels=["run", "worker"])
                metric.add_metric([stats.run, stats.worker], getattr(stats, field))
                yield metric


def register(writer: Writer, registry: Any = None) -> WriterCollector:
    """Add the writer's metrics to `registry`, by default prometheus_client's own. Unregister what is returned when
    the writer is closed and another one is to come. Raises UsageError where prometheus_client is not installed."""
    try:
        from prometheus_client import REGISTRY
    except ImportError as error:
        raise UsageError("metrics for Prometheus need prometheus-client: pip install 'trajlake[prometheus]'") from error
    collector = WriterCollector(writer)
    (registry or REGISTRY).register(collector)
    return collector

"""`compact --watch`: passes as segments arrive, each with one line of what it did, until it is told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from trajlake.errors import CommitStateUnknown, StoreUnavailable, TrajlakeError, UsageError
from trajlake.lake import Lake
from trajlake_pipelines.compact import OPTIMIZE_AFTER, CompactionReport, compact
from trajlake_pipelines.runners import Runner

LONGEST_PAUSE_SECONDS = 60.0

PassLine = dict[str, Any]
"""What one pass did: time, seconds, the counts of its report, or the error that ended it."""


class Metrics:
    """What Prometheus can fetch of a watching compactor. Raises UsageError where its client library is missing."""

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
        except ImportError as error:
            raise UsageError("metrics need prometheus-client: pip install 'trajlake[prometheus]'") from error
        registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"trajlake_compact_{name}", meaning, registry=registry)
            for name, meaning in (
                ("passes", "Passes that did something."),
                ("failures", "Passes that ended with an error."),
                ("segments", "Landing segments consumed."),
                ("bytes", "Bytes of landing segments read."),
                ("events", "Events read."),
                ("episodes", "Episodes added."),
                ("duplicate_episodes", "Episodes that were there already."),
                ("quarantined_segments", "Segments that could not be read."),
                ("incomplete", "Times that an episode was seen of which more was recorded than had arrived."),
            )
        }
        self._lag = Gauge("trajlake_compact_lag_seconds", "Age of the oldest new segment of a pass.", registry=registry)
        self._pending = Gauge("trajlake_compact_pending_episodes", "Episodes that have not ended.", registry=registry)
        self._last = Gauge("trajlake_compact_last_look_timestamp_seconds", "When landing was read.", registry=registry)
        self._server, self._thread = start_http_server(port, address, registry=registry)

    def looked(self) -> None:
        """Landing was read, whether there was anything or not."""
        self._last.set(time.time())

    def add(self, report: CompactionReport | None) -> None:
        """A pass ended; without a report it failed."""
        self._counters["passes" if report else "failures"].inc()
        if report is not None:
            for name, value in asdict(report).items():
                if name in self._counters:
                    self._counters[name].inc(len(value) if isinstance(value, tuple) else value)
            self._lag.set(report.lag_seconds)
            self._pending.set(report.pending_episodes)

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def watch(
    lake: Lake,
    stop: threading.Event,
    on_pass: Callable[[PassLine], None],
    *,
    every: float = 5.0,
    stale_after: float | None = None,
    runner: Runner | str = "local",
    metrics: Metrics | None = None,
    optimize_after: int = OPTIMIZE_AFTER,
) -> None:
    """Look at landing `every` so many seconds and compact what is there, until `stop` is set; a pass that has begun is
    finished. `on_pass` gets a line for every pass that did something or failed. `optimize_after`: see `compact`.

    A store that does not answer is no end: it is asked again, after pauses that grow to a minute. Raises what asking
    again cannot mend (UsageError, LakeMissing, AccessRefused).
    """
    pause = every
    while not stop.is_set():
        began = time.monotonic()
        line: PassLine = {"time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")}
        try:
            report = compact(lake, stale_after=stale_after, runner=runner, optimize_after=optimize_after)
        except (StoreUnavailable, CommitStateUnknown) as error:
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
            _add(metrics, None)
            on_pass(line | {"seconds": round(time.monotonic() - began, 3), "error": str(error), "again_in": pause})
        except TrajlakeError as error:
            _add(metrics, None)
            on_pass(line | {"seconds": round(time.monotonic() - began, 3), "error": str(error)})
            raise
        else:
            pause = every
            if metrics is not None:
                metrics.looked()
            if report.compactions:
                _add(metrics, report)
                on_pass(line | {"seconds": round(time.monotonic() - began, 3), **asdict(report)})
        stop.wait(pause)


def _add(metrics: Metrics | None, report: CompactionReport | None) -> None:
    if metrics is not None:
        metrics.add(report)

"""`compact`: plan ▸ Beam over units ▸ commit. The pipeline is one line, and what crosses it is small.

    Create(units) ▸ ParDo(key by unit) ▸ GroupByKey ▸ ParDo(read, merge, dedupe, sort, write)

What the units did stands in the store, not in what the pipeline returns, so any Beam runner will do and a
compaction that died resumes with the units it has.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from trajlake.errors import TrajlakeError, UsageError
from trajlake.lake import Lake
from trajlake.storage import ObjectStore
from trajlake_pipelines.merge import Sums
from trajlake_pipelines.plan import Plan, Progress, Unit, job_folder, load_or_make_plan, unit_from_json
from trajlake_pipelines.publish import publish
from trajlake_pipelines.unit import UnitResult, load_result, run_unit

RUNNERS = ("local",)
PROCESSES_PAY_FROM = 256 << 20  # bytes of segments: below, starting processes costs more than they save


@dataclass(frozen=True)
class CompactionReport:
    """What one `compact` did. Events in = steps + begins_and_ends + scores + retractions + duplicate_events +
    pending_events; `quarantined_segments` could not be read, so their events are not counted."""

    compactions: int = 0
    segments: int = 0
    quarantined_segments: int = 0
    events: int = 0
    steps: int = 0
    begins_and_ends: int = 0
    scores: int = 0
    retractions: int = 0
    duplicate_events: int = 0
    pending_events: int = 0
    episodes: int = 0
    duplicate_episodes: int = 0
    replaced_episodes: int = 0
    sealed_episodes: int = 0
    pending_episodes: int = 0


class RunUnit(beam.DoFn):
    """Does one unit. The store travels in the constructor: pipeline options do not reach every worker."""

    def __init__(self, store: ObjectStore, compaction: int) -> None:
        self._store = store
        self._compaction = compaction

    def process(self, element: tuple[int, Iterable[dict[str, Any]]]) -> Iterator[int]:
        number, units = element
        for unit in units:
            run_unit(self._store, self._compaction, unit_from_json(unit))
        yield number


def by_number(unit: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The key spreads units over workers: what follows the GroupByKey runs wherever there is room."""
    return unit["number"], unit


def compact(
    lake: Lake,
    *,
    stale_after: float | None = None,
    runner: str = "local",
    on_progress: Progress | None = None,
) -> CompactionReport:
    """Bring what landed into the tables. Running it twice changes nothing; running it beside itself is safe.

    `stale_after` (seconds): episodes without an end whose last event is older are sealed as aborted. `on_progress`
    is called with units done and units planned. First finishes a compaction that another process began and left.
    """
    if runner not in RUNNERS:
        raise UsageError(f"runner must be one of {', '.join(RUNNERS)}, not {runner!r}")
    lake.check()
    reports: list[CompactionReport] = []
    while True:
        plan = load_or_make_plan(lake.store, stale_after=stale_after)
        if plan is None or not _has_news(plan, reports):
            break
        reports.append(_carry_out(lake.store, plan, on_progress))
    return _total(reports)


def _has_news(plan: Plan, reports: list[CompactionReport]) -> bool:
    """After the first compaction a further one is for what arrived meanwhile; two are enough for one call."""
    return bool(plan.units or plan.quarantined) and len(reports) < 2


def _carry_out(store: ObjectStore, plan: Plan, on_progress: Progress | None) -> CompactionReport:
    done = {info.key for info in store.list(f"{plan.folder}/units/") if info.key.endswith(".json")}
    todo = [unit for unit in plan.units if f"{plan.folder}/units/{unit.number:06d}.json" not in done]
    if todo:
        with _watched(store, plan, on_progress):
            run_pipeline(store, plan.number, todo)
    results = [load_result(store, plan.number, unit.number) for unit in plan.units]
    publish(store, plan, results)
    return _report(plan, results)


def run_pipeline(store: ObjectStore, compaction: int, units: list[Unit]) -> None:
    """The pipeline, on Beam's in-process runner; in several processes where the input pays for their start."""
    size = sum(segment.size for unit in units for segment in unit.segments)
    processes = min(os.cpu_count() or 1, len(units)) if size >= PROCESSES_PAY_FROM else 1
    options = PipelineOptions(
        [],
        direct_num_workers=processes,
        direct_running_mode="multi_processing" if processes > 1 else "in_memory",
    )
    pipeline = beam.Pipeline("FnApiRunner", options=options)
    _ = (
        pipeline
        | "units" >> beam.Create([asdict(unit) for unit in units], reshuffle=False)
        | "key" >> beam.Map(by_number)
        | "spread" >> beam.GroupByKey()
        | "merge" >> beam.ParDo(RunUnit(store, compaction))
    )
    with _quiet_beam(), _clear_errors():
        pipeline.run().wait_until_finish()


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Beam logs about Google libraries that this does not use, and a traceback beside each exception."""
    logger = logging.getLogger("apache_beam")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _clear_errors() -> Iterator[None]:
    """An error of a unit as itself where it crossed no process, else as one line."""
    try:
        yield
    except TrajlakeError:
        raise
    except Exception as error:  # a runner raises what it likes
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise TrajlakeError(f"the pipeline failed: {reason}; run it again, what is done stays done") from error


@contextmanager
def _watched(store: ObjectStore, plan: Plan, on_progress: Progress | None) -> Iterator[None]:
    """Progress by the results that appear in the store, whichever process puts them there."""
    if on_progress is None:
        yield
        return
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.5):
            keys = [info.key for info in store.list(f"{plan.folder}/units/") if info.key.endswith(".json")]
            on_progress(len(keys), len(plan.units))

    on_progress(0, len(plan.units))
    watcher = threading.Thread(target=watch, name="trajlake-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    on_progress(len(plan.units), len(plan.units))


def _report(plan: Plan, results: list[UnitResult]) -> CompactionReport:
    sums = Sums()
    for result in results:
        sums.add(Sums(**result.sums))
    broken = set(plan.quarantined) | {key for result in results for key in result.quarantined}
    segments = {segment.key for unit in plan.units for segment in unit.segments} | set(plan.quarantined)
    return CompactionReport(
        compactions=1,
        segments=len(segments),
        quarantined_segments=len(broken),
        **vars(sums),
        episodes=sum(result.episodes for result in results),
        duplicate_episodes=sum(len(result.duplicates) for result in results),
        replaced_episodes=sum(len(result.replaced) for result in results),
        sealed_episodes=sum(len(result.sealed) for result in results),
        pending_episodes=sum(len(set(result.pending) - set(result.sealed)) for result in results),
    )


def _total(reports: list[CompactionReport]) -> CompactionReport:
    totals = {name: sum(getattr(report, name) for report in reports) for name in CompactionReport.__dataclass_fields__}
    return CompactionReport(**totals)


__all__ = ["CompactionReport", "compact", "job_folder", "run_pipeline"]

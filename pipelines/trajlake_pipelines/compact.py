"""`compact`: what landed becomes rows of the tables, once and only once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from trajlake.lake import Lake
from trajlake_pipelines.job import carry_out
from trajlake_pipelines.merge import Sums
from trajlake_pipelines.optimize import optimize
from trajlake_pipelines.plan import Plan, Progress, load_or_make_plan
from trajlake_pipelines.runners import Runner
from trajlake_pipelines.unit import UnitResult

log = logging.getLogger("trajlake")

OPTIMIZE_AFTER = 100  # changes; each leaves a file in every table, and a pass reads the list of files


@dataclass(frozen=True)
class CompactionReport:
    """What one `compact` did. Events in = steps + begins_and_ends + scores + retractions + duplicate_events +
    pending_events; `quarantined_segments` could not be read, so their events are not counted. `bytes` are those of
    the segments; `lag_seconds` is the age of the oldest new segment when it was planned, by the server's clock; of the
    episodes `incomplete`, which are pending too, more was recorded than has arrived, and of those that are `unknown`
    only scores and retractions have; of `released_episodes` something
    waited for a week in vain, and waits no longer; `merged_files` are small files of
    `steps` that were merged afterwards."""

    compactions: int = 0
    segments: int = 0
    quarantined_segments: int = 0
    bytes: int = 0
    lag_seconds: float = 0.0
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
    released_episodes: int = 0
    incomplete: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    merged_files: int = 0


def compact(
    lake: Lake,
    *,
    stale_after: float | None = None,
    runner: Runner | str = "local",
    on_progress: Progress | None = None,
    optimize_after: int = OPTIMIZE_AFTER,
) -> CompactionReport:
    """Bring what landed into the tables. Running it twice changes nothing; running it beside itself is safe.

    `stale_after` (seconds): episodes that are not complete and whose last event is older are sealed as aborted.
    `runner` is a Runner or the name of one. `on_progress` is called with units done and units planned. First finishes
    what another process began and left. After each `optimize_after` changes of the lake, whoever made them, the small
    files that they left are merged (0: never), so that the next ones stay quick. Raises UsageError, and a TrajlakeError
    where the pipeline fails.
    """
    where = Runner(runner) if isinstance(runner, str) else runner
    lake.check()
    reports: list[CompactionReport] = []
    incomplete: set[str] = set()
    unknown: set[str] = set()
    # After all that was there a further compaction is for what arrived meanwhile; one such is enough for one call.
    rounds = 0
    numbers: list[int] = []
    while rounds < 2:
        plan = load_or_make_plan(lake.store, stale_after=stale_after)
        if plan is None:
            break
        results = carry_out(lake.store, plan, where, on_progress)
        numbers.append(plan.number)
        if plan.kind == "compact":
            done = [UnitResult(**result) for result in results]
            reports.append(_report(plan, done))
            incomplete |= {episode for result in done for episode in result.incomplete}
            incomplete -= {episode for result in done for episode in result.sealed}
            # Those of before are read again, until their episode comes.
            unknown = {episode for result in done for episode in result.unknown}
            rounds += not plan.details.get("more", False)
    total = replace(_total(reports), incomplete=tuple(sorted(incomplete)), unknown=tuple(sorted(unknown)))
    if optimize_after and numbers and numbers[-1] // optimize_after > (numbers[0] - 1) // optimize_after:
        merged = optimize(lake, runner=where)
        total = replace(total, merged_files=max(0, merged.files_before - merged.files_after))
        for reason in merged.unreadable:
            log.error("small files are not merged: %s", reason)
    return total


def _report(plan: Plan, results: list[UnitResult]) -> CompactionReport:
    sums = Sums()
    for result in results:
        sums.add(Sums(**result.sums))
    broken = set(plan.quarantined) | {key for result in results for key in result.quarantined}
    segments = {segment.key: segment for unit in plan.units for segment in unit.segments}
    segments |= {segment.key: segment for segment in plan.quarantined_segments}
    fresh = [segment.modified_at for segment in segments.values() if not segment.again]
    return CompactionReport(
        compactions=1,
        segments=len(segments),
        quarantined_segments=len(broken),
        bytes=sum(segment.size for segment in segments.values()),
        lag_seconds=round(max(0.0, plan.created_at - min(fresh) / 1e6), 3) if fresh else 0.0,
        **vars(sums),
        episodes=sum(result.episodes for result in results),
        duplicate_episodes=sum(len(result.duplicates) for result in results),
        replaced_episodes=sum(len(result.replaced) for result in results),
        sealed_episodes=sum(len(result.sealed) for result in results),
        pending_episodes=sum(len(set(result.pending) - set(result.sealed)) for result in results),
        released_episodes=len(plan.details.get("released", ())),
    )


def _total(reports: list[CompactionReport]) -> CompactionReport:
    names = CompactionReport.__dataclass_fields__.keys() - {"incomplete", "unknown", "lag_seconds"}
    totals: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in names}
    return CompactionReport(**totals, lag_seconds=max((report.lag_seconds for report in reports), default=0.0))

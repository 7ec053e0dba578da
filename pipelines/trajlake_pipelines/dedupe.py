"""`dedupe`: mark episodes that repeat another one. Nothing is deleted; readers leave them out where asked to."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from trajlake.errors import UsageError
from trajlake.lake import Lake
from trajlake_pipelines import dedupe_job, near
from trajlake_pipelines.job import carry_out_own
from trajlake_pipelines.plan import Progress
from trajlake_pipelines.runners import Runner

THRESHOLD = 0.8


@dataclass(frozen=True)
class DedupeReport:
    """How many episodes there are, and how many of them are marked as duplicates of another one."""

    depth: str
    episodes: int
    duplicates: int


def dedupe(
    lake: Lake,
    *,
    depth: str = "content",
    threshold: float = THRESHOLD,
    runner: Runner | str = "local",
    on_progress: Progress | None = None,
) -> DedupeReport:
    """Set `duplicate_of` on every episode that repeats an earlier one, and take it off where that no longer holds.

    `content`: the same actions and observations (`content_hash`). `near`: that, and an estimated Jaccard similarity of
    at least `threshold` (0 to 1) between what was said and done. The marks are in column `duplicate_of`: a filter
    `duplicate_of IS NULL` leaves duplicates out. New episodes are unmarked until the next dedupe. Raises UsageError.
    """
    if depth not in dedupe_job.DEPTHS:
        raise UsageError(f"depth must be one of {', '.join(dedupe_job.DEPTHS)}, not {depth!r}")
    if not 0 < threshold <= 1:
        raise UsageError(f"threshold must be above 0 and at most 1, not {threshold}")
    if depth == "near":
        near.signature_version()  # says what is missing before anything is planned
    where = Runner(runner) if isinstance(runner, str) else runner
    lake.check()
    carry_out_own(
        lake.store,
        lambda store, number: dedupe_job.make_plan(store, number, depth=depth, threshold=threshold),
        where,
        on_progress,
    )
    snapshot = lake.snapshot()
    counts = snapshot.collect(snapshot.episodes.select(pl.len(), marked=pl.col("duplicate_of").is_not_null().sum()))
    return DedupeReport(depth, counts["len"].item(), counts["marked"].item())

"""`optimize`: fewer, larger files with the rollouts of one task side by side; the rows stay what they are."""

from __future__ import annotations

from dataclasses import dataclass

from trajlake.errors import UsageError
from trajlake.lake import Lake
from trajlake.table.commit import active_files
from trajlake.table.tables import open_table
from trajlake_pipelines import optimize_job
from trajlake_pipelines.job import carry_out_own
from trajlake_pipelines.plan import Progress
from trajlake_pipelines.runners import Runner

LEAST_TARGET_BYTES = 1 << 20


@dataclass(frozen=True)
class OptimizeReport:
    """Files of `steps` before and after, and their bytes; `episodes` is how many were moved. Where files are
    `unreadable`, nothing was."""

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    episodes: int
    unreadable: tuple[str, ...] = ()


def optimize(
    lake: Lake,
    *,
    target_bytes: int = optimize_job.TARGET_BYTES,
    everything: bool = False,
    runner: Runner | str = "local",
    on_progress: Progress | None = None,
) -> OptimizeReport:
    """Merge files of `steps` that are smaller than half of `target_bytes`, ordered by task; with `everything` rewrite
    the large ones, too. Small files of `episodes` and of the ledger are merged on the way.

    Safe beside compact, vacuum and readers: snapshots that are open go on reading the old files until a vacuum. While
    it runs a compaction waits for it (and helps, if it was left). Raises UsageError for a target below 1 MiB.
    """
    if target_bytes < LEAST_TARGET_BYTES:
        raise UsageError(f"a target of {target_bytes} bytes is too small: give at least {LEAST_TARGET_BYTES}")
    where = Runner(runner) if isinstance(runner, str) else runner
    lake.check()
    before = _files(lake)
    done = carry_out_own(
        lake.store,
        lambda store, number: optimize_job.make_plan(store, number, target_bytes=target_bytes, everything=everything),
        where,
        on_progress,
    )
    after = _files(lake)
    results = done[1] if done else []
    unreadable = tuple(sorted({result["unreadable"] for result in results if "unreadable" in result}))
    episodes = 0 if unreadable else sum(result["rows"] for result in results)
    return OptimizeReport(len(before), len(after), sum(before), sum(after), episodes, unreadable)


def _files(lake: Lake) -> list[int]:
    files = active_files(open_table(lake.store, "steps"))
    return [int(size) for size in files["size_bytes"].to_pylist()] if len(files) else []

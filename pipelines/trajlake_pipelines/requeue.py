"""`segments --retry`: give quarantined segments another try, after what was wrong was mended."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from trajlake.errors import UsageError
from trajlake.lake import Lake
from trajlake_pipelines import requeue_job
from trajlake_pipelines.job import carry_out_own
from trajlake_pipelines.runners import Runner


def retry(lake: Lake, keys: Iterable[str] = ()) -> list[str]:
    """Take segments (all, where `keys` is empty) out of quarantine; the next compaction reads them again.

    Returns their keys. Raises UsageError for a key that is not in quarantine.
    """
    lake.check()
    frame = lake.segments().filter(pl.col("state") == requeue_job.QUARANTINED).select("path")
    quarantined = set(frame.collect()["path"])
    wanted = set(keys) or quarantined
    if unknown := wanted - quarantined:
        raise UsageError(f"{min(unknown)} is not in quarantine; `trajlake segments --quarantined` lists what is")
    done = carry_out_own(
        lake.store, lambda store, number: requeue_job.make_plan(store, number, sorted(wanted)), Runner()
    )
    return [] if done is None else list(done[0].details["keys"])

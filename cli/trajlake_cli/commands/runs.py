"""`trajlake runs`: what is in the lake, one row a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trajlake_cli.options import lake_option, output_option, snapshot_option, what_is_missing
from trajlake_cli.output import Output, frame_rows, say
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    import polars as pl

    from trajlake import Snapshot


@click.command(short_help="List the runs.")
@lake_option
@snapshot_option
@output_option()
@pass_session
def command(session: Session, token: str | None, output: Output) -> None:
    """List the runs: episodes, tasks, steps, success, reward, first and last time.

    Success and reward are means over the episodes that have one. Column `retracted` counts episodes that were
    retracted; all other figures leave these out, as `stats` does.

    \b
    Examples:
      trajlake --lake ./lake runs
      trajlake --lake ./lake runs --output json
    """
    snapshot = session.snapshot(token)
    frame = _runs(snapshot)
    output.rows(frame_rows(frame), frame.columns, ("steps", "first", "tasks"))
    if frame.is_empty():
        say(what_is_missing(snapshot))
    say(f"snapshot {snapshot.token}")


def _runs(snapshot: Snapshot) -> pl.DataFrame:
    import polars as pl

    from trajlake.read.snapshot import USABLE
    from trajlake.read.tasks import HAS_TASK, THE_TASK

    frame = snapshot.episodes.group_by("run_id").agg(
        USABLE.sum().cast(pl.Int64).alias("episodes"),
        (~USABLE).sum().cast(pl.Int64).alias("retracted"),
        THE_TASK.filter(HAS_TASK & USABLE).n_unique().cast(pl.Int64).alias("tasks"),
        pl.col("n_steps").filter(USABLE).sum().cast(pl.Int64).alias("steps"),
        pl.col("success").filter(USABLE).cast(pl.Float64).mean().alias("success_rate"),
        pl.col("reward").filter(USABLE).mean().alias("reward_mean"),
        pl.col("started_at").filter(USABLE).min().alias("first"),
        pl.coalesce("ended_at", "started_at").filter(USABLE).max().alias("last"),
    )
    return snapshot.collect(frame).sort("last", "run_id", descending=[True, False], nulls_last=True)

"""`trajlake segments`: the ledger of what landed, and another try for what could not be read."""

from __future__ import annotations

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session

COLUMNS = ["path", "state", "events", "bytes", "compaction", "pending_episodes", "reason"]


@click.command(short_help="What became of each landed segment; try again.")
@lake_option
@click.option("--quarantined", is_flag=True, help="Only segments that could not be read, and why.")
@click.option("--pending", is_flag=True, help="Only segments with episodes that have not ended, or not arrived whole.")
@click.option("--retry", is_flag=True, help="Let the next compact read the quarantined segments again.")
@output_option()
@pass_session
def command(session: Session, quarantined: bool, pending: bool, retry: bool, output: Output) -> None:
    """List landed segments that compact has seen, and what became of their events.

    \b
    Examples:
      trajlake --lake ./lake segments --quarantined
      trajlake --lake ./lake segments --retry
    """
    lake = session.lake()
    lake.check()
    if retry:
        if pending:
            raise click.UsageError("--retry is for quarantined segments, not for pending ones")
        from trajlake_pipelines.requeue import retry as give_another_try

        keys = give_another_try(lake)
        output.rows([{"path": key} for key in keys], ["path"])
        say(f"{len(keys):,} segments are tried again by the next compact")
        return
    import polars as pl

    wanted = [state for state, on in (("quarantined", quarantined), ("pending", pending)) if on]
    frame = lake.segments()
    if wanted:
        frame = frame.filter(pl.col("state").is_in(wanted))
    rows = frame.select(COLUMNS).sort("path").collect()
    output.rows(rows.iter_rows(named=True), COLUMNS, ["compaction", "bytes", "events", "pending_episodes"])

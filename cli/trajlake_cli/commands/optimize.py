"""`trajlake optimize`: fewer, larger files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress
from trajlake_cli.runner_options import runner_of, runner_options
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Merge small files, rollouts of a task together.")
@lake_option
@click.option(
    "--target-mb", type=click.IntRange(min=1), default=64, metavar="MIB", help="Size that files are to have, in MiB."
)
@click.option("--all", "everything", is_flag=True, help="Rewrite large files, too, so that all are ordered by task.")
@runner_options
@output_option()
@pass_session
def command(session: Session, /, target_mb: int, everything: bool, output: Output, **where: Any) -> None:
    """Merge small files into large ones in which the rollouts of one task are neighbours.

    They are smaller then, and quicker to read. Rows stay what they are. Open snapshots go on reading the old files
    until a vacuum removes them.

    \b
    Examples:
      trajlake --lake ./lake optimize
      trajlake --lake ./lake optimize --all --target-mb 128
    """
    session.interrupted = "nothing is lost; run the same command again to finish"
    runner = runner_of(**where)
    lake = session.lake()
    lake.check()
    from trajlake_pipelines.optimize import optimize

    with progress("optimize") as report:
        done = optimize(lake, target_bytes=target_mb << 20, everything=everything, runner=runner, on_progress=report)
    if not output.is_table:
        output.rows([asdict(done)], list(asdict(done)))
    elif done.unreadable:
        click.echo("nothing was merged")
    elif not done.episodes:
        click.echo(f"nothing to merge: {done.files_after:,} files of steps, {done.bytes_after:,} bytes")
    else:
        click.echo(f"{done.files_before:,} files of steps became {done.files_after:,}")
        click.echo(f"{done.bytes_before:,} bytes became {done.bytes_after:,}")
    for reason in done.unreadable:
        say(f"{reason}; restore it from a backup or the bucket's versions, until then nothing is merged")
    if done.unreadable:
        click.get_current_context().exit(1)

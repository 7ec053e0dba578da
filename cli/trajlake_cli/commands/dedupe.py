"""`trajlake dedupe`: mark episodes that repeat another one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output
from trajlake_cli.progress import progress
from trajlake_cli.runner_options import runner_of, runner_options
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Mark episodes that repeat another one.")
@lake_option
@click.option(
    "--depth",
    type=click.Choice(["content", "near"]),
    default="content",
    help="content: the same actions and observations in the same task. near: also what is nearly the same in words and "
    "actions, in any task.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.8,
    metavar="SIMILARITY",
    help="With --depth near, the least Jaccard similarity of a duplicate.",
)
@runner_options
@output_option()
@pass_session
def command(session: Session, /, depth: str, threshold: float, output: Output, **where: Any) -> None:
    """Mark episodes that repeat an earlier one, in column duplicate_of.

    Nothing is deleted, and marks that no longer hold are taken off. What is sent twice under the same id needs no
    dedupe: compact keeps it once.

    \b
    Examples:
      trajlake --lake ./lake dedupe
      trajlake --lake ./lake dedupe --depth near --threshold 0.9
      trajlake --lake ./lake episodes --where 'duplicate_of IS NULL'
    """
    session.interrupted = "nothing is lost; run the same command again to finish"
    runner = runner_of(**where)
    lake = session.lake()
    lake.check()
    from trajlake_pipelines.dedupe import dedupe

    with progress("dedupe") as report:
        done = dedupe(lake, depth=depth, threshold=threshold, runner=runner, on_progress=report)
    if output.is_table:
        click.echo(f"{done.duplicates:,} of {done.episodes:,} episodes repeat another one")
    else:
        output.rows([asdict(done)], list(asdict(done)))

"""`trajlake score`: what an evaluation found later, as scores of the episodes that it is about."""

from __future__ import annotations

from collections.abc import Sequence

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session

_SHOWN = 5


@click.command(short_help="Add the verdicts of an evaluation to episodes.")
@click.argument("reports", nargs=-1, required=True, metavar="REPORT...", type=click.Path())
@lake_option
@click.option("--run", metavar="NAME", show_default="all runs", help="The run that was evaluated.")
@click.option("--dry-run", is_flag=True, help="Say what would be scored, and add nothing.")
@output_option()
@pass_session
def command(session: Session, reports: Sequence[str], run: str | None, dry_run: bool, output: Output) -> None:
    """Read evaluation reports of SWE-bench, and score the episodes of their instances: resolved is 1 or 0.

    A report names instances (the episodes' task_id) and not attempts: an instance of which several episodes are there
    is left out, and --run says which are meant. It is a component of `rewards`, and the episode's `success`, in the
    tables after the next compaction. Scoring twice changes nothing. Exit code 1 where an instance could not be scored.

    \b
    Examples:
      trajlake --lake ./lake score deepseek.deepseek_chat_dev.json --run chat-dev
      trajlake --lake ./lake score reports/*.json --dry-run
    """
    from dataclasses import asdict

    from trajlake.formats.swe_bench import score_report

    lake = session.lake()
    found = [score_report(lake, report, run=run, dry_run=dry_run) for report in reports]
    lists = ("unmatched", "ambiguous", "already", "different")
    rows = [
        {**asdict(each), "file": str(each.path)} | {name: len(getattr(each, name)) for name in lists} for each in found
    ]
    output.rows(rows, ["file", "instances", "resolved", "unresolved", *lists])
    for each in found:
        for name, words in (
            ("unmatched", "no episode has this task"),
            ("ambiguous", "several episodes have this task: name their run (--run)"),
            ("different", "was scored otherwise before, and is left so"),
        ):
            instances: list[str] = getattr(each, name)
            for instance in instances[:_SHOWN]:
                say(f"{each.path}: {instance}: {words}")
            if len(instances) > _SHOWN:
                say(f"{each.path}: … and {len(instances) - _SHOWN:,} more {name}")
    left = sum(len(each.unmatched + each.ambiguous + each.different) for each in found)
    sums = {name: sum(row[name] for row in rows) for name in ("instances", "resolved", "unresolved", "already")}
    say(
        f"{sums['instances']:,} instances = {sums['resolved']:,} resolved + {sums['unresolved']:,} not resolved + "
        f"{sums['already']:,} scored before + {left:,} left out"
    )
    if dry_run:
        say("nothing was written (--dry-run)")
    elif sums["resolved"] + sums["unresolved"]:
        say("next: `trajlake compact` puts them into the tables")
    if left:
        click.get_current_context().exit(1)

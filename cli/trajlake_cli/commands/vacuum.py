"""`trajlake vacuum`: remove files that no snapshot within the retention period needs."""

from __future__ import annotations

from collections import Counter

import click

from trajlake_cli.options import Duration, lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import count


@click.command(short_help="Remove files that were replaced long ago.")
@lake_option
@click.option(
    "--older-than",
    type=Duration(),
    default="7d",
    metavar="DURATION",
    help="Keep what a snapshot of this age may still read: 36h, 7d, 4w.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed, and why.")
@click.option("--force", is_flag=True, help="Allow less than the retention period of 7 days; open readers may break.")
@output_option()
@pass_session
def command(session: Session, older_than: float, dry_run: bool, force: bool, output: Output) -> None:
    """Remove files that were replaced long ago. Snapshots older than that can then no longer be read.

    \b
    Examples:
      trajlake --lake ./lake vacuum --dry-run
      trajlake --lake ./lake vacuum --older-than 30d
    """
    from trajlake.table.retention import vacuum

    report = vacuum(session.lake(), older_than_hours=older_than / 3600, dry_run=dry_run, force=force)
    output.rows(
        ({"file": file.key, "bytes": file.bytes, "why": file.reason} for file in report.files),
        ["file", "bytes", "why"],
    )
    if not report.files:
        say("nothing to remove: whatever is no longer needed is younger than that")
        return
    reasons = Counter(file.reason for file in report.files)
    why = ", ".join(f"{number:,} because {reason}" for reason, number in sorted(reasons.items()))
    objects = f"{count(len(report.files), 'object')} ({report.bytes:,} bytes)"
    if dry_run:
        say(f"{objects} would be removed: {why}; nothing was (--dry-run)")
    else:
        say(f"{objects} removed: {why}")

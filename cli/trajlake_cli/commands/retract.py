"""`trajlake retract`: remove episodes for good."""

from __future__ import annotations

from dataclasses import asdict

import click

from trajlake_cli.options import lake_option, output_option, where_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Remove episodes for good, from old versions too.")
@lake_option
@click.argument("episode_ids", nargs=-1, metavar="[EPISODE_ID]...")
@where_option
@click.option("--reason", required=True, metavar="TEXT", help="Why: a name, a licence, contamination. It is kept.")
@click.option(
    "--export",
    "exports",
    multiple=True,
    type=click.Path(exists=True, file_okay=False),
    help="A folder of an export to look through, beside those that the lake knows of. May be given several times.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_option()
@pass_session
def command(
    session: Session,
    episode_ids: tuple[str, ...],
    where: str | None,
    reason: str,
    exports: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    output: Output,
) -> None:
    """Remove episodes from the tables, from every older version of them and from what landed. Cannot be undone.

    A mark that only keeps an episode out of sampling is made by a worker: writer.retract(episode, reason).

    \b
    Examples:
      trajlake --lake ./lake retract 0198c0de-… --reason "names a customer"
      trajlake --lake ./lake retract --where "task_id = 'leaked'" --reason contaminated --dry-run
    """
    session.interrupted = "run the same command again to finish"
    lake = session.lake()
    from trajlake_pipelines.retract import retract

    if not (dry_run or yes):
        first = retract(lake, episode_ids, where=where, reason=reason, exports=exports, dry_run=True)
        click.confirm(f"Remove {first.episodes:,} episodes for good?", abort=True, err=True)
    done = retract(lake, episode_ids, where=where, reason=reason, exports=exports, dry_run=dry_run)
    if output.is_table:
        output.rows([asdict(hit) for hit in done.used_by], ["kind", "name", "part", "episodes"])
    else:
        output.rows([asdict(done)], list(asdict(done)))
    verb = "would be removed" if dry_run else "removed"
    say(f"{done.episodes:,} episodes and {done.objects:,} objects that held them ({done.bytes:,} bytes) {verb}")
    if done.used_by:
        users = len({(hit.kind, hit.name) for hit in done.used_by})
        say(f"{users:,} exports and samples hold some of them; they were not changed")
    if done.waiting:
        say(f"{len(done.waiting):,} segments also hold episodes that have not ended: run this again when they have")

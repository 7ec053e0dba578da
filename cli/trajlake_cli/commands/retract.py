"""`trajlake retract`: episodes that must not be used any more, marked or removed for good."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from trajlake_cli.options import lake_option, output_option, where_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import count

if TYPE_CHECKING:
    from trajlake_pipelines.retract import RetractReport

_SHOWN = 5  # ids in a line


@click.command(short_help="Say that episodes must not be used; on request remove them for good.")
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
@click.option("--for-good", is_flag=True, help="Remove them: from the tables, from old versions, from what landed.")
@click.option("--dry-run", is_flag=True, help="Only say which episodes, what holds them, and what used them.")
@click.option("--yes", is_flag=True, help="With --for-good, do not ask.")
@output_option()
@pass_session
def command(
    session: Session,
    episode_ids: tuple[str, ...],
    where: str | None,
    reason: str,
    exports: tuple[str, ...],
    for_good: bool,
    dry_run: bool,
    yes: bool,
    output: Output,
) -> None:
    """Say of episodes that they must not be used any more, and which samples and exports used them.

    They are marked: they stay in the lake with the reason, and no sample and no export has them from now on. With
    --for-good they are removed instead: from the tables, from every older version of them and from what landed; they
    stay away when a worker sends them again. That cannot be undone.

    \b
    Examples:
      trajlake --lake ./lake retract 0198c0de-… --reason "answers leaked"
      trajlake --lake ./lake retract --where "task_id = 'leaked'" --reason contaminated --dry-run
      trajlake --lake ./lake retract 0198c0de-… --reason "names a customer" --for-good
    """
    session.interrupted = "run the same command again to finish"
    lake = session.lake()
    from trajlake_pipelines.retract import retract

    if for_good and not (dry_run or yes):
        first = retract(lake, episode_ids, where=where, reason=reason, for_good=True, exports=exports, dry_run=True)
        question = f"Remove {count(len(first.episodes), 'episode')} for good ({_some(first.episodes)})?"
        try:
            click.confirm(question, abort=True, err=True)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise click.ClickException("nothing was removed: where nobody can be asked, --yes says yes") from None
    done = retract(lake, episode_ids, where=where, reason=reason, for_good=for_good, exports=exports, dry_run=dry_run)
    if output.is_table:
        if dry_run:
            output.rows([asdict(held) for held in done.objects], ["key", "bytes", "what"])
        output.rows([asdict(hit) for hit in done.used_by], ["kind", "name", "part", "episodes"])
    else:
        output.rows([asdict(done)], list(asdict(done)))
    say(_what_was_done(done))
    if done.used_by:
        users = len({(hit.kind, hit.name) for hit in done.used_by})
        verb = "holds" if users == 1 else "hold"
        say(f"{count(users, 'export or sample', 'exports and samples')} {verb} some of them; they were not changed")
    if done.waiting:
        say(
            f"{count(len(done.waiting), 'segment')} with them also hold episodes that have not ended: run this again "
            "when they have"
        )


def _what_was_done(done: RetractReport) -> str:
    episodes = f"{count(len(done.episodes), 'episode')} ({_some(done.episodes)})" if done.episodes else "no episode"
    would = "would be " if done.dry_run else ""
    if not done.for_good:
        return f"{episodes} {would}marked as not to be used; --for-good removes instead"
    whats = Counter(held.what for held in done.objects)
    held = ", ".join(f"{number} of {what}" for what, number in sorted(whats.items()))
    objects = f", from {count(len(done.objects), 'object')} ({done.bytes:,} bytes: {held})" if held else ""
    return f"{episodes} {would}removed for good{objects}"


def _some(episodes: list[str]) -> str:
    shown = ", ".join(episodes[:_SHOWN])
    return shown if len(episodes) <= _SHOWN else f"{shown} and {len(episodes) - _SHOWN:,} more"

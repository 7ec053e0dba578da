"""`trajlake compact`: bring what has landed into the tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from trajlake_cli.options import Duration, lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    from trajlake_pipelines.compact import CompactionReport


@click.command(short_help="Put what has landed into the tables.")
@lake_option
@click.option(
    "--stale-after",
    type=Duration(),
    metavar="DURATION",
    show_default="wait for ever",
    help="Seal episodes without an end as aborted once their last event is this old: 30m, 2h.",
)
@click.option("--runner", type=click.Choice(["local"]), default="local", help="Where Beam runs.")
@output_option()
@pass_session
def command(session: Session, stale_after: float | None, runner: str, output: Output) -> None:
    """Put events that workers and imports have landed into the tables, each episode once.

    Doing it again changes nothing, doing it twice at once is safe, and what was interrupted is finished by the next.

    \b
    Examples:
      trajlake --lake ./lake compact
      trajlake --lake ./lake compact --stale-after 2h
    """
    session.interrupted = "nothing is lost; run the same command again to finish"
    lake = session.lake()
    lake.check()
    from trajlake_pipelines.compact import compact

    with progress("compact") as report:
        done = compact(lake, stale_after=stale_after, runner=runner, on_progress=report)
    if output.is_table:
        for line in in_words(done):
            click.echo(line)
    else:
        output.rows([asdict(done)], list(asdict(done)))
    if done.quarantined_segments:
        say(
            f"{_count(done.quarantined_segments, 'segment')} could not be read and "
            f"{'is' if done.quarantined_segments == 1 else 'are'} quarantined; table segments says why"
        )


def in_words(done: CompactionReport) -> list[str]:
    """What came in and what became of it; the sum always adds up."""
    if not done.segments:
        return ["nothing new has landed"]
    parts = [
        _count(done.steps, "step"),
        _count(done.begins_and_ends, "begin or end", "begins and ends"),
        _count(done.scores, "score"),
        _count(done.retractions, "retraction"),
        _count(done.duplicate_events, "duplicate"),
        _count(done.pending_events, "of an unfinished episode", "of unfinished episodes"),
    ]
    known = [part for part in parts if not part.startswith("0 ")] or ["0 steps"]
    lines = [
        f"{_count(done.segments, 'segment')} read",
        f"{_count(done.events, 'event')} in = {' + '.join(known)}",
        f"{_count(done.episodes, 'episode')} added",
    ]
    for number, one, many in (
        (done.duplicate_episodes, "duplicate was recognised", "duplicates were recognised"),
        (
            done.replaced_episodes,
            "episode was replaced by a better attempt",
            "episodes were replaced by better attempts",
        ),
        (done.sealed_episodes, "stale episode was sealed as aborted", "stale episodes were sealed as aborted"),
        (done.pending_episodes, "episode has not ended yet", "episodes have not ended yet"),
    ):
        if number:
            lines.append(_count(number, one, many))
    return lines


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"

"""`trajlake compact`: bring what has landed into the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trajlake_cli.options import Duration, lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress
from trajlake_cli.runner_options import runner_of, runner_options
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import count, one_line

if TYPE_CHECKING:
    from trajlake import Lake
    from trajlake_pipelines.compact import CompactionReport
    from trajlake_pipelines.runners import Runner

_SHOWN = 5  # ids of episodes in one line


@click.command(short_help="Put what has landed into the tables.")
@lake_option
@click.option(
    "--stale-after",
    type=Duration(),
    metavar="DURATION",
    show_default="wait for ever",
    help="Seal episodes of which the end or other events did not arrive as aborted, once their last one is this old: "
    "30m, 2h.",
)
@click.option("--watch", is_flag=True, help="Go on as segments arrive, one JSON line a pass, until SIGTERM or Ctrl-C.")
@click.option("--every", type=Duration(), default="5s", metavar="DURATION", help="With --watch, how often to look.")
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="With --watch, answer Prometheus on this port.",
)
@click.option(
    "--metrics-address", default="127.0.0.1", metavar="ADDRESS", help="The address on which Prometheus is answered."
)
@runner_options
@output_option()
@pass_session
def command(
    session: Session,
    /,
    stale_after: float | None,
    watch: bool,
    every: float,
    metrics_port: int | None,
    metrics_address: str,
    output: Output,
    **where: Any,
) -> None:
    """Put events that workers and imports have landed into the tables, each episode once.

    Doing it again changes nothing, doing it twice at once is safe, and what was interrupted is finished by the next.
    Every hundredth change of a lake is followed by an optimize of the small files.

    \b
    Examples:
      trajlake --lake ./lake compact
      trajlake --lake ./lake compact --stale-after 2h
      trajlake --lake s3://bucket/lake compact --watch --metrics-port 9464
      trajlake --lake s3://bucket/lake compact --runner dask --scheduler tcp://host:8786
      trajlake --lake ./lake compact --processes 4
    """
    session.interrupted = "nothing is lost; run the same command again to finish"
    if metrics_port is not None and not watch:
        raise click.UsageError("--metrics-port is for --watch")
    runner = runner_of(**where)
    lake = session.lake()
    lake.check()
    if watch:
        _watch(lake, every, stale_after, runner, None if metrics_port is None else (metrics_port, metrics_address))
        return
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
            f"{count(done.quarantined_segments, 'segment')} could not be read and "
            f"{'is' if done.quarantined_segments == 1 else 'are'} quarantined; "
            "`trajlake segments --quarantined` says why"
        )


def _watch(
    lake: Lake, every: float, stale_after: float | None, runner: Runner, answer_at: tuple[int, str] | None
) -> None:
    """Passes until SIGTERM or Ctrl-C, each of which lets the pass that is going on end."""
    import signal
    import threading

    from trajlake_cli.values import json_text
    from trajlake_pipelines.watch import Metrics, watch

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    metrics = None if answer_at is None else Metrics(*answer_at)
    try:
        watch(
            lake,
            stop,
            lambda line: click.echo(json_text(line)),
            every=every,
            stale_after=stale_after,
            runner=runner,
            metrics=metrics,
        )
    finally:
        if metrics is not None:
            metrics.close()


def in_words(done: CompactionReport) -> list[str]:
    """What came in and what became of it; the sum always adds up."""
    released = (
        f"{count(done.released_episodes, 'episode')} of which something waited for a week in vain: it waits no longer"
    )
    if not done.segments:
        return [released if done.released_episodes else "nothing new has landed"]
    parts = [
        count(done.steps, "step"),
        count(done.begins_and_ends, "begin or end", "begins and ends"),
        count(done.scores, "score"),
        count(done.retractions, "retraction"),
        count(done.duplicate_events, "duplicate"),
        count(done.pending_events, "of an unfinished episode", "of unfinished episodes"),
    ]
    unended = done.pending_episodes - len(done.incomplete) - len(done.unknown)
    known = [part for part in parts if not part.startswith("0 ")] or ["0 steps"]
    lines = [
        f"{count(done.segments, 'segment')} read",
        f"{count(done.events, 'event')} in = {' + '.join(known)}",
        f"{count(done.episodes, 'episode')} added",
    ]
    for number, one, many in (
        (done.duplicate_episodes, "duplicate was recognised", "duplicates were recognised"),
        (
            done.replaced_episodes,
            "episode was replaced by a better attempt",
            "episodes were replaced by better attempts",
        ),
        (done.sealed_episodes, "stale episode was sealed as aborted", "stale episodes were sealed as aborted"),
        (done.merged_files, "small file was merged", "small files were merged"),
        (unended, "episode has not ended yet", "episodes have not ended yet"),
    ):
        if number:
            lines.append(count(number, one, many))
    if done.released_episodes:
        lines.append(released)
    if done.incomplete:
        waits = count(len(done.incomplete), "episode waits", "episodes wait")
        lines.append(f"{waits} for events that were recorded and have not arrived: {_some(done.incomplete)}")
    if done.unknown:
        have = count(len(done.unknown), "id has", "ids have")
        lines.append(f"{have} scores or retractions, and no episode yet: {_some(done.unknown)}")
    if unended or done.incomplete:
        lines.append("where their workers are gone for good: `compact --stale-after 1h` seals them as aborted")
    return lines


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN:,} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(one_line, ids[:_SHOWN])) + more

"""`trajlake replay`: step through what an agent did."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from trajlake_cli.options import (
    condition_of,
    failed_option,
    lake_option,
    run_option,
    snapshot_option,
    what_is_missing,
    where_option,
)
from trajlake_cli.output import say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import ELLIPSIS

if TYPE_CHECKING:
    from rich.console import Console

    from trajlake import Snapshot
    from trajlake.read.trajectory import Trajectory

_WIDEST = 110  # longer lines are hard to read


@click.command(short_help="Step through what an agent did.")
@click.argument("episodes", nargs=-1, metavar="[EPISODE]...")
@lake_option
@snapshot_option
@run_option
@where_option
@failed_option
@click.option("--limit", type=click.IntRange(min=0), default=10, help="How many episodes; 0 replays all.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only this step; with --interactive start there.")
@click.option("--speed", type=click.FloatRange(min=0), default=0, metavar="N", help="Steps a second; 0 does not wait.")
@click.option(
    "--interactive", "-i", is_flag=True, help="Step by keys: n next, p back, g go to, / find, ? help, q quit."
)
@click.option(
    "--max-chars", type=click.IntRange(min=0), default=800, metavar="N", help="Cut longer texts; 0 cuts none."
)
@pass_session
def command(
    session: Session,
    episodes: Sequence[str],
    token: str | None,
    runs: Sequence[str],
    where: str | None,
    failed: bool,
    status: Sequence[str],
    limit: int,
    step: int | None,
    speed: float,
    interactive: bool,
    max_chars: int,
) -> None:
    """Show episodes step by step: who said what, which tools were called and what they returned, rewards.

    Name the episodes by id (its start is enough), or choose them by --run, --failed, --status or --where, the
    newest first.

    \b
    Examples:
      trajlake --lake ./lake replay 01a22cbd651f7b
      trajlake --lake ./lake replay --failed --limit 1
      trajlake --lake ./lake replay --where "task_id = '17'" --interactive
      trajlake --lake ./lake replay 01a22cbd651f7b --step 12 --max-chars 0
    """
    if bool(episodes) == bool(where or failed or runs or status):
        raise click.UsageError("give the ids of episodes, or choose them by --run, --failed, --status or --where")
    if interactive and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("--interactive needs a terminal; without it the whole episode is printed")
    snapshot = session.snapshot(token)
    ids, matching = (
        ([one.rstrip(ELLIPSIS) for one in episodes], len(episodes))
        if episodes
        else _choose(snapshot, condition_of(snapshot, where, runs, failed, status), limit)
    )
    if not ids:
        say(what_is_missing(snapshot))
        return
    from trajlake_cli.tables import make_console

    console = make_console()
    if interactive:
        from trajlake_cli.replay.player import Player, play

        play(Player(len(ids), lambda at: snapshot.episode(ids[at]), step or 0), console)
        return
    session.interrupted = "the rest was not shown"
    for at, episode_id in enumerate(ids):
        place = f"{at + 1} of {matching:,}" if matching > 1 else ""
        _print(console, snapshot.episode(episode_id), place, step, speed, max_chars)
    if len(ids) < matching:
        say(f"{len(ids):,} of {matching:,} episodes (--limit 0 replays all)")


def _choose(snapshot: Snapshot, condition: str | None, limit: int) -> tuple[list[str], int]:
    """The newest ids that fit, and how many fit."""
    from trajlake.read.tags import in_brackets

    source = "FROM episodes" + (f" WHERE {in_brackets(condition)}" if condition else "")
    matching: int = snapshot.query(f"SELECT count(*) AS n {source}").item()
    sql = f"SELECT episode_id {source} ORDER BY started_at DESC NULLS LAST, episode_id"
    return snapshot.query(f"{sql} LIMIT {limit}" if limit else sql)["episode_id"].to_list(), matching


def _print(
    console: Console, trajectory: Trajectory, place: str, step: int | None, speed: float, max_chars: int
) -> None:
    from trajlake.errors import UsageError
    from trajlake_cli.replay.header import add_header
    from trajlake_cli.replay.page import Page
    from trajlake_cli.replay.steps import add_step, tool_names

    steps = trajectory.steps
    if step is not None and step >= len(steps):
        raise UsageError(f"episode {trajectory.episode_id} has {len(steps)} steps, the first is 0: there is no {step}")
    page = Page(min(console.width, _WIDEST), max_chars)
    add_header(page, trajectory.episode, place)
    names: dict[str, str] = {}
    for one in steps:
        names.update(tool_names([one]))
        if step is not None and one["step_index"] != step:
            continue
        add_step(page, one, names)
        if speed:
            page.print_to(console)
            time.sleep(1 / speed)
    if page.left_out:
        page.gap()
        page.add((f"{page.left_out} texts were cut; --max-chars 0 shows them whole", "bright_black"))
    page.gap()
    page.print_to(console)

"""`trajlake stats`: how well, how long, how dear; and pass@k, pass^k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import click

from trajlake_cli.options import (
    Columns,
    Numbers,
    about_repeats,
    condition_of,
    lake_option,
    output_option,
    resolve_columns,
    run_option,
    snapshot_option,
    unique_option,
    what_is_missing,
    where_option,
)
from trajlake_cli.output import Output, Row, frame_rows, say
from trajlake_cli.session import Session, pass_session

_CONVENTIONS = ("episode", "inspect", "sb3")  # of trajlake.analysis.stats, whose import would take a second
_WITH_ERROR = {"success_rate": "success_stderr", "reward_mean": "reward_stderr"}
_BOUNDS = {"success_rate": ("success_low", "success_high"), "reward_mean": ("reward_low", "reward_high")}
_ADVICE = ("runs", "policies", "repeats")  # in a table these are a line below it
_EXPENDABLE = ("latency_ms_mean", "unscored", "tokens_mean", "tasks", "unjudged", "steps_mean", "reward_mean")


@click.command(short_help="Success, reward, steps, tokens; pass@k and pass^k.")
@lake_option
@snapshot_option
@run_option
@where_option
@unique_option
@click.option(
    "--by",
    type=Columns(),
    multiple=True,
    metavar="COLUMN,…",
    help="One row for each value of these columns of table episodes, e.g. run, policy, task_id or tags['team']; may be "
    "repeated.",
)
@click.option(
    "--pass-k",
    type=Numbers(),
    metavar="K,…",
    help="Also pass^k (all of k trials solve the task) and pass@k (one of k does), as means over tasks.",
)
@click.option(
    "--convention",
    type=click.Choice(_CONVENTIONS),
    default="episode",
    help="How a mean and its error are formed: over episodes; as Inspect does, over tasks (the mean of a task's trials "
    "first); or as Stable-Baselines3 does, over episodes with ddof 0.",
)
@click.option("--per", type=click.Choice(["episode", "task"]), show_default="as the convention", help="One value is.")
@click.option("--ddof", type=click.Choice(["0", "1"]), show_default="as the convention", help="Of standard deviations.")
@click.option(
    "--nulls",
    type=click.Choice(["left-out", "failures"]),
    show_default="as the convention",
    help="What becomes of episodes that were not judged or not scored: failures have success false and reward 0.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="LEVEL",
    help="Also confidence intervals at this level, e.g. 0.95: Wilson's for rates over episodes, Student's t for means.",
)
@click.option("--bootstrap", is_flag=True, help="Intervals by the percentile bootstrap instead.")
@click.option(
    "--distribution", is_flag=True, help="Also the rewards' deviation, least, median and greatest; and time steps."
)
@output_option()
@pass_session
def command(
    session: Session,
    token: str | None,
    runs: Sequence[str],
    where: str | None,
    unique: bool,
    by: Sequence[Sequence[str]],
    pass_k: Sequence[int] | None,
    convention: str,
    per: Literal["episode", "task"] | None,
    ddof: str | None,
    nulls: Literal["left-out", "failures"] | None,
    confidence: float | None,
    bootstrap: bool,
    distribution: bool,
    output: Output,
) -> None:
    """Summarise episodes: success rate and reward with standard errors, steps, tokens, latency.

    The success rate is that of the judged episodes; `unjudged` and `unscored` count the others. Retracted episodes are
    not counted. In a table ± is the standard error (n/a: a single value; 0: all values are equal, which says little
    where they are few, so ask for intervals by --confidence); columns that say nothing, or do not fit, are left
    out. Where episodes of several runs or policies stand in one row, a line says so: --by run,policy keeps them apart.

    \b
    Examples:
      trajlake --lake ./lake stats
      trajlake --lake ./lake stats --pass-k 1,2,4
      trajlake --lake ./lake stats --by policy_version,task_family --where "run_id = 'tau'" --output csv
      trajlake --lake ./lake stats --run tau --by policy --convention inspect --confidence 0.95
    """
    from trajlake.analysis.stats import summarize

    snapshot = session.snapshot(token)
    columns = resolve_columns([name for names in by for name in names], snapshot.episodes.collect_schema().names())
    frame = summarize(
        snapshot,
        by=columns,
        pass_k=list(pass_k or ()),
        where=condition_of(snapshot, where, runs),
        unique=unique,
        convention=convention,
        per=per,
        ddof=None if ddof is None else int(ddof),
        nulls=nulls,
        confidence=0.95 if bootstrap and confidence is None else confidence,
        interval="bootstrap" if bootstrap else "standard",
        distribution=distribution,
    )
    rows = list(frame_rows(frame))
    if output.is_table:
        output.rows(*_for_people(rows, frame.columns, columns), _EXPENDABLE, columns)
        level = 0.95 if bootstrap and confidence is None else confidence
        _explain(rows, convention, per, ddof, level, bootstrap=bootstrap)
    else:
        output.rows(rows, frame.columns)
    if not sum(row["episodes"] for row in rows):
        say(what_is_missing(snapshot))
    _warn(rows, columns)
    say(f"snapshot {snapshot.token}")


def _explain(
    rows: list[Row], convention: str, per: str | None, ddof: str | None, confidence: float | None, *, bootstrap: bool
) -> None:
    """What ± and [ ] mean here."""
    from trajlake.analysis.stats import CONVENTIONS

    if all(row[mean] is None for row in rows for mean in _WITH_ERROR):
        return
    one = per or CONVENTIONS[convention].per
    of = "tasks (the mean of each task's trials)" if one == "task" else "episodes"
    if confidence is None:
        say(f"± standard error over {of}, ddof {CONVENTIONS[convention].ddof if ddof is None else ddof}")
        return
    kind = "bootstrap" if bootstrap else "Student's t" if one == "task" else "success Wilson's, reward Student's t"
    say(f"[ ] {confidence * 100:g} % interval over {of}: {kind}")


def _warn(rows: list[Row], by: Sequence[str]) -> None:
    """What a figure mixes that one would rather see apart."""
    most = {name: max((row[name] for row in rows), default=0) for name in _ADVICE}
    pooled = [f"{most[name]:,} {name}" for name in ("runs", "policies") if most[name] > 1]
    if pooled:
        apart = {"runs": "run", "policies": "policy,policy_version"}
        names = [column for name in ("runs", "policies") if most[name] > 1 for column in apart[name].split(",")]
        given = {name.removesuffix("_id").removesuffix("_name") for name in by}
        say(
            f"note: {'one row pools' if len(rows) == 1 else 'rows pool up to'} {' and '.join(pooled)}; "
            f"--by {','.join([*by, *(name for name in names if name not in given)])} keeps them apart"
        )
    if repeats := sum(row["repeats"] for row in rows):
        say(about_repeats(repeats))


def _for_people(rows: list[Row], columns: Sequence[str], by: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Values joined with their standard errors or intervals, and only columns that say something."""
    kept = [
        name
        for name in columns
        if name in by or name == "episodes" or not (name in _JOINED or _says_nothing(name, (row[name] for row in rows)))
    ]
    return [{name: _joined(row, name) for name in kept} for row in rows], kept


_JOINED = {*_WITH_ERROR.values(), *_ADVICE, *(bound for bounds in _BOUNDS.values() for bound in bounds)}


def _joined(row: Row, name: str) -> Any:
    if name not in _WITH_ERROR or row[name] is None:
        return row[name]
    low, high = _BOUNDS[name]
    if low in row:
        return f"{row[name]:.3f} [{'n/a' if row[low] is None else f'{row[low]:.3f}, {row[high]:.3f}'}]"
    error = row[_WITH_ERROR[name]]
    return f"{row[name]:.3f} ± {'n/a' if error is None else f'{error:.3f}' if error else '0'}"


def _says_nothing(name: str, values: Iterable[Any]) -> bool:
    return all(value is None or (value == 0 and name in ("unjudged", "unscored")) for value in values)

"""`trajlake stats`: how well, how long, how dear; and pass@k, pass^k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click

from trajlake_cli.options import (
    Columns,
    Numbers,
    check_columns,
    lake_option,
    output_option,
    snapshot_option,
    where_option,
)
from trajlake_cli.output import Output, Row, frame_rows, say
from trajlake_cli.session import Session, pass_session

_WITH_ERROR = {"success_rate": "success_stderr", "reward_mean": "reward_stderr"}


@click.command(short_help="Success, reward, steps, tokens; pass@k and pass^k.")
@lake_option
@snapshot_option
@where_option
@click.option(
    "--by",
    type=Columns(),
    multiple=True,
    metavar="COLUMN,…",
    help="One row for each value of these columns of table episodes; may be repeated.",
)
@click.option(
    "--pass-k",
    type=Numbers(),
    metavar="K,…",
    help="Also pass^k (all of k trials solve the task) and pass@k (one of k does), as means over tasks.",
)
@output_option()
@pass_session
def command(
    session: Session,
    token: str | None,
    where: str | None,
    by: Sequence[Sequence[str]],
    pass_k: Sequence[int] | None,
    output: Output,
) -> None:
    """Summarise episodes: success rate and reward with standard errors, steps, tokens, latency.

    The success rate is that of the judged episodes; `unjudged` and `unscored` count the others. In a table ± is the
    standard error, and columns that are empty or zero throughout are left out.

    \b
    Examples:
      trajlake --lake ./lake stats
      trajlake --lake ./lake stats --pass-k 1,2,4
      trajlake --lake ./lake stats --by policy_version,task_family --where "run_id = 'tau'" --output csv
    """
    from trajlake.analysis.stats import summarize

    snapshot = session.snapshot(token)
    columns = [name for names in by for name in names]
    check_columns(columns, snapshot.episodes.collect_schema().names())
    frame = summarize(snapshot, by=columns, pass_k=list(pass_k or ()), where=where)
    rows = list(frame_rows(frame))
    if output.is_table:
        output.rows(*_for_people(rows, frame.columns, columns))
    else:
        output.rows(rows, frame.columns)
    if not sum(row["episodes"] for row in rows):
        say("no episodes")
    say(f"snapshot {snapshot.token}")


def _for_people(rows: list[Row], columns: Sequence[str], by: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Values joined with their standard errors, and only columns that say something."""
    kept = [
        name
        for name in columns
        if name in by
        or name == "episodes"
        or not (name in _WITH_ERROR.values() or _says_nothing(name, (row[name] for row in rows)))
    ]
    return [{name: _joined(row, name) for name in kept} for row in rows], kept


def _joined(row: Row, name: str) -> Any:
    error = row.get(_WITH_ERROR.get(name, ""))
    return row[name] if error is None or row[name] is None else f"{row[name]:.3f} ± {error:.3f}"


def _says_nothing(name: str, values: Iterable[Any]) -> bool:
    return all(value is None or (value == 0 and name in ("unjudged", "unscored")) for value in values)

"""`trajlake episodes`: list episodes, filtered and sorted."""

from __future__ import annotations

from collections.abc import Sequence

import click

from trajlake_cli.options import (
    Columns,
    condition_of,
    failed_option,
    lake_option,
    output_option,
    resolve_columns,
    run_option,
    snapshot_option,
    what_is_missing,
    where_option,
)
from trajlake_cli.output import Output, frame_rows, say
from trajlake_cli.session import Session, pass_session

DEFAULT_COLUMNS = (
    "episode_id", "run_id", "task_family", "task_id", "trial", "policy_name", "policy_version",
    "status", "success", "reward", "n_steps", "failure_stage",
)  # fmt: skip
_EXPENDABLE = ("policy_name", "task_family", "run_id", "failure_stage", "policy_version", "status", "trial", "n_steps")
_OFTEN_NUMBERS = ("policy_version", "task_id")
_TABLE_LIMIT = 20


@click.command(short_help="List episodes, filtered and sorted.")
@lake_option
@snapshot_option
@run_option
@where_option
@failed_option
@click.option(
    "--sort",
    type=Columns(signed=True),
    default="-started_at",
    metavar="COLUMN,…",
    help="Sort by these columns; - before a name sorts descending. Nulls come last.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    show_default=f"{_TABLE_LIMIT} in a table, else all",
    help="How many to show; 0 shows all.",
)
@click.option(
    "--columns",
    type=Columns(),
    metavar="COLUMN,…",
    show_default="the most asked for",
    help="Which columns to show, or all. `trajlake schema show episodes` explains them.",
)
@output_option()
@pass_session
def command(
    session: Session,
    token: str | None,
    runs: Sequence[str],
    where: str | None,
    failed: bool,
    status: Sequence[str],
    sort: Sequence[str],
    limit: int | None,
    columns: Sequence[str] | None,
    output: Output,
) -> None:
    """List episodes. How many are shown, and of how many, is said on standard error.

    \b
    Examples:
      trajlake --lake ./lake episodes --failed --sort -n_steps --limit 10
      trajlake --lake ./lake episodes --where "task_id = '17' AND reward > 0.5"
      trajlake --lake ./lake episodes --columns episode_id,reward,tags --output jsonl
    """
    from trajlake.read.tags import in_brackets

    snapshot = session.snapshot(token)
    known = snapshot.episodes.collect_schema().names()
    wanted = known if columns == ["all"] else resolve_columns(columns or DEFAULT_COLUMNS, known)
    order_by = resolve_columns([name.removeprefix("-") for name in sort], known)
    condition = condition_of(snapshot, where, runs, failed, status)
    if limit is None:
        limit = _TABLE_LIMIT if output.is_table else 0
    source = "FROM episodes" + (f" WHERE {in_brackets(condition)}" if condition else "")
    total = snapshot.query(f"SELECT count(*) AS n {source}").item()
    order = ", ".join(
        f"{key} {'DESC' if given.startswith('-') else 'ASC'} NULLS LAST"
        for name, given in [*zip(order_by, sort, strict=True), ("episode_id", "")]
        for key in _sort_keys(name)
    )
    names = ", ".join(map(_in_sql, wanted))
    frame = snapshot.query(f"SELECT {names} {source} ORDER BY {order}" + (f" LIMIT {limit}" if limit else ""))
    if output.is_table and columns is None:
        wanted = [name for name in wanted if frame[name].null_count() < frame.height]
    output.rows(frame_rows(frame), wanted, () if columns else _EXPENDABLE)
    if not total:
        say(what_is_missing(snapshot))
        return
    say(f"{frame.height:,} of {total:,} episodes" + (" (--limit 0 shows all)" if frame.height < total else ""))


def _sort_keys(name: str) -> list[str]:
    """Step 900 comes before step 1200, though both are text."""
    from trajlake.read.tags import is_tag

    key = _in_sql(name)
    return [f"TRY_CAST({key} AS DOUBLE)", key] if name in _OFTEN_NUMBERS or is_tag(name) else [key]


def _in_sql(name: str) -> str:
    from trajlake.read.tags import is_tag

    return name if is_tag(name) else f'"{name}"'

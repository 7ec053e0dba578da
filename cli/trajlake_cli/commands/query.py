"""`trajlake query`: SQL over the tables."""

from __future__ import annotations

import sys

import click

from trajlake_cli.options import lake_option, output_option, snapshot_option
from trajlake_cli.output import Output, frame_rows, say
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Answer an SQL query over episodes and steps.")
@click.argument("sql")
@lake_option
@snapshot_option
@output_option()
@pass_session
def command(session: Session, sql: str, token: str | None, output: Output) -> None:
    """Answer an SQL query over the tables episodes and steps. SQL of - is read from standard input.

    It only reads: `retract` removes episodes. Only the columns and row groups that the query needs are read. The
    dialect is that of Polars.

    \b
    Examples:
      trajlake --lake ./lake query "SELECT count(*) AS n, avg(reward) AS r FROM episodes" --output json
      trajlake --lake ./lake query "SELECT task_id, avg(reward) AS r FROM episodes GROUP BY task_id ORDER BY r"
      trajlake --lake ./lake query - < question.sql
    """
    if sql == "-":
        sql = sys.stdin.read()
    frame = session.snapshot(token).query(sql)
    output.rows(frame_rows(frame), frame.columns)
    if output.is_table and frame.is_empty():
        say("no rows")

"""`trajlake schema`: the data model column by column, and what a lake's tables differ from it in."""

from __future__ import annotations

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session


@click.group(no_args_is_help=True, short_help="Show the columns; compare a lake with this version.")
def command() -> None:
    """Show the columns of the tables, and compare a lake's tables with this version.

    \b
    Examples:
      trajlake schema show episodes
      trajlake --lake ./lake schema diff
    """


@command.command()
@click.argument("table", required=False, type=click.Choice(["episodes", "steps", "segments", "events"]))
@output_option("markdown")
def show(table: str | None, output: Output) -> None:
    """List every column with its type, its unit, its meaning and the meaning of null.

    \b
    Examples:
      trajlake schema show episodes
      trajlake schema show steps --output csv
      trajlake schema show --output markdown > docs/schema.md
    """
    from trajlake_schemas import SCHEMAS
    from trajlake_schemas.reference import describe, markdown

    tables = [SCHEMAS[table]] if table else list(SCHEMAS.values())
    if output.format == "markdown":
        click.echo(markdown(tables), nl=False)
        return
    rows = [{"table": one.name, **row} for one in tables for row in describe(one)]
    columns = ["column", "type", "unit", "meaning", "null"]
    output.rows(rows, columns if table else ["table", *columns])


@command.command("diff")
@lake_option
@output_option()
@pass_session
def difference(session: Session, output: Output) -> None:
    """Compare the columns that a lake's tables hold with those of this version.

    Nullable columns may be added and types may widen; everything else is refused, with the reason.
    Exit code 1 where a difference is refused.

    \b
    Examples:
      trajlake --lake ./lake schema diff
      trajlake --lake s3://bucket/lake schema diff --output json
    """
    from trajlake_cli.lake_schemas import stored_schemas
    from trajlake_schemas import TABLES, diff

    rows = [
        {"table": name, "column": change.column, "change": change.change, "refused": change.refusal}
        for name, stored in stored_schemas(session.lake()).items()
        for change in diff(stored, TABLES[name].arrow)
    ]
    output.rows(rows, ["table", "column", "change", "refused"])
    if not rows:
        say("no difference: the lake's tables have exactly this version's columns")
    if any(row["refused"] for row in rows):
        click.get_current_context().exit(1)

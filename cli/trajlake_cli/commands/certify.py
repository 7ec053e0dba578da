"""`trajlake certify`: prove that files come out of a lake as they went in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from trajlake_cli.options import output_option
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress


@click.command(short_help="Prove that files come out as they went in.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--format", metavar="NAME", show_default="found out by content", help="The format of all files.")
@output_option()
def command(files: Sequence[str], format: str | None, output: Output) -> None:
    """Import files into a lake of their own, compact it, write them in their own format, and compare.

    The comparison is of JSON: numbers by value, the order of keys ignored. Column `typed` says which part of what a
    file says is in typed columns, and not in `extra`. Nothing is kept. Exit code 1 where a file that can be read
    comes out differently, or not whole.

    \b
    Examples:
      trajlake certify results.json
      trajlake certify runs/ --output jsonl
    """
    from trajlake_pipelines.certify import certify

    rows: list[dict[str, Any]] = []
    with progress("certify") as report:
        for found in certify(files, format=format, on_progress=report):
            share = found.typed_share
            rows.append(
                {
                    "file": str(found.path),
                    "format": found.format,
                    "episodes": found.episodes,
                    "steps": found.steps,
                    "equal": found.equal,
                    "typed": None if share is None else round(share, 3),
                    "reason": found.reason or None,
                }
            )
    output.rows(rows, ["file", "format", "episodes", "steps", "equal", "typed", "reason"], ["steps", "episodes"])
    different = sum(row["equal"] is False for row in rows)
    open_ = sum(row["equal"] is None for row in rows)
    say(f"{len(rows) - different - open_:,} files are equal, {different:,} differ, {open_:,} have no verdict")
    if different or not rows:
        click.get_current_context().exit(1)

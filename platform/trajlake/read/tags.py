"""Tags in SQL, and wherever a column is named: `tags['team']` is the text of that tag, null where an episode has none
of this name.

Polars' SQL knows no maps, so each tag that is named becomes a column before the SQL is read.
"""

from __future__ import annotations

import re

import polars as pl

from trajlake.errors import QueryError

# Texts and quoted names come first: what they hold is no tag.
_TAG = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\btags\s*\[\s*('(?:[^']|'')*')\s*\]""", re.IGNORECASE)


def with_tags(episodes: pl.LazyFrame, sql: str) -> tuple[pl.LazyFrame, str, list[str]]:
    """The frame with a column for each tag that the SQL names, the SQL with these columns, and their names."""
    columns: dict[str, pl.Expr] = {}

    def column(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        name = f"tags[{match[1]}]"
        columns[name] = _tag(match).alias(name)
        return '"' + name.replace('"', '""') + '"'

    rewritten = _TAG.sub(column, sql)
    return episodes.with_columns(columns.values()), rewritten, list(columns)


def _tag(match: re.Match[str]) -> pl.Expr:
    return pl.col("tags").map.get(match[1][1:-1].replace("''", "'"))


def is_tag(name: str) -> bool:
    """Whether a column's name is that of a tag."""
    match = _TAG.fullmatch(name)
    return match is not None and match[1] is not None


def column(name: str) -> pl.Expr:
    """The column of this name, or the tag, which then is a column of this name."""
    match = _TAG.fullmatch(name)
    return pl.col(name) if match is None or match[1] is None else _tag(match).alias(name)


def filtered(episodes: pl.LazyFrame, condition: str) -> pl.LazyFrame:
    """The rows of `episodes` that satisfy a condition in SQL. Raises Polars' errors, QueryError for one with a name."""
    frame, sql, tags = with_tags(episodes, condition)
    expression = pl.sql_expr(sql)
    try:
        pl.sql_expr(in_brackets(sql))
    except pl.exceptions.PolarsError as error:
        raise QueryError(
            f"{condition!r} is not only a condition, it has a name: leave out AS and what follows"
        ) from error
    return frame.filter(expression).drop(tags)


def in_brackets(condition: str) -> str:
    """A condition as part of another; what it ends with may be a comment."""
    return f"({condition}\n)" if "--" in condition else f"({condition})"

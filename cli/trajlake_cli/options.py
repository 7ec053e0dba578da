"""Options that several commands share, each with one spelling, one help text and one meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from trajlake_cli.output import FORMATS, Output
from trajlake_cli.session import Session

if TYPE_CHECKING:
    from trajlake import Snapshot

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def lake_option(command: Decorated) -> Decorated:
    """--lake after the subcommand: the same as before it."""

    def remember(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None:
            ctx.find_root().ensure_object(Session).uri = value

    return click.option(
        "--lake",
        metavar="ADDRESS",
        expose_value=False,
        callback=remember,
        help="The lake: a folder or s3://bucket/prefix.  [env var: TRAJLAKE_LAKE]",
    )(command)


def output_option(*more: str) -> Callable[[Decorated], Decorated]:
    """--output, given to the command as an Output."""
    return click.option(
        "--output",
        "-o",
        type=click.Choice([*FORMATS, *more]),
        default="table",
        callback=lambda ctx, param, value: Output(value),
        help="How to print rows.",
    )


def snapshot_option(command: Decorated) -> Decorated:
    """--snapshot on everything that reads the tables."""
    return click.option(
        "--snapshot",
        "token",
        metavar="TOKEN",
        help="Read this snapshot (`trajlake runs` prints its token) instead of the newest.",
    )(command)


def where_option(command: Decorated) -> Decorated:
    """--where, an SQL condition on episodes."""
    return click.option(
        "--where", metavar="SQL", help="Only episodes that satisfy this condition on columns of table episodes."
    )(command)


def failed_option(command: Decorated) -> Decorated:
    """--failed, a condition that is asked for often enough to have a name."""
    return click.option(
        "--failed", is_flag=True, help="Only failed episodes: success is false, or status is failed or aborted."
    )(command)


def seed_option(command: Decorated) -> Decorated:
    """--seed of everything that draws."""
    return click.option("--seed", type=int, default=0, help="The same seed gives the same episodes in the same order.")(
        command
    )


def condition_of(snapshot: Snapshot, where: str | None, failed: bool) -> str | None:
    """The condition of --where and --failed together. Raises QueryError with what is wrong in `where`."""
    conditions = []
    if where:
        snapshot.where(where)  # here it is checked by itself, so that the error speaks of nothing else
        conditions.append(f"({where})")
    if failed:
        from trajlake.read.snapshot import FAILED

        conditions.append(f"({FAILED})")
    return " AND ".join(conditions) or None


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A length of time such as 90s, 30m, 2h, 7d or 1h30m, given on in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        if not re.fullmatch(r"(\d+(\.\d+)?[smhdw])+", value):
            self.fail(f"{value!r} is not a length of time: write 90s, 30m, 2h, 7d or 1h30m", param, ctx)
        return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)([smhdw])", value))


class Columns(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Column names, separated by commas; the shell completes them. A leading - is kept where `signed`."""

    name = "columns"

    def __init__(self, table: str = "episodes", *, signed: bool = False) -> None:
        self._table = table
        self._signed = signed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[str]:
        if not isinstance(value, str):
            return list(value)
        names = [name.strip() for name in value.split(",")]
        if not all(names):
            self.fail(f"{value!r} has an empty name: separate names by one comma", param, ctx)
        return names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from trajlake_schemas import TABLES

        before, comma, last = incomplete.rpartition(",")
        sign = "-" if self._signed and last.startswith("-") else ""
        names = TABLES[self._table].names()
        return [
            CompletionItem(before + comma + sign + name) for name in names if name.startswith(last.removeprefix("-"))
        ]


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Whole numbers from 1, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sequence[int]:
        if not isinstance(value, str):
            return list(value)
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{value!r} has a number below 1", param, ctx)
        return numbers


def check_columns(wanted: Sequence[str], known: Sequence[str], table: str = "episodes") -> None:
    """Raise a UsageError that names the first unknown column and those that are spelled alike."""
    from difflib import get_close_matches

    from trajlake.errors import UsageError

    for name in wanted:
        if name not in known:
            alike = get_close_matches(name, known, n=3) or sorted(known)[:8]
            raise UsageError(f"table {table} has no column {name!r}; there is {', '.join(alike)}")

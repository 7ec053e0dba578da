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

STATUSES = ("completed", "truncated", "aborted", "failed")
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
        "--where",
        metavar="SQL",
        help="Only episodes that satisfy this condition on columns of table episodes; tags['team'] is a tag.",
    )(command)


def run_option(command: Decorated) -> Decorated:
    """--run, the condition that is asked for most often."""
    return click.option(
        "--run", "runs", multiple=True, metavar="NAME", help="Only episodes of this run; may be repeated."
    )(command)


def failed_option(command: Decorated) -> Decorated:
    """--failed and --status, conditions that are asked for often enough to have names."""
    command = click.option(
        "--status",
        type=click.Choice(STATUSES),
        multiple=True,
        help="Only episodes that ended so (aborted: closed or killed before the end); may be repeated.",
    )(command)
    return click.option(
        "--failed", is_flag=True, help="Only failed episodes: success is false, or an error ended them (status failed)."
    )(command)


def unique_option(command: Decorated) -> Decorated:
    """--unique of everything that counts or draws."""
    return click.option("--unique", is_flag=True, help="Leave out episodes that repeat the content of another.")(
        command
    )


def seed_option(command: Decorated) -> Decorated:
    """--seed of everything that draws."""
    return click.option("--seed", type=int, default=0, help="The same seed gives the same episodes in the same order.")(
        command
    )


def condition_of(
    snapshot: Snapshot,
    where: str | None,
    runs: Sequence[str] = (),
    failed: bool = False,
    status: Sequence[str] = (),
) -> str | None:
    """The condition of --where, --run, --failed and --status together. Raises QueryError with what is wrong in `where`,
    UsageError for a run that is not there."""
    conditions = []
    if where and where.strip():
        snapshot.where(where)  # here it is checked by itself, so that the error speaks of nothing else
        conditions.append(where)
    if failed:
        from trajlake.read.snapshot import FAILED

        conditions.append(FAILED)
    if runs:
        _check_runs(snapshot, runs)
        conditions.append(f"run_id IN ({', '.join(map(literal, runs))})")
    if status:
        conditions.append(f"status IN ({', '.join(map(literal, status))})")
    if len(conditions) < 2:
        return next(iter(conditions), None)
    from trajlake.read.tags import in_brackets

    return " AND ".join(map(in_brackets, conditions))


def about_repeats(count: int) -> str:
    """What to say of episodes that repeat another: not all of them were recorded twice."""
    return (
        f"note: {count:,} episodes have the content of another (sent twice, or the same answer given twice); "
        "--unique counts each content once"
    )


def what_is_missing(snapshot: Snapshot) -> str:
    """What to say where no episode is shown."""
    import polars as pl

    if snapshot.collect(snapshot.episodes.select(pl.len())).item():
        return "no episode fits"
    return "no episodes yet: `trajlake import` or a worker brings them, `trajlake compact` puts them into the tables"


def literal(text: str) -> str:
    """`text` as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _check_runs(snapshot: Snapshot, runs: Sequence[str]) -> None:
    known = snapshot.collect(snapshot.episodes.select("run_id").unique())["run_id"].to_list()
    for run in runs:
        if run not in known:
            from trajlake.errors import UsageError

            raise UsageError(f"there is no run {run!r}; {nearest(run, known)}")


def nearest(name: str, known: Sequence[str], *, most: int = 5) -> str:
    """`did you mean a or b?`, else `there is a, b, …`: what to say where `name` is not among `known`."""
    from difflib import get_close_matches

    if near := get_close_matches(name, known, n=3):
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there is none yet"
    shown = sorted(known)[:most]
    return f"there is {', '.join(shown)}" + (f" and {len(known) - most:,} more" if len(known) > most else "")


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


def resolve_columns(wanted: Sequence[str], known: Sequence[str], table: str = "episodes") -> list[str]:
    """The columns that are meant: `run` is run_id, `policy` is policy_name, as long as no column has that name itself;
    a tag is its own.
    Raises a UsageError that names the first unknown column and those that are spelled alike."""
    from difflib import get_close_matches

    from trajlake.errors import UsageError
    from trajlake.read.tags import is_tag

    found = []
    for name in wanted:
        meant = [column for column in (name, f"{name}_id", f"{name}_name") if column in known]
        if is_tag(name):
            meant = [name]
        if not meant:
            tag = name.removeprefix("tags.")
            alike = [f"tags[{tag!r}]"] if tag != name else get_close_matches(name, known, n=3)
            there = f"there is {', '.join(alike)}" if alike else f"`trajlake schema show {table}` lists them all"
            raise UsageError(f"table {table} has no column {name!r}; {there}")
        found.append(meant[0])
    return found

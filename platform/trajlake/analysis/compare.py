"""Which tasks got better or worse between two policies (or runs): paired by task, so that easy and hard tasks cancel.

For each task that both sides tried: the mean of its trials on each side, their difference B - A, and an interval of
it. For success that is Newcombe's hybrid score interval of two independent rates (1998, method 10), for rewards Welch's
t interval. Over all those tasks, each counting once: the mean difference with the percentile bootstrap over tasks, and
the sign test (two-sided, exact) of how many got better and worse, where tasks that stayed the same do not count.

An interval that leaves out 0 is a `clear` change of one task looked at alone. Of many tasks that did not change, about
5 in 100 look clear at 0.95; whether there is a change at all is what the figures over all tasks answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

import polars as pl

from trajlake.analysis.intervals import Interval, bootstrap, newcombe, sign_test, welch
from trajlake.analysis.stats import Nulls, as_failures, in_order, task_columns
from trajlake.errors import UsageError
from trajlake.read.snapshot import USABLE, is_repeat
from trajlake.read.tags import column, is_tag
from trajlake.read.tasks import TASK

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

Metric = Literal["success", "reward"]

_VERSIONED = "policy_name@policy_version"
_TRIED = ("policy_name", "policy_version", "run_id", _VERSIONED)
_POOLED = ("run_id", "policy_name", "policy_version", "duplicate_of")
_SHOWN = 8


@dataclass(frozen=True)
class Comparison:
    """What changed from side `a` to side `b`, which are values of `column`.

    `tasks` has one row a task that both tried, the worst change first: task_family, env_name, domain, task_id, group
    (its group_id where it has no task_id), trials_a, trials_b, mean_a, mean_b, difference (b - a), low, high, clear.
    `mean_a`, `mean_b`, `difference`, `low`, `high` are means over these tasks (None without tasks; the bounds also with
    a single one); `p_value` is the sign test's. `pooled_*` says of how many policies in how many runs (triples of run,
    name and version) a side is, `repeats` how many episodes of both have the content of another. `left_out_*` are
    episodes without a judgement or score, or a task; `only_*` tasks that the other side did not try."""

    column: str
    a: str
    b: str
    metric: Metric
    confidence: float
    episodes_a: int
    episodes_b: int
    pooled_a: int
    pooled_b: int
    repeats: int
    left_out_a: int
    left_out_b: int
    only_a: int
    only_b: int
    better: int
    worse: int
    same: int
    mean_a: float | None
    mean_b: float | None
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    tasks: pl.DataFrame


def compare(
    snapshot: Snapshot,
    a: str,
    b: str,
    by: str | None = None,
    where: str | None = None,
    *,
    metric: Metric = "success",
    nulls: Nulls = "left-out",
    confidence: float = 0.95,
    unique: bool = False,
) -> Comparison:
    """Compare the episodes whose column `by` is `a` with those where it is `b`.

    Without `by` it is found out: policy_name, policy_version, run_id, or policy_name@policy_version, whichever has
    both. Raises UsageError where a side has no episode or the two are one, QueryError for `where`.
    """
    if a == b:
        raise UsageError(f"both sides are {a!r}: give two different ones")
    if not 0 < confidence < 1:
        raise UsageError(f"a confidence is between 0 and 1, like 0.95, not {confidence}")
    frame = snapshot.where(where).filter(USABLE)
    if unique:
        frame = frame.filter(~is_repeat(snapshot))
    if by is not None and is_tag(by):
        frame = frame.with_columns(column(by))
    known = frame.collect_schema()
    if by is not None and by != _VERSIONED and by not in known:
        near = get_close_matches(by, known.names(), n=3) or known.names()
        raise UsageError(f"episodes has no column {by!r}; there is {', '.join(near)}")
    sides = {name: _side(name) for name in ([by] if by else _TRIED)}
    rows = snapshot.collect(
        frame.select(
            *TASK,
            *_POOLED,
            "group_id",
            pl.col("success"),
            pl.col("reward"),
            **{f"side {k}": e for k, e in sides.items()},
        )
    )
    compared = _column_with_both(rows, list(sides), a, b)
    rows = rows.with_columns(side=pl.col(f"side {compared}")).filter(pl.col("side").is_in([a, b]))
    rows = task_columns(rows if nulls == "left-out" else rows.with_columns(as_failures()))
    counted = rows.filter(pl.col(metric).is_not_null() & pl.col("has_task"))
    tasks = _paired(counted, a, b, metric)
    tasks = _with_intervals(tasks, metric, confidence)
    differences = tasks["difference"].sort().to_list()
    means = [
        float(sum(tasks[name]) / len(tasks)) if len(tasks) else None for name in ("mean_a", "mean_b", "difference")
    ]
    low, high = (bootstrap(differences, confidence) if len(differences) > 1 else None) or (None, None)
    better, worse = (sum(sign * each > _EQUAL for each in differences) for sign in (1, -1))
    side_a, side_b = (_Side.of(rows, counted, one, len(tasks)) for one in (a, b))
    return Comparison(
        column=compared,
        a=a,
        b=b,
        metric=metric,
        confidence=confidence,
        episodes_a=side_a.episodes,
        episodes_b=side_b.episodes,
        pooled_a=side_a.pooled,
        pooled_b=side_b.pooled,
        repeats=rows["duplicate_of"].count(),
        left_out_a=side_a.left_out,
        left_out_b=side_b.left_out,
        only_a=side_a.only,
        only_b=side_b.only,
        better=better,
        worse=worse,
        same=len(tasks) - better - worse,
        mean_a=means[0],
        mean_b=means[1],
        difference=means[2],
        low=low,
        high=high,
        p_value=sign_test(better, worse) if differences else None,
        tasks=tasks,
    )


@dataclass(frozen=True)
class _Side:
    episodes: int
    pooled: int
    left_out: int
    only: int

    @classmethod
    def of(cls, rows: pl.DataFrame, counted: pl.DataFrame, side: str, shared: int) -> _Side:
        every, used = (frame.filter(pl.col("side") == side) for frame in (rows, counted))
        pooled = every.select("run_id", "policy_name", "policy_version").n_unique()
        return cls(len(every), pooled, len(every) - len(used), used["task"].n_unique() - shared)


_EQUAL = 1e-12  # means of the same values in another order


def _side(name: str) -> pl.Expr:
    if name == _VERSIONED:
        return pl.concat_str("policy_name", "policy_version", separator="@")
    return pl.col(name).cast(pl.String)


def _column_with_both(rows: pl.DataFrame, columns: list[str], a: str, b: str) -> str:
    """The first of the columns that has both. Raises UsageError that says what there is."""
    values = {name: rows[f"side {name}"].drop_nulls().unique().sort().to_list() for name in columns}
    for name, found in values.items():
        if a in found and b in found:
            return name
    where = {one: [name for name, found in values.items() if one in found] for one in (a, b)}
    if missing := next((one for one, names in where.items() if not names), None):
        known = {each: name for name, found in values.items() if name != _VERSIONED for each in found}
        near = get_close_matches(missing, known, n=3) or sorted(known)[:_SHOWN]
        what = columns[0] if len(columns) == 1 else "policy, policy version or run"
        there = ", ".join(f"{each} ({known[each]})" for each in near)
        raise UsageError(f"no episode that fits has {what} {missing!r}; there is {there or 'none'}")
    raise UsageError(f"{a!r} is a {where[a][0]} and {b!r} is a {where[b][0]}: compare two of one kind")


def _paired(rows: pl.DataFrame, a: str, b: str, metric: Metric) -> pl.DataFrame:
    """One row a task that both sides tried."""
    value = pl.col(metric).cast(pl.Float64)
    sides = []
    for name, side in (("a", a), ("b", b)):
        found = (
            rows.filter(pl.col("side") == side)
            .group_by("task")
            .agg(
                pl.len().cast(pl.Int64).alias(f"trials_{name}"),
                value.mean().alias(f"mean_{name}"),
                value.var(ddof=1).alias(f"variance_{name}"),
            )
        )
        sides.append(found)
    joined = sides[0].join(sides[1], on="task", nulls_equal=True)
    return joined.with_columns(difference=pl.col("mean_b") - pl.col("mean_a")).unnest("task")


def _with_intervals(tasks: pl.DataFrame, metric: Metric, confidence: float) -> pl.DataFrame:
    bounds: list[Interval | None] = []
    for row in tasks.iter_rows(named=True):
        n = row["trials_a"], row["trials_b"]
        if metric == "success":
            bounds.append(newcombe(row["mean_a"], n[0], row["mean_b"], n[1], confidence))
        else:
            spread = row["variance_a"], row["variance_b"]
            bounds.append(welch(row["mean_a"], spread[0], n[0], row["mean_b"], spread[1], n[1], confidence))
    found = (
        tasks.with_columns(
            low=pl.Series([each and each[0] for each in bounds], dtype=pl.Float64),
            high=pl.Series([each and each[1] for each in bounds], dtype=pl.Float64),
        )
        .with_columns(clear=((pl.col("low") > 0) | (pl.col("high") < 0)).fill_null(False))
        .select(*TASK, "group", "trials_a", "trials_b", "mean_a", "mean_b", "difference", "low", "high", "clear")
    )
    return in_order(found, ["difference", *TASK, "group"])

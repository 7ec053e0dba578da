"""How well a policy does: rates, means with their standard errors and intervals, pass@k and pass^k.

Conventions. Papers and tools differ in what one value of a mean is, and in how its error is estimated; a `Convention`
names such a choice, and the figures of a published table come out under its own:

| name | one value is | standard error | of one value | not judged, not scored |
|---|---|---|---|---|
| `episode` | an episode | stdev (ddof 1) / root of n | null | left out, and counted |
| `inspect` | a task: the mean over its trials | stdev (ddof 1) / root of n | 0 | left out, and counted |
| `sb3` | an episode | stdev (ddof 0) / root of n | 0 | left out, and counted |

With `nulls="failures"` an episode that was not judged is one that failed, and a reward that is missing is 0.0. NaN is a
value, and makes a mean NaN. Retracted episodes are left out of everything. What a task is says trajlake.read.tasks; an
episode that belongs to no task or group is one of its own.

For a task with n judged trials, c of them successful, and k <= n:
    pass@k = 1 - C(n-c, k) / C(n, k)    at least one of k trials succeeds (Chen et al. 2021, arXiv:2107.03374)
    pass^k = C(c, k) / C(n, k)          all of k trials succeed (Yao et al. 2024, arXiv:2406.12045)
and the figure is the mean over tasks. A task with fewer than k trials cannot be counted for that k; where there are
such tasks, `tasks@k` says how many were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import polars as pl

from trajlake.analysis.intervals import bootstrap, student, wilson
from trajlake.errors import UsageError
from trajlake.read.snapshot import USABLE, is_repeat
from trajlake.read.tags import column, is_tag
from trajlake.read.tasks import HAS_TASK, TASK, THE_TASK

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

Per = Literal["episode", "task"]
Nulls = Literal["left-out", "failures"]
Interval = Literal["standard", "bootstrap"]
_Counts = np.ndarray[Any, np.dtype[np.int64]]
_Ratios = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Convention:
    """What one value of a mean is, and how its error is estimated: see the head of this module."""

    per: Per = "episode"
    ddof: int = 1
    lone_stderr: float | None = None
    """The standard error of a single value: not known (None), or 0.0."""
    nulls: Nulls = "left-out"


CONVENTIONS = {
    "episode": Convention(),
    "inspect": Convention(per="task", lone_stderr=0.0),
    "sb3": Convention(ddof=0, lone_stderr=0.0),
}

_POOLED = ("run_id", "policy_name", "policy_version", "duplicate_of")
_MEASURED = ("group_id", "success", "reward", "n_steps", "prompt_tokens", "completion_tokens", "wall_ms")


def summarize(
    snapshot: Snapshot,
    by: Sequence[str] = (),
    pass_k: Sequence[int] = (),
    where: str | None = None,
    *,
    unique: bool = False,
    convention: str | Convention = "episode",
    per: Per | None = None,
    ddof: int | None = None,
    nulls: Nulls | None = None,
    confidence: float | None = None,
    interval: Interval = "standard",
    distribution: bool = False,
) -> pl.DataFrame:
    """One row a group of episodes with equal values in the columns `by` (one row in all where it is empty); a tag
    counts as a column, `tags['team']`.

    Columns: those of `by`; episodes, unjudged, success_rate, success_stderr, unscored, reward_mean, reward_stderr,
    steps_mean (steps), tokens_mean (prompt and completion tokens), latency_ms_mean (wall time, milliseconds), tasks;
    runs, policies (pairs of name and version) and repeats (episodes whose content another one has), which say what was
    pooled; and `pass^k`, `pass@k` for each k. With `unique` repeats are left out.

    `convention` is a name of CONVENTIONS or one of your own; `per`, `ddof` and `nulls` change a part of it. With a
    `confidence` such as 0.95 there are also success_low, success_high, reward_low, reward_high: Wilson's interval for
    a rate over episodes and Student's t for means, or with `interval="bootstrap"` the percentile bootstrap. With
    `distribution` also reward_std, reward_min, reward_median, reward_max (over episodes), and timesteps: the sum of
    the episodes' steps, or of their length `l` in `extra` where only returns were recorded.

    Raises UsageError for an unknown column or convention, for k < 1 and a confidence that is not between 0 and 1,
    QueryError for `where`.
    """
    chosen = _convention(convention, per, ddof, nulls)
    if confidence is not None and not 0 < confidence < 1:
        raise UsageError(f"a confidence is between 0 and 1, like 0.95, not {confidence}")
    if interval not in get_args(Interval):
        raise UsageError(f"an interval is one of {', '.join(get_args(Interval))}, not {interval!r}")
    keys = list(by)
    rows = _rows(snapshot, keys, pass_k, where, distribution, unique)
    judged = rows if chosen.nulls == "left-out" else rows.with_columns(as_failures())
    summary = _grouped(rows, keys, _COUNTS)
    values = judged if chosen.per == "episode" else _per_task(judged, keys)
    summary = _joined(summary, _grouped(values, keys, _estimates(chosen, interval)), keys)
    if confidence is not None:
        summary = _with_intervals(summary, chosen, confidence, interval)
    summary = summary.select(*keys, *_columns(confidence is not None))
    if distribution:
        summary = _joined(summary, _grouped(judged, keys, _distribution(chosen.ddof)), keys)
    if pass_k:
        summary = _joined(summary, _pass(judged, keys, pass_k), keys)
    return in_order(summary, keys) if keys else summary


def in_order(frame: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Sorted by these columns, nulls last, and texts that are numbers as numbers: task 2 before task 10."""
    order: list[pl.Expr] = []
    for name in columns:
        if frame.schema[name] == pl.String:
            order.append(pl.col(name).cast(pl.Float64, strict=False))
        order.append(pl.col(name))
    return frame.sort(order, nulls_last=True)


def _convention(name: str | Convention, per: Per | None, ddof: int | None, nulls: Nulls | None) -> Convention:
    if isinstance(name, str):
        if name not in CONVENTIONS:
            raise UsageError(f"no convention is called {name!r}; there are {', '.join(CONVENTIONS)}")
        name = CONVENTIONS[name]
    changes: dict[str, Any] = {"per": per, "ddof": ddof, "nulls": nulls}
    chosen = replace(name, **{what: value for what, value in changes.items() if value is not None})
    for what, choices in (("per", get_args(Per)), ("ddof", (0, 1)), ("nulls", get_args(Nulls))):
        if getattr(chosen, what) not in choices:
            raise UsageError(f"{what} is one of {', '.join(map(str, choices))}, not {getattr(chosen, what)!r}")
    return chosen


def _rows(
    snapshot: Snapshot, keys: list[str], pass_k: Sequence[int], where: str | None, distribution: bool, unique: bool
) -> pl.DataFrame:
    """The usable episodes with what is measured, and the task that each belongs to."""
    frame = snapshot.where(where).filter(USABLE)
    if unique:
        frame = frame.filter(~is_repeat(snapshot))
    frame = frame.with_columns(column(name) for name in keys if is_tag(name))
    known = frame.collect_schema()
    for name in keys:
        if name not in known:
            raise UsageError(f"episodes has no column {name!r}; it has: {', '.join(known.names())}")
        if known[name].is_nested():
            raise UsageError(f"column {name!r} is a {known[name]}: group by a column of single values")
    for k in pass_k:
        if k < 1:
            raise UsageError(f"k must be 1, 2, 3, …, not {k}")
    rows = snapshot.collect(
        frame.select(
            *sorted({*keys, *TASK, *_MEASURED, *_POOLED}),
            # Read only where it is asked for and says something: `extra` may be long.
            pl.when(pl.col("n_steps") == 0).then(pl.col("extra")).alias("returns_only")
            if distribution
            else pl.lit(None, pl.String).alias("returns_only"),
        )
    )
    return task_columns(rows).with_columns(
        length=pl.coalesce(pl.col("returns_only").map_elements(_length, pl.Int64), pl.col("n_steps").cast(pl.Int64)),
    )


def task_columns(rows: pl.DataFrame) -> pl.DataFrame:
    """With the `task` that each episode belongs to, and whether it `has_task`."""
    return rows.with_columns(task=THE_TASK, has_task=HAS_TASK)


def as_failures() -> list[pl.Expr]:
    """What `nulls="failures"` makes of success and reward."""
    return [pl.col("success").fill_null(False), pl.col("reward").fill_null(0.0)]


def _length(extra: str) -> int | None:
    value = json.loads(extra)
    length = value.get("l") if isinstance(value, dict) else None
    return length if type(length) is int and 0 <= length < 2**63 else None


_TOKENS = pl.sum_horizontal("prompt_tokens", "completion_tokens", ignore_nulls=True)
_SAID_TOKENS = pl.col("prompt_tokens").is_not_null() | pl.col("completion_tokens").is_not_null()
_COUNTS = [
    pl.len().cast(pl.Int64).alias("episodes"),
    pl.col("success").is_null().sum().cast(pl.Int64).alias("unjudged"),
    pl.col("reward").is_null().sum().cast(pl.Int64).alias("unscored"),
    pl.col("n_steps").mean().alias("steps_mean"),
    pl.when(_SAID_TOKENS).then(_TOKENS).mean().alias("tokens_mean"),
    pl.col("wall_ms").mean().alias("latency_ms_mean"),
    pl.col("task").filter("has_task").n_unique().cast(pl.Int64).alias("tasks"),
    pl.col("run_id").n_unique().cast(pl.Int64).alias("runs"),
    pl.struct("policy_name", "policy_version").n_unique().cast(pl.Int64).alias("policies"),
    pl.col("duplicate_of").is_not_null().sum().cast(pl.Int64).alias("repeats"),
]


def _columns(intervals: bool) -> list[str]:
    bounds = {name: [f"{name}_low", f"{name}_high"] if intervals else [] for name in ("success", "reward")}
    return [
        *("episodes", "unjudged", "success_rate", "success_stderr", *bounds["success"]),
        *("unscored", "reward_mean", "reward_stderr", *bounds["reward"]),
        *("steps_mean", "tokens_mean", "latency_ms_mean", "tasks", "runs", "policies", "repeats"),
    ]


def _per_task(rows: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """One row a task with the means over its trials; an episode without a task is its own."""
    own = pl.when(pl.col("has_task")).then(None).otherwise(pl.int_range(pl.len())).alias("own")
    means = [pl.col("success").cast(pl.Float64).mean(), pl.col("reward").mean()]
    return rows.with_columns(own).group_by([*keys, "task", "own"]).agg(means)


def _estimates(chosen: Convention, interval: Interval) -> list[pl.Expr]:
    """For success and reward: mean, standard error, number and sum of values, and the values where they are needed."""
    found: list[pl.Expr] = []
    for name, mean in (("success", "success_rate"), ("reward", "reward_mean")):
        value = pl.col(name).cast(pl.Float64)
        stderr = value.std(ddof=chosen.ddof) / value.count().sqrt()
        if chosen.lone_stderr is not None:
            stderr = pl.when(value.count() == 1).then(pl.lit(chosen.lone_stderr)).otherwise(stderr)
        found += [
            value.mean().alias(mean),
            stderr.alias(f"{name}_stderr"),
            value.count().cast(pl.Int64).alias(f"{name}_n"),
            value.sum().alias(f"{name}_sum"),
        ]
        if interval == "bootstrap":
            found.append(value.drop_nulls().sort().implode().alias(f"{name}_values"))
    return found


def _with_intervals(summary: pl.DataFrame, chosen: Convention, confidence: float, interval: Interval) -> pl.DataFrame:
    bounds: dict[str, list[float | None]] = {}
    for name, mean in (("success", "success_rate"), ("reward", "reward_mean")):
        low, high = bounds[f"{name}_low"], bounds[f"{name}_high"] = [], []
        for row in summary.iter_rows(named=True):
            if interval == "bootstrap":
                found = bootstrap(row[f"{name}_values"] or (), confidence)
            elif name == "success" and chosen.per == "episode":
                found = wilson(row["success_sum"] or 0.0, row["success_n"] or 0, confidence)
            else:
                found = student(row[mean], row[f"{name}_stderr"], row[f"{name}_n"] or 0, confidence)
            low.append(None if found is None else found[0])
            high.append(None if found is None else found[1])
    return summary.with_columns(pl.Series(name, values, pl.Float64) for name, values in bounds.items())


def _distribution(ddof: int) -> list[pl.Expr]:
    reward = pl.col("reward")
    return [
        reward.std(ddof=ddof).alias("reward_std"),
        reward.min().alias("reward_min"),
        reward.median().alias("reward_median"),
        reward.max().alias("reward_max"),
        pl.col("length").sum().alias("timesteps"),
    ]


def _grouped(rows: pl.DataFrame, keys: list[str], aggregates: list[pl.Expr]) -> pl.DataFrame:
    return rows.group_by(keys).agg(aggregates) if keys else rows.select(aggregates)


def _joined(left: pl.DataFrame, right: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    if not keys:
        return left.hstack(right)
    return left.join(right, on=keys, how="left", nulls_equal=True)


def _pass(rows: pl.DataFrame, keys: list[str], pass_k: Sequence[int]) -> pl.DataFrame:
    judged = rows.filter(pl.col("success").is_not_null() & pl.col("has_task"))
    n = pl.col("n")
    tasks = judged.group_by([*keys, "task"]).agg(n=pl.len().cast(pl.Int64), c=pl.col("success").sum().cast(pl.Int64))
    trials, successes = tasks["n"].to_numpy(), tasks["c"].to_numpy()
    aggregates = []
    for k in dict.fromkeys(pass_k):
        all_of, none_of = (_ratio_of_binomials(top, trials, k) for top in (successes, trials - successes))
        tasks = tasks.with_columns(pl.Series(f"pass^{k}", all_of), pl.Series(f"pass@{k}", 1.0 - none_of))
        aggregates += [pl.col(name).filter(n >= k).mean() for name in (f"pass^{k}", f"pass@{k}")]
        if tasks.filter(n < k).height:
            aggregates.append((n >= k).sum().cast(pl.Int64).alias(f"tasks@{k}"))
    return _grouped(tasks, keys, aggregates)


def _ratio_of_binomials(top: _Counts, bottom: _Counts, k: int) -> _Ratios:
    """C(top, k) / C(bottom, k) as a product of ratios, exact enough for any n and without large numbers; anything
    where bottom < k."""
    ratio = np.ones(len(top))
    for i in range(min(k, int(bottom.max(initial=0)))):
        ratio *= np.maximum(top - i, 0) / np.maximum(bottom - i, 1)
    return ratio

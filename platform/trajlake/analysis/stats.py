"""How well a policy does: rates, means with their standard errors, pass@k and pass^k.

Conventions. A mean is over episodes, its standard error is the sample standard deviation (ddof = 1) over the root of
the number of episodes. Episodes that were not judged (`success` null) are left out of rates and of pass@k and counted
as `unjudged`; those without a reward are left out of the reward and counted as `unscored`. Retracted episodes are
left out of everything.

For a task with n judged trials, c of them successful, and k <= n:
    pass@k = 1 - C(n-c, k) / C(n, k)    at least one of k trials succeeds (Chen et al. 2021, arXiv:2107.03374)
    pass^k = C(c, k) / C(n, k)          all of k trials succeed (Yao et al. 2024, arXiv:2406.12045)
and the figure is the mean over tasks. A task with fewer than k trials cannot be counted for that k; where there are
such tasks, `tasks@k` says how many were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from trajlake.errors import UsageError
from trajlake.read.snapshot import USABLE

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

TASK = ("task_family", "env_name", "task_id")
_MEASURED = ("group_id", "success", "reward", "n_steps", "prompt_tokens", "completion_tokens", "wall_ms")


def summarize(
    snapshot: Snapshot, by: Sequence[str] = (), pass_k: Sequence[int] = (), where: str | None = None
) -> pl.DataFrame:
    """One row a group of episodes with equal values in the columns `by` (one row in all where it is empty).

    Columns: those of `by`; episodes, unjudged, success_rate, success_stderr, unscored, reward_mean, reward_stderr,
    steps_mean (steps), tokens_mean (prompt and completion tokens), latency_ms_mean (wall time, milliseconds), tasks;
    and `pass^k`, `pass@k` for each k. Raises UsageError for an unknown column and for k < 1, QueryError for `where`.
    """
    frame = snapshot.where(where).filter(USABLE)
    known = frame.collect_schema()
    for name in by:
        if name not in known:
            raise UsageError(f"episodes has no column {name!r}; it has: {', '.join(known.names())}")
        if known[name].is_nested():
            raise UsageError(f"column {name!r} is a {known[name]}: group by a column of single values")
    for k in pass_k:
        if k < 1:
            raise UsageError(f"k must be 1, 2, 3, …, not {k}")
    keys = list(by)
    rows = snapshot.collect(frame.select(sorted({*keys, *TASK, *_MEASURED})))
    rows = rows.with_columns(
        task=pl.struct(*TASK, pl.when(pl.col("task_id").is_null()).then(pl.col("group_id")).alias("group")),
        has_task=pl.col("task_id").is_not_null() | pl.col("group_id").is_not_null(),
    )
    summary = _grouped(rows, keys, _MEANS)
    if pass_k:
        summary = _joined(summary, _pass(rows, keys, pass_k), keys)
    return summary.sort(keys, nulls_last=True) if keys else summary


_TOKENS = pl.sum_horizontal("prompt_tokens", "completion_tokens", ignore_nulls=True)
_SAID_TOKENS = pl.col("prompt_tokens").is_not_null() | pl.col("completion_tokens").is_not_null()
_SUCCESS = pl.col("success").cast(pl.Float64)
_MEANS = [
    pl.len().cast(pl.Int64).alias("episodes"),
    pl.col("success").is_null().sum().cast(pl.Int64).alias("unjudged"),
    _SUCCESS.mean().alias("success_rate"),
    (_SUCCESS.std(ddof=1) / _SUCCESS.count().sqrt()).alias("success_stderr"),
    pl.col("reward").is_null().sum().cast(pl.Int64).alias("unscored"),
    pl.col("reward").mean().alias("reward_mean"),
    (pl.col("reward").std(ddof=1) / pl.col("reward").count().sqrt()).alias("reward_stderr"),
    pl.col("n_steps").mean().alias("steps_mean"),
    pl.when(_SAID_TOKENS).then(_TOKENS).mean().alias("tokens_mean"),
    pl.col("wall_ms").mean().alias("latency_ms_mean"),
    pl.col("task").filter("has_task").n_unique().cast(pl.Int64).alias("tasks"),
]


def _grouped(rows: pl.DataFrame, keys: list[str], aggregates: list[pl.Expr]) -> pl.DataFrame:
    return rows.group_by(keys).agg(aggregates) if keys else rows.select(aggregates)


def _joined(left: pl.DataFrame, right: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    if not keys:
        return left.hstack(right)
    return left.join(right, on=keys, how="left", nulls_equal=True)


def _pass(rows: pl.DataFrame, keys: list[str], pass_k: Sequence[int]) -> pl.DataFrame:
    judged = rows.filter(pl.col("success").is_not_null() & pl.col("has_task"))
    n, c = pl.col("n"), pl.col("c")
    tasks = judged.group_by([*keys, "task"]).agg(n=pl.len().cast(pl.Int64), c=pl.col("success").sum().cast(pl.Int64))
    aggregates = []
    for k in dict.fromkeys(pass_k):
        enough = n >= k
        aggregates += [
            _ratio_of_binomials(c, n, k).filter(enough).mean().alias(f"pass^{k}"),
            (1.0 - _ratio_of_binomials(n - c, n, k)).filter(enough).mean().alias(f"pass@{k}"),
        ]
        if tasks.filter(n < k).height:
            aggregates.append(enough.sum().cast(pl.Int64).alias(f"tasks@{k}"))
    return _grouped(tasks, keys, aggregates)


def _ratio_of_binomials(top: pl.Expr, bottom: pl.Expr, k: int) -> pl.Expr:
    """C(top, k) / C(bottom, k) as a product of ratios, exact enough for any n and without large numbers."""
    ratio = pl.lit(1.0)
    for i in range(k):
        ratio = ratio * pl.max_horizontal(top - i, 0) / (bottom - i)
    return ratio

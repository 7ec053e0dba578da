"""The population: the episodes that a sampler may draw, sorted by id, with what it has to know of each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from trajlake.errors import QueryError, UsageError
from trajlake.read.index import sorted_by_id
from trajlake.read.items import NothingFits, Window
from trajlake.read.snapshot import is_repeat
from trajlake.read.strategies import Strategy, strategy_of, with_python_numbers
from trajlake.read.tags import column
from trajlake.table.sealed import lacks_steps

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

PLACE = ("steps_path", "row_group", "row_offset", "row_count")
_ALWAYS = (
    "episode_id", "n_steps", "reward", "run_id", "policy_name", "policy_version", "group_id", "retracted",
    "duplicate_of", "stop_reason", *PLACE,
)  # fmt: skip
_EPSILON = 1e-6  # keeps groups of equal rewards from dividing by zero


@dataclass(frozen=True)
class Recipe:
    """All that a sequence of draws depends on, beside the snapshot: JSON-compatible, and equal where the draws are.

    `unique` leaves out episodes that repeat the content of another; `empty` lets in those without steps, of which only
    the return is known. `policy_version` is the trainer's, to which policy lags refer (None: for each policy of each
    run the highest that there is, because versions of different policies cannot be compared). `normalize_reward` names
    columns: within each combination of
    their values rewards become (r - mean) / (standard deviation with ddof 1 + 1e-6), as GRPO's advantages
    (Shao et al. 2024, arXiv:2402.03300) with `group_id`. `max_times_sampled` ends the drawing of an item, as in Reverb.
    """

    strategy: Strategy
    seed: int = 0
    where: str | None = None
    unique: bool = False
    empty: bool = False
    window: Window | None = None
    policy_version: float | None = None
    normalize_reward: tuple[str, ...] | None = None
    max_times_sampled: int | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
            elif isinstance(value, (Strategy, Window)):
                object.__setattr__(self, name, with_python_numbers(value))
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be from 0 to 2**63 - 1, not {self.seed}")
        if self.max_times_sampled is not None and self.max_times_sampled < 1:
            raise UsageError(f"max_times_sampled must be at least 1, not {self.max_times_sampled}")

    @classmethod
    def of(
        cls,
        strategy: str | Strategy,
        options: Mapping[str, Any],
        normalize_reward: str | Sequence[str] | None = None,
        **rest: Any,
    ) -> Recipe:
        """A recipe from what callers write: a strategy by name with its options, columns as text or list."""
        by = normalize_reward.split(",") if isinstance(normalize_reward, str) else normalize_reward
        return cls(strategy_of(strategy, options), normalize_reward=None if by is None else tuple(by), **rest)

    def to_json(self) -> dict[str, Any]:
        """As plain values; `from_json` reads them back."""
        window = None if self.window is None else dict(vars(self.window))
        by = None if self.normalize_reward is None else list(self.normalize_reward)
        return {**vars(self), "strategy": self.strategy.to_json(), "window": window, "normalize_reward": by}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Recipe:
        """Raises UsageError for what `to_json` does not write."""
        try:
            window = None if values["window"] is None else Window(**values["window"])
            by = None if values["normalize_reward"] is None else tuple(values["normalize_reward"])
            known = {name: values[name] for name in cls.__dataclass_fields__}
            strategy = strategy_of(values["strategy"], {})
            return cls(**{**known, "strategy": strategy, "window": window, "normalize_reward": by})
        except (KeyError, TypeError) as error:
            raise UsageError(f"this does not describe a sampler: {error!r}") from error


@dataclass(frozen=True)
class Population:
    """`rows` has one row an episode; `left_out` says how many were left out and why."""

    rows: pl.DataFrame
    left_out: dict[str, int] = field(default_factory=dict)


def columns_of(recipe: Recipe) -> list[pl.Expr]:
    """What has to be selected from `episodes` for this recipe. Raises QueryError for wrong SQL in the strategy."""
    try:
        special = recipe.strategy.columns()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise QueryError(f"strategy {recipe.strategy.name}: {error}") from error
    names = dict.fromkeys((*_ALWAYS, *(recipe.normalize_reward or ())))
    return [column(name) for name in names if name not in special] + [
        expression.alias(name) for name, expression in special.items()
    ]


def read_population(snapshot: Snapshot, recipe: Recipe) -> Population:
    """The population of a snapshot. Raises UsageError where nothing is left, QueryError."""
    return population(sorted_by_id(rows_of(snapshot, recipe)), recipe)


def rows_of(snapshot: Snapshot, recipe: Recipe) -> pl.DataFrame:
    """The episodes that fit `where`, with the columns of `columns_of`. Raises QueryError."""
    frame = snapshot.where(recipe.where)
    if recipe.unique:
        frame = frame.with_columns(duplicate_of=pl.when(is_repeat(snapshot)).then("duplicate_of"))
    return snapshot.collect(frame.select(columns_of(recipe)))


def population(rows: pl.DataFrame, recipe: Recipe, spent: Collection[str] = ()) -> Population:
    """The population of these rows (sorted by id, with the columns of `columns_of`) without the episodes `spent`, which
    were drawn as often as they may be. Raises NothingFits where nothing is left of them."""
    fits = f" {recipe.where!r}" if recipe.where else ""
    if rows.is_empty():
        raise NothingFits("no episode fits" + (fits or ": the snapshot is empty"))
    left_out: dict[str, int] = {}
    rows = _without(rows, "retracted", rows["retracted"].is_not_null(), left_out)
    rows = _without(rows, "steps of it were lost", rows.select(lacks_steps()).to_series(), left_out)
    if recipe.unique:
        rows = _without(rows, "repeats another episode", rows["duplicate_of"].is_not_null(), left_out)
    if not recipe.empty:
        rows = _without(rows, "no steps", rows["n_steps"] == 0, left_out)
    version = pl.col("policy_version").cast(pl.Float64, strict=False)
    highest = version.max().over("run_id", "policy_name")
    current = highest if recipe.policy_version is None else pl.lit(recipe.policy_version, pl.Float64)
    rows = rows.with_columns(policy_lag=current - version)
    if spent:  # only now: a policy stays the newest when its episodes have been drawn
        rows = _without(rows, "drawn as often as they may be", rows["episode_id"].is_in(list(spent)), left_out)
    for reason, mask in recipe.strategy.leaves_out(rows):
        # Masks are of all rows: what an earlier reason took is no longer there.
        rows = rows.with_columns(mask.alias(f"mask {reason}"))
    for name in [name for name in rows.columns if name.startswith("mask ")]:
        rows = _without(rows, name.removeprefix("mask "), rows[name].fill_null(False), left_out).drop(name)
    if rows.is_empty():
        reasons = ", ".join(f"{count} were left out: {reason}" for reason, count in left_out.items())
        raise NothingFits(f"no episode fits{fits}: {reasons}", left_out)
    if recipe.normalize_reward is not None:
        rows = rows.with_columns(normalized_reward=_normalized(recipe.normalize_reward))
    return Population(rows, left_out)


def _without(rows: pl.DataFrame, reason: str, mask: pl.Series, left_out: dict[str, int]) -> pl.DataFrame:
    if count := int(mask.sum()):
        left_out[reason] = count
        return rows.filter(~mask)
    return rows


def _normalized(by: tuple[str, ...]) -> pl.Expr:
    """Rewards that are null or NaN stay out of the mean and become null; one reward alone becomes 0."""
    reward = pl.col("reward").fill_nan(None)
    mean, deviation = reward.mean(), reward.std(ddof=1).fill_null(0.0)
    if by:
        mean, deviation = mean.over(by), deviation.over(by)
    return (reward - mean) / (deviation + _EPSILON)

"""Strategies: how items are chosen. Each is a frozen description (JSON-compatible), which becomes a Drawer over rows.

uniform      with replacement, as Reverb's Uniform
epochs       without replacement, each item once an epoch in a new order, as TorchRL's SamplerWithoutReplacement
fifo, lifo   each item once, the oldest or the newest first, as Reverb's Fifo and Lifo with max_times_sampled=1
recency      only what the policy produced at most `max_lag` versions ago, newer ones more often if wanted
prioritized  as Reverb's and TorchRL's: see trajlake.read.prioritized
stratified   by target ratios of the values of some columns (domains)
difficulty, curriculum   by the pass rate of the task: see trajlake.read.curriculum
group        all rollouts of a group at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import polars as pl

from trajlake.errors import UsageError
from trajlake.read.draws import Floats, Indexes, below, fractions, shuffled, words
from trajlake.read.items import Episodes, Groups, Items, NothingFits, Window, Windows
from trajlake.read.tags import column

Kind = Literal["independent", "order", "moving"]


@dataclass(frozen=True)
class Drawn:
    """Items with the probability of each draw."""

    items: Indexes
    probability: Floats


class Drawer(Protocol):
    """A strategy over certain rows: gives the items of any positions. `length` is how many draws there are, None where
    they never end. `kind`: are draws `independent` of each other, in an `order` of which each item is part, or from a
    `moving` population?"""

    length: int | None
    kind: Kind

    def draw(self, first: int, count: int) -> Drawn: ...

    def chances(self) -> Floats:
        """The probability of each item at the next draw; an item of 0 never comes."""
        ...


class Strategy:
    """The base of all. Subclasses are frozen dataclasses whose fields are the options."""

    name: ClassVar[str]

    def columns(self) -> dict[str, pl.Expr]:
        """What it has to know of each episode, beside what every sampler reads."""
        return {}

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        """Reasons why rows cannot be drawn, each with a mask of those rows; the first reason that fits counts."""
        return []

    def items(self, rows: pl.DataFrame, window: Window | None) -> Items:
        steps = rows["n_steps"].cast(pl.Int64).to_numpy()
        return Episodes(steps) if window is None else Windows(steps, window)

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The name and the options; `strategy_of` reads it back."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {"name": self.name, **{name: _plain(value) for name, value in options.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def with_python_numbers(described: Any) -> Any:
    """A dataclass with Python's numbers in place of numpy's: JSON has none of those, and they reckon otherwise."""
    given = {each.name: getattr(described, each.name) for each in fields(described)}
    changed = {name: value.item() for name, value in given.items() if isinstance(value, np.generic)}
    return replace(described, **changed) if changed else described


# -- uniform, epochs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniform(Strategy):
    """Every item with equal probability at every draw."""

    name: ClassVar[str] = "uniform"

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        return _Even(seed, items.size)


class _Even:
    length: int | None = None
    kind: Kind = "independent"

    def __init__(self, seed: int, size: int) -> None:
        self._seed, self._size = seed, size

    def draw(self, first: int, count: int) -> Drawn:
        return certain(below(words(self._seed, first, count), self._size), 1.0 / self._size)

    def chances(self) -> Floats:
        return np.full(self._size, 1.0 / self._size)


def certain(items: Indexes, probability: float) -> Drawn:
    """Draws that all have the same probability."""
    return Drawn(items, np.full(len(items), probability))


@dataclass(frozen=True)
class Epochs(Strategy):
    """Each item once an epoch. `epochs` bounds their number (None: without end)."""

    epochs: int | None = None
    name: ClassVar[str] = "epochs"

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise UsageError(f"epochs must be at least 1, not {self.epochs}")

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        return Shuffled(seed, items.size, self.epochs)


class Shuffled:
    """Without replacement; the probability is that of each place of an epoch before the epoch is known."""

    kind: Kind = "order"

    def __init__(self, seed: int, size: int, epochs: int | None) -> None:
        self._seed, self._size = seed, size
        self.length = None if epochs is None else epochs * size

    def draw(self, first: int, count: int) -> Drawn:
        return certain(shuffled(self._seed, first, count, self._size), 1.0 / self._size)

    def chances(self) -> Floats:
        return np.full(self._size, 1.0 / self._size)


# -- by age -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fifo(Strategy):
    """The oldest first, each once. Age is by `order`, a column or SQL expression, then by id; nulls are oldest.

    `ended_at` is by the workers' clocks: where these disagree, order by what does not, e.g. a policy version.
    """

    order: str = "ended_at"
    name: ClassVar[str] = "fifo"
    _newest_first: ClassVar[bool] = False

    def columns(self) -> dict[str, pl.Expr]:
        return {"order": pl.sql_expr(self.order)}

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        by_age = rows.select(pl.col("order").rank("dense").fill_null(0).cast(pl.Int64))["order"].to_numpy()
        order = np.argsort(items.from_rows(by_age), kind="stable")
        return _InOrder(order[::-1] if self._newest_first else order)


@dataclass(frozen=True)
class Lifo(Fifo):
    """The newest first, each once: the reverse of fifo."""

    name: ClassVar[str] = "lifo"
    _newest_first: ClassVar[bool] = True


class _InOrder:
    kind: Kind = "order"

    def __init__(self, order: Indexes) -> None:
        self._order = order
        self.length: int | None = len(order)

    def draw(self, first: int, count: int) -> Drawn:
        return certain(self._order[first : first + count], 1.0)

    def chances(self) -> Floats:
        return np.full(len(self._order), 1.0 / len(self._order))


@dataclass(frozen=True)
class Recency(Strategy):
    """Only episodes whose policy lag is at most `max_lag` versions; uniform, or with probability proportional to
    2 ** (-lag / half_life). The lag is the sampler's `policy_version` minus the episode's."""

    max_lag: float | None = None
    half_life: float | None = None
    name: ClassVar[str] = "recency"

    def __post_init__(self) -> None:
        if self.max_lag is None and self.half_life is None:
            raise UsageError("recency needs max_lag, half_life, or both")
        if (self.half_life is not None and not self.half_life > 0) or (self.max_lag is not None and self.max_lag < 0):
            raise UsageError("max_lag must not be negative, and half_life must be above 0")

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        lag = rows["policy_lag"]
        found = [("policy_version is not a number", lag.is_null())]
        if self.max_lag is not None:
            found.append((f"policy lag above {self.max_lag:g}", (lag > self.max_lag).fill_null(False)))
        return found

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        if self.half_life is None:
            return _Even(seed, items.size)
        lag = rows["policy_lag"].to_numpy()
        return _Weighted(seed, items.from_rows(np.exp2(-(lag - lag.min()) / self.half_life)))


class _Weighted:
    """With replacement, by weights that do not change."""

    length: int | None = None
    kind: Kind = "independent"

    def __init__(self, seed: int, weights: Floats) -> None:
        self._seed = seed
        self._ends = np.cumsum(weights)
        self._chances: Floats = weights / self._ends[-1]

    def draw(self, first: int, count: int) -> Drawn:
        masses = fractions(words(self._seed, first, count)) * self._ends[-1]
        items = np.minimum(np.searchsorted(self._ends, masses, side="right"), len(self._ends) - 1)
        return Drawn(items, self._chances[items])

    def chances(self) -> Floats:
        return self._chances


# -- strata -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stratified(Strategy):
    """First a stratum by `ratios`, then an item of it uniformly. A stratum is a combination of values of the columns
    `by`; its name in `ratios` is those values joined by commas (null is `null`). Without ratios all are equal."""

    by: tuple[str, ...] = ("domain",)
    ratios: Mapping[str, float] = field(default_factory=dict)
    name: ClassVar[str] = "stratified"

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", tuple(self.by))
        if not self.by:
            raise UsageError("stratified needs at least one column in `by`")
        if any(not 0 < ratio < np.inf for ratio in self.ratios.values()):
            raise UsageError(f"ratios must be above 0 and finite: {dict(self.ratios)}")

    def columns(self) -> dict[str, pl.Expr]:
        texts = [column(name).cast(pl.String).fill_null("null") for name in self.by]
        return {"stratum": pl.concat_str(texts, separator=",")}

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        if not self.ratios:
            return []
        known = set(rows["stratum"].unique())
        if missing := sorted(set(self.ratios) - known):
            raise NothingFits(
                f"no episode has {', '.join(self.by)} = {missing[0]}; there is {', '.join(sorted(known)[:8])}"
            )
        return [("stratum has no ratio", ~rows["stratum"].is_in(list(self.ratios)))]

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        names = rows["stratum"].unique().sort().to_list()
        codes = items.from_rows(rows["stratum"].cast(pl.Enum(names)).to_physical().to_numpy().astype(np.int64))
        ratios = np.array([self.ratios.get(name, 1.0) for name in names], np.float64)
        counts = np.bincount(codes, minlength=len(names))
        if empty := [name for name, count in zip(names, counts, strict=True) if not count]:
            raise NothingFits(f"no window fits into any episode of stratum {empty[0]}")
        return _Strata(seed, np.argsort(codes, kind="stable"), counts, ratios / ratios.sum())


class _Strata:
    length: int | None = None
    kind: Kind = "independent"

    def __init__(self, seed: int, order: Indexes, counts: Indexes, ratios: Floats) -> None:
        self._seed, self._order, self._counts, self._ratios = seed, order, counts, ratios
        self._firsts = np.cumsum(counts) - counts
        self._ends = np.cumsum(ratios)

    def draw(self, first: int, count: int) -> Drawn:
        chosen = np.searchsorted(self._ends, fractions(words(self._seed, first, count, stream=1)), side="right")
        chosen = np.minimum(chosen, len(self._ends) - 1)
        within = below(words(self._seed, first, count), self._counts[chosen])
        items = self._order[self._firsts[chosen] + within]
        return Drawn(items, self._ratios[chosen] / self._counts[chosen])

    def chances(self) -> Floats:
        found = np.empty(len(self._order))
        found[self._order] = np.repeat(self._ratios / self._counts, self._counts)
        return found


# -- groups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group(Strategy):
    """All rollouts of one group at once, as group-relative methods need them (GRPO; Shao et al. 2024), groups uneven as
    they are. Each group once an epoch, or independently where `replace`.

    `drop_constant` leaves out groups whose rewards are all equal (no gradient; DAPO's dynamic sampling) or that have
    fewer than two. `least` leaves out groups of fewer rollouts: live, those that are not complete yet.
    """

    by: str = "group_id"
    drop_constant: bool = True
    least: int = 1
    replace: bool = False
    epochs: int | None = None
    name: ClassVar[str] = "group"

    def columns(self) -> dict[str, pl.Expr]:
        return {"group": column(self.by)}

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        found = [(f"no {self.by}", rows["group"].is_null())]
        few = rows.select(pl.len().over("group") < self.least)["len"]
        if self.least > 1:
            found.append((f"fewer than {self.least} rollouts in their group", few))
        if self.drop_constant:
            reward = pl.col("reward").fill_nan(None)
            varies = (reward.n_unique() - reward.is_null().any() > 1).over("group")
            constant = rows.select(~varies)["reward"]
            groups = rows.filter(constant & ~few)["group"].drop_nulls().n_unique()
            found.append((f"the reward does not vary in their groups ({groups} groups)", constant))
        return found

    def items(self, rows: pl.DataFrame, window: Window | None) -> Items:
        if window is not None:
            raise UsageError("group draws whole episodes: leave the window out")
        numbers = rows["group"].rank("dense").cast(pl.Int64).fill_null(0).to_numpy() - 1
        return Groups(rows["n_steps"].cast(pl.Int64).to_numpy(), numbers)

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        return _Even(seed, items.size) if self.replace else Shuffled(seed, items.size, self.epochs)


# -- by name ------------------------------------------------------------------------------------------------------


def strategies() -> dict[str, type[Strategy]]:
    """All strategies by their names."""
    from trajlake.read.curriculum import Curriculum, Difficulty
    from trajlake.read.prioritized import Prioritized

    kinds: Sequence[type[Strategy]] = (
        Uniform, Epochs, Fifo, Lifo, Recency, Prioritized, Stratified, Difficulty, Curriculum, Group,
    )  # fmt: skip
    return {kind.name: kind for kind in kinds}


def strategy_of(name: str | Strategy | Mapping[str, Any], options: Mapping[str, Any]) -> Strategy:
    """The strategy that a name and options, or what `to_json` gave, describe. Raises UsageError."""
    if isinstance(name, Strategy):
        if options:
            raise UsageError(f"the strategy has its options already: {', '.join(options)} cannot be given beside it")
        return name
    if isinstance(name, Mapping):
        return strategy_of(name["name"], {key: value for key, value in name.items() if key != "name"})
    kinds = strategies()
    if name not in kinds:
        raise UsageError(f"strategy must be one of {', '.join(kinds)}, not {name!r}")
    known = [each.name for each in fields(kinds[name])]  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(known)):
        has = f"its options are {', '.join(known)}" if known else "it has no options"
        raise UsageError(f"strategy {name} has no option {unknown[0]!r}: {has}")
    return kinds[name](**options)

"""Difficulty bands: items by the pass rate of their task, in a band that stays or that moves with the step.

The pass rate of a task (see trajlake.read.tasks) is the mean of `success` over the episodes that may be drawn and that
were judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl

from trajlake.errors import UsageError
from trajlake.read.draws import Floats, Indexes, below, words
from trajlake.read.items import Items
from trajlake.read.strategies import Drawer, Drawn, Kind, Strategy
from trajlake.read.tasks import HAS_TASK, THE_TASK

Stage = tuple[int, float, float]


@dataclass(frozen=True)
class Curriculum(Strategy):
    """Uniform among items whose task's pass rate is in a band that moves.

    `stages` are (step, low, high): from each to the next the band moves linearly, after the last it stays. A step is
    `draws_per_step` positions (the batch size, over all ranks). A band in which no task lies draws the nearest ones.
    """

    stages: tuple[Stage, ...] = ()
    draws_per_step: int = 1
    name: ClassVar[str] = "curriculum"

    def __post_init__(self) -> None:
        stages = tuple((int(step), float(low), float(high)) for step, low, high in self.stages)
        object.__setattr__(self, "stages", stages)
        if not stages:
            raise UsageError(
                "a curriculum needs stages of STEP:LOW:HIGH (pass rates), for example 0:0.5:1 and then 1000:0.1:0.5"
            )
        if self.draws_per_step < 1:
            raise UsageError(f"a curriculum needs at least one draw per step, not {self.draws_per_step}")
        steps = [step for step, _, _ in stages]
        if steps[0] < 0 or steps != sorted(set(steps)):
            raise UsageError(f"the steps of the stages must rise, from 0 or more: {steps}")
        for _, low, high in stages:
            if not 0 <= low <= high <= 1:
                raise UsageError(f"a band goes from a lower to a higher pass rate, both from 0 to 1: {low}:{high}")

    def columns(self) -> dict[str, pl.Expr]:
        return {"task": THE_TASK, "has_task": HAS_TASK, "success": pl.col("success")}

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        return [
            ("no task_id and no group_id", ~rows["has_task"]),
            ("no episode of its task was judged", pass_rates(rows).is_null()),
        ]

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        return _Band(self, seed, items.from_rows(pass_rates(rows).to_numpy()))


def pass_rates(rows: pl.DataFrame) -> pl.Series:
    """The pass rate of each row's task; null where none of its episodes was judged."""
    return rows.select(pl.col("success").cast(pl.Float64).mean().over("task"))["success"]


class _Band:
    length: int | None = None

    def __init__(self, strategy: Curriculum, seed: int, rates: Floats) -> None:
        self.kind: Kind = "independent" if len(strategy.stages) == 1 else "moving"
        self._strategy, self._seed = strategy, seed
        self._order = np.argsort(rates, kind="stable")
        self._rates = rates[self._order]

    def draw(self, first: int, count: int) -> Drawn:
        firsts, ends = self._ranges(*self.band(np.arange(first, first + count) // self._strategy.draws_per_step))
        sizes = ends - firsts
        items = self._order[firsts + below(words(self._seed, first, count), sizes)]
        return Drawn(items, 1.0 / sizes)

    def chances(self) -> Floats:
        """Where the band moves: at its beginning."""
        firsts, ends = self._ranges(*self.band(np.zeros(1, np.int64)))
        within = slice(int(firsts[0]), int(ends[0]))
        found = np.zeros(len(self._order))
        found[self._order[within]] = 1.0 / (within.stop - within.start)
        return found

    def band(self, steps: Indexes) -> tuple[Floats, Floats]:
        """The lowest and the highest pass rate at each step."""
        at, low, high = (np.array(values, np.float64) for values in zip(*self._strategy.stages, strict=True))
        return np.interp(steps, at, low), np.interp(steps, at, high)

    def _ranges(self, low: Floats, high: Floats) -> tuple[Indexes, Indexes]:
        """Where the items of these bands stand in the order of rates; never empty."""
        slack = 1e-9  # 0.1 + 0.2 must find the pass rate 0.3
        firsts = np.searchsorted(self._rates, low - slack, side="left")
        ends = np.searchsorted(self._rates, high + slack, side="right")
        empty = firsts >= ends
        if empty.any():
            middle = (low[empty] + high[empty]) / 2
            above = np.minimum(firsts[empty], len(self._rates) - 1)
            below_it = np.maximum(firsts[empty] - 1, 0)
            nearer = np.abs(self._rates[above] - middle) < np.abs(self._rates[below_it] - middle)
            nearest = self._rates[np.where(nearer, above, below_it)]
            firsts[empty] = np.searchsorted(self._rates, nearest, side="left")
            ends[empty] = np.searchsorted(self._rates, nearest, side="right")
        return firsts, ends


@dataclass(frozen=True)
class Difficulty(Strategy):
    """Uniform among items whose task's pass rate is from `low` to `high`, both included: by default the tasks that are
    neither always nor never solved."""

    low: float = 0.2
    high: float = 0.8
    name: ClassVar[str] = "difficulty"

    def __post_init__(self) -> None:
        self._curriculum()

    def _curriculum(self) -> Curriculum:
        stages: Sequence[Stage] = ((0, self.low, self.high),)
        return Curriculum(tuple(stages))

    def columns(self) -> dict[str, pl.Expr]:
        return self._curriculum().columns()

    def leaves_out(self, rows: pl.DataFrame) -> list[tuple[str, pl.Series]]:
        rates = pass_rates(rows)
        outside = ((rates < self.low - 1e-9) | (rates > self.high + 1e-9)).fill_null(False)
        return [
            *self._curriculum().leaves_out(rows),
            (f"pass rate of its task outside {self.low:g} to {self.high:g}", outside),
        ]

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        return self._curriculum().drawer(rows, items, seed)

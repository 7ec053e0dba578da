"""Samplers: which episodes a trainer gets, as a pure function of (snapshot, filter, strategy, seed, position).

A draw is made over the sorted episode ids, never over files, so compaction and optimize do not change it. Every reader
of several walks the same sequence and keeps its own part: of each `world_size` positions the one of its rank. So parts
are disjoint, together they are the single reader's sequence, and a state can be resumed with another number of
readers. A state is reached by walking to its position, because `times_sampled` counts all draws before it: more than a
million positions a second, so minutes at 2**31, beyond which it is refused. Whole epochs are skipped, and a prioritized
state has the counts in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trajlake.errors import UsageError
from trajlake.read.batch import Batch
from trajlake.read.draws import Floats, Indexes
from trajlake.read.items import NothingFits, Pieces
from trajlake.read.population import Population, Recipe
from trajlake.read.walk import Walk

if TYPE_CHECKING:
    from trajlake.read.prefetch import Batches
    from trajlake.read.source import Source


@dataclass(frozen=True)
class Sample:
    """One drawn episode, or a window of one.

    `position` is the draw's place in the single reader's sequence (all rollouts of a drawn group share it); `item` is
    what `update_priorities` is told; `probability` that of this draw; `weight` its importance weight; `times_sampled`
    how often the item has been drawn by all readers, this time included; `policy_lag` the versions between the trainer
    and the episode's policy (None where one is not a number). The steps are `start` … `stop` - 1.
    """

    position: int
    episode_id: str
    probability: float
    weight: float = 1.0
    times_sampled: int = 1
    policy_lag: float | None = None
    item: int = 0
    start: int = 0
    stop: int = 0
    group_id: str | None = None
    reward: float | None = None
    normalized_reward: float | None = None


@dataclass(frozen=True)
class Draws:
    """Draws as arrays of equal length; the names are those of Sample. `pieces` says what the items are made of."""

    position: Indexes
    item: Indexes
    probability: Floats
    weight: Floats
    times_sampled: Indexes
    pieces: Pieces

    def __len__(self) -> int:
        return len(self.position)


class Sampler:
    """Draws items by a strategy. An iterator over samples that can be resumed; endless unless the strategy ends."""

    def __init__(
        self, snapshot: Source, population: Population, recipe: Recipe, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise UsageError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
        self.snapshot = snapshot
        self.recipe = recipe
        self.population = population
        self.rank = rank
        self.world_size = world_size
        self._items = recipe.strategy.items(population.rows, recipe.window)
        if not self._items.size:
            raise NothingFits("no window of this length fits into any episode")
        self._walk = self._from_the_beginning()

    def _from_the_beginning(self) -> Walk:
        drawer = self.recipe.strategy.drawer(self.population.rows, self._items, self.recipe.seed)
        return Walk(drawer, self._items.size, self.recipe.max_times_sampled, self.recipe.seed)

    def __len__(self) -> int:
        """How many items can be drawn."""
        return self._items.size

    @property
    def strategy(self) -> str:
        return self.recipe.strategy.name

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def where(self) -> str | None:
        return self.recipe.where

    @property
    def left_out(self) -> dict[str, int]:
        """How many episodes that fit the filter cannot be drawn, by reason."""
        return self.population.left_out

    @property
    def position(self) -> int:
        """Positions of the single reader's sequence that are behind this reader."""
        return self._walk.position

    @property
    def left(self) -> float:
        """How many more draws there are for all readers, unless priorities change; infinity where there is no end."""
        return self._walk.left()

    def may_come(self) -> list[str]:
        """The ids of the episodes that can still be drawn."""
        rows = self._items.pieces(self._walk.may_come()).row
        return self.population.rows["episode_id"].gather(np.unique(rows)).to_list()

    # -- drawing ---------------------------------------------------------------------------------------------

    def draw(self, count: int) -> Draws:
        """This reader's next `count` draws as arrays; fewer, or none, at the end of a strategy that ends. Raises
        UsageError for a count below zero."""
        if count < 0:
            raise UsageError(f"draws are 0, 1, 2, … at once, not {count}")
        first = self._walk.position
        steps = self._walk.advance(count * self.world_size)
        mine = slice(self.rank, None, self.world_size)
        items = steps.items[mine]
        return Draws(
            np.arange(first, first + len(steps.items))[mine],
            items,
            steps.probability[mine],
            steps.weight[mine],
            steps.times_sampled[mine],
            self._items.pieces(items),
        )

    def take(self, count: int) -> list[Sample]:
        """This reader's next `count` draws; a drawn group is as many samples as it has rollouts."""
        return self.samples(self.draw(count))

    def samples(self, draws: Draws) -> list[Sample]:
        """Draws as objects, one a piece."""
        pieces = draws.pieces
        names = ["episode_id", "policy_lag", "group_id", "reward"]
        if "normalized_reward" in self.population.rows.columns:
            names.append("normalized_reward")
        chosen = self.population.rows.select(names)[pieces.row]
        normalized = chosen["normalized_reward"].to_list() if len(names) == 5 else [None] * len(chosen)
        return [
            Sample(*values)
            for values in zip(
                draws.position[pieces.draw].tolist(),
                chosen["episode_id"].to_list(),
                draws.probability[pieces.draw].tolist(),
                draws.weight[pieces.draw].tolist(),
                draws.times_sampled[pieces.draw].tolist(),
                chosen["policy_lag"].to_list(),
                draws.item[pieces.draw].tolist(),
                pieces.start.tolist(),
                pieces.stop.tolist(),
                chosen["group_id"].to_list(),
                chosen["reward"].to_list(),
                normalized,
                strict=True,
            )
        ]

    def batch(self, size: int) -> Batch:
        """The next `size` draws with their steps; empty at the end of a strategy that ends."""
        draws = self.draw(size)
        rows = self.population.rows[draws.pieces.row]
        return Batch(self.snapshot, partial(self.samples, draws), rows, draws.pieces)

    def batches(self, size: int, *, prefetch: int | None = None, drop_last: bool = False) -> Batches:
        """Batches one after another, `prefetch` of them (2) read ahead by a thread: see trajlake.read.prefetch."""
        from trajlake.read.prefetch import Batches

        return Batches(self, size, prefetch=prefetch, drop_last=drop_last)

    def __iter__(self) -> Iterator[Sample]:
        while samples := self.take(1):
            yield from samples

    # -- priorities ------------------------------------------------------------------------------------------

    def update_priorities(
        self, drawn: Draws | Iterable[Sample], priorities: Sequence[float] | np.ndarray[Any, Any]
    ) -> None:
        """Set the priorities of what was drawn, e.g. to absolute TD errors. Raises UsageError.

        Several readers stay parts of one sequence only where each is told the same updates at the same position.
        """
        items = drawn.item if isinstance(drawn, Draws) else np.array([sample.item for sample in drawn], np.int64)
        if len(items) and not 0 <= items.min() <= items.max() < len(self):
            raise UsageError("these samples are of another sampler")
        self.set_priorities(items, priorities)

    def set_priorities(self, items: Indexes, priorities: Sequence[float] | np.ndarray[Any, Any]) -> None:
        """`update_priorities` by the numbers of items."""
        self._walk.update(items, priorities)

    # -- going there and resuming ----------------------------------------------------------------------------

    def go_to(self, position: int) -> None:
        """Go on at this position of the sequence, as if all before it had been drawn and no priority was updated; at
        the end where that is before. Raises UsageError for one below 0, or of 2**31 or more, and then stays."""
        walk = self._from_the_beginning()
        walk.go_to(position)
        self._walk = walk

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON-compatible values; the same for all ranks."""
        return {**self._sequence(), **self._walk.state()}

    def _sequence(self) -> dict[str, Any]:
        """Which sequence it is that this sampler walks."""
        return {"lake_id": self.snapshot.lake_id, "snapshot": self.snapshot.token, **self.recipe.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, at any rank and world size. Raises UsageError where it is of another
        sequence or damaged, and then stays."""
        walk = self._from_the_beginning()
        with refusing_damaged():
            ensure_same(self._sequence(), state)
            walk.load(state)
        self._walk = walk


@contextmanager
def refusing_damaged() -> Iterator[None]:
    """Raises UsageError where what is done here to a state shows that it is not whole."""
    try:
        yield
    except (LookupError, AttributeError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise UsageError(f"the state is damaged: {error!r}") from error


def ensure_same(mine: dict[str, Any], state: dict[str, Any]) -> None:
    """Raises UsageError where `state` is of another sampler than `mine`. States of earlier versions name no lake."""
    for name, value in mine.items():
        if state.get(name) != value and not (name == "lake_id" and name not in state):
            raise UsageError(f"the state is of another sampler: its {name} is {state.get(name)!r}, not {value!r}")

"""Prioritized replay (Schaul et al. 2016, Prioritized Experience Replay, arXiv:1511.05952).

    P(i) = p_i ** alpha / sum_k p_k ** alpha                  (equation 1)
    w_i  = (N * P(i)) ** -beta / max_j w_j                    (section 3.4) = (min_j P(j) / P(i)) ** beta

Names as in Reverb (priority) and TorchRL (alpha, beta).
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import polars as pl

from trajlake.errors import UsageError
from trajlake.read.draws import Floats, Indexes, fractions, words
from trajlake.read.items import Items
from trajlake.read.strategies import Drawer, Drawn, Kind, Strategy

_TOP_LEVELS = 12  # of a sum tree, that a binary search in 4,096 sums replaces


@dataclass(frozen=True)
class Prioritized(Strategy):
    """Items by `priority` to the power `alpha`: a numeric column or an SQL expression such as `abs(reward - 0.5)`, and
    later what the trainer sets. An item without one has the highest of all current priorities, what was set included
    (as new transitions in the paper, algorithm 1), or 1 where none is above 0; 0 is never drawn.

    The importance weights' `beta` rises to 1 over the first `anneal` positions (0: it stays).
    """

    priority: str = "reward"
    alpha: float = 0.6
    beta: float = 0.4
    anneal: int = 0
    name: ClassVar[str] = "prioritized"

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < np.inf or not 0 <= self.beta <= 1 or self.anneal < 0:
            raise UsageError("alpha must be 0 or more, beta from 0 to 1, anneal 0 or more")

    def columns(self) -> dict[str, pl.Expr]:
        return {"priority": pl.sql_expr(self.priority)}

    def drawer(self, rows: pl.DataFrame, items: Items, seed: int) -> Drawer:
        given = rows["priority"]
        if not (given.dtype.is_numeric() or given.dtype in (pl.Boolean, pl.Null)):
            raise UsageError(f"priority {self.priority} is of type {given.dtype}: give a number")
        values = items.from_rows(given.cast(pl.Float64).fill_nan(None).fill_null(float("nan")).to_numpy())
        if wrong := int(((values < 0) | np.isinf(values)).sum()):
            raise UsageError(
                f"priority {self.priority} is negative or infinite for {wrong} items: give e.g. abs({self.priority})"
            )
        return PriorityDrawer(self, seed, values)


class PriorityDrawer:
    """Draws by a sum tree; `update` changes priorities. One that is NaN is not known yet."""

    length: int | None = None
    kind: Kind = "independent"

    def __init__(self, strategy: Prioritized, seed: int, priorities: Floats) -> None:
        self._strategy, self._seed = strategy, seed
        self._changed: dict[int, float] = {}
        self._size = len(priorities)
        self._priorities = np.array(priorities, np.float64)
        self._unknown = np.flatnonzero(np.isnan(self._priorities))
        self._highest = self._highest_known()
        self._tree = SumTree(self._raised(np.where(np.isnan(self._priorities), self._highest, self._priorities)))

    def _highest_known(self) -> float:
        """A function of the priorities as they are now, so that a resumed sampler finds the same."""
        highest = float(np.fmax.reduce(self._priorities, initial=0.0))
        return highest if highest > 0 else 1.0

    def _raised(self, priorities: Floats) -> Floats:
        # 0 ** 0 is 1 in numpy, but what has priority 0 is not drawn at any exponent
        return np.where(priorities > 0, priorities**self._strategy.alpha, 0.0)

    def draw(self, first: int, count: int) -> Drawn:
        total = self._tree.total
        if not total > 0:
            raise UsageError("every priority is 0: nothing can be drawn")
        items = self._tree.find(fractions(words(self._seed, first, count)) * total)
        return Drawn(items, self._tree.values(items) / total)

    def weights(self, items: Indexes, position: int) -> Floats:
        """The importance weights of these items at `position` and after: by positions and not by draws, of which
        max_times_sampled needs more."""
        return (self._tree.least / self._tree.values(items)) ** self._betas(position, len(items))

    def _betas(self, first: int, count: int) -> float | Floats:
        beta, anneal = self._strategy.beta, self._strategy.anneal
        if not anneal:
            return beta
        return np.minimum(1.0, beta + (1.0 - beta) * np.arange(first, first + count) / anneal)

    def update(self, items: Indexes, priorities: Any) -> None:
        """Set priorities; of several for one item the last counts. Raises UsageError, and then nothing is changed."""
        priorities = checked(priorities, len(items))
        self._changed.update(zip(items.tolist(), priorities.tolist(), strict=True))
        _, last = np.unique(items[::-1], return_index=True)
        chosen = len(items) - 1 - last
        self._priorities[items[chosen]] = priorities[chosen]
        self._tree.set(items[chosen], self._raised(priorities[chosen]))
        if len(self._unknown):
            self._unknown = self._unknown[np.isnan(self._priorities[self._unknown])]
            if (highest := self._highest_known()) != self._highest:
                self._highest = highest
                self._tree.set(self._unknown, self._raised(np.full(len(self._unknown), highest)))

    def chances(self) -> Floats:
        values = self._tree.values(np.arange(self._size))
        return values / self._tree.total if self._tree.total > 0 else values

    def state(self) -> dict[str, Any]:
        """The priorities that were set, packed."""
        items = np.fromiter(self._changed, np.int64, len(self._changed))
        values = np.fromiter(self._changed.values(), np.float64, len(self._changed))
        return {"items": pack(items), "priorities": pack(values)}

    def load(self, state: dict[str, Any]) -> None:
        """Only for a drawer to which nothing was done yet."""
        self.update(unpack(state["items"], np.int64), unpack(state["priorities"], np.float64))


def checked(priorities: Any, count: int) -> Floats:
    """`count` priorities as an array. Raises UsageError for those that cannot be priorities."""
    try:
        values = np.asarray(priorities, np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"priorities must be numbers: {error}") from error
    if values.shape != (count,):
        raise UsageError(f"{count} items and priorities of shape {values.shape}: give one for each")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise UsageError("priorities must be 0 or more and finite")
    return values


def pack(values: np.ndarray[Any, Any]) -> str:
    """An array as text: little-endian, deflated, base64."""
    return base64.b64encode(zlib.compress(values.astype(values.dtype.newbyteorder("<")).tobytes(), 1)).decode()


def unpack(text: str, dtype: Any) -> np.ndarray[Any, Any]:
    """The array of `pack`."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.dtype(dtype).newbyteorder("<")).astype(dtype)


class SumTree:
    """Values whose sum, least positive one and place by cumulative sum are found in O(log n), many at a time.

    A node is always the sum of its two children as they are now, never changed by a difference: equal values give
    equal bits whatever came before, which is why a resumed sampler draws the same.
    """

    def __init__(self, values: Floats) -> None:
        self._levels = max(1, (len(values) - 1).bit_length())
        self._base = 1 << self._levels
        self._sums = np.zeros(2 * self._base)
        self._least = np.full(2 * self._base, np.inf)
        self._tops: Floats | None = None
        self._put(slice(self._base, self._base + len(values)), values)
        first = self._base
        while first > 1:
            first //= 2
            self._combine(np.arange(first, 2 * first))

    def _put(self, nodes: Any, values: Floats) -> None:
        self._sums[nodes] = values
        self._least[nodes] = np.where(values > 0, values, np.inf)

    def _combine(self, nodes: Indexes) -> None:
        self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]
        self._least[nodes] = np.minimum(self._least[2 * nodes], self._least[2 * nodes + 1])

    def set(self, items: Indexes, values: Floats) -> None:
        """Change values; `items` must be different ones."""
        if not len(items):
            return
        self._tops = None
        nodes = items + self._base
        self._put(nodes, values)
        for _ in range(self._levels):
            nodes = np.unique(nodes >> 1)
            self._combine(nodes)

    @property
    def total(self) -> float:
        return float(self._sums[1])

    @property
    def least(self) -> float:
        """The least value above 0."""
        return float(self._least[1])

    def values(self, items: Indexes) -> Floats:
        return self._sums[items + self._base]

    def find(self, masses: Floats) -> Indexes:
        """For each mass in [0, total) the item in whose share of the cumulative sum it is; never one of value 0."""
        order = np.argsort(masses)  # neighbours walk the same nodes, which are then in the processor's cache
        left_over = masses[order]
        # The upper levels in one step: the node in whose share of the cumulative sum of its level a mass is.
        level = min(self._levels, _TOP_LEVELS)
        if self._tops is None:
            self._tops = np.cumsum(self._sums[1 << level : 2 << level])
        last = int(np.searchsorted(self._tops, self._tops[-1]))  # behind it there is nothing
        nodes = np.minimum(np.searchsorted(self._tops, left_over, side="right"), last)
        left_over = np.maximum(left_over - np.where(nodes > 0, self._tops[nodes - 1], 0.0), 0.0)
        nodes += 1 << level
        for _ in range(self._levels - level):
            nodes *= 2
            left = self._sums[nodes]
            # Rounding may leave a mass beyond the last value: it stays on the side where there is something.
            right = (left_over >= left) & (self._sums[nodes + 1] > 0)
            left_over -= np.where(right, left, 0.0)
            nodes += right
        found = np.empty(len(masses), np.int64)
        found[order] = nodes - self._base
        return found

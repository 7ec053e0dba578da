"""The walk along the single reader's sequence: counts how often each item came, and leaves out what came too often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trajlake.errors import UsageError
from trajlake.read.draws import Floats, Indexes, occurrences
from trajlake.read.prioritized import PriorityDrawer, pack, unpack
from trajlake.read.strategies import Drawer

_CHUNK = 1 << 20
_NOTHING = 1e-9  # of probability: what is left when every item has come as often as it may


@dataclass(frozen=True)
class Steps:
    """A piece of the walk; arrays of equal length. `weight` is 1 unless the strategy corrects for bias."""

    items: Indexes
    probability: Floats
    weight: Floats
    times_sampled: Indexes


class Walk:
    """`position` counts what was given, `draws` what the strategy drew for it: more where `most` times are allowed, for
    an item that has come so often is drawn again (which gives the others their probabilities without it)."""

    def __init__(self, drawer: Drawer, size: int, most: int | None) -> None:
        if most is not None and drawer.kind == "moving":
            raise UsageError("max_times_sampled needs a population that stays: leave it out, or give one stage")
        self.drawer = drawer
        self.position = 0
        self._draws = 0
        self._most = most
        self._counts = np.zeros(size, np.int32)
        self._alive = 1.0  # the probability of all items that may still come

    def advance(self, count: int) -> Steps:
        """The next `count` steps; fewer at the end."""
        parts = []
        missing = count
        while missing > 0:
            size = min(missing, _CHUNK)
            if self.drawer.length is not None:
                size = min(size, self.drawer.length - self._draws)
            if size <= 0 or self._alive <= _NOTHING:
                break
            part = self._next(size)
            missing -= len(part.items)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        columns = [[getattr(part, name) for part in parts] for name in Steps.__dataclass_fields__]
        kinds = (np.int64, np.float64, np.float64, np.int64)
        return Steps(*(np.concatenate([np.array([], kind), *each]) for kind, each in zip(kinds, columns, strict=True)))

    def _next(self, size: int) -> Steps:
        drawn = self.drawer.draw(self._draws, size)
        self._draws += size
        items, probability = drawn.items, drawn.probability
        times = self._counts[items] + occurrences(items) + 1
        if self._most is not None:
            independent = self.drawer.kind == "independent"
            share = probability if independent else 1.0 / len(self._counts)
            last = np.where(times == self._most, share, 0.0)
            # One after another, so that the bits do not depend on how a walk is cut into pieces.
            alive = np.subtract.accumulate(np.concatenate([[self._alive], last]))
            self._alive, alive = float(alive[-1]), alive[:-1]  # before each draw
            kept = (times <= self._most) & (alive > _NOTHING)
            items, times, probability = items[kept], times[kept], probability[kept]
            if independent:
                probability = np.minimum(1.0, probability / alive[kept])
        np.maximum.at(self._counts, items, times.astype(np.int32))
        weight = np.ones(len(items))
        if isinstance(self.drawer, PriorityDrawer):
            weight = self.drawer.weights(items, self.position)
        self.position += len(items)
        return Steps(items, probability, weight, times.astype(np.int64))

    def left(self) -> float:
        """How many more steps are certain, whatever comes; infinity where there is no end."""
        items = self.may_come()
        ends = np.inf if self.drawer.length is None else float(self.drawer.length - self._draws)
        if self._most is not None:
            ends = min(ends, float((self._most - self._counts[items]).sum()))
        return ends if len(items) else 0.0

    def may_come(self) -> Indexes:
        """The items that have a chance and have not come as often as they may."""
        drawable = self.drawer.chances() > 0
        if self._most is not None:
            drawable &= self._counts < self._most
        return np.flatnonzero(drawable)

    def update(self, items: Indexes, priorities: Any) -> None:
        """Set priorities. Raises UsageError where the strategy has none."""
        if not isinstance(self.drawer, PriorityDrawer):
            raise UsageError("this strategy has no priorities to update: use prioritized")
        self.drawer.update(items, priorities)
        if self._most is not None:
            self._alive = 1.0 - self.drawer.chance_of(np.flatnonzero(self._counts >= self._most))

    def state(self) -> dict[str, Any]:
        """Where the walk is. What a fixed sequence can tell again is left out."""
        state: dict[str, Any] = {"position": self.position}
        if self._most is not None:
            state["draws"] = self._draws
        if isinstance(self.drawer, PriorityDrawer):
            came = np.flatnonzero(self._counts)
            state["times_sampled"] = {"items": pack(came), "times": pack(self._counts[came])}
            state["updates"] = self.drawer.state()
            state["alive"] = self._alive
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go there; only from the beginning. Raises UsageError."""
        position = int(state["position"])
        if isinstance(self.drawer, PriorityDrawer):
            self.drawer.load(state["updates"])
            came = unpack(state["times_sampled"]["items"], np.int64)
            self._counts[came] = unpack(state["times_sampled"]["times"], np.int32)
            self._alive = float(state["alive"])
            self.position, self._draws = position, int(state.get("draws", position))
            return
        while self.position < position:
            if not len(self.advance(min(_CHUNK, position - self.position)).items):
                raise UsageError(f"the state is at position {position}, but the sequence ends at {self.position}")
        self._draws = int(state.get("draws", self._draws))

"""The walk along the single reader's sequence: counts how often each item came, and leaves out what came too often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trajlake.errors import UsageError
from trajlake.read.draws import Floats, Indexes, fractions, occurrences, words
from trajlake.read.prioritized import PriorityDrawer, SumTree, pack, unpack
from trajlake.read.strategies import Drawer

_CHUNK = 1 << 20
_FARTHEST = (1 << 31) - 1  # counts are of 32 bits, and to walk so far takes minutes
_UNEVEN = 1e-3  # of an even share of the probability


@dataclass(frozen=True)
class Steps:
    """A piece of the walk; arrays of equal length. `weight` is 1 unless the strategy corrects for bias."""

    items: Indexes
    probability: Floats
    weight: Floats
    times_sampled: Indexes


class Walk:
    """`position` counts what was given, `draws` what the strategy drew for it: more where `most` times are allowed, for
    an item that has come so often is drawn again (which gives the others their probabilities without it). Where the
    others have become very improbable, they are drawn by themselves: every item that has a chance comes in the end."""

    def __init__(self, drawer: Drawer, size: int, most: int | None, seed: int) -> None:
        if most is not None and drawer.kind == "moving":
            raise UsageError("max_times_sampled needs a population that stays: leave it out, or give one stage")
        self.drawer = drawer
        self.position = 0
        self._draws = 0
        self._most = most
        self._seed = seed
        self._counts = np.zeros(size, np.int32)
        self._alive = 1.0  # the probability of all items that may still come
        self._living = 0 if most is None else len(self.may_come())  # how many they are
        self._rest: SumTree | None = None  # their probabilities, where they are drawn by themselves

    def advance(self, count: int) -> Steps:
        """The next `count` steps; fewer at the end."""
        parts = []
        missing = count
        while missing > 0 and (part := self._next(missing)) is not None:
            missing -= len(part.items)
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        columns = [[getattr(part, name) for part in parts] for name in Steps.__dataclass_fields__]
        kinds = (np.int64, np.float64, np.float64, np.int64)
        return Steps(*(np.concatenate([np.array([], kind), *each]) for kind, each in zip(kinds, columns, strict=True)))

    def _next(self, wanted: int) -> Steps | None:
        """At most `wanted` further steps, and none where all that was drawn had come too often; None at the end."""
        if self._most is None:
            size = self._at_most(wanted)
            if size <= 0:
                return None
            drawn = self.drawer.draw(self._draws, size)
            self._draws += size
            return self._given(drawn.items, drawn.probability, self._counts[drawn.items] + occurrences(drawn.items) + 1)
        if not self._living:
            return None
        independent = self.drawer.kind == "independent"
        if independent and self._uneven(self._alive, self._living):
            return self._one_of_the_rest()
        self._rest = None
        share = self._alive if independent else self._living / len(self._counts)
        size = self._at_most(int(min(_CHUNK, np.ceil(wanted / share))))
        if size <= 0:
            return None
        drawn = self.drawer.draw(self._draws, size)
        times = self._counts[drawn.items] + occurrences(drawn.items) + 1
        last, kept = times == self._most, times <= self._most
        # One after another, so that the bits do not depend on how a walk is cut into pieces.
        shares = np.where(last, drawn.probability, 0.0)
        alive = np.subtract.accumulate(np.concatenate([[self._alive], shares]))
        living = self._living - np.concatenate([[0], np.cumsum(last)])
        ends = np.flatnonzero(np.cumsum(kept) == wanted)[:1] + 1  # what is drawn too much is drawn again
        if independent:
            ends = np.append(ends, np.flatnonzero(self._uneven(alive[:-1], living[:-1]))[:1])
        used = int(ends.min()) if len(ends) else size
        self._draws += used
        self._alive, self._living = float(alive[used]), int(living[used])
        chosen = np.flatnonzero(kept[:used])
        probability = drawn.probability[chosen]
        if independent:
            probability = np.minimum(1.0, probability / alive[chosen])
        return self._given(drawn.items[chosen], probability, times[chosen])

    def _at_most(self, count: int) -> int:
        size = min(count, _CHUNK)
        return size if self.drawer.length is None else min(size, self.drawer.length - self._draws)

    def _uneven(self, alive: Any, living: Any) -> Any:
        """Whether the items that may still come have so little of the probability that they would be drawn in vain."""
        return alive * len(self._counts) <= _UNEVEN * living

    def _one_of_the_rest(self) -> Steps:
        """A draw among those that may still come. It depends on them alone, not on the draws before."""
        if self._rest is None:
            chances = np.zeros(len(self._counts))
            living = self.may_come()
            chances[living] = self.drawer.chances()[living]
            self._rest = SumTree(chances)
        total = self._rest.total
        item = self._rest.find(fractions(words(self._seed, self._draws, 1, stream=3)) * total)
        probability = np.minimum(1.0, self._rest.values(item) / total)
        times = self._counts[item] + 1
        if times[0] == self._most:
            self._rest.set(item, np.zeros(1))
            self._living -= 1
        self._draws += 1
        self._alive = self._rest.total
        return self._given(item, probability, times)

    def _given(self, items: Indexes, probability: Floats, times: Any) -> Steps:
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
            living = self.may_come()
            self._living, self._rest = len(living), None
            self._alive = float(self.drawer.chances()[living].sum())

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
            self._living = 0 if self._most is None else len(self.may_come())
            self.position, self._draws = position, int(state.get("draws", position))
            return
        self.go_to(position)
        if self.position < position:
            raise UsageError(f"the state is at position {position}, but the sequence ends at {self.position}")
        self._draws = int(state.get("draws", self._draws))

    def go_to(self, position: int) -> None:
        """Walk there, or to the end where that is before; only from the beginning. Raises UsageError.

        How often each item came depends on all draws before. Only of whole epochs it is known without them.
        """
        if not 0 <= position <= _FARTHEST:
            raise UsageError(f"a position must be from 0 to {_FARTHEST:,}, not {position:,}")
        if self.drawer.kind == "order" and self._most is None:
            end = position if self.drawer.length is None else min(position, self.drawer.length)
            epochs = end // len(self._counts)
            self._counts[:] = epochs
            self.position = self._draws = epochs * len(self._counts)
        while self.position < position and len(self.advance(min(_CHUNK, position - self.position)).items):
            pass

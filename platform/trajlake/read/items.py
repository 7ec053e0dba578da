"""What one draw gives: an episode, a window of one, or all rollouts of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trajlake.errors import UsageError
from trajlake.read.draws import Indexes

Array = np.ndarray[Any, Any]


class NothingFits(UsageError):
    """No item can be drawn; a live sampler waits for one. `left_out` is that of Population."""

    def __init__(self, message: str, left_out: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.left_out = left_out or {}


@dataclass(frozen=True)
class Pieces:
    """What drawn items are made of. `draw` says which of the items asked for a piece belongs to, `row` which row of the
    population its episode is; its steps are `start` … `stop` - 1, and `length` is what it is padded to."""

    draw: Indexes
    row: Indexes
    start: Indexes
    stop: Indexes
    length: Indexes


class Items(Protocol):
    """The things that are drawn, numbered 0, …, size - 1."""

    @property
    def size(self) -> int: ...

    def pieces(self, items: Indexes) -> Pieces: ...

    def from_rows(self, values: Array) -> Array:
        """Values by row of the population as values by item."""
        ...


@dataclass(frozen=True)
class Episodes:
    """Each item is one whole episode; `steps` is how many steps each has."""

    steps: Indexes

    @property
    def size(self) -> int:
        return len(self.steps)

    def pieces(self, items: Indexes) -> Pieces:
        stops = self.steps[items]
        return Pieces(np.arange(len(items)), items, np.zeros(len(items), np.int64), stops, stops)

    def from_rows(self, values: Array) -> Array:
        return values


@dataclass(frozen=True)
class Window:
    """Which slices of an episode are drawn, in the words of RLDS `batch`: `length` steps from every `shift`-th step on.

    A slice never crosses an episode's end. `drop_remainder` leaves out slices that the end cuts short (TorchRL's
    `strict_length`); else they are shorter, or padded to `length` where `pad`. Slices of n + 1 steps with shift 1 are
    what n-step returns need.
    """

    length: int
    shift: int = 1
    drop_remainder: bool = True
    pad: bool = False

    def __post_init__(self) -> None:
        if self.length < 1 or self.shift < 1:
            raise UsageError(f"a window needs length and shift of at least 1, not {self.length} and {self.shift}")
        if self.pad and self.drop_remainder:
            raise UsageError("padding is for slices that are cut short: give drop_remainder=False with pad=True")


class Windows:
    """Each item is a window. They are counted and never listed: a billion of them take no memory."""

    def __init__(self, steps: Indexes, window: Window) -> None:
        self._steps = steps
        self._window = window
        last = steps - window.length if window.drop_remainder else steps - 1  # the last step that one begins at
        self._counts = np.maximum(0, last // window.shift + 1)
        self._ends = np.cumsum(self._counts)

    @property
    def size(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def pieces(self, items: Indexes) -> Pieces:
        rows = np.searchsorted(self._ends, items, side="right")
        starts = (items - (self._ends[rows] - self._counts[rows])) * self._window.shift
        stops = np.minimum(starts + self._window.length, self._steps[rows])
        lengths = np.full(len(items), self._window.length) if self._window.pad else stops - starts
        return Pieces(np.arange(len(items)), rows, starts, stops, lengths)

    def from_rows(self, values: Array) -> Array:
        return np.repeat(values, self._counts)


class Groups:
    """Each item is a group: all its rollouts, in the order of their ids. `numbers` has the group of each row, or -1."""

    def __init__(self, steps: Indexes, numbers: Indexes) -> None:
        self._steps = steps
        self._rows = np.flatnonzero(numbers >= 0)
        self._rows = self._rows[np.argsort(numbers[self._rows], kind="stable")]
        self._counts = np.bincount(numbers[self._rows]) if len(self._rows) else np.array([], np.int64)
        self._firsts = np.cumsum(self._counts) - self._counts

    @property
    def size(self) -> int:
        return len(self._counts)

    def pieces(self, items: Indexes) -> Pieces:
        counts = self._counts[items]
        draw = np.repeat(np.arange(len(items)), counts)
        within = np.arange(len(draw)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._rows[self._firsts[items][draw] + within]
        stops = self._steps[rows]
        return Pieces(draw, rows, np.zeros(len(rows), np.int64), stops, stops)

    def from_rows(self, values: Array) -> Array:
        raise UsageError("groups are drawn as a whole: values of single episodes do not choose between them")

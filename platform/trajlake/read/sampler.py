"""Samplers: which episodes a trainer gets, as a pure function of (snapshot, filter, strategy, seed, position).

A draw is made over the sorted episode ids, never over files, so compaction and optimize do not change it, and the
draw at one position does not depend on how many were made before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from trajlake.errors import UsageError
from trajlake.read.trajectory import Trajectory

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

STRATEGIES = ("uniform",)


@dataclass(frozen=True)
class Sample:
    """One draw: its position in the sequence, the episode, and the probability with which it was drawn."""

    position: int
    episode_id: str
    probability: float


class Sampler:
    """Draws episodes uniformly with replacement, as Reverb's `Uniform` does. An iterator that can be resumed."""

    def __init__(self, snapshot: Snapshot, episode_ids: list[str], *, where: str | None, seed: int) -> None:
        self.snapshot = snapshot
        self.strategy = "uniform"
        self.where = where
        self.seed = seed
        self.position = 0
        self._ids = episode_ids

    def __len__(self) -> int:
        """How many episodes can be drawn."""
        return len(self._ids)

    def take(self, count: int) -> list[Sample]:
        """The next `count` draws."""
        first = self.position
        self.position += count
        indexes = _uniform(self.seed, first, count, len(self._ids))
        probability = 1.0 / len(self._ids)
        return [Sample(first + step, self._ids[index], probability) for step, index in enumerate(indexes)]

    def batch(self, size: int) -> list[Trajectory]:
        """The next `size` draws with their steps."""
        return list(self.snapshot.trajectories(sample.episode_id for sample in self.take(size)))

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield from self.take(1)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here, as JSON-compatible values."""
        return {
            "snapshot": self.snapshot.token,
            "strategy": self.strategy,
            "where": self.where,
            "seed": self.seed,
            "position": self.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises UsageError where it is of another sequence."""
        mine = self.state_dict()
        for name in ("snapshot", "strategy", "where", "seed"):
            if state.get(name) != mine[name]:
                raise UsageError(
                    f"the state is of another sampler: its {name} is {state.get(name)!r}, not {mine[name]!r}"
                )
        self.position = int(state["position"])


def make_sampler(snapshot: Snapshot, strategy: str, *, where: str | None, seed: int) -> Sampler:
    """See Snapshot.sampler. Retracted episodes are never drawn."""
    from trajlake.read.snapshot import USABLE

    if strategy not in STRATEGIES:
        raise UsageError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to 2**63 - 1, not {seed}")
    ids = snapshot.collect(snapshot.where(where).filter(USABLE).select(pl.col("episode_id").sort()))["episode_id"]
    if ids.is_empty():
        raise UsageError("no episode fits" + (f" {where!r}" if where else ": the snapshot is empty"))
    return Sampler(snapshot, ids.to_list(), where=where, seed=seed)


def _uniform(seed: int, first: int, count: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` indexes below `size` for the positions from `first` on.

    Position p uses the p-th 64-bit word of Philox with key `seed` (four words a counter step), scaled by multiply
    and shift (Lemire 2019), whose bias is below size / 2**64.
    """
    block, skip = divmod(first, 4)
    words = np.random.Philox(key=seed, counter=block).random_raw(skip + count)[skip:]
    high, low = words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)
    # (word * size) >> 64 in two halves, since size fits 32 bits for any lake that fits a machine
    wide = np.uint64(size)
    return ((high * wide + ((low * wide) >> np.uint64(32))) >> np.uint64(32)).astype(np.int64)

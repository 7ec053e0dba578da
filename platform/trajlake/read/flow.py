"""Flow control between workers that insert episodes and a trainer that samples them, as in Reverb's rate limiters.

    MinSize                 no sample before the lake has so many episodes
    SampleToInsertRatio     keeps samples near `samples_per_insert` times the episodes

A lake never makes a rollout wait: what a worker recorded is kept. So the limiter holds the trainer back; a worker that
wants to pause where the trainer is behind asks `can_insert`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trajlake.errors import UsageError


class RateLimiter(Protocol):
    """Decides by the numbers of episodes inserted and of samples drawn so far."""

    def can_sample(self, inserts: int, samples: int, count: int) -> bool:
        """Whether `count` more samples may be drawn."""
        ...

    def can_insert(self, inserts: int, samples: int, count: int) -> bool:
        """Whether `count` more episodes should be inserted."""
        ...

    @property
    def largest_batch(self) -> float:
        """The most samples that may ever be drawn at once: more would wait for ever."""
        ...


@dataclass(frozen=True)
class MinSize:
    """Reverb's MinSize: nothing is drawn before `min_size` episodes are there."""

    min_size: int = 1

    def __post_init__(self) -> None:
        if self.min_size < 1:
            raise UsageError(f"min_size must be at least 1, not {self.min_size}")

    @property
    def largest_batch(self) -> float:
        return float("inf")

    def can_sample(self, inserts: int, samples: int, count: int) -> bool:
        return inserts >= self.min_size

    def can_insert(self, inserts: int, samples: int, count: int) -> bool:
        return True


@dataclass(frozen=True)
class SampleToInsertRatio:
    """Reverb's SampleToInsertRatio. With d = inserts * samples_per_insert - samples, drawing needs
    d - count >= samples_per_insert * min_size_to_sample - error_buffer, and inserting needs
    d + count * samples_per_insert <= samples_per_insert * min_size_to_sample + error_buffer.

    Raises UsageError for a buffer in which neither side could move: as in Reverb it must be at least
    max(1, samples_per_insert), so that one insert and one sample always fit.
    """

    samples_per_insert: float
    min_size_to_sample: int
    error_buffer: float

    def __post_init__(self) -> None:
        if not self.samples_per_insert > 0 or self.min_size_to_sample < 1:
            raise UsageError("samples_per_insert must be above 0, and min_size_to_sample at least 1")
        least = max(1.0, self.samples_per_insert)
        if not self.error_buffer >= least:
            raise UsageError(
                f"error_buffer {self.error_buffer:g} would let workers and trainer wait for each other: "
                f"give at least max(1, samples_per_insert) = {least:g}"
            )

    @property
    def _middle(self) -> float:
        return self.samples_per_insert * self.min_size_to_sample

    @property
    def largest_batch(self) -> float:
        return 2.0 * self.error_buffer - self.samples_per_insert

    def can_sample(self, inserts: int, samples: int, count: int) -> bool:
        if inserts < self.min_size_to_sample:
            return False
        return inserts * self.samples_per_insert - samples - count >= self._middle - self.error_buffer

    def can_insert(self, inserts: int, samples: int, count: int) -> bool:
        if inserts + count <= self.min_size_to_sample:
            return True
        return (inserts + count) * self.samples_per_insert - samples <= self._middle + self.error_buffer

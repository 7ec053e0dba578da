"""What a worker is given to do: one episode, as what is said of it at its begin and the steps that it plays."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from trajlake.ingest.episode import EndFields, EpisodeFields, StepFields


@dataclass(frozen=True)
class Assignment:
    """`play()` plays it anew: yields the steps as they happen and returns the outcome."""

    begin: EpisodeFields
    play: Callable[[], Generator[StepFields, None, EndFields]]

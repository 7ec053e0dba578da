"""Rewards that arrive late, from a verifier or a judge that is not the worker."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from trajlake.ingest.metrics import CloseReport
    from trajlake.ingest.writer import Writer


class Scores:
    """Adds reward components to episodes of any worker. Made by `lake.scores(run)`; use it as a context manager.

    A score for an episode that is not there yet waits for it. Compaction puts scores into `episodes.rewards`;
    one that is named `reward` becomes the episode's reward, too, and `success` its verdict. True is 1, and False is 0.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def add(
        self,
        episode_id: str,
        name: str,
        value: float | bool,
        *,
        weight: float | None = None,
        kind: Literal["verifiable", "judged"] | None = None,
    ) -> None:
        """Add the component `name` to an episode. Raises UsageError that names what is wrong."""
        self._writer.score(episode_id, name, value, weight=weight, kind=kind)

    def flush(self, timeout: float | None = None) -> None:
        """Return when all that was added is durable; as `Writer.flush`."""
        self._writer.flush(timeout)

    def close(self, timeout: float = 60.0) -> CloseReport:
        """As `Writer.close`."""
        return self._writer.close(timeout)

    def __enter__(self) -> Scores:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

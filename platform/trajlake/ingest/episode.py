"""What a rollout holds in its hands: one episode that is being recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from trajlake.errors import WriterClosed
from trajlake.ingest.values import begin_row, end_row, microseconds, step_row

if TYPE_CHECKING:
    from trajlake.ingest.writer import Writer


class EpisodeFields(TypedDict, total=False):
    """What may be said of an episode at its begin; integers in identifiers come back as integers."""

    group_id: str | int
    task_id: str | int
    task_family: str
    domain: str
    difficulty: str | int
    trial: int
    seed: int
    env_name: str
    env_version: str | int
    env_snapshot: str
    policy_name: str
    policy_version: str | int
    agent_name: str
    agent_version: str | int
    parent_episode_id: str
    source_format: str
    source_hash: str
    tags: Mapping[str, str]
    extra: Mapping[str, Any]


class StepFields(TypedDict, total=False):
    """What may be said of a step; every field is optional. docs/schema.md gives units and the meaning of null."""

    source: str
    message: str
    content_parts: Sequence[Mapping[str, Any]]
    reasoning: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_results: Sequence[Mapping[str, Any]]
    reward: float
    terminated: bool
    truncated: bool
    observation: Any
    action: Any
    tensors: Mapping[str, Any]
    token_ids: Any
    loss_mask: Any
    logprobs: Any
    policy_version: str
    model: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    latency_ms: float
    is_copied_context: bool
    error: str
    timestamp: Any
    parent_step: int
    extra: Mapping[str, Any]


class EndFields(TypedDict, total=False):
    """What may be said of an episode at its end."""

    status: str
    terminated: bool
    truncated: bool
    stop_reason: str
    success: bool
    reward: float
    rewards: Mapping[str, float] | Sequence[Mapping[str, Any]]
    failure_stage: str
    failure_detail: str
    extra: Mapping[str, Any]


class Episode:
    """Records one episode. Use it as a context manager: an exception ends it as failed, with the error.

    A step of classic RL is one action: `observation` is what was seen before it, `action` what was done, `reward`,
    `terminated` and `truncated` what came back; the last step also carries `tensors={"final_observation": …}`.
    """

    def __init__(
        self,
        writer: Writer,
        episode_id: str,
        attempt: int,
        begin: EpisodeFields,
        started_at: Any = None,
    ) -> None:
        self.episode_id = episode_id
        self.attempt = attempt
        self._writer = writer
        self._steps = 0
        self._ended = False
        self._terminated: bool | None = None
        self._truncated: bool | None = None
        row = begin_row(begin)
        if started_at is not None:
            row["occurred_at"] = microseconds(started_at)
        writer.record("begin", episode_id, attempt, row)

    def step(self, **fields: Unpack[StepFields]) -> int:
        """Record one step and return its index. The values are copied; nothing is written in this thread.

        Raises UsageError that names the field, and WriterClosed after the end.
        """
        if self._ended:
            raise WriterClosed(f"episode {self.episode_id} has ended: a step cannot be added")
        given: dict[str, Any] = dict(fields)
        tensors = {name: given.pop(name) for name in ("observation", "action") if given.get(name) is not None}
        if tensors:
            given["tensors"] = tensors | dict(given.get("tensors") or {})
        if given.get("source") is None:
            given["source"] = "agent"
        row = step_row(given)
        self._writer.record("step", self.episode_id, self.attempt, row)
        self._terminated = row.get("terminated", self._terminated)
        self._truncated = row.get("truncated", self._truncated)
        self._steps += 1
        return self._steps - 1

    def end(self, *, ended_at: Any = None, **fields: Unpack[EndFields]) -> None:
        """Record the outcome. `terminated` and `truncated` default to those of the last step that said so, and
        `status` to truncated or completed accordingly. Raises WriterClosed at a second call."""
        if self._ended:
            raise WriterClosed(f"episode {self.episode_id} has ended already")
        given: dict[str, Any] = dict(fields)
        if given.get("terminated") is None:
            given["terminated"] = self._terminated
        if given.get("truncated") is None:
            given["truncated"] = self._truncated
        if given.get("status") is None:
            given["status"] = "truncated" if given["truncated"] and not given["terminated"] else "completed"
        row = end_row(given)
        if ended_at is not None:
            row["occurred_at"] = microseconds(ended_at)
        self._writer.record("end", self.episode_id, self.attempt, row)
        self._ended = True
        self._writer.forget(self)

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended:
            return
        if kind is None:
            self.end()
        elif issubclass(kind, Exception):
            self.end(
                status="failed",
                stop_reason=kind.__name__,
                failure_stage="other",
                failure_detail=f"{kind.__name__}: {error}",
            )
        else:  # the process is being ended: KeyboardInterrupt, SystemExit
            self.end(status="aborted", stop_reason=kind.__name__)

"""What a rollout holds in its hands: one episode that is being recorded."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from trajlake.errors import WriterClosed
from trajlake.ingest.arrays import Row
from trajlake.ingest.conversation import Conversation
from trajlake.ingest.scalars import microseconds
from trajlake.ingest.values import begin_row, end_row, freeze_step, row_bytes

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
    policy_version: str | int
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
    """Records one episode; safe to use from several threads. Use it as a context manager, plain or async: an
    exception ends it as failed, with the error.

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
        self._put = writer.put
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._steps = 0
        self._ended = False
        self._terminated: bool | None = None
        self._truncated: bool | None = None
        self._conversation: Conversation | None = None
        row = opening_row(begin, started_at)
        self._put("begin", episode_id, attempt, row, row_bytes(row))

    def step(self, **fields: Unpack[StepFields]) -> int:
        """Record one step and return its index. The values are copied; nothing is written in this thread.

        Raises UsageError that names the field, and WriterClosed after the end.
        """
        row = with_tensors(fields) if "observation" in fields or "action" in fields else cast(Row, fields)
        size = freeze_step(row)
        with self._lock:
            return self._add(row, size)

    async def astep(self, **fields: Unpack[StepFields]) -> int:
        """`step`, while the event loop goes on: it waits in another thread where memory is full."""
        row = with_tensors(fields)
        size = freeze_step(row)
        with self._lock:
            index = self._add(row, size, wait=False)
        if index >= 0:
            return index
        import asyncio  # takes a while, and few need it

        return await asyncio.to_thread(self._add_locked, row, size)

    def call(self, messages: Sequence[Any], response: Any = None, **fields: Unpack[StepFields]) -> int:
        """Record one call of a chat model: the full prompt `messages`, the `response`, and `fields` of the response's
        step (token ids, log-probabilities, reward, …). Returns the index of the last step.

        Only messages that the last call did not have become steps, so that giving the whole history each time costs
        as many bytes as giving it once. Where history was rewritten (summarised, cut, or another branch is taken),
        the first message that differs follows, by `parent_step`, the last one that does not; messages that an
        earlier call had in that place are not stored again.

        Messages are OpenAI-style objects, or have `model_dump`; a response may also be text, or a whole chat
        completion, of which usage, model and log-probabilities are taken. None records the prompt alone. Raises
        UsageError that names the message.
        """
        with self._lock:
            if self._conversation is None:
                self._conversation = Conversation()
            news = self._conversation.news(messages, response, fields, self._steps)
            rows = [with_tensors(cast(StepFields, step)) for step in news.steps]
            for row, size in [(row, freeze_step(row)) for row in rows]:
                self._add(row, size)
            self._conversation.add(news)
            return self._conversation.last_step

    def sub_episode(self, *, episode_id: str | None = None, **fields: Unpack[EpisodeFields]) -> Episode:
        """Begin an episode of its own within this one (a sub-agent, a branch); it refers to this as its parent, and
        may end before or after it."""
        fields.setdefault("parent_episode_id", self.episode_id)
        return self._writer.episode(episode_id=episode_id, **fields)

    def score(self, name: str, value: float, *, weight: float | None = None, kind: str | None = None) -> None:
        """Add a reward component, before or after the end."""
        self._writer.score(self.episode_id, name, value, weight=weight, kind=kind)

    def end(self, *, ended_at: Any = None, **fields: Unpack[EndFields]) -> None:
        """Record the outcome. `terminated` and `truncated` default to those of the last step that said so, and
        `status` to truncated or completed accordingly. Raises WriterClosed at a second call."""
        with self._lock:
            row = self._end_row(ended_at, fields)
            self._put("end", self.episode_id, self.attempt, row, row_bytes(row))
            self._ended = True
        self._writer.forget(self)

    async def aend(self, *, ended_at: Any = None, **fields: Unpack[EndFields]) -> None:
        """`end`, while the event loop goes on."""
        import asyncio  # takes a while, and few need it

        await asyncio.to_thread(functools.partial(self.end, ended_at=ended_at, **fields))

    def discard(self, reason: str = "discarded") -> None:
        """End the episode as one that nobody wants: it is aborted, and retracted with `reason`, so that no sample
        and no export has it. After `end` it only retracts."""
        if not self._ended:
            self.end(status="aborted", stop_reason="discarded")
        self._writer.retract(self.episode_id, reason)

    # -- what the calls above share --------------------------------------------------------------------------

    def _add_locked(self, row: Row, size: int) -> int:
        with self._lock:
            return self._add(row, size)

    def _add(self, row: Row, size: int, wait: bool = True) -> int:
        """Record a step, with `_lock` held, and give its index; -1 where it would have to wait and may not."""
        if self._ended:
            raise WriterClosed(f"episode {self.episode_id} has ended: a step cannot be added")
        if not self._put("step", self.episode_id, self.attempt, row, size, wait):
            return -1
        if "terminated" in row or "truncated" in row:
            self._terminated = self._terminated if row.get("terminated") is None else row["terminated"]
            self._truncated = self._truncated if row.get("truncated") is None else row["truncated"]
        index = self._steps
        self._steps = index + 1
        return index

    def _end_row(self, ended_at: Any, fields: EndFields) -> Row:
        if self._ended:
            raise WriterClosed(f"episode {self.episode_id} has ended already")
        return outcome_row(fields, ended_at, self._terminated, self._truncated)

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended and self._process == os.getpid():  # a forked child leaves the parent's episode alone
            self.end(**_outcome(kind, error))

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended and self._process == os.getpid():
            await self.aend(**_outcome(kind, error))


def opening_row(fields: EpisodeFields, started_at: Any) -> Row:
    """The `begin` struct of an episode. Raises UsageError that names the field."""
    row = begin_row(fields)
    if started_at is not None:
        row["occurred_at"] = microseconds(started_at)
    return row


def outcome_row(fields: EndFields, ended_at: Any, terminated: bool | None, truncated: bool | None) -> Row:
    """The `end` struct of an episode; `terminated` and `truncated` are those of its last step that said so. Raises
    UsageError that names the field."""
    given: dict[str, Any] = dict(fields)
    if given.get("terminated") is None:
        given["terminated"] = terminated
    if given.get("truncated") is None:
        given["truncated"] = truncated
    if given.get("status") is None:
        given["status"] = "truncated" if given["truncated"] and not given["terminated"] else "completed"
    row = end_row(given)
    if ended_at is not None:
        row["occurred_at"] = microseconds(ended_at)
    return row


def with_tensors(fields: StepFields) -> Row:
    """The call's own dict, with observation and action among the tensors."""
    given = cast(Row, fields)
    tensors = {name: given.pop(name) for name in ("observation", "action") if name in given}
    tensors = {name: value for name, value in tensors.items() if value is not None}
    if tensors:
        given["tensors"] = tensors | dict(given.get("tensors") or {})
    return given


def _outcome(kind: type[BaseException] | None, error: BaseException | None) -> EndFields:
    """How an episode ends whose `with` block was left."""
    if kind is None:
        return {}
    if not issubclass(kind, Exception):  # the process, or the task, is being ended
        return {"status": "aborted", "stop_reason": kind.__name__}
    detail = f"{kind.__name__}: {error}"
    return {"status": "failed", "stop_reason": kind.__name__, "failure_stage": "other", "failure_detail": detail}

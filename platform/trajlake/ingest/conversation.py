"""What is new in a prompt: each message of a conversation is stored once, however often it is sent to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trajlake.errors import FormatError, UsageError

_ROOT = -1
_REASONING = ("reasoning_content", "reasoning")
_NO_NEWS: tuple[Any, ...] = (None, "", [], {})  # a key that holds one of these says as much as an absent key


@dataclass
class _Message:
    """A message that is a step. `given` is as it was last seen, in a copy; `parent` is the step that it follows."""

    step: int
    parent: int
    given: Any
    reasoning: Any


@dataclass(frozen=True)
class News:
    """What a call adds: its steps, in order, and the path through the conversation that it makes."""

    steps: list[dict[str, Any]]
    path: list[_Message]
    fresh: list[_Message]


class Conversation:
    """The tree of all messages that were recorded in one episode, and the path that the last call took in it."""

    def __init__(self) -> None:
        self._path: list[_Message] = []
        self._children: dict[tuple[int, str], list[_Message]] = {}

    @property
    def last_step(self) -> int:
        """The step of the last message of the last call."""
        return self._path[-1].step if self._path else _ROOT

    def news(self, messages: Sequence[Any], response: Any, fields: Mapping[str, Any], next_step: int) -> News:
        """What this call adds, the first step of which will have the index `next_step`; nothing is changed yet.

        Raises UsageError that names the message.
        """
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise UsageError(f"messages must be a list of messages, not {type(messages).__name__}")
        path = self._known(messages)
        given = [_plain(message) for message in messages[len(path) :]]
        steps = [_step(f"message {number}", message) for number, message in enumerate(given, len(path) + 1)]
        if response is not None:
            answer, said = _answer(response)
            given.append(answer)
            step = _step("the response", answer)
            extra = {name: value for one in (step, said, fields) for name, value in (one.get("extra") or {}).items()}
            steps.append({**step, **said, **fields, **({"extra": extra} if extra else {})})
        elif fields:
            raise UsageError(f"{', '.join(fields)} belong to a response, and there is none")
        fresh: list[_Message] = []
        for index, (step, message) in enumerate(zip(steps, given, strict=True), next_step):
            parent = path[-1].step if path else _ROOT
            if parent != index - 1:
                step["parent_step"] = parent
            fresh.append(_Message(index, parent, message, _reasoning(message)))
            path.append(fresh[-1])
        return News(steps, path, fresh)

    def add(self, news: News) -> None:
        """The steps of `news` were recorded."""
        self._path = news.path
        for message in news.fresh:
            self._children.setdefault((message.parent, _fingerprint(message.given)), []).append(message)

    def _known(self, messages: Sequence[Any]) -> list[_Message]:
        """The longest path from the root that these messages follow."""
        count = 0
        for node, given in zip(self._path, messages, strict=False):
            # Mostly the very same texts as in the last call, which Python compares by identity.
            if node.given != given:
                break
            count += 1
        path = self._path[:count]
        for given in messages[count:]:
            message = _plain(given)
            parent = path[-1].step if path else _ROOT
            candidates = self._children.get((parent, _fingerprint(message)), [])
            reasoning = _reasoning(message)
            # Most servers want the reasoning taken out of what is sent back: that is not another history.
            found = next((one for one in candidates if reasoning in (None, one.reasoning)), None)
            if found is None:
                break
            found.given = message
            path.append(found)
        return path


def _plain(given: Any) -> Any:
    """A copy that stays as it is when the caller goes on changing the message."""
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_none=True)
    return _copied(given)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value


def _reasoning(message: Any) -> Any:
    if not isinstance(message, dict):
        return None
    return next((message[name] for name in _REASONING if message.get(name)), None)


def _fingerprint(message: Any) -> str:
    """What makes a message the same as another: everything but its reasoning and keys that hold nothing."""
    if isinstance(message, dict):
        message = {name: value for name, value in message.items() if name not in _REASONING and value not in _NO_NEWS}
    return json.dumps(message, sort_keys=True, separators=(",", ":"), default=repr)


def _step(name: str, message: Any) -> dict[str, Any]:
    from trajlake.formats.chat import chat_steps  # which needs the fields of an episode

    try:
        return dict(chat_steps([message])[0])
    except FormatError as error:
        raise UsageError(f"{name}: {str(error).removeprefix('message 1: ')}") from error


def _answer(response: Any) -> tuple[Any, dict[str, Any]]:
    """The response as a message, and what a chat completion says beside it."""
    if isinstance(response, str):
        return {"role": "assistant", "content": response}, {}
    given = _plain(response)
    if not isinstance(given, dict) or "choices" not in given:
        return {"role": "assistant", **given} if isinstance(given, dict) else given, {}
    choices = given["choices"]
    if len(choices) != 1:
        raise UsageError(f"the response has {len(choices)} choices: call once for each of them, with its message")
    usage = given.get("usage") or {}
    said = {
        "model": given.get("model"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }
    if content := (choices[0].get("logprobs") or {}).get("content"):
        said["logprobs"] = [token["logprob"] for token in content]
    if choices[0].get("finish_reason"):
        said["extra"] = {"finish_reason": choices[0]["finish_reason"]}
    return choices[0]["message"], {name: value for name, value in said.items() if value is not None}

"""OpenAI-style chat: rows of {"messages": […], …} or bare lists of messages; one episode a row, one step a message.

A file that is one array of messages is one episode. Keys that bear the name of a column and hold what it takes go
there, so that our own JSON Lines export comes in again; every other key stays in `extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import (
    Format,
    Record,
    Refused,
    fits_begin,
    fits_end,
    fits_time,
    from_row,
    per_row,
    write_rows,
)
from trajlake.formats.chat import COLUMNS, are_messages, chat_steps, finite_or_not, is_message, merge_extra
from trajlake.formats.json_rows import Row
from trajlake.formats.messages import chat_messages
from trajlake.formats.rebuild import episode_extra, source_row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields
from trajlake.read.trajectory import Trajectory
from trajlake_schemas import EPISODES

# What is imported is from this file, not from where the file's rows once came from; that is kept in `extra`.
_BEGIN = frozenset(EpisodeFields.__annotations__) - {"source_format", "source_hash", "extra"}
_END = frozenset(EndFields.__annotations__) - {"extra"}
_ALIASES = {"id": "task_id", "model": "policy_name"}


def _is_row(value: Any) -> bool:
    return are_messages(value) or (isinstance(value, dict) and are_messages(value.get("messages")))


def _detect(source: Source) -> bool:
    return any(_is_row(value) for value in source.first_values) or _is_one_conversation(source)


def _is_one_conversation(source: Source) -> bool:
    first = source.first_values
    return bool(first) and source.layout == "array" and all(map(is_message, first))


def _read(source: Source) -> Iterator[Record | Refused]:
    if _is_one_conversation(source):
        yield _conversation(source)
    else:
        yield from _rows(source)


def _conversation(source: Source) -> Record | Refused:
    """The whole file as one episode, which a broken message spoils: what is missing would not be seen later."""
    messages = []
    for row in source.rows():
        if isinstance(row, Refused):
            return Refused(
                "row 1", f"the file is one conversation, and its message {row.row[4:]} is broken: {row.reason}"
            )
        messages.append(row.value)
    return from_row(_record, Row("row 1", messages), _rebuild, {"layout": "values"})


def _record(value: Any, key: str) -> Record:
    if isinstance(value, list):
        return Record(key, {}, chat_steps(value, columns=COLUMNS, exact=True), source={"bare": True})
    if not isinstance(value, dict):
        raise FormatError("neither an object with `messages` nor a list of messages")
    rest = dict(value)
    if "messages" not in rest:
        raise FormatError("has no `messages`")
    steps = chat_steps(rest.pop("messages"), columns=COLUMNS, exact=True)
    begin: dict[str, Any] = {}
    end: dict[str, Any] = {}
    times: dict[str, Any] = {}
    for name, value in list(rest.items()):
        if value is None and name in EPISODES:
            del rest[name]  # says what an absent key says
        elif name in _BEGIN and fits_begin(name, value):
            begin[name] = rest.pop(name)
        elif name in _END and fits_end(name, number := _numbers(value)):
            end[name] = number
            del rest[name]
        elif name in {"started_at", "ended_at"} and fits_time(value):
            times[name] = rest.pop(name)
    for name, column in _ALIASES.items():
        if column not in begin and rest.get(name) is not None and fits_begin(column, rest[name]):
            begin[column] = rest.pop(name)
    extra: dict[str, Any] = {}
    merge_extra(rest, extra)
    if extra:
        begin["extra"] = extra
    return Record(key, cast(EpisodeFields, begin), steps, cast(EndFields, end), **times)


def _numbers(value: Any) -> Any:
    """A reward, or a list of named rewards, with what our own JSON export had to write as text as numbers again."""
    if not isinstance(value, list):
        return finite_or_not(value)
    return [
        item | {name: finite_or_not(item[name]) for name in ("value", "weight") if name in item}
        if isinstance(item, dict)
        else item
        for item in value
    ]


def _rebuild(trajectory: Trajectory) -> Any:
    episode = trajectory.episode
    messages = chat_messages(trajectory.steps, columns=COLUMNS, tells_errors=True)
    if source_row(episode).get("bare"):
        return messages
    row = {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in episode.items()
        if name in _BEGIN | _END | {"started_at", "ended_at"} and value is not None
    }
    if row.get("status") == "completed":
        del row["status"]  # it is what an episode is that nothing else is said of
    return row | {"messages": messages} | episode_extra(trajectory)


_rows = per_row(_record, _rebuild)

FORMAT = Format(
    name="openai-chat",
    description='OpenAI-style chat: JSON Lines or a JSON array of {"messages": […], …}, or one list of messages',
    detect=_detect,
    read=_read,
    write=write_rows(_rebuild, "lines"),
    takes_any=True,
    one_file_each=False,
    suffix=".jsonl",
)

"""OpenAI-style chat: rows of {"messages": […], …} or bare lists of messages; one episode a row, one step a message.

A file that is one array of messages is one episode. Keys that bear the name of a column and hold what it takes go
there, so that our own JSON Lines export comes in again; every other key stays in `extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, Refused, fits_begin, fits_end, fits_time, from_row
from trajlake.formats.chat import COLUMNS, are_messages, chat_steps, finite_or_not, is_message, merge_extra
from trajlake.formats.json_rows import Row
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields
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
        return
    for row in source.rows():
        yield row if isinstance(row, Refused) else from_row(_record, row)


def _conversation(source: Source) -> Record | Refused:
    """The whole file as one episode, which a broken message spoils: what is missing would not be seen later."""
    messages = []
    for row in source.rows():
        if isinstance(row, Refused):
            return Refused(
                "row 1", f"the file is one conversation, and its message {row.row[4:]} is broken: {row.reason}"
            )
        messages.append(row.value)
    return from_row(_record, Row("row 1", messages))


def _record(value: Any, key: str) -> Record:
    if isinstance(value, list):
        return Record(key, {}, chat_steps(value, columns=COLUMNS))
    if not isinstance(value, dict):
        raise FormatError("neither an object with `messages` nor a list of messages")
    rest = dict(value)
    if "messages" not in rest:
        raise FormatError("has no `messages`")
    steps = chat_steps(rest.pop("messages"), columns=COLUMNS)
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


FORMAT = Format(
    name="openai-chat",
    description='OpenAI-style chat: JSON Lines or a JSON array of {"messages": […], …}, or one list of messages',
    detect=_detect,
    read=_read,
)

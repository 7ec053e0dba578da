"""Files that are known and not imported: what each is, why its rows are no trajectories, and what to do instead."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

from trajlake.formats.source import Source

_MAPPING = "describe it with a mapping file (--mapping)"
_SUMMARY = "a summary of runs that holds no steps"


def _keys(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and set(names) <= value.keys()


def _each(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """An object that is a table: every value is of one kind."""
    return lambda value: isinstance(value, dict) and bool(value) and all(map(is_value, value.values()))


_ROWS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        _keys("lake", "snapshot", "shards", "files", "left_out_retracted"),
        "the manifest of an export, which says what the files beside it are",
    ),
    (
        _keys("eval_set_id", "tasks"),
        f"the list of an Inspect eval set, {_SUMMARY}: import the logs (.eval) beside it",
    ),
    (
        _each(_keys("version", "eval", "status")),
        f"a listing of Inspect logs by their headers, {_SUMMARY}: import the logs (.eval) that it names",
    ),
    (
        _keys("name", "memory", "is_success"),
        "a Reflexion summary of environments: whether each was solved so far, which is carried from trial to trial, "
        "and no steps; the trajectories stand in the trial logs beside it as text",
    ),
    (
        _keys("win", "answer_generation"),
        "a ToolBench answer: a tree of tries that repeats the same conversation in every prefix, so that one "
        f"trajectory cannot be told from it; {_MAPPING} for `answer_generation.train_messages`",
    ),
    (
        _each(_keys("query", "answer")),
        f"ToolEval's converted answers, whose steps are one text; import the ToolBench answers, or {_MAPPING}",
    ),
    (_each(_keys("query", "is_solved")), f"ToolEval's votes on answers, {_SUMMARY}: use them as scores"),
    (_each(_keys("round_0")), f"ToolEval's preferences between two models, {_SUMMARY}: use them as scores"),
    (
        _keys("messages_display"),
        "dialogues flattened into one text, whose messages cannot be told apart again for certain: import the "
        "results that they were made of",
    ),
)

_HTML = re.compile(rb"\s*<(!doctype html|html)\b", re.IGNORECASE)
_MARKDOWN = re.compile(rb"\s*#{1,6} ")
_FIRST_LINE = 64 * 1024


def explain(source: Source) -> str | None:
    """What the file is and what to do, for a file that is no trajectory or cannot be read as one; None if unknown."""
    if _is_tfrecord(source):
        return (
            "a TFRecord file: what its records mean is in the program that wrote them; read it there, and record it "
            'with a Writer, or write JSON Lines of {"messages": […]}'
        )
    if source.kind:
        return None
    for value in source.first_values[:1]:
        for is_value, words in _ROWS:
            if is_value(value):
                return words
        return None
    return _explain_text(source)


def _explain_text(source: Source) -> str | None:
    head = source.head
    if head.startswith(b"game: ") and b"GameType." in head:
        return (
            "an OpenSpiel playthrough, a text for people: play the game again from its action sequence and record it "
            "with a Writer"
        )
    if _HTML.match(head):
        return "a web page (HTML), as a download that failed leaves: fetch the file itself, perhaps after logging in"
    if _MARKDOWN.match(head):
        return "Markdown, a text for people: import the files that its tables were made of"
    first, _, rest = head.partition(b"\n")
    for separator, name in ((b"\t", "tabs"), (b",", "commas"), (b";", "semicolons")):
        if first.count(separator) > 1 and rest and b"{" not in first[:_FIRST_LINE]:
            return (
                f"a table in CSV, separated by {name}; of CSV only Stable-Baselines3's Monitor files are read, which "
                "begin with a line of # and JSON. Write its rows as JSON Lines"
            )
    return None


def _is_tfrecord(source: Source) -> bool:
    """Whether the first records follow each other as their lengths say: length, its checksum, data, its checksum."""
    position, found = 0, 0
    with source.open() as file:
        while found < 3 and position + 16 <= source.size:
            file.seek(position)
            header = file.read(12)
            if len(header) < 12:  # somebody writes it at this moment
                return False
            (length,) = struct.unpack("<Q", header[:8])
            if not 0 < length <= source.size - position - 16 or header[8:] != _masked_crc(header[:8]):
                return False
            position += 16 + length
            found += 1
    return found > 0


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

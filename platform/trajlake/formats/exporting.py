"""Exporting episodes as files of a foreign format, the counterpart of `importing`.

What was imported from the format comes out as it went in, in the order of its file. Any other episode becomes a valid
row by its columns alone: `extra` holds what its own source meant, and is left out. Formats whose rows cannot be made of
columns take nothing else than what was imported from them.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from trajlake.errors import ExportError, FormatError, UsageError
from trajlake.formats import FORMATS, Format, Refused, format_named, open_source
from trajlake.formats.rebuild import SOURCE_ROW, extra_of, source_row, standard
from trajlake.read.shards import Batch, ShardFile, shard_file
from trajlake.read.trajectory import Trajectory, restored

if TYPE_CHECKING:
    from trajlake.read.snapshot import Snapshot

_NOT_IN_NAMES = re.compile(r"[^\w.+=@-]+")
_LONGEST_NAME = 100
_CHATS = ("openai-chat", "tau-bench", "verifiers")
_SAYS = ("message", "reasoning", "content_parts", "tool_calls", "tool_results")
_SAYS_NOTHING = {"episode_id", "step_index", "source", "timestamp", "extra", "restore"}


@dataclass(frozen=True)
class Part:
    """A file to write: its name and which rows are its episodes. `file` is what its source said once of all of them,
    where the episode that keeps that is not among them; `whole` says that they are of one source, whose layout it
    has."""

    name: str
    rows: Sequence[int]
    file: Mapping[str, Any] | None = None
    whole: bool = True


def export_format(name: str, others: Iterable[str]) -> Format:
    """The format, if files of it can be written. Raises UsageError that lists what can, with `others`."""
    chosen = format_named(name) if name in FORMATS else None
    if chosen is None or chosen.write is None:
        found = [format_named(each) for each in FORMATS]
        offered = [*others, *(each.name for each in found if each.write is not None)]
        why = f"{name!r} is none" if chosen is None else f"{name} has no way back"
        raise UsageError(f"format must be one of {', '.join(offered)}: {why}")
    return chosen


def is_own(row: Mapping[str, Any], chosen: Format) -> bool:
    """Whether the episode was imported from this format, so that its source can be made again."""
    return row["source_format"] == chosen.name and bool(source_row(row))


def parts_of(snapshot: Snapshot, rows: pl.DataFrame, chosen: Format, shards: int) -> tuple[list[Part], int]:
    """The files to write, and how many of the episodes come out as they went in. Raises UsageError where the format
    cannot take these episodes, or is not split."""
    own = [is_own(row, chosen) for row in rows.select("source_format", "extra").iter_rows(named=True)]
    if not chosen.takes_any and not all(own):
        raise UsageError(_why_not(rows, own, chosen))
    places = [
        (0, row["run_id"] or "", row["source_hash"] or "", source_row(row).get("row") or 0)
        if is_its_own
        else (1, "", "", 0)
        for is_its_own, row in zip(own, rows.iter_rows(named=True), strict=True)
    ]
    ids = rows.get_column("episode_id").to_list()
    order = sorted(range(len(rows)), key=lambda place: (places[place], ids[place]))
    if not chosen.one_file_each:
        split = [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), shards)]
        names = [f"shard-{number:05d}-of-{shards:05d}{chosen.suffix}" for number in range(shards)]
        whole = shards == 1 and len({places[place][:3] for place in order}) == 1
        return [Part(name, part, whole=whole) for name, part in zip(names, split, strict=True)], sum(own)
    if shards != 1:
        raise UsageError(f"a file of {chosen.name} is one document, and is not split: leave the number of shards out")
    groups: dict[Any, list[int]] = {}
    for place in order:
        groups.setdefault(places[place][:3] if own[place] else place, []).append(place)
    used: Counter[str] = Counter()
    return [_document(snapshot, rows, group, chosen, used) for group in groups.values()], sum(own)


def _why_not(rows: pl.DataFrame, own: list[bool], chosen: Format) -> str:
    others = len(own) - sum(own)
    example = rows["episode_id"][own.index(False)]
    found = [each.name for each in map(format_named, FORMATS) if each.takes_any]
    return (
        f"{others:,} of {len(own):,} episodes, e.g. {example}, were not imported from {chosen.name}, whose files "
        f"cannot be made of columns: choose those that were with \"source_format = '{chosen.name}'\", or a format that "
        f"takes any episode (parquet, jsonl, {', '.join(found)})"
    )


def _document(snapshot: Snapshot, rows: pl.DataFrame, group: list[int], chosen: Format, used: Counter[str]) -> Part:
    """One source file, or one episode from elsewhere, named after its task."""
    first = rows.row(group[0], named=True)
    task = (
        first["task_id"] if len(group) == 1 and first["task_id"] else (first["source_hash"] or first["episode_id"])[:16]
    )
    name = _NOT_IN_NAMES.sub("_", str(task)).strip(".")[:_LONGEST_NAME] or first["episode_id"][:16]
    name += chosen.suffix
    used[name] += 1
    if used[name] > 1:  # another attempt at the task: its file keeps its name in a folder of its own
        name = f"{used[name]}/{name}"
    file = None
    if is_own(first, chosen) and not any(
        "file" in source_row({"extra": extra}) for extra in rows.get_column("extra").gather(group)
    ):
        file = _said_of_file(snapshot, first)
    return Part(name, group, file)


def _said_of_file(snapshot: Snapshot, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the source of an episode said once, from the episode that keeps it, which was left out."""
    same_file = (pl.col("source_hash") == row["source_hash"]) & (pl.col("run_id") == row["run_id"])
    found = snapshot.collect(snapshot.episodes.filter(same_file).select("extra"))
    said = (source_row(each).get("file") for each in found.iter_rows(named=True))
    return next((file for file in said if isinstance(file, dict)), None)


def write_part(chosen: Format, part: Part, batches: Iterable[Batch], path: Path) -> ShardFile:
    """Write one file and read it back. Raises ExportError where an episode cannot be said in the format, or does not
    read back."""
    assert chosen.write is not None
    counts = {"rows": 0, "steps": 0}

    def trajectories() -> Iterator[Trajectory]:
        for batch in batches:
            for one in _trajectories(batch):
                counts["rows"] += 1
                counts["steps"] += len(one.steps)
                if not is_own(one.episode, chosen):
                    yield by_columns(one, chosen)
                elif part.file is not None and counts["rows"] == 1:
                    yield _with_source_row(one, {**source_row(one.episode), "file": part.file})
                elif not part.whole:
                    kept = {name: value for name, value in source_row(one.episode).items() if name != "file"}
                    yield _with_source_row(one, kept)
                else:
                    yield one

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            file.writelines(chosen.write(trajectories()))
            file.flush()
            os.fsync(file.fileno())
        read = 0
        for item in chosen.read(open_source(path)) if counts["rows"] else ():  # an empty file is none to import
            if isinstance(item, Refused):
                raise ExportError(f"{path.name}: {item.row} does not read back: {item.reason}")
            read += 1
    except FormatError as error:
        raise ExportError(f"{path.name}: {error}") from error
    if read != counts["rows"]:
        raise ExportError(f"{path.name}: {counts['rows']} episodes were written and {read} read back")
    return shard_file(path, part.name, counts["rows"], counts["steps"])


def _trajectories(batch: Batch) -> Iterator[Trajectory]:
    rows, tables = batch
    for row, steps in zip(rows.iter_rows(named=True), tables, strict=True):
        yield Trajectory(restored(row), [restored(step) for step in steps.to_pylist()])


def _with_source_row(one: Trajectory, kept: Mapping[str, Any]) -> Trajectory:
    extra = {**extra_of(one.episode), SOURCE_ROW: kept}
    return replace(one, episode={**one.episode, "extra": json.dumps(extra)})


def by_columns(one: Trajectory, chosen: Format) -> Trajectory:
    """The episode as conversation formats have it, by its columns alone: a tool's results as steps behind the step
    that called it (in chat at once, as their APIs want it), an id for every call, arguments as text, what an
    environment said as said by a user, and null for NaN and infinities. Raises ExportError for an episode that says
    nothing but arrays."""
    if one.steps and not any(step[name] is not None for step in one.steps for name in _SAYS):
        raise ExportError(
            f"episode {one.episode_id} has steps of arrays and no text, for which {chosen.name} has no place: export "
            "it as parquet or jsonl"
        )
    steps: list[dict[str, Any]] = []
    waiting: list[str] = []  # calls without a result so far
    answered = {result["call_id"] for step in one.steps for result in step["tool_results"] or ()}
    for given in one.steps:
        step = {**given, "extra": None}
        results = [dict(result) for result in step["tool_results"] or []]
        if step["source"] == "environment":
            if (
                step["message"] is None
                and answered >= {*waiting}
                and [result["call_id"] for result in results] == [None]
            ):
                step |= {"message": results[0]["content"] or None, "tool_results": None}  # an answer to nothing
                results = []
            if all(value is None for name, value in step.items() if name not in _SAYS_NOTHING):
                continue  # what was logged, and is no word to anyone
            step["source"] = "user"
        if step["content_parts"] is not None and chosen.name in _CHATS:
            step["content_parts"] = [_image_url(part) for part in step["content_parts"]]
        if step["source"] == "tool" and not results:
            if waiting:
                results = [{"call_id": None, "content": step["message"], "is_error": None}]
                step["message"] = None
            else:
                step["source"] = "user"  # an answer to nothing
        if step["tool_calls"] is not None:
            step["tool_calls"] = [_call(call, f"call-{len(steps)}-{n}") for n, call in enumerate(step["tool_calls"])]
            waiting = [call["id"] for call in step["tool_calls"]]
        if step["source"] != "tool" and not step["tool_calls"] and step["message"] is step["content_parts"] is None:
            step["message"] = ""  # only what makes calls may say nothing
        for result in results:
            if result["call_id"] is None and waiting:
                result["call_id"] = waiting[0]
            waiting = [identity for identity in waiting if identity != result["call_id"]]
        steps += _messages(step, results)
    if chosen.name in _CHATS:
        steps = _behind_calls(steps)
    return Trajectory(standard({**one.episode, "extra": None}), standard(steps))


def _behind_calls(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with each tool's answer directly behind the step that made the call. Others come between where calls
    that were made at the same time are steps of their own. What answers no call is said by the user."""
    groups: list[list[dict[str, Any]]] = []
    callers: dict[str, list[dict[str, Any]]] = {}  # ids come again, and the last call counts
    for step in steps:
        answers = step["tool_results"] if step["source"] == "tool" else None
        group = callers.get(answers[0]["call_id"]) if answers else None
        if group is None:
            groups.append(group := [])
            if answers:  # to nothing
                said = answers[0]["content"] if step["message"] is None else step["message"]
                step = {**step, "source": "user", "tool_results": None, "message": said or ""}
        group.append(step)
        callers |= {call["id"]: group for call in step["tool_calls"] or ()}
    return [step for group in groups for step in group]


def _image_url(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """An image as OpenAI's messages have it; any other part as it is."""
    if part["type"] != "image" or (part["data"] is None and part["uri"] is None):
        return part
    url = part["uri"]
    if part["data"] is not None:
        url = f"data:{part['media_type'] or 'image/png'};base64,{base64.b64encode(part['data']).decode('ascii')}"
    return dict.fromkeys(part) | {"type": "image_url", "extra": json.dumps({"image_url": {"url": url}})}


def _call(call: Mapping[str, Any], otherwise: str) -> dict[str, Any]:
    given = "{}" if call["arguments"] is None else call["arguments"]
    return {**call, "id": call["id"] or otherwise, "arguments": given, "arguments_kind": "string"}


def _messages(step: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step as itself, with its results behind it; a tool's step is its first result."""
    if step["source"] != "tool":
        answers = [dict.fromkeys(step) | {"source": "tool", "tool_results": [result]} for result in results]
        return [{**step, "tool_results": None}, *answers]
    first = {**step, "tool_results": results[:1]}
    return [first, *(dict.fromkeys(step) | {"source": "tool", "tool_results": [result]} for result in results[1:])]

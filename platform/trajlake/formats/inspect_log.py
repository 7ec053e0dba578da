"""Inspect logs, version 2 and 3, as `.eval` archives and as JSON: one episode a sample and epoch, one step a message.

https://github.com/UKGovernmentBEIS/inspect_ai, `src/inspect_ai/log/_log.py`, `_condense.py` and `_pool.py`. Attachments
in messages are put in place. The transcript's events stay as the log has them, condensed (with every event's input
written out they would grow with the square of the conversation), beside the message that they led to; what they say
of a message (tokens, time) is in its columns. Steps are the sample's `messages`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from trajlake.errors import FormatError, UsageError
from trajlake.formats.archive import Archive, is_archive, open_archive
from trajlake.formats.base import Format, Record, Refused, Row, fits_begin, fits_step, fits_time, from_row
from trajlake.formats.chat import chat_steps
from trajlake.formats.inspect_parts import error_text, from_chat, resolved, to_chat
from trajlake.formats.inspect_scores import outcome
from trajlake.formats.json_rows import Layout
from trajlake.formats.messages import chat_messages
from trajlake.formats.rebuild import (
    Exact,
    episode_extra,
    exact,
    extra_of,
    given_back,
    json_bytes,
    rebuilt,
    same,
    source_row,
)
from trajlake.formats.source import Source
from trajlake.ingest.episode import EpisodeFields, StepFields
from trajlake.read.trajectory import Trajectory

_HEADER, _START, _REDUCTIONS = "header.json", "_journal/start.json", "reductions.json"
_EPOCH = re.compile(r"_epoch_[0-9]+\Z")
"""How the name of a sample's member or folder ends: `samples/{id}_epoch_{epoch}.json`."""
_LARGE = ("attachments", "message_pool", "call_pool", "events_data", "transcript", "timelines")
"""Parts of a sample that its events refer to: they stay with them, at the first step."""
_USAGE = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_tokens_cache_read": "cached_tokens",
    "total_cost": "cost_usd",
}


# -- which files -------------------------------------------------------------------------------------------------


def _is_log(value: Any) -> bool:
    if not isinstance(value, dict) or not {"version", "eval"} <= value.keys():
        return False
    return isinstance(value["eval"], dict) and {"task", "model"} <= value["eval"].keys()


def _detect(source: Source) -> bool:
    if not is_archive(source):
        return any(map(_is_log, source.first_values))
    try:
        with open_archive(source) as archive:
            return _HEADER in archive.names or _START in archive.names
    except FormatError:
        return _START.encode() in source.head[:256]  # reading it says what is wrong


def _read(source: Source) -> Iterator[Record | Refused]:
    if is_archive(source):
        with open_archive(source) as archive:
            yield from _read_archive(source, archive)
        return
    for log in source.rows():
        if isinstance(log, Refused):
            yield log
        elif not _is_log(log.value) or not isinstance(log.value.get("samples", []), list):
            yield Refused(log.key, "not a log of Inspect: an object with version, eval and a list of samples")
        else:
            header = {name: item for name, item in log.value.items() if name != "samples"}
            rows = enumerate(log.value.get("samples", ()), 1)
            samples = (Row(f"{log.key} sample {number}", value) for number, value in rows)
            yield from _samples(samples, header, source.layout)


def _read_archive(source: Source, archive: Archive) -> Iterator[Record | Refused]:
    names = archive.names
    found = next((name for name in (_HEADER, _START) if name in names), None)
    if found is None:
        raise FormatError(f"{source.path}: an archive without {_HEADER}: not a log of Inspect")
    header = _member(source, archive, found)
    if not _is_log(header):
        raise FormatError(f"{source.path}: its {found} is not the header of a log of Inspect")
    if _REDUCTIONS in names:
        header = {**header, "reductions": _member(source, archive, _REDUCTIONS)}

    def rows() -> Iterator[Row | Refused]:
        split = set()
        for name in names:
            folder = _in_chunks(name)
            if folder is not None and folder not in split:
                split.add(folder)
                yield Refused(folder, "a sample in chunks: convert the log with `inspect log convert`")
            elif _is_sample(name):
                try:
                    yield Row(name, archive.read_json(name))
                except FormatError as error:
                    yield Refused(name, str(error))

    yield from _samples(rows(), header, "values")


def _values(source: Source) -> Iterator[Row | Refused]:
    """The log as JSON, also of an archive: what `_write` makes."""
    if not is_archive(source):
        yield from source.rows()
        return
    with open_archive(source) as archive:
        log = dict(archive.read_json(_HEADER if _HEADER in archive.names else _START))
        log["samples"] = [archive.read_json(name) for name in archive.names if _is_sample(name)]
        if _REDUCTIONS in archive.names:
            log["reductions"] = archive.read_json(_REDUCTIONS)
        yield Row("row 1", log)


def _in_chunks(name: str) -> str | None:
    """The folder of the sample that this member is a part of, where that was written in chunks, as the newest versions
    do with very large samples. Ids stand in names as they are, with slashes and all."""
    *folders, file = name.split("/")
    if folders[:1] != ["samples"] or _EPOCH.search(file.removesuffix(".json")):
        return None
    ends = [at for at, folder in enumerate(folders, 1) if _EPOCH.search(folder)]
    return "/".join(folders[: ends[-1]]) if ends else None


def _is_sample(name: str) -> bool:
    return name.startswith("samples/") and name.endswith(".json") and _in_chunks(name) is None


def _member(source: Source, archive: Archive, name: str) -> Any:
    try:
        return archive.read_json(name)
    except FormatError as error:
        raise FormatError(f"{source.path}: its {name}: {error}") from error


def _samples(rows: Iterable[Row | Refused], header: Mapping[str, Any], layout: Layout) -> Iterator[Record | Refused]:
    spec = header["eval"]
    file = {"log": header, "layout": layout}
    for row in rows:
        item = (
            row
            if isinstance(row, Refused)
            else from_row(lambda value, key: _record(value, key, spec), row, _rebuild, file)
        )
        if isinstance(item, Record):
            file = {}  # the header is long, and said once
        yield item


# -- one sample --------------------------------------------------------------------------------------------------


def _record(value: Any, key: str, spec: Mapping[str, Any]) -> Record:
    if not isinstance(value, dict):
        raise FormatError("not an object: a sample has id, epoch, messages and scores")
    rest = dict(value)
    messages = rest.pop("messages", None) or []
    if not isinstance(messages, list):
        raise FormatError("its messages are not a list")
    attachments = _attachments(value)
    whole = [resolved(message, attachments) for message in messages]
    steps = chat_steps([to_chat(message) for message in whole], columns={"model"})
    for step, message in zip(steps, whole, strict=True):
        words = error_text(message)
        if words and step["source"] == "tool" and message.get("content") not in ("", words):
            step["error"] = words  # it returned something, and failed
    models = [event for event in _events(value) if isinstance(event, dict) and event.get("event") == "model"]
    places = _places(messages, models)
    for place, event in places:
        _put_usage(cast(dict[str, Any], steps[place]), event.get("output"), event.get("timestamp"))
    if not models:
        made = [step for step in steps if step["source"] == "agent"]
        if len(made) == 1:
            _put_usage(cast(dict[str, Any], made[0]), value.get("output"), None)
    _put_events(rest, steps, {id(event): place for place, event in places}, messages)
    begin: dict[str, Any] = {}
    for name, column, given in (
        ("id", "task_id", value.get("id")),
        (None, "task_family", spec.get("task")),
        (None, "policy_name", spec.get("model")),
        (None, "env_version", spec.get("task_version")),
    ):
        if given is not None and fits_begin(column, given):
            begin[column] = given
            rest.pop(name or "", None)
    if "task_id" in begin:
        names = ("task_family", "task_id")
        begin["group_id"] = "/".join(["inspect", *(str(begin[name]) for name in names if name in begin)])
    if type(rest.get("epoch")) is int and rest["epoch"] >= 1:
        begin["trial"] = rest.pop("epoch") - 1
    begin["extra"] = rest
    started, ended = _times(value)
    return Record(key, cast(EpisodeFields, begin), steps, outcome(value), started, ended)


def _attachments(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    transcript = sample.get("transcript")  # where the first logs of version 2 had them
    found = [sample.get("attachments"), transcript.get("content") if isinstance(transcript, dict) else None]
    return {name: text for each in found if isinstance(each, dict) for name, text in each.items()}


def _events(sample: Mapping[str, Any]) -> list[Any]:
    events, transcript = sample.get("events"), sample.get("transcript")
    if not events and isinstance(transcript, dict):
        events = transcript.get("events")
    return events if isinstance(events, list) else []


def _places(messages: list[Any], models: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """The calls of the model, with the position of the message that came of each: by the message's id, or where the
    log has none, one after another if there are as many calls as answers."""
    by_id = {message["id"]: at for at, message in enumerate(messages) if isinstance(message.get("id"), str)}
    found = []
    for event in models:
        place = by_id.get(_made(event).get("id"))
        if place is not None:
            found.append((place, event))
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    if not found and len(answers) == len(models):
        found = list(zip(answers, models, strict=True))
    return found


def _made(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message that a call of the model gave."""
    with suppress(KeyError, IndexError, TypeError):
        message = event["output"]["choices"][0]["message"]
        if isinstance(message, dict):
            return message if isinstance(message.get("id"), str) else {}
    return {}


def _put_usage(step: dict[str, Any], output: Any, timestamp: Any) -> None:
    if step["source"] != "agent" or not isinstance(output, dict):
        return
    usage = output.get("usage")
    for name, column in _USAGE.items():
        value = usage.get(name) if isinstance(usage, dict) else None
        if value is not None and fits_step(column, value):
            step[column] = value
    seconds = output.get("time")
    if isinstance(seconds, (int, float)) and fits_step("latency_ms", seconds):
        step["latency_ms"] = seconds * 1000
    if timestamp is not None and fits_step("timestamp", timestamp):
        step["timestamp"] = timestamp


def _put_events(
    rest: dict[str, Any], steps: list[StepFields], places: Mapping[int, int], messages: Sequence[Any]
) -> None:
    """Move the events from the sample to its steps, in their order; each goes to the newest message before it. They
    are longer than what is said: where that is proved already, the whole step is."""
    if not steps:
        return
    kept: list[dict[str, Any]] = [{} for _ in steps]
    kept[0] = {name: rest.pop(name) for name in _LARGE if name in rest}
    events = rest.get("events")
    if isinstance(events, list):
        del rest["events"]
        kept[0]["events"] = []
        place = 0
        for event in events:
            place = max(place, places.get(id(event), 0))
            kept[place].setdefault("events", []).append(event)
    for place, (step, more, message) in enumerate(zip(steps, kept, messages, strict=True)):
        if more:
            is_usual = _is_usual(step, message)
            step["extra"] = {**step.get("extra", {}), "sample": more}
            if is_usual:
                steps[place] = exact(step, (message, more))


def _is_usual(step: StepFields, message: Any) -> bool:
    """Whether the message comes out of its step again."""
    if "sample" in step.get("extra", {}):
        return False
    try:
        [again] = chat_messages([given_back(step)], columns={"model"})
    except UsageError:
        return False  # `rows_of` says so
    return same(message, from_chat(again))


def _times(sample: Mapping[str, Any]) -> tuple[Any, Any]:
    events = [event for event in _events(sample) if isinstance(event, dict)]
    both = (
        (sample.get("started_at"), events[0].get("timestamp") if events else None),
        (sample.get("completed_at"), events[-1].get("timestamp") if events else None),
    )
    started, ended = (next((time for time in each if time is not None and fits_time(time)), None) for each in both)
    return started, ended


# -- the way back ------------------------------------------------------------------------------------------------


def _rebuild(trajectory: Trajectory) -> dict[str, Any]:
    episode, extra = trajectory.episode, episode_extra(trajectory)
    sample: dict[str, Any] = {}
    if episode["task_id"] is not None:
        sample["id"] = episode["task_id"]
    if episode["trial"] is not None:
        sample["epoch"] = episode["trial"] + 1
    sample |= extra
    messages: list[Any] = []
    kept = []
    for step in trajectory.steps:
        if type(step) is Exact:
            message, more = step.source
            messages.append(message)
            kept.append(more)
            continue
        own = extra_of(step)
        more = own.pop("sample", {})
        kept.append(more if isinstance(more, dict) else {})
        said = {**step, "extra": None if not own else json_bytes(own).decode("utf-8", "surrogatepass")}
        messages += map(from_chat, chat_messages([said], columns={"model"}))
    sample["messages"] = messages
    if "input" not in sample:  # it was recorded elsewhere, and Inspect wants to be told
        prompts = [step["message"] for step in trajectory.steps if step["source"] == "user" and step["message"]]
        sample |= {"input": prompts[0] if prompts else "", "target": ""}
        if episode["reward"] is not None and "scores" not in sample:
            sample["scores"] = {"reward": {"value": episode["reward"]}}
    if kept:
        sample |= {name: item for name, item in kept[0].items() if name != "events"}
        if "events" in kept[0]:
            sample["events"] = [event for more in kept for event in more.get("events", ())]
    return sample


def _write(episodes: Iterable[Trajectory]) -> Iterator[bytes]:
    """Logs as JSON, sample by sample; `reductions` at the end of each, as Inspect puts them."""
    between, end, tail = b"", b"", b""
    for trajectory in episodes:
        file = source_row(trajectory.episode).get("file")
        log = file.get("log") if isinstance(file, dict) else None
        if isinstance(log, dict) or not tail:
            if tail:
                yield tail + (b",\n" if end else b"\n")
            elif isinstance(file, dict) and file.get("layout") == "array":
                end = b"]\n"
                yield b"[\n"
            header = dict(log) if isinstance(log, dict) else _made_up(trajectory)
            reductions = {"reductions": header.pop("reductions")} if "reductions" in header else {}
            tail = b"]" + (b"," if reductions else b"") + json_bytes(reductions)[1:]
            between = json_bytes(header)[:-1] + (b"," if header else b"") + b'"samples":[\n'
        yield between + json_bytes(rebuilt(trajectory, _rebuild))
        between = b",\n"
    yield tail + b"\n" + end if tail else b""


def _made_up(trajectory: Trajectory) -> dict[str, Any]:
    """The least that Inspect reads as a header, for episodes that were not imported from a log."""
    episode = trajectory.episode
    started = episode["started_at"].isoformat() if episode["started_at"] is not None else "1970-01-01T00:00:00+00:00"
    spec: dict[str, Any] = {
        "created": started,
        "task": episode["task_family"] or episode["run_id"] or "trajlake",
        "dataset": {},
        "model": episode["policy_name"] or "unknown",
        "config": {},
    }
    return {"version": 2, "status": "success", "eval": spec}


FORMAT = Format(
    name="inspect",
    description="Inspect log: .eval archive or JSON of {version, eval, samples}, version 2 and 3",
    detect=_detect,
    read=_read,
    write=_write,
    values=_values,
)

"""Stable-Baselines3 Monitor CSV: `#{"t_start": …, "env_id": …}`, then a row an episode; returns only, no steps.

https://github.com/DLR-RM/stable-baselines3, `stable_baselines3/common/monitor.py`. `r` is the episode's return, `l` its
length and `t` the seconds from `t_start` to its end. No step was recorded, so `n_steps` is 0 and the length stays in
`extra` as `l`, which `stats` takes for the time steps of an episode without steps.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from io import TextIOWrapper
from typing import Any, cast

from trajlake.errors import FormatError
from trajlake.formats.base import Format, Record, Refused, fits_begin, fits_time
from trajlake.formats.json_rows import loads
from trajlake.formats.source import Source
from trajlake.ingest.episode import EndFields, EpisodeFields

_COLUMNS = ["r", "l", "t"]
_NO_ENVIRONMENT = "None"  # as Python writes an environment that is not registered
_LONGEST_LINE = 1 << 20  # characters


def _detect(source: Source) -> bool:
    first, _, rest = source.head.partition(b"\n")
    return first.startswith(b"#") and rest.split(b"\n", 1)[0].strip().split(b",")[:3] == [b"r", b"l", b"t"]


def _read(source: Source) -> Iterator[Record | Refused]:
    if source.kind:
        raise FormatError(f"{source.path}: not text; it is {source.kind}")
    with source.open() as raw, TextIOWrapper(raw, "utf-8", "replace", newline="\n") as file:
        start = _start(file.readline(_LONGEST_LINE), source)
        names = [name.strip() for name in file.readline(_LONGEST_LINE).split(",")]
        if names[:3] != _COLUMNS:
            raise FormatError(f"{source.path}: its second line does not begin with r,l,t")
        before = 0.0 if isinstance(start.get("t_start"), float) else None
        number, read = 2, 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            read += len(line)
            if not line.strip():
                continue
            try:
                record = _record(f"line {number}", line, names, start, before)
            except FormatError as error:
                yield Refused(f"line {number}", str(error))
                continue
            seconds = cast(dict[str, Any], record.begin["extra"])["t"]
            before = seconds if before is not None and seconds >= before else None  # another run may go on in the file
            source.position = min(read, source.size)
            yield record


def _start(line: str, source: Source) -> dict[str, Any]:
    try:
        start = loads(line.strip().removeprefix("#"))
    except ValueError as error:
        raise FormatError(f"{source.path}: its first line is not `#` and a JSON object: {error}") from error
    if not isinstance(start, dict):
        raise FormatError(f"{source.path}: its first line is not `#` and a JSON object")
    return start


def _record(key: str, line: str, names: list[str], start: dict[str, Any], before: float | None) -> Record:
    """`before` is when the episode before this one ended, in seconds from the start; None where that is unknown."""
    try:
        cells = next(csv.reader([line.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise FormatError(f"not CSV: {error}") from None
    if len(cells) != len(names):
        raise FormatError(f"has {len(cells)} values where the header names {len(names)}")
    values = dict(zip(names, cells, strict=True))
    reward, length, seconds = _number(values.pop("r"), "r"), _length(values.pop("l")), _number(values.pop("t"), "t")
    begin: dict[str, Any] = {"extra": {"l": length, "t": seconds}}
    if values:
        begin["extra"]["columns"] = values
    times: dict[str, Any] = {}
    if before is not None and math.isfinite(seconds) and seconds >= before:
        times = {"started_at": start["t_start"] + before, "ended_at": start["t_start"] + seconds}
    if not all(map(fits_time, times.values())):
        times = {}
    name = start.get("env_id")
    if name is not None and name != _NO_ENVIRONMENT and fits_begin("env_name", name):
        begin["env_name"] = name
    typed = {*(["env_id"] if name is None or "env_name" in begin else []), *(["t_start"] if times else [])}
    if more := {name: value for name, value in start.items() if name not in typed}:
        begin["extra"]["start"] = more
    return Record(key, cast(EpisodeFields, begin), [], EndFields(reward=reward), **times)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise FormatError(f"its {name} is no number: {text[:40]!r}") from None


def _length(text: str) -> int:
    try:
        length = int(text)
    except ValueError:
        raise FormatError(f"its l is no whole number: {text[:40]!r}") from None
    if not 0 <= length < 2**63:
        raise FormatError(f"its l is no length: {text[:40]!r}")
    return length


FORMAT = Format(
    name="monitor-csv",
    description='Stable-Baselines3 Monitor CSV: #{"t_start": …}, then r,l,t; returns only',
    detect=_detect,
    read=_read,
)

"""Certify: prove that a file comes out of a lake as it went in, and show how much of it columns hold.

The file goes the whole way: import through a Writer, compaction, a snapshot, and out again in its own format. What
comes out is compared with the source as JSON: numbers by value, NaN equal to NaN, the order of keys ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trajlake
from trajlake.errors import FormatError
from trajlake.formats import Format, Refused, format_named, open_source
from trajlake.formats.base import Write
from trajlake.formats.importing import FileReport, import_files
from trajlake.formats.rebuild import difference, source_row
from trajlake.read.snapshot import Snapshot
from trajlake.read.trajectory import Trajectory
from trajlake_pipelines.compact import compact
from trajlake_schemas.episodes import BEGIN, OUTCOME
from trajlake_schemas.steps import STEP_CONTENT

_NOT_CONTENT = {"extra", "restore", "parent_step", "source_format", "source_hash", "group_id", "status"}
_EPISODE = [column.name for column in (*BEGIN, *OUTCOME) if column.name not in _NOT_CONTENT] + [
    "started_at",
    "ended_at",
]
_STEP = [column.name for column in STEP_CONTENT if column.name not in _NOT_CONTENT]
_MISSING = object()


@dataclass(frozen=True)
class Certificate:
    """What became of one file. `equal` is None where its format has no way back or the file was not read at all;
    `reason` says why it is not True, with the path of the first value that differs.

    `typed_bytes` are the bytes of text, and of numbers as JSON, in the columns that hold what the file says (not those
    that place, count or group); `extra_bytes` those of `extra`.
    """

    path: Path
    format: str | None
    episodes: int
    steps: int
    refused: int
    equal: bool | None
    reason: str
    typed_bytes: int = 0
    extra_bytes: int = 0

    @property
    def typed_share(self) -> float | None:
        """The part of the content that is in typed columns, from 0 to 1."""
        whole = self.typed_bytes + self.extra_bytes
        return self.typed_bytes / whole if whole else None


def certify(
    paths: Iterable[str | os.PathLike[str]],
    *,
    format: str | None = None,
    on_progress: Callable[[int, int | None], None] | None = None,
) -> Iterator[Certificate]:
    """Certify files and folders, in a lake in a temporary folder that is removed afterwards. `on_progress` is called
    with files done and files to do. Raises UsageError for a format that does not exist."""
    with TemporaryDirectory(prefix="trajlake-certify-") as folder:
        lake = trajlake.create(Path(folder) / "lake")
        with lake.writer(run="certify", worker="certify", spool=Path(folder) / "spool") as writer:
            report = import_files(writer, paths, format=format)
        compact(lake)
        snapshot = lake.snapshot()
        ids = _ids_by_file(snapshot)
        for done, file in enumerate(report.files, 1):
            yield _certify(snapshot, file, ids, Path(folder) / "written")
            if on_progress is not None:
                on_progress(done, len(report.files))


def _ids_by_file(snapshot: Snapshot) -> dict[str, list[str]]:
    """The episodes of each file, by its hash, in the order of its rows."""
    rows = snapshot.collect(snapshot.episodes.select("episode_id", "source_hash", "extra"))
    places: dict[str, list[tuple[int, str]]] = {}
    for row in rows.iter_rows(named=True):
        places.setdefault(row["source_hash"], []).append((source_row(row)["row"], row["episode_id"]))
    return {name: [episode_id for _, episode_id in sorted(found)] for name, found in places.items()}


def _certify(snapshot: Snapshot, file: FileReport, ids: Mapping[str, list[str]], written: Path) -> Certificate:
    def certificate(equal: bool | None, reason: str, weighed: _Weighed | None = None) -> Certificate:
        sizes = (weighed.typed, weighed.extra) if weighed else (0, 0)
        return Certificate(file.path, file.format, file.episodes, file.steps, file.refused, equal, reason, *sizes)

    if file.error is not None or file.format is None:
        return certificate(None, file.error or "of no known format")
    source = open_source(file.path)
    weighed = _Weighed(snapshot.trajectories(ids.get(source.sha256, [])))
    if not file.rows_in:
        return certificate(None, "it holds no episodes")
    chosen = format_named(file.format)
    write = chosen.write
    if write is None:
        for _ in weighed:
            pass
        return certificate(None, f"the format {file.format} has no way back", weighed)
    try:
        _write(write, weighed, written)
        reason = _first_difference(chosen, file.path, written)
    except FormatError as error:
        reason = str(error)
    if file.refused:
        refusal = f"{file.refused} of its rows did not come in, the first: {file.refusals[0].reason}"
        return certificate(False, refusal, weighed)
    return certificate(not reason, reason, weighed)


def _write(write: Write, episodes: Iterable[Trajectory], path: Path) -> None:
    with path.open("wb") as file:
        file.writelines(write(episodes))


def _first_difference(chosen: Format, path: Path, written: Path) -> str:
    """Where what was written is not what was read; empty where it is the same."""
    source, other = open_source(path), open_source(written)
    values = source.rows if chosen.values is None else partial(chosen.values, source)
    if not source.kind and (source.layout == "array") != (other.layout == "array"):
        return f"its values stand as {source.layout}, and came out as {other.layout}"
    for row, again in zip_longest(values(), other.rows(), fillvalue=_MISSING):
        if row is _MISSING or again is _MISSING:
            return "it has rows that did not come out" if again is _MISSING else "rows came out that it does not have"
        if isinstance(row, Refused) or isinstance(again, Refused):
            return f"{row.row}: {row.reason}" if isinstance(row, Refused) else f"what came out is no JSON: {again}"
        for found_path, *_ in difference(row.value, again.value):  # type: ignore[attr-defined]
            return f"{row.key}: {json.dumps(found_path)} differs"  # type: ignore[attr-defined]
    return ""


class _Weighed:
    """Trajectories that are weighed as they pass."""

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._trajectories = trajectories
        self.typed = 0
        self.extra = 0

    def __iter__(self) -> Iterator[Trajectory]:
        for trajectory in self._trajectories:
            self._weigh(trajectory.episode, _EPISODE)
            for step in trajectory.steps:
                self._weigh(step, _STEP)
            yield trajectory

    def _weigh(self, row: Mapping[str, Any], names: Iterable[str]) -> None:
        self.typed += sum(_size(row[name]) for name in names)
        self.extra += _size(row["extra"])
        parts = row.get("content_parts") or ()
        beside = sum(_size(part["extra"]) for part in parts)
        self.typed -= beside
        self.extra += beside


def _size(value: Any) -> int:
    """Bytes of what a value says, without the names of fields."""
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(str(value))

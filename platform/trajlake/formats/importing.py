"""Importing files: every row goes through a Writer, as if a worker had recorded it, or is refused with its reason."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trajlake.errors import FormatError, NoTrajectories, UsageError
from trajlake.formats import Format, Record, Refused, Source, detect_source, format_named, open_source
from trajlake.formats.ledger import Ledger
from trajlake.formats.rebuild import SOURCE_ROW, extended
from trajlake.ingest.arrays import Row
from trajlake.ingest.episode import EpisodeFields, opening_row
from trajlake.ingest.json_text import json_text
from trajlake.ingest.writer import Writer

Progress = Callable[[Path, int, int], None]
"""Called with the file, the bytes of it that are read, and its size in bytes."""

Hashes = Mapping[Path, str | None]
"""Files, with their hashes; None for a file that cannot be read."""

KEPT_REFUSALS = 100
_FLUSH_BYTES = 64 << 20  # of files that were read: what a stopped import reads again is less
_DEEP = 100  # folders: a path that is deeper is left to the iteration of `os.path.realpath`
_GREW = (
    "a file of this path was imported with other content before: rows that are in both are there twice; "
    "`trajlake dedupe` marks them, and --unique counts each once"
)
_ASKED_OTHERWISE = "imported before with other --set or --mapping, and left so; another --run takes it with these"
_LONGEST_REASON = 500  # characters: a reason quotes the file, and the file may say anything


@dataclass
class FileReport:
    """What became of one file: `rows_in == episodes + refused`.

    `refusals` and `notes` are the first hundred: of the refused, and of where the file contradicts itself (its rows
    win) or what was imported before. `error` says why the file was not read at all, or not further; `left_out` that it
    is of a kind that is known to hold no trajectories, so that nothing is missing. `same_as` is the file before it that
    holds the same bytes, so that it was not read: its rows are counted there. `already` says that the run has the file
    from an earlier import; the figures are of that one, and nothing was read.
    """

    path: Path
    format: str | None = None
    rows_in: int = 0
    episodes: int = 0
    steps: int = 0
    refused: int = 0
    refusals: list[Refused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    left_out: bool = False
    same_as: Path | None = None
    already: bool = False


@dataclass
class ImportReport:
    """What became of all files; the sums are over files."""

    files: list[FileReport] = field(default_factory=list)

    @property
    def rows_in(self) -> int:
        return sum(file.rows_in for file in self.files)

    @property
    def episodes(self) -> int:
        return sum(file.episodes for file in self.files)

    @property
    def steps(self) -> int:
        return sum(file.steps for file in self.files)

    @property
    def refused(self) -> int:
        return sum(file.refused for file in self.files)

    @property
    def failed(self) -> list[FileReport]:
        """The files with an `error`, but those that are left out."""
        return [file for file in self.files if file.error is not None and not file.left_out]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Rows hold no cycles; that Python looks for some among all of them takes a third of an import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def import_files(
    writer: Writer,
    paths: Iterable[str | os.PathLike[str]] | Hashes,
    *,
    format: str | Format | None = None,
    begin: EpisodeFields | None = None,
    on_progress: Progress | None = None,
    ledger: Ledger | None = None,
) -> ImportReport:
    """Record the episodes of files and folders (walked in sorted order, hidden names left out) with `writer`; or of
    files that were found and hashed a moment ago.

    `format` is the name of one for all files (or one of your own, such as `load_mapping` gives), else each file's is
    found out by its content; `begin` is said of every episode where its file does not say it (for example
    `policy_name`). Nothing about a file is fatal: what cannot be read is in the report. When this returns, what it
    reports is durable. Importing a file again gives the same episode ids, which compaction recognises; with a
    `ledger`, files that the run has already are left out.
    Until it returns, Python's collector of cycles is off in this process, but for a look at what is new after 64 MiB.

    Raises UsageError for a format that does not exist or `begin` that cannot be, and what `Writer.flush` raises.
    """
    chosen = format_named(format) if isinstance(format, str) else format
    check_begin(begin)
    report = ImportReport()
    seen: dict[str, Path] = {}
    pending: list[tuple[str, FileReport]] = []
    waiting = 0
    files = paths if isinstance(paths, Mapping) else dict.fromkeys(files_of(paths))
    for path, sha256 in files.items():
        file = FileReport(path)
        report.files.append(file)
        try:
            source = open_source(path, sha256=sha256)
            if (same_as := seen.setdefault(source.sha256, path)) != path:
                file.same_as = same_as
                continue
            if ledger is not None and is_known(ledger, source, None if chosen is None else chosen.name, file):
                continue
            if ledger is not None and ledger.had_other_content(path, source.sha256):
                file.notes.append(_GREW)
            _import(writer, source, chosen or detect_source(source), begin or {}, file, on_progress)
            pending.append((source.sha256, file))
            waiting += source.size
        except (FormatError, OSError) as error:
            file.error = _bounded(str(error).removeprefix(f"{path}: "))
            file.left_out = isinstance(error, NoTrajectories)
        if waiting >= _FLUSH_BYTES:
            _put_down(writer, ledger, pending)
            waiting = 0
    _put_down(writer, ledger, pending)
    return report


def check_begin(begin: EpisodeFields | None) -> None:
    """Raises UsageError where `begin` is not what can be said of an episode."""
    opening_row(begin or {}, None)


def is_known(ledger: Ledger, source: Source, format: str | None, file: FileReport) -> bool:
    """Whether the run has the file, as this format if one is named; the report then says what it has."""
    said = ledger.find(source.sha256)
    if said is None or (format is not None and format != said.get("format")):
        return False
    try:
        episodes, steps, refused = (int(said[name]) for name in ("episodes", "steps", "refused"))
    except (KeyError, TypeError, ValueError):
        return False
    file.format, file.already = str(said.get("format")), True
    file.episodes, file.steps, file.refused, file.rows_in = episodes, steps, refused, episodes + refused
    if ledger.was_asked_otherwise(said):
        file.notes.append(_ASKED_OTHERWISE)
    return True


def _put_down(writer: Writer, ledger: Ledger | None, pending: list[tuple[str, FileReport]]) -> None:
    """Make everything durable, and then say so of the files."""
    writer.flush()
    if ledger is not None:
        ledger.put(
            {
                sha256: {
                    "format": file.format,
                    "episodes": file.episodes,
                    "steps": file.steps,
                    "refused": file.refused,
                    "path": os.path.abspath(file.path),
                }
                for sha256, file in pending
            }
        )
    pending.clear()
    gc.collect(1)  # of what came since, without looking through what was there before


def episode_id(run: str, sha256: str, key: str) -> str:
    """The id of the episode in one row of one file, in one run: always the same, 32 hex digits."""
    return hashlib.sha256("\0".join([run, sha256, key]).encode()).hexdigest()[:32]


def _import(
    writer: Writer,
    source: Source,
    chosen: Format,
    begin: EpisodeFields,
    file: FileReport,
    on_progress: Progress | None,
) -> None:
    file.format = chosen.name
    provenance: EpisodeFields = {"source_format": chosen.name, "source_hash": source.sha256}
    position = -1
    for item in chosen.read(source):
        file.rows_in += 1
        refusal = _record(writer, source, item, begin, provenance, file.rows_in) if isinstance(item, Record) else item
        if refusal is not None:
            file.refused += 1
            if len(file.refusals) < KEPT_REFUSALS:
                file.refusals.append(Refused(refusal.row, _bounded(refusal.reason)))
        elif isinstance(item, Record):
            file.episodes += 1
            file.steps += len(item.steps)
            file.notes += map(_bounded, item.notes[: KEPT_REFUSALS - len(file.notes)])
        if on_progress is not None and source.position != position:
            position = source.position
            on_progress(source.path, position, source.size)
    if on_progress is not None:
        on_progress(source.path, source.size, source.size)


def _record(
    writer: Writer, source: Source, record: Record, begin: EpisodeFields, provenance: EpisodeFields, row: int
) -> Refused | None:
    """Record one episode whole, or say why not. `row` is its number in the file."""
    try:
        # All of it first: an episode that breaks off at its tenth step would be worse than none.
        rows = record.rows
        opening = _completed(rows.begin, record, begin, row)
    except UsageError as error:
        return Refused(record.key, str(error))
    opening |= provenance
    events = [("begin", opening), *[("step", step) for step in rows.steps], ("end", rows.end)]
    writer.record_all(episode_id(writer.run, source.sha256, record.key), 0, events)
    return None


def _completed(row: Row, record: Record, begin: EpisodeFields, number: int) -> Row:
    """The record's begin with what the caller says of every episode, and what the way back needs."""
    kept = {"row": number, **record.source}
    extra = row.get("extra")
    if begin:
        said = {name for name, value in record.begin.items() if value is not None}
        more: EpisodeFields = {name: value for name, value in begin.items() if name not in {*said, "extra"}}  # type: ignore[assignment]
        if added := sorted(begin.keys() - said - {"extra"}):
            kept["added"] = added
        if "extra" in begin:
            extra = json_text({**(begin["extra"] or {}), **(record.begin.get("extra") or {})})
        given = opening_row(more, None)
        if "restore" in given and "restore" in row:
            given["restore"] = json_text({**json.loads(given["restore"]), **json.loads(row["restore"])})
            row = {**row, "restore": given["restore"]}
        row = given | row
    return {**row, "extra": extended(extra, SOURCE_ROW, kept)}


def files_of(paths: Iterable[str | os.PathLike[str]]) -> Iterator[Path]:
    """The files, each once, in the order given and sorted within a folder."""
    seen = set()
    known: dict[Path, str] = {}
    for path in map(Path, paths):
        for file in _walk(path) if path.is_dir() else [path]:
            if (real := _real(file, known)) not in seen:
                seen.add(real)
                yield file


def _real(path: Path, known: dict[Path, str]) -> str:
    """`os.path.realpath`, which looks at every folder above anew; `known` keeps what was found."""
    if path not in known:
        folder = path.parent
        if folder == path or path.name == ".." or len(path.parts) > _DEEP or os.path.islink(path):
            known[path] = os.path.realpath(path)
        else:
            known[path] = os.path.join(_real(folder, known), path.name)
    return known[path]


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if not entry.is_symlink():  # it may lead back up
                yield from _walk(entry)
        else:
            yield entry


def _bounded(reason: str) -> str:
    return reason if len(reason) <= _LONGEST_REASON else reason[:_LONGEST_REASON] + "…"

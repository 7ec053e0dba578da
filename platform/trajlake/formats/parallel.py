"""Importing folders into a lake: in several processes where that pays, and on from where an import was stopped.

Reading JSON and making rows of it hold Python's lock, so that threads gain nothing: processes do, one Writer each. This
process is one of them, and hashes the files while the others start.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from trajlake.errors import FormatError, UsageError
from trajlake.formats import Format, open_source
from trajlake.formats.importing import (
    FileReport,
    Hashes,
    ImportReport,
    Progress,
    check_begin,
    files_of,
    import_files,
    is_known,
)
from trajlake.formats.ledger import Ledger
from trajlake.formats.mapping import load_mapping
from trajlake.ingest.episode import EpisodeFields
from trajlake.lake import Lake, connect
from trajlake.processes import process_pool

if TYPE_CHECKING:
    from trajlake.ingest.writer import Writer

_WORTH_A_PROCESS = 24 << 20  # bytes of files for each: it takes as long to start a process as to read these
_BATCH_BYTES = 4 << 20  # of files that are read between two flushes
_WRITER_BATCH_BYTES = 4 << 20  # no rollout waits while a batch becomes Arrow
_LOST = "the process that read it was killed, perhaps for want of memory; run the same command again"


_Given = tuple[Hashes, Future[list[FileReport]]]
"""What a process of the pool is to read, and its reports."""


@dataclass(frozen=True)
class _Job:
    """What every process is told."""

    uri: str
    run: str
    format: str | None
    mapping: str | None
    begin: EpisodeFields
    again: bool


def import_tree(
    lake: Lake,
    run: str,
    paths: Iterable[str | os.PathLike[str]],
    *,
    format: str | None = None,
    mapping: str | os.PathLike[str] | None = None,
    begin: EpisodeFields | None = None,
    processes: int | None = None,
    again: bool = False,
    on_progress: Progress | None = None,
) -> ImportReport:
    """Import files and folders into `run` of a lake, as `import_files` does, in the order of their names.

    Files that the run has whole from an earlier import are left out, unless `again`. `mapping` names a mapping file
    to read all files by. `processes` is how many there may be; None is as many as there are processors where the
    files are large enough. Raises UsageError as `import_files` and `load_mapping` do.
    """
    if format is not None and mapping is not None:
        raise UsageError("give a format or a mapping, not both")
    job = _Job(lake.uri, run, format, None if mapping is None else str(mapping), begin or {}, again)
    chosen = _format(job)
    check_begin(begin)
    files = list(files_of(paths))
    ledger = _ledger(lake, job)
    found: dict[Path, FileReport] = {}
    hashes = None if ledger.is_empty else _not_known(files, chosen, ledger, found)
    wanted = _count(files if hashes is None else list(hashes), processes)
    if wanted > 1:
        with process_pool(wanted - 1, _start, job) as pool:
            if hashes is None:  # while the others start
                hashes = _not_known(files, chosen, ledger, found)
            found |= _shared_out(lake, job, hashes, pool, wanted, on_progress)
    elif hashes := _not_known(files, chosen, ledger, found) if hashes is None else hashes:
        with _writer(lake, run) as writer:
            report = import_files(writer, hashes, format=chosen, begin=begin, on_progress=on_progress, ledger=ledger)
        found |= {file.path: file for file in report.files}
    return ImportReport([found[path] for path in files])


def _writer(lake: Lake, run: str) -> Writer:
    return lake.writer(run=run, batch_bytes=_WRITER_BATCH_BYTES)


def _format(job: _Job) -> str | Format | None:
    return load_mapping(job.mapping) if job.mapping is not None else job.format


def _ledger(lake: Lake, job: _Job) -> Ledger:
    text = None if job.mapping is None else Path(job.mapping).read_text(encoding="utf-8")
    return Ledger(lake.store, job.run, again=job.again, mapping=text, begin=job.begin)


def _count(files: Sequence[Path], processes: int | None) -> int:
    if processes is not None:
        if processes < 1:
            raise UsageError(f"processes must be 1, 2, 3, …, not {processes}")
        return min(processes, len(files))
    size = sum(_size(path) for path in files)
    return max(1, min(len(os.sched_getaffinity(0)), len(files), size // _WORTH_A_PROCESS))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _shared_out(
    lake: Lake, job: _Job, hashes: Hashes, pool: Executor, count: int, on_progress: Progress | None
) -> dict[Path, FileReport]:
    """Read the files, here and in the `count - 1` processes of the pool."""
    found: dict[Path, FileReport] = {}
    waiting = deque(_batches(hashes, count))
    lock = Lock()

    def say(path: Path, position: int, size: int) -> None:
        if on_progress is not None:
            with lock:
                on_progress(path, position, size)

    def next_batch() -> Hashes | None:
        with suppress(IndexError):
            return waiting.popleft()
        return None

    def give(given: deque[_Given]) -> bool:
        if (batch := next_batch()) is None:
            return False
        try:
            given.append((batch, pool.submit(_read, batch)))
        except BrokenExecutor:
            waiting.appendleft(batch)
            raise
        return True

    def read_elsewhere() -> None:
        """Give batches to a process as long as there are some, and the process lives."""
        given: deque[_Given] = deque()
        try:
            while True:
                # While there are many, one lies ready: this thread has to wait for the one that reads here.
                while len(given) < (2 if len(waiting) > 2 * count else 1) and give(given):
                    pass
                if not given:
                    return
                for report in given[0][1].result():
                    found[report.path] = report
                    say(report.path, _size(report.path), _size(report.path))
                given.popleft()
        except BrokenExecutor:
            for batch, _ in list(given)[:1]:
                found.update({path: FileReport(path, error=_LOST) for path in batch})
            waiting.extend(batch for batch, _ in list(given)[1:])
        except BaseException:
            waiting.clear()
            raise

    def read_here(read: Callable[[Hashes, Progress], ImportReport]) -> None:
        while (batch := next_batch()) is not None:
            found.update({report.path: report for report in read(batch, say).files})

    with ThreadPoolExecutor(count - 1) as threads:
        others = [threads.submit(read_elsewhere) for _ in range(count - 1)]
        try:
            with _writer(lake, job.run) as writer:
                read = _reader(lake, writer, job)
                read_here(read)
                for other in others:
                    other.result()
                read_here(read)  # what was given back
        except BaseException:
            waiting.clear()
            raise
    return found


def _not_known(
    files: Sequence[Path], chosen: str | Format | None, ledger: Ledger, found: dict[Path, FileReport]
) -> Hashes:
    """The files that the run does not have, of those with the same bytes the first; of the others there is a report."""
    seen: dict[str, Path] = {}
    name = chosen if chosen is None or isinstance(chosen, str) else chosen.name
    kept: dict[Path, str | None] = {}
    for path in files:
        try:
            source = open_source(path)
            sha256 = source.sha256
        except (FormatError, OSError):
            kept[path] = None  # whoever reads it says what is wrong
            continue
        if (same_as := seen.setdefault(sha256, path)) != path:
            found[path] = FileReport(path, same_as=same_as)
            continue
        report = FileReport(path)
        if is_known(ledger, source, name, report):
            found[path] = report
        else:
            kept[path] = sha256
    return kept


def _batches(hashes: Hashes, count: int) -> list[Hashes]:
    """The files in their order, in parts that are large enough to be flushed, and many enough to be shared out; the
    last are small, so that nobody waits long for another."""
    sizes = {path: _size(path) for path in hashes}
    left = sum(sizes.values())
    batches: list[dict[Path, str | None]] = []
    size = limit = 0
    for path, sha256 in hashes.items():
        if size >= limit:
            batches.append({})
            size, limit = 0, max(_BATCH_BYTES, left // (count * 8))
        batches[-1][path] = sha256
        size += sizes[path]
        left -= sizes[path]
    return list(batches)


def _reader(lake: Lake, writer: Writer, job: _Job) -> Callable[[Hashes, Progress | None], ImportReport]:
    """Imports batches with the writer."""
    chosen = _format(job)
    ledger = _ledger(lake, job)

    def read(hashes: Hashes, on_progress: Progress | None) -> ImportReport:
        return import_files(writer, hashes, format=chosen, begin=job.begin, ledger=ledger, on_progress=on_progress)

    return read


_read_files: Callable[[Hashes, None], ImportReport] | None = None
"""In a process of the pool: imports with the process's own writer."""


def _start(job: _Job) -> None:
    global _read_files
    lake = connect(job.uri)
    writer = _writer(lake, job.run)
    Finalize(None, writer.close, exitpriority=100)
    _read_files = _reader(lake, writer, job)


def _read(batch: Hashes) -> list[FileReport]:
    assert _read_files is not None
    return _read_files(batch, None).files

"""What writers that are gone left in the spool: brought into the store, or looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trajlake.errors import SegmentUnreadable, StoreError
from trajlake.ingest.spool import SpoolFolder, SpoolMeta, abandoned, read_meta
from trajlake.ingest.upload import forget_file, put_file
from trajlake.storage import ObjectStore

log = logging.getLogger("trajlake")


@dataclass(frozen=True)
class Recovery:
    """What was found in the spool of writers that are gone: segments uploaded and the bytes sent, segments that
    cannot be read with the reason (they stay), and why it stopped before everything was uploaded, if it did."""

    segments: int
    bytes: int
    unreadable: tuple[str, ...]
    stopped: str = ""


def recover(store: ObjectStore, spool: Path) -> Recovery:
    """Upload what writers of this lake left in `spool` when they died. Where the store is down the files stay for
    the next start, and the result says so."""
    segments = size = 0
    unreadable: list[str] = []
    stopped = ""
    try:
        for found in recover_each(store, spool):
            if isinstance(found, str):
                unreadable.append(found)
            else:
                segments += 1
                size += found
    except StoreError as error:
        stopped = str(error)
    if segments:
        log.info("uploaded %d segments that writers left in %s when they died", segments, spool)
    return Recovery(segments, size, tuple(unreadable), stopped)


def recover_each(store: ObjectStore, spool: Path) -> Iterator[int | str]:
    """The same, one segment at a time: gives the bytes sent, or the reason why a segment cannot be read. Raises
    StoreError."""
    for folder in abandoned(spool, store.uri):
        try:
            for number, path in list(folder.segments()):
                try:
                    size = put_file(store, folder, number, path)
                except (SegmentUnreadable, OSError) as error:
                    log.error("the spool segment %s cannot be read and stays there: %s", path, error)
                    yield f"{path}: {error}" if isinstance(error, OSError) else str(error)
                else:
                    forget_file(path)
                    yield size
        finally:
            folder.release(remove=True)


@dataclass(frozen=True)
class SpoolEntry:
    """One writer's folder in a spool. `state` is `in use` (its process lives), `left` (what it holds waits for a
    start on this lake, or for `recover`) or `unreadable`."""

    path: Path
    state: str
    meta: SpoolMeta | None
    epoch: int | None
    segments: int
    bytes: int


def spool_status(spool: Path) -> list[SpoolEntry]:
    """The folders of `spool`. Nothing is changed, and writers that live are not disturbed."""
    if not spool.is_dir():
        return []
    entries = []
    for path in sorted(path for path in spool.iterdir() if path.is_dir()):
        folder = SpoolFolder.adopt(path)
        try:
            meta = read_meta(path)
        except (OSError, ValueError, TypeError):
            meta = None
        files = list(_sizes(path))
        state = "unreadable" if meta is None else "in use" if folder is None else "left"
        entries.append(SpoolEntry(path, state, meta, None if folder is None else folder.epoch, len(files), sum(files)))
        if folder is not None:
            folder.release(remove=False)
    return entries


def _sizes(path: Path) -> Iterator[int]:
    for file in path.iterdir():
        if file.suffix in {".arrow", ".open"}:
            try:
                yield file.stat().st_size
            except FileNotFoundError:  # its writer has just uploaded it
                continue

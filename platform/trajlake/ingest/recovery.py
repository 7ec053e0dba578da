"""What writers that are gone left in the spool: brought into the store, or looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trajlake.errors import AccessRefused, BucketMissing, StoreError, StoreUnavailable
from trajlake.ingest.spool import SpoolFolder, SpoolMeta, abandoned, is_in_use, read_meta
from trajlake.ingest.upload import Sent, forget_file, put_file, set_aside
from trajlake.storage import ObjectStore

log = logging.getLogger("trajlake")


@dataclass(frozen=True)
class Recovery:
    """What was found in the spool of writers that are gone: segments uploaded and the bytes sent, what is wrong with
    those that are damaged (the files stay; what can be read of them was uploaded), and why it stopped before everything
    was uploaded, if it did."""

    segments: int
    bytes: int
    unreadable: tuple[str, ...]
    stopped: str = ""


def recover(store: ObjectStore, spool: Path, lake_id: str | None = None) -> Recovery:
    """Upload what writers of this lake left in `spool` when they died. Where the store is down the files stay for
    the next start, and the result says so. Give the `lake_id` of its marker, where that can be read."""
    segments = size = 0
    unreadable: list[str] = []
    stopped = ""
    try:
        for found in recover_each(store, spool, lake_id):
            if found.damage:
                unreadable.append(found.damage)
            if found.events:
                segments += 1
                size += found.bytes
    except StoreError as error:
        stopped = str(error)
    unreadable += [
        f"{entry.path}: its meta.json or epoch is damaged, so whose events it holds is not known"
        for entry in spool_status(spool)
        if entry.state == "unreadable" and entry.segments
    ]
    if segments:
        log.info("uploaded %d segments that writers left in %s when they died", segments, spool)
    return Recovery(segments, size, tuple(unreadable), stopped)


def recover_each(store: ObjectStore, spool: Path, lake_id: str | None) -> Iterator[Sent]:
    """The same, one segment at a time. Raises StoreError where no other segment would fare better."""
    for folder in abandoned(spool, store.uri, lake_id):
        try:
            for number, path in list(folder.segments()):
                try:
                    sent = put_file(store, folder, number, path)
                except OSError as error:
                    log.error("the spool segment %s cannot be read and stays there: %s", path, error)
                    yield Sent(0, 0, f"{path}: {error}")
                    continue
                except (StoreUnavailable, AccessRefused, BucketMissing):
                    raise
                except StoreError as error:  # another object is in its place: what follows it must not pass it
                    log.error("the spool segment %s cannot be uploaded and stays there: %s", path, error)
                    yield Sent(0, 0, f"{path}: {error}")
                    break
                if sent.damage:
                    set_aside(path, sent)
                else:
                    forget_file(path)
                yield sent
        finally:
            folder.release(remove=True)


@dataclass(frozen=True)
class SpoolEntry:
    """One writer's folder in a spool. `state` is `in use` (its process lives), `left` (what it holds waits for a
    start on this lake, or for `recover`) or `unreadable`. `damaged` files are kept and wait for nothing: what could be
    read of them was uploaded."""

    path: Path
    state: str
    meta: SpoolMeta | None
    epoch: int | None
    segments: int
    bytes: int
    damaged: int


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
        state = "left" if folder is not None else "in use" if is_in_use(path) else "unreadable"
        epoch = None if folder is None else folder.epoch
        damaged = len(list(path.glob("*.damaged")))
        entries.append(SpoolEntry(path, state, meta, epoch, len(files), sum(files), damaged))
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

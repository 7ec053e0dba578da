"""One segment into landing: from the spool or from memory, exactly once under its own key."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from trajlake.errors import SegmentUnreadable, StoreError, StoreUnavailable
from trajlake.ingest.epochs import claim_epoch
from trajlake.ingest.segment import SegmentName, decode_segment, encode_segment
from trajlake.ingest.spool import NoSpool, SpoolFolder, read_ready, read_spooled
from trajlake.storage import Lost, ObjectStore, Unknown

log = logging.getLogger("trajlake")

_IDENTITY = ["kind", "episode_id", "attempt", "sequence", "recorded_at"]


@dataclass(frozen=True, eq=False)
class ClosedSegment:
    """A segment that takes no more: on disk (`path`) or in memory (`table`). Every event with a sequence below
    `up_to` is durable once this one and all before it are; `bytes` is the room that it takes until then."""

    number: int
    events: int
    up_to: int
    bytes: int
    path: Path | None = None
    table: pa.Table | None = None


@dataclass(frozen=True)
class Sent:
    """What reached the store of one segment; `damage` says where the disk lost the rest of it, else it is empty."""

    bytes: int
    events: int
    damage: str = ""


def put_closed(store: ObjectStore, folder: SpoolFolder | NoSpool, segment: ClosedSegment) -> Sent:
    """Bring a closed segment into landing; the file stays. Of one that the disk has damaged, that is what can be read.
    Raises StoreError and OSError."""
    if segment.path is None:
        assert segment.table is not None
        return Sent(put_segment(store, folder, segment.number, segment.table), segment.events)
    sent = put_file(store, folder, segment.number, segment.path)
    if sent.events == segment.events:
        return replace(sent, damage="")
    damage = sent.damage or f"{segment.path}: {segment.events} events were written and {sent.events} are left"
    return replace(sent, damage=damage)


def put_file(store: ObjectStore, folder: SpoolFolder | NoSpool, number: int, path: Path) -> Sent:
    """The same for a file that another process left."""
    if ready := read_ready(path):
        data, count = ready
        return Sent(_put(store, folder, number, data, None), count)
    events, damage = read_spooled(path)
    if damage and not damage.startswith(str(path)):
        damage = f"{path}: {damage}"
    return Sent(put_segment(store, folder, number, events, is_part=bool(damage)), len(events), damage)


def put_segment(
    store: ObjectStore, folder: SpoolFolder | NoSpool, number: int, events: pa.Table, *, is_part: bool = False
) -> int:
    """Bring events into landing under this writer's epoch; `is_part`: they are what is left of the segment. Returns the
    bytes sent. Raises StoreError."""
    if not len(events):
        return 0
    return _put(store, folder, number, encode_segment(events), events, is_part=is_part)


def _put(
    store: ObjectStore,
    folder: SpoolFolder | NoSpool,
    number: int,
    data: bytes,
    events: pa.Table | None,
    *,
    is_part: bool = False,
) -> int:
    """The key belongs to this epoch alone, so an object that is there already is this segment, from a try whose
    answer was lost; that it holds the same events is checked. Where they are a part, it may hold the whole."""
    if folder.epoch is None:
        _claim(store, folder)
    assert folder.epoch is not None
    name = SegmentName(folder.meta.run_id, folder.meta.worker_id, folder.epoch, number)
    outcome = store.put_if_absent(name.key, data)
    if isinstance(outcome, Unknown):
        raise StoreUnavailable(str(outcome.error)) from outcome.error
    if isinstance(outcome, Lost):
        _check_same(store, name.key, decode_segment(data, name.key) if events is None else events, is_part)
    return len(data)


def forget_file(path: Path) -> None:
    """Remove a file whose events the store has. Where the disk does not let go of it, it is sent again at the next
    start, under the same key, which changes nothing."""
    try:
        path.unlink()
    except OSError as error:
        log.warning("%s is uploaded and cannot be removed: %s", path, error)


def set_aside(path: Path, sent: Sent) -> None:
    """Keep a damaged file under a name that is not sent again, and say so."""
    kept = path.with_suffix(".damaged")
    try:
        path.rename(kept)
    except OSError as error:
        log.warning("%s cannot be renamed: %s", path, error)
        kept = path
    log.error(
        "a spool segment was damaged on disk: %s; %d events of it were uploaded, and the file is kept as %s",
        sent.damage,
        sent.events,
        kept,
    )


def _claim(store: ObjectStore, folder: SpoolFolder | NoSpool) -> None:
    epoch = claim_epoch(store, folder)
    try:
        folder.set_epoch(epoch)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # Nobody can add to a spool that is read-only. What is sent from it again later, under another epoch, is a
        # second take of the same episodes, of which compaction keeps one.
        log.warning("the epoch cannot be kept in %s: %s", folder.path, error)
        folder.epoch = epoch


def _check_same(store: ObjectStore, key: str, events: pa.Table, is_part: bool) -> None:
    """That the object at `key` holds these events, in whatever bytes another version of a library made of them."""
    try:
        stored = decode_segment(store.get(key), key).select(_IDENTITY)
        same = (stored[: len(events)] if is_part else stored).equals(events.select(_IDENTITY))
    except SegmentUnreadable:
        same = False
    if not same:
        raise StoreError(f"{key} holds something else than the segment that belongs there; the spool keeps the segment")

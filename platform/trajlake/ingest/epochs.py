"""Epochs: each process that writes as a worker of a run has its own, so no two of them ever share a key."""

from __future__ import annotations

import json
import logging
import re

from trajlake.errors import StoreError, StoreUnavailable, UsageError
from trajlake.ingest.spool import NoSpool, SpoolFolder
from trajlake.storage import ObjectStore, Unknown, Won

log = logging.getLogger("trajlake")

EPOCHS = "epochs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(what: str, name: str) -> str:
    """`name` unchanged. Raises UsageError where it cannot be part of an object's key."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{what} must be of letters, digits, '.', '_' and '-', at most 128 of them, not {name!r}")
    return name


def claim_epoch(store: ObjectStore, folder: SpoolFolder | NoSpool) -> int:
    """The next free epoch of this run and worker, now ours. Says so where another process may still write."""
    meta = folder.meta
    prefix = f"{EPOCHS}/{meta.run_id}/{meta.worker_id}/"
    keys = [info.key for info in store.list(prefix)]
    claimed = [int(key[len(prefix) : -len(".json")]) for key in keys if key.endswith(".json")]
    # A claim whose answer was lost may be ours already: that very one is tried again.
    epoch = max(claimed, default=-1) + 1 if folder.claimed is None else folder.claimed
    claim = json.dumps({"host": meta.host, "pid": meta.pid, "claim": folder.claim}).encode()
    while True:
        outcome = store.put_if_absent(f"{prefix}{epoch:06d}.json", claim)
        if isinstance(outcome, Won):
            break
        if isinstance(outcome, Unknown):
            folder.claimed = epoch
            raise StoreUnavailable(str(outcome.error)) from outcome.error
        epoch += 1
    if epoch > 0 and f"{prefix}{epoch - 1:06d}.closed" not in keys and not meta.is_fork:
        log.warning(
            "worker %s of run %s was in use before and did not close; this process writes as its epoch %d",
            meta.worker_id,
            meta.run_id,
            epoch,
        )
    return epoch


def close_epoch(store: ObjectStore, folder: SpoolFolder | NoSpool, segments: int) -> None:
    """Mark the epoch as ended in order, with so many segments in landing, which tells whether some are lost later. Only
    a courtesy to the next process and to `trajlake doctor`, so a failure is only logged."""
    if folder.epoch is None:
        return
    meta = folder.meta
    try:
        key = f"{EPOCHS}/{meta.run_id}/{meta.worker_id}/{folder.epoch:06d}.closed"
        store.put_if_absent(key, json.dumps({"segments": segments}).encode())
    except StoreError as error:
        log.info("the epoch could not be marked as closed: %s", error)

"""Whether a store keeps the promises that Trajlake rests on, tried on the store itself.

`check_store` is what `trajlake doctor` shows; `ensure_safe` is the short form before a lake is made.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median
from threading import Barrier

from trajlake.errors import StoreError, StoreUnavailable, StoreUnsafe
from trajlake.storage.base import ByteRange, Lost, ObjectStore, PutOutcome, Unknown, Won, byte_order, folder_order

FOLDER = "_doctor"
RACERS = 8
LATENCY_ROUNDS = 5
LARGEST_SKEW = timedelta(seconds=60)


@dataclass(frozen=True)
class Check:
    """One promise: its name, whether it is kept, and what was seen (or what to do)."""

    name: str
    ok: bool
    detail: str


def check_store(store: ObjectStore) -> list[Check]:
    """Try everything on objects below `_doctor/`, which are removed at the end. Takes seconds; raises nothing
    about the store, whose errors are the details of the checks that fail."""
    folder = f"{FOLDER}/{uuid.uuid4().hex}"
    checks = [_run("write, read, list, delete", _try_everything, store, f"{folder}/basics")]
    if checks[0].ok:  # else all others would say the same
        checks += [
            _run("create only if absent", _try_condition, store, f"{folder}/condition"),
            _run("one winner of a race", _try_race, store, f"{folder}/race"),
            _run("listing in order", _try_order, store, f"{folder}/order"),
            _run("Delta commits exclude each other", _try_delta, store, f"{folder}/delta"),
            _run("clocks agree", _try_clock, store, f"{folder}/clock"),
            _run("latency", _try_latency, store, f"{folder}/latency"),
        ]
    with contextlib.suppress(StoreError):
        for found in list(store.list(f"{folder}/")):
            store.delete(found.key)
    return checks


def ensure_safe(store: ObjectStore) -> None:
    """Two puts of different bytes under one key. Raises `StoreUnsafe` where the second overwrites the first, and
    the store's own error where it cannot be written."""
    key = f"{FOLDER}/{uuid.uuid4().hex}/condition"
    try:
        _try_condition(store, key)
    finally:
        store.delete(key)


def _run(name: str, attempt: Callable[[ObjectStore, str], str], store: ObjectStore, place: str) -> Check:
    try:
        return Check(name, True, attempt(store, place))
    except (StoreError, OSError) as error:
        return Check(name, False, " ".join(str(error).split()))


def _try_everything(store: ObjectStore, place: str) -> str:
    key, body = f"{place}/object", b"0123456789"
    _put(store, key, body)
    _expect(store.get(key) == body, "what was written did not read back")
    _expect(store.get_ranges(key, [ByteRange(7, 3), ByteRange(0, 1)]) == [b"789", b"0"], "ranges read back wrong")
    info = store.stat(key)
    _expect(info is not None and info.size == len(body), "the object has the wrong size")
    _expect([found.key for found in store.list(f"{place}/")] == [key], "the object is not listed")
    store.delete(key)
    _expect(store.stat(key) is None, "the object is there after it was deleted")
    return store.uri


def _try_condition(store: ObjectStore, key: str) -> str:
    _put(store, key, b"first")
    outcome = _settle(store, key, b"second")
    if outcome != Lost() or store.get(key) != b"first":
        raise StoreUnsafe(
            f"{store.uri} ignores If-None-Match: a second writer overwrote the first. Use a server that honours it "
            "(MinIO, AWS S3, SeaweedFS, Ceph)"
        )
    return "a second put of other bytes was refused, the first is unchanged"


def _try_race(store: ObjectStore, key: str) -> str:
    barrier = Barrier(RACERS)

    def put(body: bytes) -> PutOutcome:
        barrier.wait()
        return _settle(store, key, body)

    bodies = [b"racer %d" % number for number in range(RACERS)]
    with ThreadPoolExecutor(RACERS) as threads:
        outcomes = list(threads.map(put, bodies))
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome == Won()]
    if winners != [store.get(key)]:
        raise StoreUnsafe(f"of {RACERS} racing puts {len(winners)} were told that they won")
    return f"{RACERS} puts at once, one won, and its bytes are there"


def _try_order(store: ObjectStore, place: str) -> str:
    # `-` sorts before `/`, and a server that walks a tree of folders lists them the other way round.
    keys = [f"{place}/{name}" for name in ("run-2/1", "run/1", "run/2", "run0")]
    for key in reversed(keys):
        _put(store, key, b"")
    listed = [found.key for found in store.list(f"{place}/")]
    orders = {"of their keys": sorted(keys, key=byte_order), "of their folders": sorted(keys, key=folder_order)}
    found = [name for name, expected in orders.items() if listed == expected]
    _expect(bool(found), "objects are listed in the order of neither their keys nor their folders")
    after = [found.key for found in store.list(f"{place}/", start_after=listed[0])]
    _expect(after == listed[1:], "a listing after a key misses some")
    return f"in the order {found[0]}"


def _try_delta(store: ObjectStore, place: str) -> str:
    import pyarrow as pa  # not for `ensure_safe`, which every import asks
    from deltalake import DeltaTable, write_deltalake
    from deltalake.exceptions import DeltaError

    location, options = store.location(place), store.storage_options()
    barrier = Barrier(2)

    def append(value: int) -> None:
        barrier.wait()
        write_deltalake(location, pa.table({"value": [value]}), mode="append", storage_options=options)

    try:
        write_deltalake(location, pa.table({"value": [0]}), storage_options=options)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(append, (1, 2)))
        table = DeltaTable(location, storage_options=options)
        values = sorted(table.to_pyarrow_table()["value"].to_pylist())
    except DeltaError as error:
        raise StoreError(str(error)) from error
    if table.version() != 2 or values != [0, 1, 2]:
        raise StoreUnsafe(f"two Delta commits at once left version {table.version()} with {values}")
    return "two commits at once are two versions"


def _try_clock(store: ObjectStore, key: str) -> str:
    before = datetime.now(UTC)
    _put(store, key, b"x")
    after = datetime.now(UTC)
    info = store.stat(key)
    assert info is not None
    # Servers say whole seconds, rounded down or up.
    early = max(timedelta(0), before - info.modified_at - timedelta(seconds=1))
    late = max(timedelta(0), info.modified_at - after - timedelta(seconds=1))
    skew = max(early, late)
    _expect(
        skew <= LARGEST_SKEW,
        f"the server's clock is {skew.total_seconds():.0f} s {'behind' if early else 'ahead'}: set one of the two",
    )
    return f"within {skew.total_seconds() + 1:.0f} s"


def _try_latency(store: ObjectStore, place: str) -> str:
    body = bytes(100 * 1024)
    puts, gets = [], []
    for number in range(LATENCY_ROUNDS):
        started = time.perf_counter()
        _put(store, f"{place}/{number}", body)
        written = time.perf_counter()
        store.get(f"{place}/{number}")
        puts.append(written - started)
        gets.append(time.perf_counter() - written)
    return f"100 KiB: put {1000 * median(puts):.0f} ms, get {1000 * median(gets):.0f} ms (median of {LATENCY_ROUNDS})"


def _settle(store: ObjectStore, key: str, body: bytes) -> PutOutcome:
    outcome = store.put_if_absent(key, body)
    if isinstance(outcome, Unknown):
        raise outcome.error if isinstance(outcome.error, StoreError) else StoreUnavailable(str(outcome.error))
    return outcome


def _put(store: ObjectStore, key: str, body: bytes) -> None:
    _expect(_settle(store, key, body) == Won(), f"{key} was there already")


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise StoreError(otherwise)

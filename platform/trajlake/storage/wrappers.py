"""Stores around another store: one that counts what is asked of it, one in which things go wrong."""

from __future__ import annotations

import builtins
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from trajlake.errors import StoreUnavailable
from trajlake.storage.base import ByteRange, ObjectInfo, ObjectStore, PutOutcome, Unknown

OPERATIONS = ("put_if_absent", "get", "get_ranges", "list", "stat", "delete")


class _Wrapper:
    """Passes everything on; `location` and `storage_options` go straight to the inner store."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.store!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self.store.uri

    def location(self, key: str) -> str:
        return self.store.location(key)

    def storage_options(self) -> dict[str, str] | None:
        return self.store.storage_options()


class CountingStore(_Wrapper):
    """Counts calls and bytes by operation (`put_if_absent`, `get`, …), and remembers each `(operation, key)`.

    `calls["get"]` is a number of calls, `bytes["get"]` the bytes that they read (for puts: offered). A listing
    counts as one call when it is begun, with its prefix as the key, and no bytes.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.log: builtins.list[tuple[str, str]] = []

    def reset(self) -> None:
        """Begin again at nothing."""
        with self._lock:
            self.calls.clear()
            self.bytes.clear()
            self.log.clear()

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        self._count("put_if_absent", key, memoryview(data).nbytes)
        return self.store.put_if_absent(key, data)

    def get(self, key: str) -> bytes:
        self._count("get", key)
        data = self.store.get(key)
        self._add_bytes("get", len(data))
        return data

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        self._count("get_ranges", key)
        found = self.store.get_ranges(key, ranges)
        self._add_bytes("get_ranges", sum(map(len, found)))
        return found

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        self._count("list", prefix)
        return self.store.list(prefix, start_after=start_after)

    def stat(self, key: str) -> ObjectInfo | None:
        self._count("stat", key)
        return self.store.stat(key)

    def delete(self, key: str) -> None:
        self._count("delete", key)
        self.store.delete(key)

    def _count(self, operation: str, key: str, size: int = 0) -> None:
        with self._lock:
            self.calls[operation] += 1
            self.bytes[operation] += size
            self.log.append((operation, key))

    def _add_bytes(self, operation: str, size: int) -> None:
        with self._lock:
            self.bytes[operation] += size


class Moment(Enum):
    """When a call fails: before it did anything, after all of it was done (its answer is lost), or not at all."""

    BEFORE = "before"
    AFTER = "after"
    NEVER = "never"


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one call of `operation` on a key that contains `key`.

    After `delay` seconds the call fails at `moment`: `put_if_absent` answers `Unknown`, or raises where `is_raised`;
    every other operation raises `StoreUnavailable`.
    """

    operation: str = "put_if_absent"
    key: str = ""
    moment: Moment = Moment.BEFORE
    delay: float = 0.0
    is_raised: bool = False

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"no operation {self.operation!r}; there are {', '.join(OPERATIONS)}")


class FaultyStore(_Wrapper):
    """A store in which things go wrong, by script or by chance.

    Each `Fault` of `script` strikes once, at the first call that fits it, in the order given. Beside that, each
    call of one of `operations` fails with `probability`, drawn from `seed`, half of them before and half after
    their effect. `struck` lists the faults that happened.
    """

    def __init__(
        self,
        store: ObjectStore,
        script: Iterable[Fault] = (),
        *,
        probability: float = 0.0,
        seed: int = 0,
        operations: Sequence[str] = OPERATIONS,
    ) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._script = list(script)
        self._probability = probability
        self._random = random.Random(seed)  # noqa: S311 (no secret)
        self._operations = frozenset(operations)
        self.struck: builtins.list[Fault] = []

    def add(self, *faults: Fault) -> None:
        """Append to the script."""
        with self._lock:
            self._script.extend(faults)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        fault = self._next("put_if_absent", key)
        if fault is None or fault.moment is not Moment.BEFORE:
            outcome = self.store.put_if_absent(key, data)
            if fault is None or fault.moment is Moment.NEVER:
                return outcome
        error = _failure(fault, key)
        if fault.is_raised:
            raise error
        return Unknown(error)

    def get(self, key: str) -> bytes:
        with self._struck("get", key):
            return self.store.get(key)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> builtins.list[bytes]:
        with self._struck("get_ranges", key):
            return self.store.get_ranges(key, ranges)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """A fault after the effect strikes when everything has been listed."""
        with self._struck("list", prefix):
            yield from self.store.list(prefix, start_after=start_after)

    def stat(self, key: str) -> ObjectInfo | None:
        with self._struck("stat", key):
            return self.store.stat(key)

    def delete(self, key: str) -> None:
        with self._struck("delete", key):
            self.store.delete(key)

    @contextmanager
    def _struck(self, operation: str, key: str) -> Iterator[None]:
        fault = self._next(operation, key)
        if fault is not None and fault.moment is Moment.BEFORE:
            raise _failure(fault, key)
        yield
        if fault is not None and fault.moment is Moment.AFTER:
            raise _failure(fault, key)

    def _next(self, operation: str, key: str) -> Fault | None:
        with self._lock:
            fault = next((one for one in self._script if one.operation == operation and one.key in key), None)
            if fault is not None:
                self._script.remove(fault)
            elif operation in self._operations and self._random.random() < self._probability:
                fault = Fault(operation, key, self._random.choice((Moment.BEFORE, Moment.AFTER)))
            else:
                return None
            self.struck.append(fault)
        time.sleep(fault.delay)
        return fault


def _failure(fault: Fault, key: str) -> StoreUnavailable:
    return StoreUnavailable(f"injected: {fault.operation} of {key!r} failed {fault.moment.value} its effect")

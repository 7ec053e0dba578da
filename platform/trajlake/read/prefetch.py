"""Batches read ahead by a thread: bounded, resumable, and a reader's error reaches whoever takes the batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trajlake.errors import UsageError
from trajlake.read.batch import Batch
from trajlake.read.prioritized import Prioritized

if TYPE_CHECKING:
    from trajlake.read.sampler import Sampler


class Batches(Iterator[Batch]):
    """The batches of a sampler, at most `prefetch` of them ahead of the caller (0: none, and no thread).

    `state_dict` is where the caller is, however far the thread has read. A context manager: leaving it stops the
    thread. Prioritized batches are never read ahead, for an update may change what comes next.
    """

    def __init__(self, sampler: Sampler, size: int, *, prefetch: int | None = None, drop_last: bool = False) -> None:
        changes = sampler.strategy == Prioritized.name
        prefetch = (0 if changes else 2) if prefetch is None else prefetch
        if prefetch and changes:
            raise UsageError("prioritized batches cannot be read ahead: give prefetch=0")
        if size < 1 or prefetch < 0:
            raise UsageError(f"a batch has at least one draw, and prefetch is not negative: {size}, {prefetch}")
        self._sampler = sampler
        self._size = size
        self._prefetch = prefetch
        self._drop_last = drop_last
        self._state = sampler.state_dict()
        self._changed = threading.Condition()
        self._ready: deque[tuple[Batch, dict[str, Any]]] = deque()
        self._error: BaseException | None = None
        self._finished = self._stopped = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> Batch:
        if self._prefetch == 0:
            batch = self._read()
            if batch is None:
                raise StopIteration
        else:
            batch, self._state = self._wait()
        return batch

    def _read(self) -> Batch | None:
        before = self._sampler.position
        batch = self._sampler.batch(self._size)
        given = batch.draws
        if self._sampler.position == before or not given or (self._drop_last and given < self._size):
            return None
        _ = batch.tables  # the reading itself
        return batch

    def _wait(self) -> tuple[Batch, dict[str, Any]]:
        if self._thread is None and not self._finished:
            self._thread = threading.Thread(target=self._read_ahead, name="trajlake-prefetch", daemon=True)
            self._thread.start()
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._finished or self._stopped:
                    raise StopIteration
                self._changed.wait()
            found = self._ready.popleft()
            self._changed.notify_all()
            return found

    def _read_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    while len(self._ready) >= self._prefetch and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        return
                found = self._read()
                with self._changed:
                    if found is None:
                        return
                    self._ready.append((found, self._sampler.state_dict()))
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller's thread)
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler goes on after the batches that were taken."""
        return self._state if self._prefetch else self._sampler.state_dict()

    def close(self) -> None:
        """Stop reading ahead; the sampler then stands where the thread was."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

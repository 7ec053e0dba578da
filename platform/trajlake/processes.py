"""Processes that work for this one, on the same machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import pyarrow as pa

from trajlake.errors import TrajlakeError

_ANY_SIZE = "1e18"
"""Bytes. Where psutil is installed, loky starts a process anew that has come to hold 300 MB more: ours keep memory
that the next piece of work uses again."""


@contextmanager
def process_pool(count: int, begin: Callable[..., object], *arguments: Any) -> Iterator[Executor]:
    """`count` new processes, each of which begins with `begin(*arguments)` and has its share of the cores for the
    threads of Arrow and Polars. They end with the block, after what they were given; at once where it raises, and where
    this process is killed.

    They are started afresh and do not import the program that runs, so it needs no guard against that; what they
    are given travels by cloudpickle. Raises TrajlakeError where one of them was killed.
    """
    import loky  # untyped

    cores = max(1, (os.cpu_count() or 1) // count)
    limits = {"POLARS_MAX_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
    limits["LOKY_MAX_MEMORY_LEAK_SIZE"] = _ANY_SIZE
    pool = loky.ProcessPoolExecutor(
        count, initializer=_begin, initargs=(os.getpid(), cores, begin, arguments), env=limits
    )
    kill = True
    try:
        # Ctrl-C is for this process, which then ends them; they inherit that they do not hear it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            pool.submit(os.getpid)  # starts them
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield pool
        kill = False
    except BrokenExecutor as error:
        raise TrajlakeError(
            "a process that did part of the work was killed, perhaps for want of memory: run the same command again, "
            "what is done stays done"
        ) from error
    finally:
        pool.shutdown(kill_workers=kill)


def leave_pandas_out() -> None:
    """For processes that are all ours: Arrow imports pandas with its first array, where it is installed, to know its
    types, and that takes longer than all other imports. Nothing here hands them to Arrow."""
    if "pandas" not in sys.modules:
        hidden = _Hidden()
        sys.meta_path.insert(0, hidden)
        try:
            pa.array([])
        finally:
            sys.meta_path.remove(hidden)


class _Hidden(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def _begin(parent: int, cores: int, begin: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    leave_pandas_out()
    pa.set_cpu_count(cores)
    begin(*arguments)


def _end_with(parent: int) -> None:
    """A parent that was killed has not told its children to end."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

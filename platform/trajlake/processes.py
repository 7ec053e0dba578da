"""Processes that work for this one, on the same machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from trajlake.errors import TrajlakeError


@contextmanager
def process_pool(count: int, begin: Callable[..., None], *arguments: Any) -> Iterator[Executor]:
    """`count` new processes, each of which begins with `begin(*arguments)` and has its share of the cores for the
    threads of Arrow and Polars. They end with the block: after what they were given, or at once where it raises.

    They are started afresh and do not import the program that runs, so it needs no guard against that; what they
    are given travels by cloudpickle. Raises TrajlakeError where one of them was killed.
    """
    import loky  # untyped

    cores = max(1, (os.cpu_count() or 1) // count)
    limits = {"POLARS_MAX_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
    pool = loky.ProcessPoolExecutor(count, initializer=_begin, initargs=(cores, begin, arguments), env=limits)
    kill = True
    try:
        yield pool
        kill = False
    except BrokenExecutor as error:
        raise TrajlakeError(
            "a process that did part of the work was killed, perhaps for want of memory: run the same command again, "
            "what is done stays done"
        ) from error
    finally:
        pool.shutdown(kill_workers=kill)


def _begin(cores: int, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    pa.set_cpu_count(cores)
    begin(*arguments)

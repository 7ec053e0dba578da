"""Carrying out a plan: Beam over its units, then the commits. The pipeline is one line, and what crosses it is small.

    Create((key, unit)) ▸ GroupByKey ▸ ParDo(work)

What the units did stands in the store, not in what the pipeline returns, so any Beam runner will do and a change
that died resumes with the units it has.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import apache_beam as beam
import pyarrow as pa

from trajlake.errors import StoreError, TrajlakeError
from trajlake.processes import process_pool
from trajlake.storage import ObjectStore
from trajlake_pipelines import kinds
from trajlake_pipelines.plan import Plan, Progress, load_plan, next_number, propose, result_key
from trajlake_pipelines.runners import AtOnce, Runner, clear_error

Element = dict[str, Any]
_THREADS = 8


class RunUnit(beam.DoFn):
    """Does the units of a key, in the pool of that name where this process has it. The store travels in the
    constructor: pipeline options do not reach every worker."""

    def __init__(self, store: ObjectStore, kind: str, number: int, pool: str) -> None:
        self._store = store
        self._kind = kind
        self._number = number
        self._pool = pool

    def setup(self) -> None:
        kinds.use_reusing_memory()

    def process(self, element: tuple[int, Iterable[str]]) -> Iterator[int]:
        key, units = element
        pool = _POOLS.get(self._pool)
        if pool is None:
            for each in units:
                kinds.run_element(self._store, self._kind, self._number, each)
        else:
            work = [pool.submit(kinds.run_element, self._store, self._kind, self._number, each) for each in units]
            for done in work:
                done.result()
        yield key


_POOLS: dict[str, Executor] = {}
"""Who does several units at a time, by a name that travels with the pipeline where the pool itself cannot."""


@contextmanager
def _pool_for(at_once: AtOnce) -> Iterator[str]:
    """The name of a pool of this process. Processes start here, while Beam puts its pipeline together."""
    name = uuid.uuid4().hex
    if at_once.units == 1:
        yield name
        return
    pool = process_pool(at_once.units, kinds.use_reusing_memory) if at_once.in_processes else _threads(at_once.units)
    with pool as _POOLS[name]:
        try:
            yield name
        finally:
            del _POOLS[name]


@contextmanager
def _threads(count: int) -> Iterator[Executor]:
    pool = ThreadPoolExecutor(count, "trajlake-unit")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def carry_out(store: ObjectStore, plan: Plan, runner: Runner, on_progress: Progress | None = None) -> list[Element]:
    """Do the units that are not done, and commit; what each unit did, in the order of their numbers."""
    elements = kinds.elements_of(plan)
    done = {info.key for info in store.list(f"{plan.folder}/units/")} if elements else set()
    todo = [unit for unit in elements if result_key(plan.number, unit["number"]) not in done]
    if todo:
        with _watched(store, plan, len(elements), on_progress):
            _run(store, plan, todo, runner)
    with ThreadPoolExecutor(_THREADS) as pool:
        keys = [result_key(plan.number, unit["number"]) for unit in elements]
        results = [_result(key, data) for key, data in zip(keys, pool.map(store.get, keys), strict=True)]
    kinds.publish(store, plan, results)
    return results


def _result(key: str, data: bytes) -> Element:
    try:
        result: Element = dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{key} is damaged ({error}): remove it, and compact does that unit again") from error
    return result


def carry_out_own(
    store: ObjectStore, make: kinds.Make, runner: Runner, on_progress: Progress | None = None
) -> tuple[Plan, list[Element]] | None:
    """Finish what others have begun, then make a plan with `make(store, number)` and carry it out.

    None where it makes none. Where another process was faster with a plan of that number, theirs is done first.
    """
    while True:
        number = next_number(store)
        plan = load_plan(store, number)
        if plan is None:
            own = make(store, number)
            if own is None:
                return None
            plan = propose(store, own)
            results = carry_out(store, plan, runner, on_progress)
            if plan == own:
                return plan, results
        else:
            carry_out(store, plan, runner)


def _run(store: ObjectStore, plan: Plan, units: list[Element], runner: Runner) -> None:
    size = sum(map(kinds.bytes_of, units))
    at_once = runner.at_once(len(units), size, native=plan.kind in kinds.NATIVE)
    # By number they are spread: what follows the GroupByKey runs wherever there is room. With one key they stay with
    # one worker, which does several at a time. As text, for Beam looks into all else, and copies it at every step.
    keyed = [(unit["number"] if at_once.units == 1 else 0, json.dumps(unit)) for unit in units]

    with _quiet_beam(), _own_memory():
        try:
            with _pool_for(at_once) as pool:

                def build(pipeline: beam.Pipeline) -> None:
                    _ = (
                        pipeline
                        | "units" >> beam.Create(keyed, reshuffle=False)
                        | "spread" >> beam.GroupByKey()
                        | "work" >> beam.ParDo(RunUnit(store, plan.kind, plan.number, pool))
                    )

                runner.run(build, store)
        except TrajlakeError:
            raise
        except Exception as error:  # a runner raises what it likes
            raise clear_error(error) from error


@contextmanager
def _own_memory() -> Iterator[None]:
    """Whoever calls this keeps the allocator that they have."""
    before = pa.default_memory_pool()
    try:
        yield
    finally:
        pa.set_memory_pool(before)


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Beam and dask log about libraries that this does not use, and a traceback beside each exception."""
    loggers = [logging.getLogger(name) for name in ("apache_beam", "distributed", "root")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _watched(store: ObjectStore, plan: Plan, total: int, on_progress: Progress | None) -> Iterator[None]:
    """Progress by the results that appear in the store, whichever process puts them there."""
    if on_progress is None:
        yield
        return
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.5):
            keys = [info.key for info in store.list(f"{plan.folder}/units/") if info.key.endswith(".json")]
            on_progress(len(keys), total)

    on_progress(0, total)
    watcher = threading.Thread(target=watch, name="trajlake-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    on_progress(total, total)

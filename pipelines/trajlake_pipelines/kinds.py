"""The kinds of change that a plan can be, and what each does with a unit and at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from trajlake.storage import ObjectStore
from trajlake_pipelines import dedupe_job, optimize_job, requeue_job, retract_job
from trajlake_pipelines import publish as compact_publish
from trajlake_pipelines.plan import Plan
from trajlake_pipelines.unit import UnitResult, run_unit
from trajlake_pipelines.units import unit_from_json

Element = dict[str, Any]
Make = Callable[[ObjectStore, int], Plan | None]
"""Makes the plan of a number, or None where there is nothing to do."""

NATIVE = frozenset({"compact", "optimize"})
"""Kinds whose units work outside the interpreter, nearly all of the time."""


def elements_of(plan: Plan) -> list[Element]:
    """The units of a plan as they cross a shuffle; each has a `number`."""
    if plan.kind == "compact":
        return [asdict(unit) for unit in plan.units]
    units: list[Element] = plan.details.get("units", [])
    return units


def bytes_of(element: Element) -> int:
    """How much a unit reads, in bytes."""
    if "segments" in element:
        return sum(segment["size"] for segment in element["segments"])
    return int(element.get("bytes", 0))


def run_element(store: ObjectStore, kind: str, number: int, text: str) -> None:
    """Do one unit, given as JSON, and leave its result in the store; nothing where the result is there."""
    element: Element = json.loads(text)
    if kind == "compact":
        run_unit(store, number, unit_from_json(element))
    elif kind == "optimize":
        optimize_job.run(store, number, element)
    elif kind == "dedupe":
        dedupe_job.run(store, number, element)
    else:
        raise AssertionError(f"a {kind} has no units")


def publish(store: ObjectStore, plan: Plan, results: list[Element]) -> None:
    """Commit a plan whose units are done."""
    if plan.kind == "compact":
        compact_publish.publish(store, plan, [UnitResult(**result) for result in results])
    elif plan.kind == "optimize":
        optimize_job.publish(store, plan, results)
    elif plan.kind == "dedupe":
        dedupe_job.publish(store, plan, results)
    elif plan.kind == "retract":
        retract_job.publish(store, plan)
    elif plan.kind == "requeue":
        requeue_job.publish(store, plan)
    else:
        raise AssertionError(f"unknown kind of plan: {plan.kind}")


def use_reusing_memory() -> None:
    """Units ask for the same memory one after the other. Arrow's usual allocator gives it back to the system between
    them, and to get it again took a quarter of the processor time; this one keeps it for a second."""
    with suppress(NotImplementedError):  # not on every system
        pa.set_memory_pool(pa.jemalloc_memory_pool())

"""What all benchmarks share: options, results, timing in turns, a process of its own, tables.

A benchmark is a module with `TITLE` and `run(options) -> list[Result]`; `__main__` knows its name. The contender
called "trajlake" is us; the others of the same case are compared with it. Nothing is asserted about time.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.benchmarks.data import REPOSITORY

if TYPE_CHECKING:
    from tests.benchmarks.corpus import Corpus

OURS = "trajlake"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Options:
    """How large and how often. `s3` is an address below which there is nothing, or None to leave S3 out; `gigabytes`
    of Arrow are what `compact` has in its large case."""

    folder: Path
    corpus: Corpus
    repeats: int
    steps_from: int  # episodes whose steps ingest writes
    lookups: int
    batches: int
    gigabytes: float
    s3: str | None = None

    def scratch(self, name: str) -> Path:
        """A new empty folder."""
        path = self.folder / f"{name}-{time.monotonic_ns()}"
        path.mkdir(parents=True)
        return path

    def s3_scratch(self, name: str) -> str:
        """A new empty address on the S3 server."""
        assert self.s3 is not None
        return f"{self.s3}/{name}-{time.monotonic_ns()}"


@dataclass(frozen=True)
class Result:
    """What one contender did in one case. Contenders of the same case did the same work.

    Times in seconds; `processor` is the time of all cores together, which other programs on the machine disturb less.
    `work` is the bytes worked through (for MB/s), `size` the bytes stored or sent, `memory` the peak in bytes.
    `time_goal` and `size_goal` are the least ratio (theirs to ours) that we want.
    """

    case: str
    contender: str
    seconds: float | None
    p95: float | None = None
    p99: float | None = None
    work: int | None = None
    size: int | None = None
    processor: float | None = None
    memory: int | None = None
    time_goal: float | None = None
    size_goal: float | None = None
    note: str = ""


# -- timing --------------------------------------------------------------------------------------------------------


def timed(action: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_turns(contenders: Mapping[str, Callable[[], Item]], repeats: int, warm_up: bool = True) -> dict[str, list[Item]]:
    """What each contender's calls gave (usually their seconds), taking turns in an order that rotates, so that a
    slow moment of the machine meets all. With `warm_up` a first round does not count."""
    names = list(contenders)
    found: dict[str, list[Item]] = {name: [] for name in names}
    for turn in range(-1 if warm_up else 0, repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            value = contenders[name]()
            if turn >= 0:
                found[name].append(value)
    return found


def latencies(
    contenders: Mapping[str, Callable[[Any], Any]],
    items: Sequence[Any],
    warm_up: Sequence[Any],
    same: Callable[[Any], Any],
) -> dict[str, list[float]]:
    """Seconds of each contender for each item, in turns. What they give for the items of `warm_up` must be equal
    after `same`, which brings it into one form."""
    names = list(contenders)
    for item in warm_up:
        answers = {name: same(contenders[name](item)) for name in names}
        for name in names[1:]:
            assert answers[name] == answers[names[0]], f"{name} and {names[0]} give different rows for {item!r:.80}"
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn, item in enumerate(items):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            action = contenders[name]
            began = time.perf_counter()
            action(item)
            found[name].append(time.perf_counter() - began)
    return found


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True)
class Alone:
    """What an action did in a process of its own; `value` is what it gave (JSON)."""

    seconds: float
    processor: float
    memory: int
    value: Any


def alone(function: str, **arguments: Any) -> Alone:
    """`module:function(**arguments)` gives an action; time it in a new process, and its peak memory with children.

    Memory is VmHWM and not `ru_maxrss`: that one survives exec, so a child would show its parent's peak.
    """
    command = [sys.executable, "-m", "tests.benchmarks.harness", function, json.dumps(arguments)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        peak = _Peak(child.pid)
        output, _ = child.communicate()
        peak.stop()
    if child.returncode:
        raise RuntimeError(f"{function} failed with exit code {child.returncode}")
    seconds, processor, memory, value = json.loads(output.splitlines()[-1])
    return Alone(seconds, processor, max(memory, peak.bytes), value)


class _Peak:
    """Watches the memory of a process tree: the sum of the peaks of those that live at once."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.05):
            self.bytes = max(self.bytes, sum(map(_peak_bytes, _tree(self._pid))))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _tree(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _tree(child))]


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _main() -> None:
    logging.disable(logging.WARNING)  # of Beam, about libraries of Google's
    target, arguments = sys.argv[1:]
    module, _, name = target.partition(":")
    action = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    began, processor = time.perf_counter(), _processor_seconds()
    value = action()
    seconds, processor = time.perf_counter() - began, _processor_seconds() - processor
    print(json.dumps([seconds, processor, _peak_bytes(os.getpid()), value]))


def _processor_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


# -- showing -------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "contender", "time", "p95", "p99", "processor", "MB/s", "bytes", "peak memory",
    "time ÷ ours", "bytes ÷ ours", "goal",
)  # fmt: skip


def tables(results: Sequence[Result]) -> Iterable[tuple[str, list[str], list[list[str]], list[str]]]:
    """For each case its name, the columns that have something in them, the rows, and the notes."""
    cases: dict[str, list[Result]] = {}
    for result in results:
        cases.setdefault(result.case, []).append(result)
    for case, found in cases.items():
        ours = next((result for result in found if result.contender == OURS), None)
        rows = [_row(result, ours) for result in found]
        used = [index for index in range(len(_COLUMNS)) if any(row[index] for row in rows)]
        notes = [f"{result.contender}: {result.note}" for result in found if result.note]
        yield case, [_COLUMNS[index] for index in used], [[row[index] for index in used] for row in rows], notes


def _row(result: Result, ours: Result | None) -> list[str]:
    time_ratio = size_ratio = None
    if ours is not None and result is not ours:
        if result.seconds and ours.seconds:
            time_ratio = result.seconds / ours.seconds
        if result.size and ours.size:
            size_ratio = result.size / ours.size
    goals = [
        f"{what} ≥ {goal:.3g}: {'met' if ratio >= goal else 'MISSED'}"
        for what, goal, ratio in (
            ("time", result.time_goal, time_ratio),
            ("bytes", result.size_goal, size_ratio),
        )
        if goal is not None and ratio is not None
    ]
    return [
        result.contender,
        _seconds(result.seconds) or ("left out" if result.size is None else ""),
        _seconds(result.p95),
        _seconds(result.p99),
        _seconds(result.processor),
        f"{result.work / result.seconds / 1e6:,.1f}" if result.work and result.seconds else "",
        _bytes(result.size),
        _bytes(result.memory),
        "1" if result is ours else f"{time_ratio:.2f}" if time_ratio else "",
        ("1" if ours.size else "") if ours and result is ours else f"{size_ratio:.2f}" if size_ratio else "",
        ", ".join(goals),
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if value < 1e-3:
        return f"{value * 1e6:.1f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:,.2f} MB"


def folder_bytes(path: Path) -> int:
    """Bytes of all files below `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    _main()

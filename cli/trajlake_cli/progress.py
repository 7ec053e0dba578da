"""A progress bar on standard error where that is a terminal; elsewhere, for a log, a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trajlake_cli.output import say

Report = Callable[[int, int | None], None]
"""Called with how much is done, and of how much (None where that is not known)."""


_LINE_SECONDS = 15.0
_clock = time.monotonic


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """Show `what` with a bar while the block runs; the block calls what it is given as work is done."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _Lines(what).report
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from trajlake_cli.tables import make_console

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    """What is done, but not more often than is bearable; short work says nothing."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said_at = _clock()

    def report(self, done: int, total: int | None) -> None:
        """A Report."""
        if _clock() - self._said_at >= _LINE_SECONDS:
            self._said_at = _clock()
            say(f"{self._what}: {done:,}{'' if total is None else f' of {total:,}'}")

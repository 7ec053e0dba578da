"""A progress bar on standard error where that is a terminal, and silence in a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int | None], None]
"""Called with how much is done, and of how much (None where that is not known)."""


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """Show `what` with a bar while the block runs; the block calls what it is given as work is done."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield _silent
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


def _silent(done: int, total: int | None) -> None:
    pass

"""How the demo looks: numbered headings, commands as they would be typed, a bar a worker, checks, a summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from trajlake_cli.tables import make_console
from trajlake_cli.text import one_line

if TYPE_CHECKING:
    from trajlake.demo.check import Check
    from trajlake.demo.workers import WorkerState

_WIDEST = 100
_MARGIN = 12


class Stage:
    """Prints to standard output. Long lines wrap on a terminal and stay whole in a pipe."""

    def __init__(self) -> None:
        self._console = make_console()
        self._began = time.monotonic()
        self._number = 0

    @property
    def seconds(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._began

    def title(self, text: str) -> None:
        """The first line."""
        self._console.print(Text(text, style="bold"))

    def heading(self, text: str) -> None:
        """The next of the numbered parts."""
        self._number += 1
        line = Text(f"\n{self._number}  ", style="bold cyan").append(text, style="bold")
        self._console.print(line.append(f"  {self.seconds:.0f} s", style="bright_black"))
        self._flush()

    def note(self, text: str, style: str = "") -> None:
        """A line below a heading."""
        self._print_wrapped("   ", Text(one_line(text), style=style))
        self._flush()

    def command(self, text: str) -> None:
        """A command, as it could be typed."""
        self._console.print()
        self._print_wrapped("   $ ", Text(text, style="bold green"))
        self._flush()

    def check(self, check: Check) -> None:
        """A claim with a mark that says whether it holds."""
        mark, style = ("✓", "bold green") if check.holds else ("✗", "bold red")
        self._print_wrapped(Text(f"   {mark} ", style=style), Text(check.claim, style="" if check.holds else style))
        self._print_wrapped("     ", Text(one_line(check.detail), style="bright_black"))

    def summary(self, title: str, good: bool, facts: Sequence[tuple[str, Sequence[str]]]) -> None:
        """The last screen: named facts, each of one or more lines."""
        style = "bold green" if good else "bold red"
        rule = Text("━" * min(self._console.width, _WIDEST), style=style)
        self._console.print(Text(), rule, Text(f"{title}  {self.seconds:.0f} s", style=style), sep="\n")
        for name, lines in facts:
            self._console.print()
            for at, line in enumerate(lines):
                front = Text((name if at == 0 else "").ljust(_MARGIN), style="bright_black")
                self._print_wrapped(front, Text(one_line(line)))
        self._console.print(rule)
        self._flush()

    def _print_wrapped(self, front: str | Text, line: Text) -> None:
        """`line` behind `front`, and below itself where it is longer than the terminal is wide."""
        front = Text(front, style=line.style) if isinstance(front, str) else front
        room = max(self._console.width - front.cell_len, 20)
        for at, piece in enumerate(line.wrap(self._console, room)):
            piece.rstrip()
            before = front if at == 0 else Text(" " * front.cell_len)
            self._console.print(before + piece, no_wrap=True, crop=False, overflow="ignore")

    @staticmethod
    def _flush() -> None:
        sys.stdout.flush()


@contextmanager
def watching() -> Iterator[Callable[[Sequence[WorkerState]], None]]:
    """Bars on standard error, one a worker, that are gone when the block ends; nothing where that is no terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda workers: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

    columns = (
        TextColumn("   {task.description:<11}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False, style="bright_black"),
    )
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(workers: Sequence[WorkerState]) -> None:
            for worker in workers:
                if worker.name not in tasks:
                    tasks[worker.name] = bars.add_task(worker.name, total=None, facts="starts")
                total = worker.progress.assigned or None
                facts = f"{worker.events:,} events, {worker.acknowledged:,} acknowledged" if total else "starts"
                facts += "  killed, started again" if worker.kill else ""
                bars.update(tasks[worker.name], completed=worker.progress.ended, total=total, facts=facts)

        yield show

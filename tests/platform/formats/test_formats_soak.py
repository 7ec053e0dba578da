"""Ten thousand mutations of real rows a format: `make soak`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.platform.formats.mutation import real_files, withstand

from trajlake.formats import format_named, open_source
from trajlake.formats.json_rows import Row

EXAMPLES = 10_000


def shortened(value: Any) -> Any:
    """A row of which long lists and texts are cut, so that an input takes milliseconds; what was equal stays equal."""
    if isinstance(value, str):
        return value[:400]
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in list(value.items())[:24]}
    return [shortened(item) for item in value[:6]] if isinstance(value, list) else value


def rows_as_they_are(rows: list[Any]) -> list[Any]:
    return rows


def as_arrays(rows: list[Any]) -> list[Any]:
    return [[row] for row in rows]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "folder", "files_of"),
    [
        ("tau-bench", "tau-bench/historical_trajectories", as_arrays),
        ("tau2-bench", "tau2-bench", rows_as_they_are),
        ("intercode", "intercode", rows_as_they_are),
        ("verifiers", "verifiers", as_arrays),
        ("swe-agent", "swe-agent", rows_as_they_are),
        ("mini-swe-agent", "mini-swe-agent-pr816", rows_as_they_are),
        ("openhands", "openhands/evaluation", as_arrays),
        ("openhands", "openhands/tests/unit", as_arrays),
    ],
)
def test_mutated_real_rows_give_records_and_refusals(
    realdata: Path, tmp_path: Path, name: str, folder: str, files_of: Callable[[list[Any]], list[Any]]
) -> None:
    rows = [
        shortened(row.value)
        for path, _, _ in real_files(realdata, folder)
        for row in open_source(path).rows()
        if isinstance(row, Row)
    ]
    withstand(format_named(name), files_of(rows[:40]), tmp_path, EXAMPLES)

"""Every file that other projects published comes in with the counts of INDEX.tsv, or is refused for a reason."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import trajlake
from trajlake.formats.importing import FileReport, ImportReport
from trajlake.formats.parallel import import_tree
from trajlake_pipelines.compact import compact

pytestmark = [pytest.mark.e2e, pytest.mark.beam]

REFUSED = {
    "Git LFS pointer named .jsonl": ("a Git LFS pointer", "git lfs pull"),
    "JSON (dict)": ("summary of runs that holds no steps", "import the logs"),
    "JSONL, flattened dialogue text": ("flattened into one text", "import the results"),
    "OpenSpiel playthrough text": ("an OpenSpiel playthrough", "play the game again"),
    "Reflexion env_results JSON": ("a Reflexion summary", "trial logs"),
    "TFRecord (tf.Example)": ("a TFRecord file", "record it with a Writer"),
    "ToolBench answer JSON (tree/chain)": ("a ToolBench answer", "--mapping"),
    "ToolEval converted/pass-rate JSON dict": ("ToolEval's", ""),
    "csv": ("a table in CSV", "JSON Lines"),
    "markdown (published table)": ("Markdown", "import the files"),
    "preds / exit statuses / eval report": ("an SWE-bench evaluation report", "Writer.score"),
    "verifiers eval metadata": ("metadata of a verifiers evaluation", "results.jsonl"),
}
"""Format in INDEX.tsv to what the reason says: what the file is, and what to do."""

RETURNS_ONLY = ("SB3 ",)
"""Formats of which INDEX.tsv counts steps that were not recorded; their length is in `extra`."""


def index(realdata: Path) -> list[dict[str, str]]:
    with (realdata / "INDEX.tsv").open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def imported(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[trajlake.Lake, ImportReport]:
    """All of it, imported as one tree, and compacted."""
    folder = tmp_path_factory.mktemp("realdata")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJLAKE_SPOOL", str(folder / "spool"))
        lake = trajlake.create(folder / "lake")
        report = import_tree(lake, "realdata", [realdata])
        compact(lake)
    return lake, report


def test_every_file_imports_with_its_counts_or_is_refused_with_a_reason(
    realdata: Path, imported: tuple[trajlake.Lake, ImportReport]
) -> None:
    files = {str(file.path.relative_to(realdata)): file for file in imported[1].files}
    rows = index(realdata)
    assert len(rows) > 150
    problems = [problem for row in rows for problem in check(row, files.pop(row["file"]))]
    assert not problems, "\n".join(problems)
    assert set(files) <= {"INDEX.tsv", "PUBLISHED.tsv", "README.md"}


def check(row: dict[str, str], file: FileReport) -> list[str]:
    """What is wrong with the report of one file."""
    name, expected = row["file"], REFUSED.get(row["format"])
    if expected is not None:
        if file.error is None or not all(words in file.error for words in expected):
            return [f"{name}: refused for {expected}, not {file.error}"]
        return [] if not file.episodes else [f"{name}: refused, and {file.episodes} episodes"]
    if file.error is not None or file.refused:
        return [f"{name}: {file.error or file.refusals[0]}"]
    steps = 0 if row["format"].startswith(RETURNS_ONLY) else int(row["steps_or_messages"])
    if (file.episodes, file.steps) != (int(row["episodes"]), steps):
        return [f"{name}: {file.episodes} episodes and {file.steps} steps, not {row['episodes']} and {steps}"]
    return []


def test_the_tables_hold_what_was_imported(realdata: Path, imported: tuple[trajlake.Lake, ImportReport]) -> None:
    lake, report = imported
    snapshot = lake.snapshot()
    found = snapshot.query(
        "SELECT source_format, COUNT(*) AS episodes, SUM(n_steps) AS steps FROM episodes GROUP BY source_format"
    )
    expected: dict[str, list[int]] = {}
    for file in report.files:
        if file.episodes:
            sums = expected.setdefault(str(file.format), [0, 0])
            sums[0] += file.episodes
            sums[1] += file.steps
    assert {row["source_format"]: [row["episodes"], row["steps"]] for row in found.to_dicts()} == expected
    steps = snapshot.collect(snapshot.steps.select(pl.len())).item()
    assert steps == report.steps


def test_a_second_import_reads_nothing_again(
    realdata: Path, imported: tuple[trajlake.Lake, ImportReport], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lake, first = imported
    second = import_tree(lake, "realdata", [realdata])
    whole: list[Any] = [file for file in first.files if file.error is None]
    assert [file.path for file in second.files if file.already] == [file.path for file in whole]
    assert (second.episodes, second.steps) == (first.episodes, first.steps)

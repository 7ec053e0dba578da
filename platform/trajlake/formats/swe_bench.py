"""SWE-bench evaluation reports as late scores: which instances were resolved, said of the episodes that tried them.

https://github.com/SWE-bench/SWE-bench, `swebench/harness/reporting.py`. A report names instances and not attempts, so
an instance is scored where exactly one episode has it as its task; of several one must be chosen by its run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from trajlake.errors import FormatError
from trajlake.formats.json_rows import Refused
from trajlake.formats.source import open_source
from trajlake_schemas.episodes import SCORED_SUCCESS

if TYPE_CHECKING:
    from trajlake.lake import Lake

COMPONENT = "resolved"
_VERDICTS = {"resolved_ids": 1.0, "unresolved_ids": 0.0, "error_ids": 0.0, "empty_patch_ids": 0.0}


@dataclass
class Scored:
    """What became of one report: `instances == resolved + unresolved + len(unmatched) + len(ambiguous) +
    len(already) + len(different)`. Only the first two were scored: `already` have the score, `different` another one,
    which stays."""

    path: Path
    instances: int
    resolved: int = 0
    unresolved: int = 0
    unmatched: list[str] = field(default_factory=list)
    ambiguous: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def is_report(value: Any) -> bool:
    """Whether this is an evaluation report of SWE-bench."""
    return isinstance(value, dict) and isinstance(value.get("resolved_ids"), list) and "submitted_ids" in value


def read_report(path: str | Path) -> dict[str, float]:
    """1.0 or 0.0 by instance, of those that were evaluated; a patch that was empty or broke the tests is 0.0. Raises
    FormatError where the file is no report, or contradicts itself."""
    rows = list(open_source(path).rows())
    if len(rows) != 1 or isinstance(rows[0], Refused) or not is_report(rows[0].value):
        raise FormatError(
            f"{path}: not an evaluation report of SWE-bench: one object with submitted_ids and resolved_ids"
        )
    verdicts: dict[str, float] = {}
    for name, score in _VERDICTS.items():
        ids = rows[0].value.get(name, [])
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise FormatError(f"{path}: its `{name}` is not a list of names")
        for instance in ids:
            if verdicts.setdefault(instance, score) != score:
                raise FormatError(f"{path}: says of {instance} that it was resolved, and that it was not")
    return verdicts


def score_report(lake: Lake, path: str | Path, *, run: str | None = None, dry_run: bool = False) -> Scored:
    """Add the component `resolved`, and `success`, to the episodes of a report's instances, in one run or in all. They
    are in the tables after the next compaction. Raises FormatError for a file that is no report, and what
    `Writer.flush` raises."""
    verdicts = read_report(path)
    found = Scored(Path(path), len(verdicts))
    chosen: dict[str, float] = {}
    episodes = _episodes(lake, list(verdicts), run)
    for instance, score in sorted(verdicts.items()):
        candidates = episodes.get(instance, [])
        if len(candidates) != 1:
            (found.ambiguous if candidates else found.unmatched).append(instance)
            continue
        episode_id, said = candidates[0]
        if said:
            (found.already if said == {score} else found.different).append(instance)
            continue
        chosen[episode_id] = score
    found.resolved = sum(score == 1.0 for score in chosen.values())
    found.unresolved = len(chosen) - found.resolved
    if chosen and not dry_run:
        with lake.scores(run or "scores") as scores:
            for episode_id, score in chosen.items():
                for name in (COMPONENT, SCORED_SUCCESS):
                    scores.add(episode_id, name, score, kind="verifiable")
            scores.flush()
    return found


def _episodes(lake: Lake, tasks: list[str], run: str | None) -> dict[str, list[tuple[str, set[float]]]]:
    """By task, the episodes that can be used, and what they are scored already."""
    snapshot = lake.snapshot()
    wanted = pl.col("task_id").is_in(tasks) & pl.col("retracted").is_null()
    if run is not None:
        wanted &= pl.col("run_id") == run
    rows = snapshot.collect(snapshot.episodes.filter(wanted).select("task_id", "episode_id", "rewards"))
    found: dict[str, list[tuple[str, set[float]]]] = {}
    for row in rows.iter_rows(named=True):
        said = {part["value"] for part in row["rewards"] or () if part["name"] == COMPONENT}
        found.setdefault(row["task_id"], []).append((row["episode_id"], said))
    return found

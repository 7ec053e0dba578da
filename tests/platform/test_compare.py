"""Which tasks got worse between two policies: figures computed by hand, published ones, and what cannot be compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import polars as pl
import pytest

from trajlake.analysis.compare import Comparison, compare
from trajlake.analysis.intervals import newcombe, sign_test, welch
from trajlake.errors import UsageError
from trajlake.read.snapshot import Snapshot

pytestmark = pytest.mark.unit

COLUMNS: dict[str, Any] = {
    "task_family": pl.String, "env_name": pl.String, "task_id": pl.String, "group_id": pl.String, "run_id": pl.String,
    "domain": pl.String,
    "policy_name": pl.String, "policy_version": pl.String, "success": pl.Boolean, "reward": pl.Float64,
    "retracted": pl.String, "duplicate_of": pl.String, "episode_id": pl.String,
}  # fmt: skip


class Rows:
    """In place of a snapshot: these episodes."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        filled = [{"episode_id": f"e{place}", **row} for place, row in enumerate(rows)]
        self.episodes = pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in filled], COLUMNS).lazy()

    def where(self, condition: str | None) -> pl.LazyFrame:
        return self.episodes if condition is None else self.episodes.filter(pl.sql_expr(condition))

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        return frame.collect()


def compared(rows: Sequence[dict[str, Any]], a: str = "old", b: str = "new", **options: Any) -> Comparison:
    return compare(cast(Snapshot, Rows(rows)), a, b, **options)


def outcomes(policy: str, **tasks: str) -> list[dict[str, Any]]:
    """`t1="110-"`: the trials of a task, each solved, not solved or not judged."""
    judged = {"1": True, "0": False, "-": None}
    return [
        {"policy_name": policy, "run_id": "r", "task_id": task, "success": judged[each]}
        for task, trials in tasks.items()
        for each in trials
    ]


def test_differences_by_task_the_worst_first() -> None:
    found = compared(
        outcomes("old", same="10", worse="1111", better="00", alone="1")
        + outcomes("new", same="01", worse="0001-", better="10", other="0", third="1")
    )
    assert found.column == "policy_name"
    assert found.tasks["task_id"].to_list() == ["worse", "same", "better"]
    assert found.tasks["difference"].to_list() == [-0.75, 0.0, 0.5]
    assert found.tasks["trials_a"].to_list() == [4, 2, 2]
    assert found.tasks["trials_b"].to_list() == [4, 2, 2]
    assert (found.better, found.worse, found.same) == (1, 1, 1)
    assert (found.episodes_a, found.episodes_b, found.left_out_a, found.left_out_b) == (9, 11, 0, 1)
    assert (found.only_a, found.only_b) == (1, 2)
    assert (found.pooled_a, found.pooled_b, found.repeats) == (1, 1, 0)
    # Means over tasks, each counting once: (1/2 + 1 + 0) / 3 and (1/2 + 1/4 + 1/2) / 3.
    assert found.mean_a == pytest.approx(0.5)
    assert found.mean_b == pytest.approx(1.25 / 3)
    assert found.difference == pytest.approx(-0.25 / 3)
    assert found.p_value == 1.0
    assert found.low is not None
    assert found.high is not None
    assert -0.75 <= found.low < found.difference < found.high <= 0.5


def test_what_was_not_judged_can_count_as_failed_and_retracted_episodes_never_count() -> None:
    rows = outcomes("old", t="11") + outcomes("new", t="1-")
    assert compared(rows).difference == 0.0
    assert compared(rows, nulls="failures").difference == -0.5
    marked = [*rows, {"policy_name": "new", "run_id": "r", "task_id": "t", "success": False, "retracted": "a name"}]
    assert compared(marked).difference == 0.0
    repeated = [*rows, {"policy_name": "new", "run_id": "r", "task_id": "t", "success": False, "duplicate_of": "e0"}]
    assert compared(repeated).difference == -0.5
    assert compared(repeated).repeats == 1
    tasks = dict.fromkeys(("10", "9", "2"), "1")
    assert compared(outcomes("old", **tasks) + outcomes("new", **tasks)).tasks["task_id"].to_list() == ["2", "9", "10"]
    assert compared(repeated, unique=True).difference == 0.0
    assert compared([*rows, {**rows[0], "run_id": "another"}]).pooled_a == 2


def test_a_task_is_compared_with_the_same_one_and_not_with_its_namesake_of_another_domain() -> None:
    old = [
        {**row, "domain": domain}
        for domain, trials in (("air", "11"), ("rail", "00"))
        for row in outcomes("old", t=trials)
    ]
    found = compared(old + [{**row, "domain": "rail"} for row in outcomes("new", t="11")])
    [task] = found.tasks.to_dicts()
    assert (task["domain"], task["mean_a"], task["mean_b"]) == ("rail", 0.0, 1.0)
    assert (found.only_a, found.only_b) == (1, 0)


def test_rewards() -> None:
    def scored(policy: str, *rewards: float | None) -> list[dict[str, Any]]:
        return [{"policy_name": policy, "env_name": "e", "group_id": "g", "reward": reward} for reward in rewards]

    found = compared(scored("old", 0.0, 2.0) + scored("new", 3.0, 5.0, None), metric="reward")
    [task] = found.tasks.to_dicts()
    assert (task["env_name"], task["group"], task["mean_a"], task["mean_b"]) == ("e", "g", 1.0, 4.0)
    half = 4.302652729911275 * math.sqrt(2)  # the quantile of t with 2 degrees of freedom
    assert (task["low"], task["high"]) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert task["clear"] is False
    assert (found.low, found.high) == (None, None), "one task says nothing of others"


def test_published_intervals_and_the_sign_test_by_hand() -> None:
    # Newcombe 1998, table II, example (a): 56/70 - 48/80 by method 10.
    assert newcombe(48 / 80, 80, 56 / 70, 70, 0.95) == (
        pytest.approx(0.0524, abs=5e-5),
        pytest.approx(0.3339, abs=5e-5),
    )
    low, high = newcombe(1.0, 4, 0.0, 4, 0.95) or (0, 0)
    assert pytest.approx(low) == -1
    assert high < 0
    assert newcombe(0.0, 0, 1.0, 4, 0.95) is None
    assert welch(1.0, 0.0, 3, 2.0, 0.0, 3, 0.95) is None, "constant values say nothing of the error"
    assert welch(1.0, None, 1, 2.0, 1.0, 3, 0.95) is None
    assert sign_test(1, 5) == 2 * (1 + 6) / 64
    assert sign_test(6, 0) == 2 / 64
    assert sign_test(3, 3) == sign_test(0, 0) == 1.0
    assert sign_test(400, 600) == pytest.approx(sign_test(600, 400))


@pytest.mark.parametrize(
    ("a", "b", "by", "column"),
    [
        ("p", "q", None, "policy_name"),
        ("1", "2", None, "policy_version"),
        ("r1", "r2", None, "run_id"),
        ("p@1", "q@2", None, "policy_name@policy_version"),
        ("r1", "r2", "run_id", "run_id"),
    ],
)
def test_what_the_sides_are_is_found_out(a: str, b: str, by: str | None, column: str) -> None:
    rows = [
        {"run_id": run, "policy_name": name, "policy_version": version, "task_id": "t", "success": name == "q"}
        for run, name, version in (("r1", "p", "1"), ("r2", "q", "2"))
    ]
    found = compared(rows, a, b, by=by)
    assert (found.column, found.difference) == (column, 1.0)


def test_what_cannot_be_compared() -> None:
    rows = outcomes("old", t="1") + outcomes("new", u="1")
    for a, b, by, words in (
        ("old", "old", None, "both sides are 'old'"),
        ("old", "nwe", None, r"has policy, policy version or run 'nwe'; there is new \(policy_name\)"),
        ("old", "r", None, "'old' is a policy_name and 'r' is a run_id"),
        ("old", "new", "run_id", "has run_id 'old'; there is r"),
        ("old", "new", "nope", "no column 'nope'"),
    ):
        with pytest.raises(UsageError, match=words):
            compared(rows, a, b, by=by)
    with pytest.raises(UsageError, match="a confidence is between 0 and 1"):
        compared(rows, confidence=95)
    nothing = compared(rows)
    assert (len(nothing.tasks), nothing.only_a, nothing.only_b) == (0, 1, 1)
    assert (nothing.difference, nothing.p_value, nothing.low) == (None, None, None)

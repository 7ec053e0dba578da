"""Figures agree with their definitions: pass@k and pass^k by brute force, conventions, intervals, nulls."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any, cast

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trajlake.analysis.intervals import bootstrap, student, t_quantile, wilson
from trajlake.analysis.stats import CONVENTIONS, Convention, summarize
from trajlake.errors import UsageError
from trajlake.read.snapshot import Snapshot

pytestmark = pytest.mark.unit

COLUMNS: dict[str, Any] = {
    "task_family": pl.String, "env_name": pl.String, "task_id": pl.String, "group_id": pl.String,
    "policy_name": pl.String, "domain": pl.String, "success": pl.Boolean, "reward": pl.Float64, "n_steps": pl.Int32,
    "prompt_tokens": pl.Int64, "completion_tokens": pl.Int64, "wall_ms": pl.Float64, "extra": pl.String,
    "retracted": pl.String, "run_id": pl.String, "policy_version": pl.String, "duplicate_of": pl.String,
    "episode_id": pl.String,
}  # fmt: skip


class Rows:
    """In place of a snapshot: these episodes."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        filled = [{"n_steps": 1, "episode_id": f"e{place}", **row} for place, row in enumerate(rows)]
        self.episodes = pl.DataFrame([{name: row.get(name) for name in COLUMNS} for row in filled], COLUMNS).lazy()

    def where(self, condition: str | None) -> pl.LazyFrame:
        return self.episodes if condition is None else self.episodes.filter(pl.sql_expr(condition))

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        return frame.collect()


def summary(rows: Sequence[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    return summarize(cast(Snapshot, Rows(rows)), **options).to_dicts()


def trials(tasks: Sequence[Sequence[bool | None]]) -> list[dict[str, Any]]:
    return [{"task_id": str(task), "success": success} for task, outcomes in enumerate(tasks) for success in outcomes]


TASKS = st.lists(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=7), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(tasks=TASKS, k=st.integers(1, 8))
def test_pass_at_k_and_pass_hat_k_are_what_drawing_k_trials_gives(tasks: list[list[bool | None]], k: int) -> None:
    [row] = summary(trials(tasks), pass_k=[k])
    judged = [[success for success in outcomes if success is not None] for outcomes in tasks]
    counted = [outcomes for outcomes in judged if len(outcomes) >= k]
    draws = [list(combinations(outcomes, k)) for outcomes in counted]
    some = [sum(map(any, each)) / len(each) for each in draws]
    every = [sum(map(all, each)) / len(each) for each in draws]
    assert row[f"pass@{k}"] == (pytest.approx(statistics.mean(some)) if some else None)
    assert row[f"pass^{k}"] == (pytest.approx(statistics.mean(every)) if every else None)
    if any(0 < len(outcomes) < k for outcomes in judged):
        assert row[f"tasks@{k}"] == len(counted)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 60), data=st.data())
def test_pass_at_k_is_the_ratio_of_binomials(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    [row] = summary(trials([[True] * c + [False] * (n - c)]), pass_k=[k])
    assert row[f"pass@{k}"] == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), rel=1e-9, abs=1e-12)
    assert row[f"pass^{k}"] == pytest.approx(math.comb(c, k) / math.comb(n, k), rel=1e-9, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(tasks=TASKS)
def test_pass_1_is_the_rate_over_tasks_and_more_trials_help_one_and_hurt_all(tasks: list[list[bool | None]]) -> None:
    ks = [1, 2, 3]
    [row] = summary([one for one in trials(tasks) if one["success"] is not None], pass_k=ks, per="task") or [{}]
    assert row["pass@1"] == (None if row["pass^1"] is None else pytest.approx(row["pass^1"]))
    assert row["pass@1"] == (None if row["success_rate"] is None else pytest.approx(row["success_rate"]))
    even = [outcomes for outcomes in tasks if len(outcomes) >= 3 and None not in outcomes]
    if even:
        [row] = summary(trials(even), pass_k=ks)
        assert row["pass@1"] <= row["pass@2"] + 1e-12 <= row["pass@3"] + 2e-12
        assert row["pass^1"] >= row["pass^2"] - 1e-12 >= row["pass^3"] - 2e-12


REWARDS = st.lists(st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=5), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(tasks=REWARDS, ddof=st.sampled_from([0, 1]), nulls=st.sampled_from(["left-out", "failures"]))
def test_means_and_errors_over_episodes_and_over_tasks(tasks: list[list[float | None]], ddof: int, nulls: str) -> None:
    rows = [{"task_id": str(task), "reward": reward} for task, rewards in enumerate(tasks) for reward in rewards]
    given = [[0.0 if r is None and nulls == "failures" else r for r in rewards] for rewards in tasks]
    kept = [[reward for reward in rewards if reward is not None] for rewards in given]
    values = {
        "episode": [reward for rewards in kept for reward in rewards],
        "task": [statistics.fmean(rewards) for rewards in kept if rewards],
    }
    for per, each in values.items():
        [row] = summary(rows, per=per, ddof=ddof, nulls=nulls)
        assert row["unscored"] == sum(reward is None for rewards in tasks for reward in rewards)
        if not each:
            assert (row["reward_mean"], row["reward_stderr"]) == (None, None)
            continue
        assert row["reward_mean"] == pytest.approx(statistics.fmean(each), abs=1e-9)
        if len(each) > ddof:
            deviation = statistics.stdev(each) if ddof else statistics.pstdev(each)
            assert row["reward_stderr"] == pytest.approx(deviation / math.sqrt(len(each)), abs=1e-9)
        else:
            assert row["reward_stderr"] is None


def test_conventions_by_name() -> None:
    rows = [{"task_id": task, "reward": reward} for task, reward in (("a", 1.0), ("a", 0.0), ("b", 1.0))]
    assert summary(rows)[0]["reward_mean"] == pytest.approx(2 / 3)
    assert summary(rows, convention="inspect")[0]["reward_mean"] == 0.75
    assert summary(rows, convention="inspect")[0]["reward_stderr"] == 0.25
    assert summary(rows, convention="inspect", per="episode")[0]["reward_mean"] == pytest.approx(2 / 3)
    assert summary(rows, convention="sb3")[0]["reward_stderr"] == pytest.approx(math.sqrt(2 / 9) / math.sqrt(3))
    lone = [{"task_id": "a", "reward": 1.0}]
    assert [summary(lone, convention=name)[0]["reward_stderr"] for name in CONVENTIONS] == [None, 0.0, 0.0]
    assert summary(lone, convention=Convention(lone_stderr=-1.0))[0]["reward_stderr"] == -1.0


def test_episodes_without_a_task_are_tasks_of_their_own() -> None:
    rows = [{"reward": 1.0}, {"reward": 0.0}, {"group_id": "g", "reward": 1.0}, {"group_id": "g", "reward": 0.0}]
    [row] = summary(rows, per="task")
    assert (row["reward_mean"], row["tasks"]) == (0.5, 1)
    assert row["reward_stderr"] == pytest.approx(0.5 / math.sqrt(3))


def test_tasks_of_two_domains_that_share_a_number_are_two() -> None:
    rows = [{"domain": domain, "task_id": "0", "success": domain == "air"} for domain in ("air", "rail") for _ in "ab"]
    [row] = summary(rows, pass_k=[1, 2])
    assert (row["tasks"], row["pass^2"], row["pass@2"]) == (2, 0.5, 0.5)


def test_groups_nulls_nan_and_retracted() -> None:
    rows = [
        {"policy_name": "a", "domain": "x", "success": True, "reward": 1.0},
        {"policy_name": "a", "domain": "y", "success": None, "reward": None},
        {"policy_name": "b", "domain": "x", "success": False, "reward": math.nan},
        {"policy_name": "b", "domain": "x", "success": True, "reward": 5.0, "retracted": "wrong"},
        {"policy_name": None, "domain": "x", "success": True, "reward": 2.0},
    ]
    a, b, unknown = summary(rows, by=["policy_name"])
    assert (a["episodes"], a["unjudged"], a["unscored"], a["success_rate"], a["reward_mean"]) == (2, 1, 1, 1.0, 1.0)
    assert (b["episodes"], math.isnan(b["reward_mean"])) == (1, True)
    assert (unknown["policy_name"], unknown["reward_mean"]) == (None, 2.0)
    a = summary(rows, by=["policy_name"], nulls="failures")[0]
    assert (a["unjudged"], a["unscored"], a["success_rate"], a["reward_mean"]) == (1, 1, 0.5, 0.5)
    assert [row["episodes"] for row in summary(rows, by=["policy_name", "domain"])] == [1, 1, 1, 1]
    assert summary(rows, where="domain = 'y'")[0]["episodes"] == 1
    assert summary([])[0]["episodes"] == 0


def test_columns_are_the_same_and_in_order_unless_more_is_asked_for() -> None:
    plain = [
        "episodes", "unjudged", "success_rate", "success_stderr", "unscored", "reward_mean", "reward_stderr",
        "steps_mean", "tokens_mean", "latency_ms_mean", "tasks", "runs", "policies", "repeats",
    ]  # fmt: skip
    assert list(summary(trials([[True]]))[0]) == plain
    more = summary(trials([[True]]), pass_k=[1], confidence=0.95, distribution=True)[0]
    assert [name for name in more if name in plain] == plain
    assert set(more) - set(plain) == {
        *("success_low", "success_high", "reward_low", "reward_high", "pass@1", "pass^1"),
        *("reward_std", "reward_min", "reward_median", "reward_max", "timesteps"),
    }


def test_what_was_pooled_is_counted_and_repeats_can_be_left_out() -> None:
    rows = [
        {"run_id": "a", "policy_name": "p", "policy_version": "1", "success": True, "episode_id": "x"},
        {"run_id": "a", "policy_name": "p", "policy_version": "2", "success": True, "episode_id": "y"},
        {"run_id": "b", "policy_name": "p", "policy_version": "2", "success": False, "duplicate_of": "x"},
        {"run_id": "b", "policy_name": None, "policy_version": "2", "success": False},
    ]
    [row] = summary(rows)
    assert (row["runs"], row["policies"], row["repeats"]) == (2, 3, 1)
    [row] = summary(rows, unique=True)
    assert (row["episodes"], row["success_rate"], row["repeats"]) == (3, pytest.approx(2 / 3), 0)


def test_versions_and_tasks_that_are_numbers_stand_in_the_order_of_numbers() -> None:
    rows = [{"policy_version": version, "reward": 1.0} for version in ("200", "b", "1000", None, "a", "30")]
    assert [row["policy_version"] for row in summary(rows, by=["policy_version"])] == [
        "30", "200", "1000", "a", "b", None,
    ]  # fmt: skip


def test_distribution_and_the_length_of_what_has_no_steps() -> None:
    rows = [
        {"reward": 1.0, "n_steps": 0, "extra": json.dumps({"l": 72, "t": 1.5})},
        {"reward": 3.0, "n_steps": 0, "extra": json.dumps({"l": "72"})},
        {"reward": 8.0, "n_steps": 0, "extra": json.dumps({"t": math.nan})},
        {"reward": None, "n_steps": 5, "extra": json.dumps({"l": 1000})},
        {"reward": None, "n_steps": 0},
    ]
    [row] = summary(rows, distribution=True, ddof=0)
    assert row["timesteps"] == 77
    assert (row["reward_min"], row["reward_median"], row["reward_max"]) == (1.0, 3.0, 8.0)
    assert row["reward_std"] == pytest.approx(statistics.pstdev([1, 3, 8]))


def test_intervals_per_group() -> None:
    rows = [{"policy_name": name, "success": s, "reward": float(s)} for name in "ab" for s in [True] * 8 + [False] * 2]
    for row in summary(rows, by=["policy_name"], confidence=0.95):
        assert (row["success_low"], row["success_high"]) == wilson(8, 10, 0.95)
        assert (row["reward_low"], row["reward_high"]) == pytest.approx((0.49838, 1.10162), abs=1e-5)
    for row in summary(rows, by=["policy_name"], confidence=0.95, interval="bootstrap"):
        assert (row["success_low"], row["success_high"]) == bootstrap([0.0] * 2 + [1.0] * 8, 0.95)
    row = summary([{"task_id": "a", "success": None}], confidence=0.9)[0]
    assert [row[name] for name in ("success_low", "success_high", "reward_low", "reward_high")] == [None] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"convention": "mine"},
        {"per": "run"},
        {"ddof": 2},
        {"nulls": "zero"},
        {"confidence": 0.0},
        {"confidence": 1.0},
        {"interval": "exact"},
        {"by": ["color"]},
        {"pass_k": [0]},
    ],
)
def test_what_there_is_not_is_said(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        summary(trials([[True]]), **options)


# -- intervals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.30265273),
        (0.95, 5, 2.01504837),
        (0.995, 30, 2.74999565),
        (0.975, 1000, 1.96233908),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(probability: float, degrees: int, expected: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-8)


def test_wilson_is_that_of_the_textbook() -> None:
    assert wilson(8, 10, 0.95) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0, 0, 0.95) is None


@given(n=st.integers(1, 500), data=st.data(), confidence=st.floats(0.01, 0.999))
def test_wilson_holds_the_rate_and_stays_within_0_and_1(n: int, data: st.DataObject, confidence: float) -> None:
    successes = data.draw(st.integers(0, n))
    found = wilson(successes, n, confidence)
    assert found is not None
    assert 0 <= found[0] <= successes / n <= found[1] <= 1
    mirrored = wilson(n - successes, n, confidence)
    assert mirrored is not None
    assert found[0] == pytest.approx(1 - mirrored[1], abs=1e-9)


def test_student_and_bootstrap() -> None:
    assert student(1.0, 0.5, 1, 0.95) is None
    assert student(None, None, 5, 0.95) is None
    assert student(1.0, 0.0, 5, 0.95) is None, "equal values say nothing of the error"
    assert bootstrap([], 0.95) is None
    assert bootstrap([math.nan], 0.95) is None
    assert bootstrap([3.0] * 5, 0.95) == (3.0, 3.0)
    low, high = bootstrap([float(value) for value in range(100)], 0.95) or (0, 0)
    assert (low, high) == pytest.approx((49.5 - 5.66, 49.5 + 5.66), abs=0.3)

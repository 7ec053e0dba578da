"""Published results come out of `stats`, after import and compaction: one test a row of PUBLISHED.tsv."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trajlake
from trajlake.analysis.stats import summarize
from trajlake.formats import open_source
from trajlake.formats.importing import import_files
from trajlake_pipelines.compact import compact

pytestmark = [pytest.mark.e2e, pytest.mark.beam]

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TRAJLAKE_REALDATA", REPOSITORY.parent / "shared" / "realdata"))
"""As the fixture `realdata`, which cannot be had when tests are collected."""


def published() -> list[Any]:
    path = FOLDER / "PUBLISHED.tsv"
    if not path.exists():
        reason = f"no published results at {path}"
        return [pytest.param({}, marks=pytest.mark.skip(reason=reason), id="none")]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [pytest.param(row, id=f"{row['file']}-{row['metric']}") for row in rows]


@pytest.fixture(scope="module")
def lake(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> trajlake.Lake:
    """The files of PUBLISHED.tsv, imported and compacted."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAJLAKE_SPOOL", str(folder / "spool"))
        lake = trajlake.create(folder / "lake")
        with lake.writer(run="published") as writer:
            names = dict.fromkeys(row.values[0]["file"] for row in published())
            report = import_files(writer, [realdata / name for name in names])
        assert not report.failed
        assert not report.refused
        compact(lake)
    return lake


# -- how each format's figures are had: one function a format ----------------------------------------------------


def _tau_bench(summary: Callable[..., dict[str, Any]], metric: str) -> float:
    return float(summary(pass_k=[int(metric[-1])])[metric])


def _inspect(summary: Callable[..., dict[str, Any]], metric: str) -> float:
    row = summary(convention="inspect")
    return float(row["reward_mean" if metric.endswith("/accuracy") else "reward_stderr"])


def _verifiers(summary: Callable[..., dict[str, Any]], metric: str) -> float:
    return float(summary()["reward_mean"])


def _sb3(summary: Callable[..., dict[str, Any]], metric: str) -> str:
    row = summary(convention="sb3", distribution=True)
    return f"{row['reward_mean']:.3f};{row['reward_std']:.3f};{row['timesteps']};{row['episodes']}"


FIGURES = {"tau-bench": _tau_bench, "inspect_ai": _inspect, "verifiers": _verifiers, "rl-baselines3-zoo": _sb3}
"""The first folder of a file to how its figures are had."""


@pytest.mark.parametrize("row", published())
def test_a_published_figure_comes_out(row: dict[str, str], lake: trajlake.Lake, realdata: Path) -> None:
    sha256 = open_source(realdata / row["file"]).sha256

    def summary(**options: Any) -> dict[str, Any]:
        frame = summarize(lake.snapshot(), where=f"source_hash = '{sha256}'", **options)
        return frame.to_dicts()[0]

    found = FIGURES[row["file"].split("/")[0]](summary, row["metric"])
    if isinstance(found, str):
        assert found == row["value"]
    else:
        # To the digits that are published: 0.420 is less exact than 1.3806349206399997.
        digits = len(row["value"].partition(".")[2])
        assert found == pytest.approx(float(row["value"]), rel=1e-12, abs=0.5000001 * 10**-digits if digits < 9 else 0)

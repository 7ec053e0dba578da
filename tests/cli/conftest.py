"""Fixtures of the CLI's tests: a way to run it in this process, and a small lake with everything in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click.testing
import numpy as np
import pytest
from click.testing import CliRunner

import trajlake
from trajlake_cli.main import cli

Run = Callable[..., click.testing.Result]

HOSTILE = "red \x1b[31mtext\x1b[0m, \u202eoverride, [bold]markup[/bold], \x9b2J, nul \x00"


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine's user changes what is printed."""
    for name in ("TRAJLAKE_LAKE", "TRAJLAKE_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run() -> Run:
    """`run("episodes", "--limit", 3, code=0)`: the result, after a check of its exit code."""

    def run_cli(*args: object, code: int = 0, stdin: str | None = None) -> click.testing.Result:
        result = CliRunner().invoke(cli, [str(arg) for arg in args], input=stdin, prog_name="trajlake")
        assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    return run_cli


@pytest.fixture(scope="session")
def full_lake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compacted lake of nine episodes: solved, failed, aborted, unscored, NaN, hostile, of classic RL."""
    from trajlake_pipelines.compact import compact

    folder = tmp_path_factory.mktemp("cli")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="agents", worker="w0", spool=folder / "spool") as writer:
        for trial, solved in enumerate((True, False, True, False)):
            with writer.episode(
                episode_id=f"a{trial}" + "0" * 30,
                task_family="airline",
                task_id=f"airline/{trial // 2}",
                trial=trial % 2,
                policy_name="scripted",
                policy_version="7",
                tags={"team": "blue", "note": "x"},
            ) as episode:
                episode.step(source="user", message="Book me a flight.")
                episode.step(
                    source="agent",
                    reasoning="I need the user first.",
                    tool_calls=[{"id": "c1", "name": "get_user", "arguments": '{"user_id": "mia"}'}],
                    completion_tokens=12,
                    prompt_tokens=100,
                )
                episode.step(
                    source="tool",
                    tool_results=[{"call_id": "c1", "content": "Error: no such user", "is_error": not solved}],
                )
                episode.end(
                    success=solved,
                    reward=float(solved),
                    **({} if solved else {"failure_stage": "tool_call", "failure_detail": "no such user"}),
                )
        with writer.episode(episode_id="b0" + "0" * 30, task_id="hostile") as episode:
            episode.step(source="agent", message=HOSTILE)
            episode.end(status="aborted")
        with writer.episode(episode_id="c0" + "0" * 30, task_id="scores") as episode:
            episode.step(source="agent", message="x" * 5000)
            episode.end(reward=float("nan"))
        with writer.episode(episode_id="c1" + "0" * 30, task_id="scores") as episode:
            episode.step(source="agent", message="no score")
    with lake.writer(run="control", worker="w0", spool=folder / "spool") as writer:
        for number in range(2):
            with writer.episode(episode_id=f"d{number}" + "0" * 30, env_name="CartPole-v1", seed=number) as episode:
                for step in range(3):
                    episode.step(
                        observation=np.array([0.5, -0.25, 0.125, 1.0], "float32"),
                        action=np.int64(step % 2),
                        reward=1.0,
                        terminated=step == 2,
                        truncated=False,
                    )
                episode.end(reward=3.0, success=True)
    compact(lake)
    return lake.uri


@pytest.fixture
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parents[2]

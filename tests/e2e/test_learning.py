"""The example that learns: workers write, a trainer draws from the lake, CartPole is solved."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trajlake

pytestmark = [pytest.mark.e2e, pytest.mark.beam]

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "cartpole.py"


@pytest.mark.timeout(600)  # it takes 20 s of an idle machine
def test_a_policy_learns_cartpole_from_the_lake_while_workers_write_to_it(tmp_path):
    pytest.importorskip("gymnasium", reason="the example's environment")
    command = [sys.executable, str(EXAMPLE), str(tmp_path / "lake"), "--seconds", "420"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    reached = re.search(r"mean return (\d+): solved", done.stdout)
    assert reached
    assert int(reached[1]) >= 195
    lake = trajlake.connect(tmp_path / "lake")
    versions = lake.snapshot().query("SELECT count(DISTINCT policy_version) AS n FROM episodes")
    assert versions["n"].item() > 1  # what was learned from came from several policies

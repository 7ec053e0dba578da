"""`trajlake demo`, small: as a user runs it, with the kill, on a folder and on a real S3 server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

import trajlake
from trajlake import devserver

pytestmark = pytest.mark.e2e

TRAJLAKE = str(Path(sys.executable).with_name("trajlake"))


def environment():
    """Without variables that lead to a lake, which the demo is not to look at anyway, or that say how wide a line is
    (pytest-xdist sets COLUMNS)."""
    foreign = ("AWS_", "TRAJLAKE_", "MINIO_", "COLUMNS")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def demo(folder, *arguments, **variables):
    command = [TRAJLAKE, "demo", "--small", "--folder", "demo", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment() | variables, capture_output=True, text=True, timeout=240, check=False
    )


def test_on_a_folder_nothing_acknowledged_is_lost_though_a_worker_is_killed(tmp_path):
    done = demo(tmp_path, "--local", TRAJLAKE_LAKE=str(tmp_path / "not-this-one"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓ every") == 3
    assert "✗ every" not in done.stdout
    assert "nothing that was acknowledged" in done.stdout
    assert re.search(r"desk-2 .*got SIGKILL in mid-episode", done.stdout)
    assert re.search(r"desk-2 was killed with \d+ events that nobody had been promised", done.stdout)
    assert "\x1b" not in done.stdout + done.stderr  # plain text in a pipe
    assert not (tmp_path / "not-this-one").exists()

    snapshot = trajlake.connect(tmp_path / "demo" / "lake").snapshot()
    ended = snapshot.query("SELECT status, count(*) AS n FROM episodes GROUP BY status")
    counts = dict(ended.iter_rows())
    assert counts["aborted"] == 1
    assert sum(counts.values()) == 6 + 20 + 24 + 24 + 1  # all that was given to the workers, and the interrupted one
    manifest = json.loads((tmp_path / "demo" / "export" / "demo-1" / "manifest.json").read_text())
    assert sum(file["rows"] for file in manifest["files"]) == 75


@pytest.mark.s3
def test_on_a_server_it_can_be_kept_and_added_to(tmp_path):
    first = demo(tmp_path, "--keep-server")
    try:
        assert first.returncode == 0, first.stdout + first.stderr
        assert devserver.status(tmp_path / "demo" / "server") is not None
        assert "export AWS_ENDPOINT_URL=" in first.stdout
        second = demo(tmp_path, "--keep")
        assert second.returncode == 0, second.stdout + second.stderr
        assert "there already, this run is added" in second.stdout
        server = devserver.status(tmp_path / "demo" / "server")
        assert server is not None  # it ran before, so it goes on
        runs = subprocess.run(
            [TRAJLAKE, "runs", "--output", "json"], env=environment() | server.environment(), capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        assert {run["run_id"]: run["episodes"] for run in json.loads(runs.stdout)} == {"demo-1": 75, "demo-2": 75}
    finally:
        devserver.stop(tmp_path / "demo" / "server")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_what_it_started(tmp_path, number):
    command = [TRAJLAKE, "demo", "--small", "--local", "--folder", "demo"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(children(process.pid)) < 4:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    started = children(process.pid)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert complaint.decode().splitlines()[-1].startswith("trajlake: interrupted: ")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "thesis.tex").write_text("x")
    done = demo(tmp_path, "--local")
    assert done.returncode == 1
    assert done.stderr == "trajlake: demo holds other things than a demo: choose another folder with --folder\n"
    assert [entry.name for entry in (tmp_path / "demo").iterdir()] == ["thesis.tex"]

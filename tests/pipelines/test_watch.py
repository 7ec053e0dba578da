"""`compact --watch`: passes as segments arrive, one line each, and an end that finishes what has begun."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from tests.rollouts import assert_sound, record

import trajlake
from trajlake.errors import AccessRefused, StoreUnavailable
from trajlake_pipelines import watch as watch_module
from trajlake_pipelines.compact import CompactionReport
from trajlake_pipelines.watch import Metrics, watch

pytestmark = pytest.mark.beam


def run_until(lines, count, stop):
    def on_pass(line):
        lines.append(line)
        if len(lines) == count:
            stop.set()

    return on_pass


def test_a_pass_for_what_arrives_and_silence_in_between(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    lines, stop = [], threading.Event()
    record(lake, range(3))
    thread = threading.Thread(target=watch, args=(lake, stop, run_until(lines, 2, stop)), kwargs={"every": 0.05})
    thread.start()
    while not lines:
        time.sleep(0.05)
    record(lake, range(3, 5))
    thread.join(60)
    assert [line["episodes"] for line in lines] == [3, 2]
    assert all({"time", "seconds", "bytes", "lag_seconds", "duplicate_episodes"} <= set(line) for line in lines)
    assert_sound(lake)


def test_small_files_are_merged_now_and_then(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    lines, stop = [], threading.Event()

    def on_pass(line):
        lines.append(line)
        if len(lines) == 3:
            stop.set()
        else:
            record(lake, [len(lines)], worker=f"w{len(lines)}")

    record(lake, [0])
    watch(lake, stop, on_pass, every=0.05, optimize_after=2)
    assert [line["merged_files"] for line in lines] == [0, 1, 1]
    assert_sound(lake)


def test_a_store_that_is_down_is_a_line_and_asked_again(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")
    answers = iter([StoreUnavailable("down"), StoreUnavailable("down"), CompactionReport(compactions=1)])

    def compact(*_, **__):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(watch_module, "compact", compact)
    lines, stop = [], threading.Event()
    watch(lake, stop, run_until(lines, 3, stop), every=0.01)
    assert [line.get("error") for line in lines] == ["down", "down", None]
    assert [line.get("again_in") for line in lines] == [0.02, 0.04, None]


def test_what_asking_again_cannot_mend_ends_it(tmp_path, monkeypatch):
    lake = trajlake.create(tmp_path / "lake")

    def compact(*_, **__):
        raise AccessRefused("no")

    monkeypatch.setattr(watch_module, "compact", compact)
    lines = []
    with pytest.raises(AccessRefused):
        watch(lake, threading.Event(), lines.append)
    assert lines[0]["error"] == "no"


def test_prometheus_finds_lag_bytes_episodes_and_duplicates():
    metrics = Metrics(0)
    try:
        metrics.add(CompactionReport(compactions=1, bytes=100, episodes=5, duplicate_episodes=2, lag_seconds=1.5))
        metrics.add(None)
        metrics.looked()
        port = metrics._server.server_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    for line in (
        "bytes_total 100.0",
        "episodes_total 5.0",
        "duplicate_episodes_total 2.0",
        "lag_seconds 1.5",
        "failures_total 1.0",
    ):
        assert f"trajlake_compact_{line}" in text


def test_sigterm_ends_after_the_pass(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(3))
    command = [sys.executable, "-m", "trajlake_cli", "--lake", lake.uri, "compact", "--watch", "--every", "1s"]
    code = "from trajlake_cli.main import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *command[3:]], stdout=subprocess.PIPE, text=True) as process:
        line = json.loads(process.stdout.readline())
        assert line["episodes"] == 3
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(30) == 0
    assert_sound(lake)

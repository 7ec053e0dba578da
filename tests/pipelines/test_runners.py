"""The same input gives the same rows wherever the pipeline runs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from tests.rollouts import assert_same_rows, assert_sound, copy_landing, record, record_episode

import trajlake
from trajlake.errors import TrajlakeError, UsageError
from trajlake_pipelines import kinds, unit
from trajlake_pipelines import plan as plan_module
from trajlake_pipelines.compact import compact
from trajlake_pipelines.runners import Runner, find_prism, prism_server

needs_prism = [
    pytest.mark.prism,
    pytest.mark.skipif(find_prism() is None, reason="Prism is not built: `make prism` (needs Go)"),
]


@pytest.fixture
def several_units(monkeypatch):
    monkeypatch.setattr(plan_module.load_or_make_plan, "__kwdefaults__", {"unit_bytes": 4000})


@pytest.fixture
def expected(tmp_path):
    """A lake that was compacted in process, with one of everything that a compaction has to decide."""
    lake = trajlake.create(tmp_path / "expected")
    record(lake, range(12))
    record(lake, range(3), worker="again", attempt=1, steps=4)
    with lake.writer(run="run", worker="open") as writer:
        record_episode(writer, 50, end=False)
        writer.score("e0003", "style", 0.5)
    return lake


def same_landing(uri, expected):
    lake = trajlake.create(uri)
    copy_landing(expected.store, lake.store)
    compact(expected)
    return lake


RUNNERS = {
    "several processes": Runner(processes=2),
    "Beam's processes": Runner(options=("--direct_num_workers=2", "--direct_running_mode=multi_processing")),
    "bundles repeated": Runner(options=("--direct_runner_bundle_repeat=3",)),
    "dask": Runner("dask"),
    "prism": Runner("prism"),
}


@pytest.mark.beam
@pytest.mark.parametrize(
    "runner",
    [
        "several processes",
        "Beam's processes",
        "bundles repeated",
        pytest.param("dask", marks=pytest.mark.dask),
        pytest.param("prism", marks=needs_prism),
    ],
)
def test_the_same_input_gives_the_same_rows(lake_uri, expected, several_units, runner):
    lake = same_landing(lake_uri, expected)
    report = compact(lake, runner=RUNNERS[runner])
    assert report.episodes == 12
    assert len(list(lake.store.list("jobs/compact/00000001/units/0"))) > 4
    assert_sound(lake)
    assert_same_rows(lake, expected)


@pytest.mark.beam
def test_a_large_input_is_spread_over_processes_that_say_nothing(tmp_path, expected, several_units, monkeypatch, capfd):
    monkeypatch.setattr("trajlake_pipelines.runners.PROCESSES_PAY_FROM", 0)
    monkeypatch.setattr("trajlake_pipelines.runners.MOST_THREADS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    lake = trajlake.create(tmp_path / "lake")
    copy_landing(expected.store, lake.store)
    monkeypatch.setattr(unit, "_write", lambda *_: pytest.fail("a unit was done in this process"))
    compact(lake)
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "")
    monkeypatch.undo()
    compact(expected)
    assert_same_rows(lake, expected)


@pytest.mark.beam
def test_a_process_that_is_killed_is_one_clear_line_and_the_next_run_finishes(tmp_path, expected, several_units):
    lake = same_landing(tmp_path / "lake", expected)
    me = os.getpid()
    killed = []

    def kill():
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            with suppress(OSError):  # a thread or child that is gone
                for task in Path(f"/proc/{me}/task").iterdir():
                    for child in (task / "children").read_text().split():
                        if b"popen_loky" in Path(f"/proc/{child}/cmdline").read_bytes():
                            os.kill(int(child), signal.SIGKILL)
                            killed.append(child)
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TrajlakeError, match="a process .* was killed.*run the same command again"):
        compact(lake, runner=Runner(processes=2))
    killer.join()
    assert killed
    compact(lake, runner=Runner(processes=2))
    assert_sound(lake)
    assert_same_rows(lake, expected)


@pytest.mark.beam
def test_processes_need_no_guard_in_the_program_that_calls(tmp_path, expected):
    lake = same_landing(tmp_path / "lake", expected)
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import trajlake
from trajlake_pipelines.compact import compact
from trajlake_pipelines.runners import Runner

print(compact(trajlake.connect({lake.uri!r}), runner=Runner(processes=2)).episodes)
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "12\n", done.stderr
    assert_same_rows(lake, expected)


@pytest.mark.beam
def test_processes_end_when_the_one_that_began_them_is_killed(tmp_path):
    program = """
import os, time
from trajlake.processes import process_pool

with process_pool(2, os.getpid) as pool:
    print(*{pool.submit(os.getpid).result() for _ in range(50)}, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        children = [Path(f"/proc/{pid}") for pid in parent.stdout.readline().split()]
        assert children
        assert all(child.exists() for child in children)
        parent.kill()
    deadline = time.monotonic() + 30
    while any(child.exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(child.exists() for child in children)


def test_processes_are_counted_and_are_for_the_local_runner():
    with pytest.raises(UsageError, match="not 0 for local"):
        Runner(processes=0)
    with pytest.raises(UsageError, match="not 2 for dask"):
        Runner("dask", processes=2)


@pytest.mark.beam
def test_a_process_works_on_as_many_units_at_a_time_as_there_are_cores(tmp_path, expected, several_units, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    lake = trajlake.create(tmp_path / "lake")
    copy_landing(expected.store, lake.store)
    two, real = threading.Barrier(2), kinds.run_element

    def run_element(store, kind, number, element):
        if json.loads(element)["number"] < 2:
            two.wait(timeout=60)
        real(store, kind, number, element)

    monkeypatch.setattr(kinds, "run_element", run_element)
    memory = pa.default_memory_pool().backend_name
    compact(lake)
    assert pa.default_memory_pool().backend_name == memory
    monkeypatch.undo()
    compact(expected)
    assert_same_rows(lake, expected)


@pytest.mark.beam
def test_repeated_bundles_leave_no_file_twice(tmp_path, expected, several_units):
    lake = same_landing(tmp_path / "lake", expected)
    compact(lake, runner=RUNNERS["bundles repeated"])
    files = lambda lake: sorted(info.key for info in lake.store.list("steps/") if info.key.endswith(".parquet"))  # noqa: E731
    assert files(lake) == files(expected)


@pytest.fixture
def dask_cluster(tmp_path):
    """A scheduler and two workers, each a process of its own; the address and the workers."""
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port=0", "--no-dashboard"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([*command, "--scheduler-file", str(file)], **quiet)]
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    address = json.loads(file.read_text())["address"]
    worker = [
        sys.executable,
        "-m",
        "distributed.cli.dask_worker",
        address,
        "--nthreads=1",
        "--no-nanny",
        "--no-dashboard",
    ]
    processes += [
        subprocess.Popen([*worker, f"--local-directory={tmp_path / name}"], **quiet) for name in ("one", "two")
    ]
    import distributed

    with distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield address, processes[1:]
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.dask
@pytest.mark.beam
def test_a_dask_worker_that_is_killed_in_mid_job_changes_nothing(
    lake_uri, expected, several_units, dask_cluster, monkeypatch
):
    address, workers = dask_cluster
    lake = same_landing(lake_uri, expected)
    killed = []

    def kill():
        while not any(info.key.endswith(".json") for info in lake.store.list("jobs/compact/00000001/units/")):
            time.sleep(0.02)
        os.kill(workers[0].pid, signal.SIGKILL)
        killed.append(len(list(lake.store.list("jobs/compact/00000001/units/0"))))

    killer = threading.Thread(target=kill)
    killer.start()
    compact(lake, runner=Runner("dask", scheduler=address))
    killer.join()
    assert killed
    assert workers[0].wait(10) == -signal.SIGKILL
    assert_sound(lake)
    assert_same_rows(lake, expected)


@pytest.mark.dask
def test_a_scheduler_that_is_down_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr("trajlake_pipelines.runners.SCHEDULER_SECONDS", 1.0)
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(2))
    with pytest.raises(TrajlakeError, match=r"^no dask scheduler answers at tcp://127.0.0.1:9: start one .*$"):
        compact(lake, runner=Runner("dask", scheduler="tcp://127.0.0.1:9"))
    assert compact(lake).episodes == 2  # its plan is finished here


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"name": "hadoop"}, "runner must be one of local, dask, prism, flink, spark, dataflow"),
        ({"name": "flink"}, "needs the address of its job server"),
        ({"name": "local", "scheduler": "tcp://x:1"}, "a scheduler's address is for the runner dask"),
        ({"name": "dask", "job_endpoint": "x:1"}, "a job endpoint and an environment are for"),
    ],
)
def test_what_does_not_go_together_is_refused(how, why):
    with pytest.raises(UsageError, match=why):
        Runner(**how)


def test_a_job_server_that_is_down_is_one_clear_line(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(2))
    with pytest.raises(TrajlakeError, match="no job server of flink answers at localhost:9: start it"):
        compact(lake, runner=Runner("flink", job_endpoint="localhost:9"))


@pytest.mark.beam
@pytest.mark.s3
def test_neither_plan_nor_pipeline_nor_log_holds_the_secret(s3_uri, s3_server, monkeypatch, caplog):
    import apache_beam as beam

    protos = []
    real = beam.Pipeline.run

    def run(self, *rest):
        protos.append(self.to_runner_api().SerializeToString())
        return real(self, *rest)

    monkeypatch.setattr(beam.Pipeline, "run", run)
    lake = trajlake.create(s3_uri)
    record(lake, range(2))
    with caplog.at_level("DEBUG"):
        compact(lake)
    secret = s3_server["AWS_SECRET_ACCESS_KEY"].encode()
    assert protos
    assert not any(secret in proto for proto in protos)
    assert not any(secret in lake.store.get(info.key) for info in lake.store.list("jobs/"))
    assert secret.decode() not in caplog.text


@pytest.fixture
def worker_pool():
    """Beam's pool of external workers, as it stands beside a Flink task manager; its environment is its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = {"PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}  # it starts `python` from there
    command = [sys.executable, "-m", "apache_beam.runners.worker.worker_pool_main", f"--service_port={port}"]
    pool = subprocess.Popen(
        command, env=os.environ | path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert pool.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
    yield f"EXTERNAL:localhost:{port}"
    os.killpg(pool.pid, signal.SIGKILL)
    pool.wait()


@pytest.mark.beam
@pytest.mark.prism
@pytest.mark.skipif(find_prism() is None, reason="Prism is not built: `make prism` (needs Go)")
def test_prism_with_workers_that_another_process_starts(tmp_path, expected, several_units, worker_pool):
    lake = same_landing(tmp_path / "lake", expected)
    with prism_server() as endpoint:
        compact(lake, runner=Runner("prism", job_endpoint=endpoint, environment=worker_pool))
    assert_sound(lake)
    assert_same_rows(lake, expected)

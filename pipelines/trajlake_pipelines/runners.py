"""Where a pipeline runs. The names that `--runner` knows, and what each needs to be told.

Nothing secret travels: a store is pickled without its credentials, and each process takes them from its own
environment. So workers that this process starts (local, dask without an address, LOOPBACK) have them at once, and
others must have been started with them; a dask cluster is asked before the work begins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from trajlake.errors import TrajlakeError, UsageError
from trajlake.storage import ObjectStore
from trajlake_pipelines.guard import check_shape

RUNNERS = ("local", "dask", "prism", "flink", "spark", "dataflow")
PROCESSES_PAY_FROM = 256 << 20  # bytes of input: below, starting processes costs more than they save
_BEAMS_OWN = ("--direct_num_workers", "--direct_running_mode")  # ways of FnApiRunner to have several workers
MOST_THREADS = 4  # with more of them units wait for the interpreter
SCHEDULER_SECONDS = 10.0
PRISM_SECONDS = 30.0
PRISM_LOCATION = "TRAJLAKE_PRISM"  # names the program where it is neither beside python nor on the PATH


PipelineFor = Callable[[beam.Pipeline], None]
"""What builds a pipeline: called with an empty one."""


@dataclass(frozen=True)
class AtOnce:
    """How many units one worker does at a time, and whether in processes or in threads of its own."""

    units: int
    in_processes: bool = False


@dataclass(frozen=True)
class Runner:
    """`scheduler` is the address of a dask scheduler (none: a cluster of local processes); `job_endpoint` that of a
    Beam job server; `environment` how its workers are found: `LOOPBACK`, `EXTERNAL:host:port`, `DOCKER:image` or
    `PROCESS:{…}`; `options` further options of Beam; `processes` how many `local` starts (None: as it pays). Raises
    UsageError for what does not go together."""

    name: str = "local"
    scheduler: str | None = None
    job_endpoint: str | None = None
    environment: str | None = None
    options: tuple[str, ...] = ()
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.name not in RUNNERS:
            raise UsageError(f"runner must be one of {', '.join(RUNNERS)}, not {self.name!r}")
        if self.scheduler is not None and self.name != "dask":
            raise UsageError(f"a scheduler's address is for the runner dask, not for {self.name}")
        if (self.job_endpoint or self.environment) and self.name in {"local", "dask"}:
            raise UsageError(f"a job endpoint and an environment are for prism, flink and spark, not for {self.name}")
        if self.processes is not None and (self.name != "local" or self.processes < 1):
            raise UsageError(f"processes are 1, 2, 3, … for the runner local, not {self.processes} for {self.name}")
        if self.name in {"flink", "spark"} and not self.job_endpoint:
            raise UsageError(f"the runner {self.name} needs the address of its job server: --job-endpoint host:port")

    def at_once(self, units: int, size: int, *, native: bool) -> AtOnce:
        """How one worker goes about `units` units that read `size` bytes together.

        Workers of a cluster do one at a time. This machine does as many as it has cores: in processes where the input
        pays for their start, else in threads of this one where their work is `native` (outside the interpreter) and
        the cores few.
        """
        if self.name != "local" or any(option.startswith(_BEAMS_OWN) for option in self.options):
            return AtOnce(1)
        cores = min(self.processes or os.cpu_count() or 1, units)
        if self.processes is not None or size >= PROCESSES_PAY_FROM:
            return AtOnce(cores, in_processes=cores > 1)
        return AtOnce(cores if native and cores <= MOST_THREADS else 1)

    def run(self, pipeline_for: PipelineFor, store: ObjectStore) -> None:
        """Run the pipeline to its end.

        Raises what the pipeline raises, and a TrajlakeError in one line where the cluster does not answer.
        """
        with self._options(store) as (name, options):
            pipeline = beam.Pipeline(name, options=options)
            pipeline_for(pipeline)
            check_shape(pipeline)
            result = pipeline.run()
            try:
                result.wait_until_finish()
            finally:
                if client := getattr(result, "client", None):
                    client.close()

    @contextmanager
    def _options(self, store: ObjectStore) -> Iterator[tuple[Any, PipelineOptions]]:
        if self.name == "local":
            yield "FnApiRunner", PipelineOptions(list(self.options))
        elif self.name == "dask":
            with _dask_cluster(self.scheduler, store) as address:
                flags = [f"--dask_client_address={address}", "--dask_partition_size=1", *self.options]
                yield _DASK, PipelineOptions(flags)
        elif self.name == "dataflow":
            if importlib.util.find_spec("google.cloud.storage") is None:
                raise UsageError("the runner dataflow needs Google's libraries: pip install 'apache-beam[gcp]'")
            yield "DataflowRunner", PipelineOptions(list(self.options))
        elif self.job_endpoint is None:
            with prism_server() as endpoint:
                yield "PortableRunner", PipelineOptions(self._portable_flags(endpoint))
        else:
            _check_answers(self.job_endpoint, f"no job server of {self.name}")
            yield "PortableRunner", PipelineOptions(self._portable_flags(self.job_endpoint))

    def _portable_flags(self, endpoint: str) -> list[str]:
        kind, _, config = (self.environment or "LOOPBACK").partition(":")
        flags = [f"--job_endpoint={endpoint}", f"--environment_type={kind}"]
        if config:
            flags.append(f"--environment_config={config}")
        return [*flags, *self.options]


_DASK = "apache_beam.runners.dask.dask_runner.DaskRunner"


@contextmanager
def _dask_cluster(address: str | None, store: ObjectStore) -> Iterator[str]:
    """The address of a scheduler that answers and whose workers can use the lake."""
    try:
        import distributed  # untyped
    except ImportError as error:
        raise UsageError("the runner dask needs dask.distributed: pip install 'trajlake[dask]'") from error
    with contextlib.ExitStack() as stack:
        if address is None:
            cluster = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=os.cpu_count() or 1,
                    threads_per_worker=1,
                    dashboard_address=None,
                    silence_logs=logging.ERROR,
                )
            )
            address = str(cluster.scheduler_address)
        try:
            client = stack.enter_context(
                distributed.Client(address, timeout=SCHEDULER_SECONDS, set_as_default=False, name="trajlake-check")
            )
            answers = client.run(_can_use, store)
        except (OSError, ValueError, TimeoutError) as error:
            raise TrajlakeError(
                f"no dask scheduler answers at {address}: start one (`dask scheduler`), correct the address, or leave "
                "it out for a cluster of local processes"
            ) from error
        if not answers:
            raise TrajlakeError(f"the dask scheduler at {address} has no workers: start one (`dask worker {address}`)")
        for worker, trouble in answers.items():
            if trouble is not None:
                raise TrajlakeError(
                    f"dask worker {worker} cannot use the lake: {trouble}; workers take credentials from their own "
                    "environment"
                )
        yield address


def _can_use(store: ObjectStore) -> str | None:
    """Asked of every worker: None, or why it cannot read the lake."""
    from trajlake.table.tables import read_marker

    try:
        read_marker(store)
    except TrajlakeError as error:
        return str(error)
    return None


def find_prism() -> str | None:
    """Beam's Prism runner: by TRAJLAKE_PRISM, beside this python (`make prism` puts it there), on the PATH, or where
    Go installs."""
    candidates = [os.environ.get(PRISM_LOCATION), str(Path(sys.executable).with_name("prism")), shutil.which("prism")]
    candidates.append(str(Path.home() / "go" / "bin" / "prism"))
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


@contextmanager
def prism_server() -> Iterator[str]:
    """Start Prism for the time of the block; its job endpoint."""
    program = find_prism()
    if program is None:
        raise UsageError(
            "Prism is not here: build it with `make prism` (needs Go), name it in TRAJLAKE_PRISM, or give "
            "--job-endpoint of one that runs"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, f"-job_port={port}", "-serve_http=false", "-log_level=error", "-log_kind=text"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            endpoint = f"localhost:{port}"
            deadline = time.monotonic() + PRISM_SECONDS
            while not _answers(endpoint):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise TrajlakeError(f"{program} did not start: run `{' '.join(command)}` to see why")
                time.sleep(0.05)
            yield endpoint
        finally:
            server.terminate()


def _check_answers(endpoint: str, who: str) -> None:
    if not _answers(endpoint):
        raise TrajlakeError(f"{who} answers at {endpoint}: start it, or correct the address")


def _answers(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3.0):
            return True
    except (OSError, ValueError):
        return False


def clear_error(error: Exception) -> TrajlakeError:
    """What a runner raised as one line: runners of other processes give tracebacks as text."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, TrajlakeError):
            return found
        found = found.__cause__
    lines: list[Any] = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if lines else type(error).__name__
    return TrajlakeError(f"the pipeline failed: {reason}; run it again, what is done stays done")

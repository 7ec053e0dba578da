"""Starts the four workers, watches them, kills one in mid-episode and starts it again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trajlake.demo import acks, board
from trajlake.demo.acks import Acknowledged
from trajlake.demo.board import Progress
from trajlake.demo.worker import SOURCES, ack_path, board_path
from trajlake.errors import TrajlakeError

VICTIM = "desk-2"
_KILL_AFTER = 0.25  # of its episodes, at a moment that shows all there is to see …
_KILL_ANYHOW_AFTER = 0.7  # … or then at any moment in mid-episode
_POLL_SECONDS = 0.02
_TERMINATE_SECONDS = 5.0


@dataclass(frozen=True)
class Kill:
    """What was true when the worker was killed."""

    pid: int
    progress: Progress

    @property
    def unacknowledged(self) -> int:
        """Events that it had recorded and that nobody was promised."""
        return self.progress.events - self.progress.acknowledged


@dataclass
class WorkerState:
    """One worker as it can be seen from outside; `processes` counts its starts."""

    name: str
    processes: int = 0
    progress: Progress = field(default_factory=Progress)
    earlier: Progress = field(default_factory=Progress)  # of the process that was killed
    kill: Kill | None = None

    @property
    def events(self) -> int:
        return self.earlier.events + self.progress.events

    @property
    def acknowledged(self) -> int:
        return self.earlier.acknowledged + self.progress.acknowledged


@dataclass(frozen=True)
class DemoIngest:
    """What the workers did: how each ended, and what each of their processes was promised."""

    run_id: str
    spool: Path
    seconds: float
    workers: tuple[WorkerState, ...]
    promises: dict[str, list[Acknowledged]]

    @property
    def victim(self) -> WorkerState:
        return next(worker for worker in self.workers if worker.name == VICTIM)


Watch = Callable[[Sequence[WorkerState]], None]


def run(lake_uri: str, run_id: str, *, size: str, spool: Path, folder: Path, watch: Watch | None = None) -> DemoIngest:
    """Play everything and return when all workers have ended; on any error, and on Ctrl-C, end those that run.

    `folder` gets each process's acknowledgements, progress and log. The environment leads the workers to the store.
    Raises TrajlakeError with the last words of a worker that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    crew = _Crew(lake_uri, run_id, size, spool, folder)
    try:
        for worker in crew.workers:
            crew.start(worker, skip=0)
        while crew.is_working():
            crew.look()
            if crew.victim.kill is None and _is_moment(crew.victim.progress):
                crew.kill_in_mid_episode(crew.victim)
            if watch is not None:
                watch(crew.workers)
            time.sleep(_POLL_SECONDS)
        crew.look()
        if watch is not None:
            watch(crew.workers)
    finally:
        crew.end()
    promises = {
        worker.name: [acks.read(ack_path(folder, worker.name, process)) for process in range(worker.processes)]
        for worker in crew.workers
    }
    return DemoIngest(run_id, spool, time.monotonic() - began, tuple(crew.workers), promises)


class _Crew:
    """The processes, by worker."""

    def __init__(self, lake_uri: str, run_id: str, size: str, spool: Path, folder: Path) -> None:
        self._arguments = [f"--lake={lake_uri}", f"--run={run_id}", f"--size={size}", f"--spool={spool}"]
        self._arguments.append(f"--parent={os.getpid()}")
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.workers = [WorkerState(name) for name in SOURCES]

    @property
    def victim(self) -> WorkerState:
        return next(worker for worker in self.workers if worker.name == VICTIM)

    def start(self, worker: WorkerState, skip: int) -> None:
        """Start a worker's process; it goes on after the first `skip` of its episodes."""
        number = worker.processes
        command = [
            sys.executable, "-m", "trajlake.demo.worker", worker.name, *self._arguments,
            f"--folder={self._folder}", f"--process={number}", f"--skip={skip}",
        ]  # fmt: skip
        with self._log(worker.name).open("ab") as log, _undisturbed():
            # A group of its own, so that Ctrl-C reaches only us and we end it in order.
            self._running[worker.name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        worker.earlier, worker.progress = worker.progress, Progress(ended=skip, assigned=worker.progress.assigned)
        worker.processes += 1

    def is_working(self) -> bool:
        """Whether any process runs. Raises TrajlakeError where one failed."""
        for name, process in self._running.items():
            if process.poll() not in (None, 0):
                words = self._log(name).read_text(errors="replace").strip().splitlines()
                raise TrajlakeError(
                    f"worker {name} ended with {process.returncode}: {words[-1] if words else 'it said nothing'} "
                    f"(see {self._log(name)})"
                )
        return any(process.poll() is None for process in self._running.values())

    def look(self) -> None:
        """Read how far each is."""
        for worker in self.workers:
            found = self._progress(worker)
            if found.assigned:
                worker.progress = found

    def kill_in_mid_episode(self, worker: WorkerState) -> None:
        """SIGKILL and a new start, if it is still the moment.

        It is halted while we look, so that what we see is what it was killed with.
        """
        process = self._running[worker.name]
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):  # it ended in this moment, and we have just taken its exit code
            process.returncode = os.waitstatus_to_exitcode(status)
            return
        found = self._progress(worker)
        if _is_moment(found):
            process.kill()
            process.wait()
            worker.progress = found
            worker.kill = Kill(process.pid, found)
            self.start(worker, skip=found.ended)
        else:
            process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End what still runs: first asked, then forced."""
        running = [process for process in self._running.values() if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()

    def _progress(self, worker: WorkerState) -> Progress:
        return board.read(board_path(self._folder, worker.name, worker.processes - 1))

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let Ctrl-C and its kin wait: in the middle of starting a process they would leave one that nobody ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: waiting.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if waiting:
        signal.raise_signal(waiting[0])


def _is_moment(progress: Progress) -> bool:
    """Whether to kill now: the begin of the open episode is on the disk, and not everything is acknowledged; and, if
    we need not hurry, some of what is not acknowledged is on the disk and the rest only in memory."""
    if not progress.assigned or progress.ended < _KILL_AFTER * progress.assigned:
        return False
    if not 0 < progress.begun_at <= progress.spooled or progress.events == progress.acknowledged:
        return False
    shows_all = progress.acknowledged < progress.spooled < progress.events
    return shows_all or progress.ended >= _KILL_ANYHOW_AFTER * progress.assigned

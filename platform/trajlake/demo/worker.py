"""One worker process: `python -m trajlake.demo.worker …` plays its assignments and streams them into the lake.

This is what a rollout worker looks like: a writer, an episode, steps, an end. All else here keeps count, so that
afterwards it can be said whether what was acknowledged is there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import trajlake
from trajlake.demo import gym
from trajlake.demo.acks import AckFile, EpisodeAck
from trajlake.demo.assignment import Assignment
from trajlake.demo.board import Board, Progress
from trajlake.demo.desk import rollout
from trajlake.errors import NotDurable, TrajlakeError, UsageError
from trajlake.ingest.writer import Writer

FLUSH_SECONDS = 0.5
FLUSH_PATIENCE = 60.0  # seconds

log = logging.getLogger("trajlake.demo")


@dataclass(frozen=True)
class Size:
    """How much the demo plays. `*_pause` are the seconds that one decision takes, beside its computation."""

    cartpole: int
    frozenlake: int
    desk_tasks: int  # of each domain
    desk_trials: int
    gym_pause: float
    desk_pause: float


SIZES = {
    "full": Size(cartpole=60, frozenlake=240, desk_tasks=12, desk_trials=3, gym_pause=0.0005, desk_pause=0.02),
    "small": Size(cartpole=6, frozenlake=20, desk_tasks=4, desk_trials=2, gym_pause=0.0, desk_pause=0.02),
}

SOURCES: dict[str, Callable[[Size], list[Assignment]]] = {
    "cartpole": lambda size: gym.cartpole(size.cartpole, pause=size.gym_pause),
    "frozenlake": lambda size: gym.frozenlake(size.frozenlake, pause=size.gym_pause),
    "desk-1": lambda size: _desk(size, 0),
    "desk-2": lambda size: _desk(size, 1),
}
"""The four workers by name, and what each is given to do."""


def _desk(size: Size, share: int) -> list[Assignment]:
    return rollout.assignments(size.desk_tasks, size.desk_trials, share=share, shares=2, pause=size.desk_pause)


class Recorder:
    """Plays assignments into a writer and writes down what the writer acknowledged."""

    def __init__(self, writer: Writer, acks: AckFile, board: Board, progress: Progress) -> None:
        self._writer = writer
        self._acks = acks
        self._board = board
        self._progress = progress
        self._news: dict[str, EpisodeAck] = {}
        self._last = EpisodeAck("")
        self._flushed = time.monotonic()

    def record(self, assignment: Assignment) -> None:
        """One episode, from its begin to its end."""
        with self._writer.episode(**assignment.begin) as episode:
            self._last = EpisodeAck(episode.episode_id)
            self._progress.begun_at = self._progress.events + 1
            self._count()
            cut_off = False
            play = assignment.play()
            while True:
                try:
                    step = next(play)
                except StopIteration as end:
                    outcome = end.value
                    break
                episode.step(**step)
                cut_off = bool(step.get("truncated")) and not step.get("terminated")
                self._last.steps += 1
                self._count()
                if time.monotonic() - self._flushed >= FLUSH_SECONDS:
                    self.acknowledge()
            episode.end(**outcome)
        self._last.status = outcome.get("status") or ("truncated" if cut_off else "completed")
        self._progress.begun_at = 0
        self._progress.ended += 1
        self._count()

    def _count(self) -> None:
        """One more event was recorded, of the last episode."""
        stats = self._writer.stats
        self._progress.events += 1
        self._progress.spooled = stats.durable_events + stats.spooled_events
        self._news[self._last.episode_id] = self._last
        self._board.show(self._progress)

    def acknowledge(self) -> None:
        """Flush; what was recorded before is then promised, so write it down."""
        self._flushed = time.monotonic()
        try:
            self._writer.flush(FLUSH_PATIENCE)
        except NotDurable as error:
            log.warning("not acknowledged yet: %s", error)
            return
        self._acks.write(self._progress.events, self._news.values())
        self._progress.acknowledged = self._progress.events
        self._board.show(self._progress)
        self._news = {}


def run(
    lake: trajlake.Lake,
    run_id: str,
    name: str,
    size: Size,
    *,
    spool: Path,
    folder: Path,
    process: int = 0,
    skip: int = 0,
    parent: int | None = None,
) -> None:
    """Play what worker `name` is given, all but the first `skip`. `process` counts the starts of this worker; when
    process `parent`, that started it, is gone, it ends."""
    assignments = SOURCES[name](size)
    progress = Progress(ended=skip, assigned=len(assignments))
    acks, board = AckFile(ack_path(folder, name, process)), Board(board_path(folder, name, process))
    board.show(progress)
    with lake.writer(run_id, name, spool=spool, segment_seconds=2.0) as writer:
        recorder = Recorder(writer, acks, board, progress)
        for assignment in assignments[skip:]:
            if parent is not None and os.getppid() != parent:
                raise UsageError("whoever started this worker is gone")
            recorder.record(assignment)
        recorder.acknowledge()
    acks.close()
    board.close()


def ack_path(folder: Path, name: str, process: int) -> Path:
    """Where process number `process` of a worker writes down what was acknowledged."""
    return folder / f"{name}.{process}.acks.jsonl"


def board_path(folder: Path, name: str, process: int) -> Path:
    """Where it shows how far it is."""
    return folder / f"{name}.{process}.board"


def main(arguments: Sequence[str] | None = None) -> int:
    """The process: 0 when everything was played, 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="trajlake.demo.worker")
    parser.add_argument("name", choices=sorted(SOURCES))
    for option in ("--lake", "--run"):
        parser.add_argument(option, required=True)
    for option in ("--spool", "--folder"):
        parser.add_argument(option, required=True, type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        lake = trajlake.connect(given.lake)
        run(
            lake, given.run, given.name, SIZES[given.size],
            spool=given.spool, folder=given.folder, process=given.process, skip=given.skip, parent=given.parent,
        )  # fmt: skip
    except TrajlakeError as error:
        print(f"worker {given.name}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

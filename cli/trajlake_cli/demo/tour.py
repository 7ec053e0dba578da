"""The demo from the server to the summary. Whatever a person could type is run as that command, in this process."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import trajlake
from trajlake import devserver
from trajlake.demo.check import Findings, check
from trajlake.demo.workers import VICTIM, DemoIngest, WorkerState
from trajlake.demo.workers import run as run_workers
from trajlake.errors import LakeExists
from trajlake_cli.demo.folder import DemoFolder, environment
from trajlake_cli.demo.stage import Stage, watching

WORKERS = {
    "cartpole": "Gymnasium's CartPole-v1, a random policy and one that balances",
    "frozenlake": "Gymnasium's FrozenLake-v1, a random policy and a planned one",
    "desk-1": "an agent with tools at a desk, policies v1 and v2",
    "desk-2": "the same desk, other tasks",
}

_SOLVED = (
    "SELECT domain, policy_version, count(*) AS episodes, avg(CAST(success AS DOUBLE)) AS solved, "
    "avg(n_steps) AS steps FROM episodes GROUP BY domain, policy_version ORDER BY domain, policy_version"
)
_FAILED = (
    "SELECT failure_stage, count(*) AS episodes, min(failure_detail) AS example FROM episodes "
    "WHERE task_family = 'desk' AND failure_stage IS NOT NULL GROUP BY failure_stage ORDER BY episodes DESC"
)
_TO_REPLAY = (
    "SELECT episode_id FROM episodes WHERE success = false AND task_family = 'desk' "
    "AND failure_stage IN ('tool_call', 'validation') ORDER BY n_steps, started_at LIMIT 1"
)


class Tour:
    """One run of the demo in its folder. `size` is `full` or `small`."""

    def __init__(self, stage: Stage, place: DemoFolder, size: str, *, keep_server: bool) -> None:
        self._stage = stage
        self._place = place
        self._size = size
        self._keep_server = keep_server

    def on_server(self) -> bool:
        """The demo on a real S3 server, which is stopped at the end unless it is to be kept. True if all is well."""
        stage, place = self._stage, self._place
        stage.heading("a real S3 server")
        ran_before = devserver.status(place.server) is not None
        server = devserver.start(place.server)
        try:
            stage.note(f"{server.url}, data in {place.shown / 'server'}, process {server.pid}")
            with environment(server.environment()):
                good = self._lead(server.lake_uri, server)
        except BaseException:
            if not ran_before:
                devserver.stop(place.server)
            raise
        if not self._keep_server and not ran_before:
            devserver.stop(place.server)
        return good

    def on_folder(self) -> bool:
        """The demo without a server, on a lake in the folder. True if all is well."""
        uri = str(self._place.local_lake)
        with environment({"TRAJLAKE_LAKE": uri}):
            return self._lead(uri, None)

    def _lead(self, uri: str, server: devserver.ServerInfo | None) -> bool:
        stage, place = self._stage, self._place
        stage.heading("an empty lake")
        try:
            trajlake.create(uri)
            stage.note(f"{uri}: made")
        except LakeExists:
            stage.note(f"{uri}: there already, this run is added")
        lake = trajlake.connect(uri)
        run_id = place.next_run()

        stage.heading("four worker processes stream rollouts into it at once; one will be killed")
        for name, what in WORKERS.items():
            stage.note(f"{name:<11} {what}")
        with watching() as watch:
            ingest = run_workers(
                uri, run_id, size=self._size, spool=place.spool, folder=place.run_folder(run_id), watch=watch
            )
        self._tell(ingest)

        stage.heading("Beam puts what has landed into Delta tables")
        self._run("compact", "--stale-after", "0s")

        stage.heading("is anything missing? the workers' notes against the tables")
        snapshot = lake.snapshot()
        findings = check(lake, snapshot, ingest)
        for one in findings.checks:
            stage.check(one)

        stage.heading("ask: what did v2 gain, and what did it lose?")
        self._run("query", _SOLVED)
        self._run("stats", "--where", "task_family = 'desk'", "--pass-k", "1,3")
        self._run("query", _FAILED)

        stage.heading("step through a failed episode")
        found = snapshot.query(_TO_REPLAY)
        if len(found):
            self._run("replay", found.item())

        stage.heading("train: a sample that is the same every time, and shards")
        self._run("sample", "-n", "4", "--seed", "7", "--where", "task_family = 'desk'")
        export = place.shown / "export" / run_id
        self._run("export", str(export), "--shards", "4", "--seed", "7")

        self._sum_up(ingest, findings, uri, export, server)
        return findings.holds

    def _run(self, *arguments: str) -> None:
        """Show a command and run it, as the command line would. Ends the demo where it fails."""
        from trajlake_cli.main import cli

        self._stage.command(_typed(arguments))
        code = cli.main(list(arguments), prog_name="trajlake", standalone_mode=False)
        if code:
            raise click.exceptions.Exit(int(code))

    def _tell(self, ingest: DemoIngest) -> None:
        for worker in ingest.workers:
            self._stage.note(_in_words(worker), "bright_black" if worker.kill is None else "yellow")

    def _sum_up(
        self, ingest: DemoIngest, findings: Findings, uri: str, export: Path, server: devserver.ServerInfo | None
    ) -> None:
        came_in = [
            f"{findings.episodes:,} episodes, {findings.steps:,} steps, {findings.events:,} events from four workers "
            f"in {ingest.seconds:.0f} s",
            f"{findings.bytes / 1e6:.1f} MB in {findings.segments:,} segments",
        ]
        lies_in = [f"{self._place.shown}: the lake {uri}, the shards in {export}"]
        self._stage.summary(
            "Everything is there" if findings.holds else "Not everything is as it should be: see the checks above",
            findings.holds,
            [
                ("came in", came_in),
                ("was lost", _losses(ingest, findings)),
                ("lies in", lies_in),
                ("try next", self._next_commands(server)),
            ],
        )

    def _next_commands(self, server: devserver.ServerInfo | None) -> list[str]:
        place = shlex.quote(str(self._place.shown / "server"))
        lines = [] if shutil.which("trajlake") else [f'export PATH="{Path(sys.executable).parent}:$PATH"']
        if server is None:
            lines.append(f"export TRAJLAKE_LAKE={shlex.quote(str(self._place.local_lake))}")
        elif self._keep_server:
            lines += server.export_lines()
        else:
            lines.append(f'eval "$(trajlake dev up --folder {place})"  # starts the server again')
        lines += [
            "trajlake episodes --failed --limit 20",
            "trajlake replay --failed --interactive",
            "trajlake stats --by domain,policy_version",
        ]
        if server is not None:
            lines.append(f"trajlake dev down --folder {place}  # stops it; the data stays")
        return lines


def _typed(arguments: tuple[str, ...]) -> str:
    """The command line, with double quotes where single ones stand in the text."""
    quoted = (f'"{one}"' if " " in one and '"' not in one else shlex.quote(one) for one in arguments)
    return " ".join(["trajlake", *quoted])


def _in_words(worker: WorkerState) -> str:
    line = f"{worker.name:<11} {worker.progress.ended:,} episodes, {worker.events:,} events"
    if worker.kill is None:
        return line
    at = worker.kill.progress
    return (
        f"{line}; process {worker.kill.pid} got SIGKILL in mid-episode, with {at.acknowledged:,} of its {at.events:,} "
        "events acknowledged, and was started again"
    )


def _losses(ingest: DemoIngest, findings: Findings) -> list[str]:
    first = "nothing that was acknowledged" if findings.holds else "see the checks that failed"
    kill = ingest.victim.kill
    if kill is None:
        return [first]
    return [
        first,
        f"{VICTIM} was killed with {kill.unacknowledged:,} events that nobody had been promised: "
        f"{findings.saved_events:,} were in its spool and are there, {findings.lost_events:,} died in its memory",
    ]


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and a closed terminal end the demo as Ctrl-C does, so that what it started is ended too."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

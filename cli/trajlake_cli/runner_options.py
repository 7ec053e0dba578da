"""Where a pipeline runs, as options of every command that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from trajlake_pipelines.runners import Runner

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

RUNNERS = ("local", "dask", "prism", "flink", "spark", "dataflow")


def runner_options(command: Decorated) -> Decorated:
    """--runner and what goes with it, and further options of Beam behind `--`."""
    for option in reversed(
        (
            click.option("--runner", type=click.Choice(RUNNERS), default="local", help="Where Beam runs."),
            click.option(
                "--processes",
                type=click.IntRange(min=1),
                metavar="N",
                show_default="as it pays",
                help="How many processes the runner local starts.",
            ),
            click.option(
                "--scheduler",
                metavar="ADDRESS",
                help="The dask scheduler, tcp://host:port; without it dask gets a cluster of local processes.",
            ),
            click.option("--job-endpoint", metavar="HOST:PORT", help="The Beam job server of prism, flink or spark."),
            click.option(
                "--environment",
                metavar="KIND",
                help="Where a job server finds workers: LOOPBACK (this process), EXTERNAL:host:port, DOCKER:image.",
            ),
            click.argument("beam_options", metavar="[-- BEAM OPTIONS]", nargs=-1, type=click.UNPROCESSED),
        )
    ):
        command = option(command)
    return command


def runner_of(
    runner: str,
    processes: int | None,
    scheduler: str | None,
    job_endpoint: str | None,
    environment: str | None,
    beam_options: tuple[str, ...],
) -> Runner:
    """The Runner that the options name. Raises UsageError for what does not go together."""
    from trajlake_pipelines.runners import Runner

    if strange := next((option for option in beam_options if not option.startswith("--")), None):
        raise click.UsageError(f"unexpected argument {strange!r}: options for Beam look like `-- --name=value`")
    return Runner(runner, scheduler, job_endpoint, environment, beam_options, processes)

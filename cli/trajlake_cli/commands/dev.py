"""`trajlake dev`: a real S3 server on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from trajlake_cli.options import Decorated, output_option
from trajlake_cli.output import Output, say


def _default_folder() -> str:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "trajlake" / "s3")


def _folder_option(command: Decorated) -> Decorated:
    return click.option(
        "--folder",
        type=click.Path(file_okay=False),
        default=_default_folder,
        show_default="~/.local/state/trajlake/s3",
        help="Where the server keeps its data, its keys and its log.",
    )(command)


@click.group(no_args_is_help=True, short_help="Run a real S3 server on this machine.")
def command() -> None:
    """Run a real S3 server on this machine, for trying things out. It listens on 127.0.0.1 only.

    \b
    Examples:
      eval "$(trajlake dev up)"     start it, and set TRAJLAKE_LAKE and the AWS variables of this shell
      trajlake init
      trajlake dev down
    """


@command.command()
@_folder_option
@click.option("--port", type=click.IntRange(1, 65535), show_default="a free one", help="The port of S3.")
@click.option("--bucket", show_default="trajlake, or that of the last time", help="The bucket to make.")
def up(folder: str, port: int | None, bucket: str | None) -> None:
    """Start the server, or find the one that runs, and print the variables that lead to it as export lines.

    \b
    Examples:
      eval "$(trajlake dev up)"
      trajlake dev up --folder /data/s3 --port 9000
    """
    from trajlake.devserver import start

    server = start(folder, port, bucket)
    for line in server.export_lines():
        click.echo(line)
    say(f"S3 server at {server.url}, data in {server.folder}")
    if sys.stdout.isatty():
        say(f"to set these variables in this shell: {_evaluated(folder)}")
    else:  # the lines are being evaluated, or kept
        say(f"next: trajlake init --if-missing; `trajlake dev down{_where(folder)}` stops the server")


def _evaluated(folder: str) -> str:
    """The line that sets the variables of a shell."""
    return f'eval "$(trajlake dev up{_where(folder)})"'


def _where(folder: str) -> str:
    return "" if folder == _default_folder() else f" --folder {shlex.quote(folder)}"


@command.command()
@_folder_option
def down(folder: str) -> None:
    """Stop the server. Its data stays.

    \b
    Examples:
      trajlake dev down
    """
    from trajlake.devserver import status as find
    from trajlake.devserver import stop

    server = find(folder)
    if server is None or not stop(folder):
        say(f"no server runs on {folder}")
        return
    say(f"stopped the S3 server at {server.url} (pid {server.pid}); its data stays in {server.folder}")


@command.command()
@_folder_option
@output_option()
def status(folder: str, output: Output) -> None:
    """Say whether the server runs, and where. Exit code 1 where it does not.

    \b
    Examples:
      trajlake dev status
      trajlake dev status --output json
    """
    from trajlake.devserver import status as find

    server = find(folder)
    if server is None:
        output.rows([], ["url", "lake", "pid", "folder"])
        say(f"no server runs on {folder}; to start one: {_evaluated(folder)}")
        click.get_current_context().exit(1)
    row = {"url": server.url, "lake": server.lake_uri, "pid": server.pid, "folder": str(server.folder)}
    output.rows([row], list(row))
    if os.environ.get("AWS_ENDPOINT_URL") != server.url:
        say(f"this shell does not lead to it yet: {_evaluated(folder)}")
    elif output.is_table:
        stop = f"trajlake dev down{_where(folder)}"
        say(f"next: trajlake init --if-missing, then `trajlake runs`; `{stop}` stops the server")

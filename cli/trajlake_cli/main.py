"""The command `trajlake`: a group that imports a command's module only when that command is asked for."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import click

from trajlake_cli.failures import INTERRUPTED, complain, end_for, is_debugging, log_to_stderr
from trajlake_cli.session import AGAIN, Session
from trajlake_cli.text import neutralise

SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("demo", "init", "doctor", "dev"),
    "Fill": ("import", "certify", "score", "compact"),
    "Look": ("runs", "episodes", "show", "query", "stats", "compare", "replay"),
    "Train": ("sample", "export", "lineage"),
    "Keep": ("spool", "segments", "dedupe", "optimize", "retract", "vacuum", "schema", "completion"),
}
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)


class LazyGroup(click.Group):
    """Finds command NAME as `command` in trajlake_cli.commands.NAME, and ends every failure with one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = "import_" if cmd_name == "import" else cmd_name
        command = importlib.import_module(f"trajlake_cli.commands.{module}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            if near := get_close_matches(args[0], COMMANDS, n=2):
                vars(error)["message"] += f" Did you mean {' or '.join(near)}?"
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, COMMANDS))
        for section, names in SECTIONS.items():
            with formatter.section(section):
                rows = [(name.ljust(max(map(len, COMMANDS))), self._summary(ctx, name, width)) for name in names]
                formatter.write_dl(rows)

    def _summary(self, ctx: click.Context, name: str, width: int) -> str:
        command = self.get_command(ctx, name)
        assert command is not None
        return command.get_short_help_str(width)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except click.ClickException as error:
            vars(error)["message"] = neutralise(error.message)  # it may quote a name that came from outside
            raise
        except (click.Abort, click.exceptions.Exit, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  (also polars' panics, which are no Exception)
            end_for(error, ctx, ctx.ensure_object(Session).interrupted)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
)
@click.option(
    "--lake",
    metavar="ADDRESS",
    envvar="TRAJLAKE_LAKE",
    show_envvar=True,
    help="The lake: a folder or s3://bucket/prefix. May also stand after the command.",
)
@click.version_option(package_name="trajlake", prog_name="trajlake", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, lake: str | None) -> None:
    """Keep what reinforcement-learning agents did, ask about it, step through it, and train on it.

    \b
    Examples:
      trajlake demo                                    everything once, on this machine
      trajlake --lake ./lake init
      trajlake --lake ./lake import results.json --run tau
      trajlake --lake ./lake compact
      trajlake --lake ./lake replay --failed --limit 1

    On S3 the address is s3://bucket/prefix; server and credentials come from the usual variables
    (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).
    """
    session = ctx.ensure_object(Session)
    session.uri = lake
    log_to_stderr()


def main() -> None:
    """The entry point of the installed command."""
    if not sys.warnoptions and not is_debugging():
        warnings.simplefilter("ignore")  # they are for developers; what a person must know is an error or a log line
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a lone surrogate or a poor locale must not end a command
    try:
        cli.main(prog_name="trajlake")
    except KeyboardInterrupt:  # before a command began
        complain(f"interrupted: {AGAIN}")
        sys.exit(INTERRUPTED)

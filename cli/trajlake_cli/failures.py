"""How a command ends when something is wrong: one line on standard error, and an exit code that says which kind."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import click

from trajlake_cli.text import message_line, one_line

FAILED = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells expect
PIPE_CLOSED = 141  # 128 + SIGPIPE
DEBUG = "TRAJLAKE_DEBUG"


def end_for(error: BaseException, ctx: click.Context, interrupted: str) -> NoReturn:
    """Say in one line what happened and exit. `interrupted` says what to do after Ctrl-C."""
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        ctx.exit(PIPE_CLOSED)
    if _was_interrupted(error):
        complain(f"interrupted: {interrupted}")
        ctx.exit(INTERRUPTED)
    if is_debugging():
        raise error
    candidates = _candidates(error)
    text = str(error).split("\n")[0] if candidates else str(error)
    complain(text or type(error).__name__ if _is_ours(error) else _unexpected(error))
    for line in candidates:
        print(f"  {one_line(line)}", file=sys.stderr)  # noqa: T201
    ctx.exit(FAILED)


def complain(text: str) -> None:
    """One line on standard error, under the program's name."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    print(f"trajlake: {message_line(text)}", file=sys.stderr)  # noqa: T201


def is_debugging() -> bool:
    """Whether the person asked for tracebacks."""
    return os.environ.get(DEBUG, "") not in {"", "0"}


def log_to_stderr() -> None:
    """Warnings of the library, and errors of what it uses, become plain lines on standard error."""
    logger = logging.getLogger("trajlake")
    logger.setLevel(logging.DEBUG if is_debugging() else logging.WARNING)
    logger.propagate = False
    logger.handlers = [_PlainHandler()]
    root = logging.getLogger()
    if not root.handlers:  # else Beam's first warning makes one that shows them all
        root.addHandler(_PlainHandler(logging.WARNING if is_debugging() else logging.ERROR))


class _PlainHandler(logging.Handler):
    """Looks standard error up at every line, so that a progress bar that has taken it over shows the line above it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {message_line(record.getMessage())}", file=sys.stderr)  # noqa: T201


def _was_interrupted(error: BaseException | None) -> bool:
    """Ctrl-C, also where a library that it hit has made another error of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_ours(error: BaseException) -> bool:
    """Asked without importing anything: an error of ours has brought its module along."""
    errors = sys.modules.get("trajlake_schemas.errors")
    return errors is not None and isinstance(error, errors.TrajlakeError)


def _candidates(error: BaseException) -> list[str]:
    """What an error of ours has to say below its first line."""
    errors = sys.modules.get("trajlake.errors")
    is_list = errors is not None and isinstance(error, errors.EpisodeAmbiguous)
    return str(error).split("\n")[1:] if is_list else []


def _unexpected(error: BaseException) -> str:
    return f"{type(error).__name__}: {error} (unexpected; set {DEBUG}=1 for the traceback)"


def _forget_stdout() -> None:
    """Whoever read standard output has gone: let what is still buffered go nowhere, without a complaint at exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)

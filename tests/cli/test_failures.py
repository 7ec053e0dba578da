"""Every failure is one line on standard error and an exit code."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest

from trajlake.errors import StoreUnavailable
from trajlake_cli.main import cli
from trajlake_cli.session import Session

pytestmark = pytest.mark.unit


def wrapped(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


class Panic(BaseException):
    """As polars' panics: no Exception."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets `trajlake runs` raise what the test wants."""

    def install(error: BaseException) -> None:
        @click.command()
        @click.pass_context
        def command(ctx: click.Context) -> None:
            ctx.ensure_object(Session).interrupted = "run it again"
            print("rows before")
            raise error

        real = type(cli).get_command

        def get_command(self: Any, ctx: click.Context, name: str) -> click.Command | None:
            return command if name == "runs" else real(self, ctx, name)

        monkeypatch.setattr(type(cli), "get_command", get_command)

    return install


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            StoreUnavailable("http://x does not answer:\n  start it"),
            1,
            "trajlake: http://x does not answer: start it\n",
        ),
        (StoreUnavailable("evil \x1b[2J"), 1, "trajlake: evil ␛[2J\n"),
        (StoreUnavailable(), 1, "trajlake: StoreUnavailable\n"),
        (ValueError("a\nb"), 1, "trajlake: ValueError: a b (unexpected; set TRAJLAKE_DEBUG=1 for the traceback)\n"),
        (Panic("poof"), 1, "trajlake: Panic: poof (unexpected; set TRAJLAKE_DEBUG=1 for the traceback)\n"),
        (KeyboardInterrupt(), 130, "trajlake: interrupted: run it again\n"),
        (wrapped(ValueError("pipeline"), KeyboardInterrupt()), 130, "trajlake: interrupted: run it again\n"),
        (BrokenPipeError(), 141, ""),
        (click.UsageError("bad"), 2, "Usage: trajlake [OPTIONS] COMMAND [ARGS]...\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_one_line(run: Any, failing: Any, error: BaseException, code: int, line: str) -> None:
    failing(error)
    result = run("runs", code=code)
    assert result.stdout == "rows before\n"
    assert result.stderr == line if code != 2 else "bad" in result.stderr


def test_debugging_shows_the_traceback(run: Any, failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAJLAKE_DEBUG", "1")
    failing(StoreUnavailable("no answer"))
    assert isinstance(run("runs", code=1).exception, StoreUnavailable)


def test_warnings_of_the_library_are_plain_lines(run: Any, failing: Any) -> None:
    def shout() -> None:
        logging.getLogger("trajlake").info("not shown")
        logging.getLogger("trajlake").warning("run %s:\n waits", "x\x1b")
        logging.getLogger("somebody").warning("not shown either")

    class Shouting(StoreUnavailable):
        def __str__(self) -> str:
            shout()
            return "no answer"

    failing(Shouting())
    assert run("runs", code=1).stderr == "warning: run x␛: waits\ntrajlake: no answer\n"


@pytest.mark.parametrize(
    "arguments", [["runs"], ["episodes"], ["compact"], ["init"], ["query", "SELECT 1"], ["doctor"]]
)
def test_without_a_lake(run: Any, arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert "--lake ADDRESS" in result.stderr
    assert "s3://bucket/lake" in result.stderr


@pytest.mark.parametrize("arguments", [["runs"], ["episodes"], ["compact"], ["show", "x"], ["import", "file.json"]])
def test_where_there_is_no_lake(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    result = run(*arguments, "--lake", tmp_path / "none", code=1)
    assert result.stderr.startswith("trajlake: there is no lake at ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["episodes", "--limit", "-1"],
        ["episodes", "--output", "xml"],
        ["episodes", "--columns", "a,,b"],
        ["stats", "--pass-k", "0"],
        ["stats", "--pass-k", "one"],
        ["vacuum", "--older-than", "5 parsecs"],
        ["replay"],
        ["replay", "x", "--failed"],
        ["replay", "x", "--interactive"],
        ["import"],
        ["import", "x", "--set", "policy_name"],
        ["import", "x", "--set", "trial=first"],
        ["completion", "powershell"],
    ],
)
def test_usage_errors(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    assert "Error: " in run("--lake", tmp_path, *arguments, code=2).stderr


def test_a_closed_pipe_is_quiet() -> None:
    program = "import trajlake_cli.main as m; m.main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "schema", "show", "--output", "jsonl"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        pipesize=4096,  # which does not hold all that is written
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 141


def test_ctrl_c_is_one_line() -> None:
    program = """
import sys, time
import trajlake_cli.commands.schema as schema
from trajlake_cli.main import main
def wait(*args, **kwargs):
    print("ready", flush=True)
    time.sleep(60)
schema.show.callback = wait
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, "schema", "show"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "trajlake: interrupted: run the same command again\n"

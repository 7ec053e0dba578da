"""What a person reads before anything else: quick to come, complete, and the same in docs/cli.md."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from trajlake_cli.main import COMMANDS, SECTIONS, cli
from trajlake_cli.reference import page

pytestmark = pytest.mark.unit

HEAVY = ("numpy", "pyarrow", "polars", "apache_beam", "rich", "deltalake", "minio", "trajlake", "trajlake_schemas")


def all_commands() -> Iterator[tuple[str, click.Command]]:
    root = click.Context(cli, info_name="trajlake")
    for name in COMMANDS:
        command = cli.get_command(root, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            for sub, child in command.commands.items():
                yield f"{name} {sub}", child


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["episodes", "--help"], ["replay", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = imported_by(*arguments)
    assert "trajlake_cli" in loaded
    assert not loaded & set(HEAVY)


def test_an_import_into_a_folder_imports_what_it_needs(tmp_path: Path) -> None:
    import trajlake

    trajlake.create(tmp_path / "lake")
    (tmp_path / "chat.json").write_text('[{"messages": [{"role": "user", "content": "hello"}]}]')
    given = ["--lake", str(tmp_path / "lake"), "import", "--run", "r", str(tmp_path / "chat.json")]
    loaded = imported_by(*given)
    assert "pyarrow" in loaded
    assert not loaded & {"pandas", "minio", "apache_beam", "loky"}


def imported_by(*arguments: str) -> set[str]:
    """The packages that a command imports."""
    program = f"""
import sys, json
from trajlake_cli.main import main
sys.argv = ["trajlake", *{arguments!r}]
try:
    main()
finally:
    print("MODULES " + json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.partition("MODULES ")[2]))


def test_sections_hold_every_command_file(repository: Path) -> None:
    files = {path.stem.rstrip("_") for path in (repository / "cli/trajlake_cli/commands").glob("[a-z]*.py")}
    assert files == set(COMMANDS)
    assert len(COMMANDS) == sum(map(len, SECTIONS.values()))


@pytest.mark.parametrize(
    ("name", "command"), list(all_commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_is_documented(name: str, command: click.Command) -> None:
    help_text = inspect.cleandoc(command.help or "")
    assert help_text.split("\n")[0].rstrip().endswith("."), "begins with a sentence"
    assert "\b\nExamples:\n  " in help_text, "has examples whose lines are kept"
    assert "trajlake" in help_text.partition("Examples:")[2]
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert (parameter.help or "").endswith((".", "]")), f"{name}: {parameter.opts} has no help"


def test_short_help_is_never_cut() -> None:
    result = click.Context(cli, info_name="trajlake", terminal_width=78, **cli.context_settings).get_help()
    assert "..." not in result.partition("Start:")[2]


def test_defaults_are_shown() -> None:
    for name, default in (("sample", "[default: 32"), ("export", "[default: parquet]"), ("vacuum", "[default: 7d]")):
        command = cli.get_command(click.Context(cli, info_name="trajlake"), name)
        assert command is not None
        root = click.Context(cli, info_name="trajlake", **cli.context_settings)
        assert default in click.Context(command, parent=root, info_name=name, terminal_width=200).get_help()


def test_reference_page_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs/cli.md").read_text() == page(), "run `make docs`"


def test_every_command_stands_in_the_reference_page() -> None:
    text = page()
    for name, _ in all_commands():
        assert f"\n### trajlake {name}\n" in text


def test_a_command_that_is_misspelt_is_told_the_right_name(run: Any) -> None:
    assert "No such command 'statz'. Did you mean stats?" in run("statz", code=2).stderr
    assert "Did you mean" not in run("xyzzy", code=2).stderr


def test_a_spool_that_is_not_there_is_not_taken_for_an_empty_one(run: Any, tmp_path: Path) -> None:
    missing = tmp_path / "spol"
    assert f"there is no folder {missing}" in run("--lake", tmp_path, "spool", "recover", missing, code=2).stderr


def test_installed_command() -> None:
    program = Path(sys.executable).with_name("trajlake")
    if not program.exists():
        pytest.skip("trajlake is not installed beside this interpreter")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.startswith("trajlake ")
    assert done.stderr == ""

"""`trajlake import`: bring files of other formats in, through the same Writer that workers use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    from trajlake.formats.importing import FileReport, ImportReport
    from trajlake.ingest.episode import EpisodeFields
    from trajlake.ingest.writer import Writer

_WHOLE_NUMBERS = ("trial", "seed")
_MANY = 20
"""From more files on the table has a line a folder."""
_SUMS = ("files", "episodes", "steps", "refused")


def _format_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from trajlake.formats import FORMATS

    return [name for name in FORMATS if name.startswith(incomplete)]


@click.command(short_help="Bring in files of other formats.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@lake_option
@click.option("--run", default="imported", metavar="NAME", help="The run that the episodes belong to.")
@click.option(
    "--format",
    metavar="NAME",
    show_default="found out by content",
    shell_complete=_format_names,
    help="The format of all files.",
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Said of every episode whose file does not say it, e.g. policy_name=gpt-4o or tags.team=a; may be repeated.",
)
@click.option(
    "--mapping",
    metavar="FILE",
    type=click.Path(),
    help="A mapping file (TOML) that says where in rows of an unknown format columns and steps are.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="by the size of the files",
    help="How many processes read.",
)
@click.option("--again", is_flag=True, help="Also read files that the run has already.")
@click.option("--dry-run", is_flag=True, help="Read and check the files, and write nothing.")
@click.option("--verbose", "-v", is_flag=True, help=f"One line a file in the table, also of more than {_MANY} files.")
@output_option()
@pass_session
def command(
    session: Session,
    files: Sequence[str],
    run: str,
    format: str | None,
    assignments: Sequence[str],
    mapping: str | None,
    processes: int | None,
    again: bool,
    dry_run: bool,
    verbose: bool,
    output: Output,
) -> None:
    """Import files, or folders of files. Each file's format is found out by its content.

    Each row becomes an episode or is refused with its reason; the good rows of a file with bad ones are imported.
    An import that was stopped goes on when it is called again: files that are in already are left out. Exit code 1
    where anything was refused now; files in a folder that are known to hold no trajectories, and files with the same
    bytes as one before them, are named and left out.

    Column `refused` counts rows, and 1 for a file that could not be read, or not to its end.

    \b
    Examples:
      trajlake --lake ./lake import results.json --run tau
      trajlake --lake ./lake import chats/ --run sft --set policy_name=gpt-4o --set task_family=support
      trajlake --lake ./lake import rollouts/ --mapping ours.toml
      trajlake import results.json --dry-run
    """
    begin = _begin(assignments)
    if mapping is not None and format is not None:
        raise click.UsageError("give --format or --mapping, not both")
    session.interrupted = "run the same command again; files that are in already will be left out"
    from trajlake.formats.importing import import_files
    from trajlake.formats.mapping import load_mapping
    from trajlake.formats.parallel import import_tree

    if not dry_run:
        lake = session.lake()
        lake.check()
    with progress("import") as report:
        sizes: dict[Path, tuple[int, int]] = {}

        def on_progress(path: Path, done: int, size: int) -> None:
            sizes[path] = (done, size)
            report(sum(each[0] for each in sizes.values()), sum(each[1] for each in sizes.values()))

        if dry_run:
            chosen = format if mapping is None else load_mapping(mapping)
            nowhere = cast("Writer", _Nowhere(run))
            result = import_files(nowhere, files, format=chosen, begin=begin, on_progress=on_progress)
        else:
            result = import_tree(
                lake,
                run,
                files,
                format=format,
                mapping=mapping,
                begin=begin,
                processes=processes,
                again=again,
                on_progress=on_progress,
            )
    for file in result.files:
        file.left_out = file.left_out and file.path not in map(Path, files)  # who names a file wants it
    _show(result.files, files, output, verbose)
    if not _tell(result, dry_run):
        click.get_current_context().exit(1)


def _show(files: Sequence[FileReport], arguments: Sequence[str], output: Output, verbose: bool) -> None:
    rows = [
        {
            "file": str(file.path),
            "format": file.format,
            "episodes": file.episodes,
            "steps": file.steps,
            "refused": file.refused + _is_lost(file),
            "state": _state(file),
        }
        for file in files
    ]
    if output.is_table:
        for row, file in zip(rows, files, strict=True):
            row["file"] = _below(file.path, arguments)
        if len(rows) > _MANY and not verbose:
            columns = ["folder", "format", "state", "files", "episodes", "steps", "refused"]
            output.rows(_by_folder(rows), columns)
            say(f"{len(rows):,} files: --verbose shows one line each, --output json the same for programs")
            return
    output.rows(rows, ["file", "format", "episodes", "steps", "refused", "state"])


def _is_lost(file: FileReport) -> bool:
    """Whether the file, or the rest of it, was refused as a whole."""
    return file.error is not None and not file.left_out


def _below(path: Path, arguments: Sequence[str]) -> str:
    """A file's place below the folder that was named; of several, with the folder's name."""
    for argument in map(Path, arguments):
        if path != argument and path.is_relative_to(argument):
            below = path.relative_to(argument)
            return str(below if len(arguments) == 1 else argument.name / below)
    return str(path)


def _by_folder(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums by folder, format and state; by so many levels of folders that the table stays short."""
    parts = [Path(row["file"]).parent.parts for row in rows]
    depth = max(map(len, parts))
    while depth and len({each[:depth] for each in parts}) > _MANY:
        depth -= 1
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row, folders in zip(rows, parts, strict=True):
        key = ("/".join(folders[:depth]) or ".", row["format"], row["state"])
        empty = dict(zip(("folder", "format", "state"), key, strict=True)) | dict.fromkeys(_SUMS, 0)
        group = groups.setdefault(key, empty)
        for name in _SUMS:
            group[name] += 1 if name == "files" else row[name]
    return list(groups.values())


def _state(file: FileReport) -> str:
    if file.left_out or file.same_as is not None:
        return "left out"
    if file.error is not None:
        return "refused" if not file.episodes else "read in part"
    return "in already" if file.already else "read"


def _tell(result: ImportReport, dry_run: bool) -> bool:
    """Say what was refused, and the sum; whether everything went in."""
    for file in result.files:
        for refusal in file.refusals:
            say(f"{file.path}: {refusal.row}: {refusal.reason}")
        for note in () if file.already else file.notes:
            say(f"{file.path}: {note}")
        if file.already and file.refused:
            what = f"{_count(file.refused, 'row')} of it {_was(file.refused)} refused"
            say(f"{file.path}: {what} when it was imported (--again shows why)")
        elif file.refused > len(file.refusals):
            say(f"{file.path}: … and {_count(file.refused - len(file.refusals), 'more row')} refused")
        if file.same_as is not None:
            say(f"{file.path}: left out: it holds the same bytes as {file.same_as}")
        if file.error is not None:
            say(_error_of(file))
    new = [file for file in result.files if not file.already]
    if already := [file for file in result.files if file.already]:
        _tell_what_was_in(already)
    rows, episodes, refused = (_sum(new, name) for name in ("rows_in", "episodes", "refused"))
    lost = sum(map(_is_lost, new))
    if rows or lost or not already:
        rest = f"; {_count(lost, 'file')} refused as a whole, or from some row on: rows not counted" if lost else ""
        say(f"{_count(rows, 'row')} in = {_count(episodes, 'episode')} + {refused:,} refused{rest}")
    if left := sum(file.left_out for file in result.files):
        say(f"{_count(left, 'file')} in the folder left out: known, and no trajectories")
    if not result.files:
        say("trajlake: there are no files in what was named")
        return False
    bad = [f"{_count(refused, 'row')} refused"] if refused else []
    bad += [f"{_count(len(result.failed), 'file')} could not be imported, or not to the end"] if result.failed else []
    if bad:
        rest = "" if not result.episodes else "; the others are fine" if dry_run else "; the others are in"
        say(f"trajlake: {' and '.join(bad)}, as said above{rest}")
        return False
    if dry_run:
        say("nothing was written (--dry-run)")
    else:
        say("next: `trajlake compact` puts them into the tables" if episodes else "there is nothing new")
    return True


def _tell_what_was_in(files: Sequence[FileReport]) -> None:
    """Of many files the same is said once."""
    for note, count in Counter(note for file in files for note in file.notes).items():
        first = next(file.path for file in files if note in file.notes)
        others = f" and {_count(count - 1, 'more file')}" if count > 1 else ""
        say(f"{first}{others}: {note}")
    count, was = len(files), _was(len(files))
    episodes, them = _count(_sum(files, "episodes"), "episode"), "it" if count == 1 else "them"
    say(f"{_count(count, 'file')} {was} in already, with {episodes}, and {was} not read (--again reads {them})")


def _sum(files: Sequence[FileReport], name: str) -> int:
    return sum(getattr(file, name) for file in files)


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _error_of(file: FileReport) -> str:
    text = str(file.error)
    return text if str(file.path) in text else f"{file.path}: {text}"


def _begin(assignments: Sequence[str]) -> EpisodeFields:
    from trajlake.ingest.episode import EpisodeFields

    known = sorted(set(EpisodeFields.__annotations__) - {"tags", "extra", "source_format", "source_hash"})
    values: dict[str, Any] = {}
    for assignment in assignments:
        column, equals, value = assignment.partition("=")
        if not equals or not column:
            raise click.BadParameter(f"{assignment!r}: write COLUMN=VALUE", param_hint="--set")
        if column.startswith("tags."):
            if column == "tags.":
                raise click.BadParameter(f"{assignment!r}: a tag needs a name, such as tags.team=a", param_hint="--set")
            values.setdefault("tags", {})[column.removeprefix("tags.")] = value
        elif column not in known:
            raise click.BadParameter(
                f"{column!r} is not what can be said of all episodes: that is {', '.join(known)} and tags.NAME. "
                "What differs from episode to episode the file says itself, or a mapping file (--mapping) finds in it",
                param_hint="--set",
            )
        elif column in _WHOLE_NUMBERS:
            try:
                values[column] = int(value)
            except ValueError:
                raise click.BadParameter(f"{column} is a whole number, not {value!r}", param_hint="--set") from None
        else:
            values[column] = value
    return cast("EpisodeFields", values)


class _Nowhere:
    """In place of a Writer for a dry run: every episode is checked as it would be, and forgotten."""

    def __init__(self, run: str) -> None:
        self.run = run

    def record_all(self, episode_id: str, attempt: int, events: Sequence[tuple[str, dict[str, Any]]]) -> None: ...

    def flush(self) -> None: ...

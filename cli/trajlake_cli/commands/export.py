"""`trajlake export`: write training shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from trajlake_cli.options import (
    condition_of,
    lake_option,
    output_option,
    run_option,
    seed_option,
    snapshot_option,
    unique_option,
    where_option,
)
from trajlake_cli.output import Output, say
from trajlake_cli.progress import progress
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import one_line

if TYPE_CHECKING:
    from trajlake import Snapshot

_SHOWN = 5  # ids in a line


def _format_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from trajlake.formats import FORMATS, format_named

    names = ["parquet", "jsonl", *(name for name in FORMATS if format_named(name).write is not None)]
    return [name for name in names if name.startswith(incomplete)]


@click.command(short_help="Write training shards.")
@click.argument("destination", type=click.Path(file_okay=False))
@lake_option
@snapshot_option
@click.option(
    "--format",
    metavar="NAME",
    default="parquet",
    shell_complete=_format_names,
    help="What the shards are: parquet, jsonl, or a foreign format with a way back, such as atif or verl.",
)
@click.option("--shards", type=click.IntRange(min=1), default=1, help="How many files.")
@seed_option
@run_option
@where_option
@unique_option
@output_option()
@pass_session
def command(
    session: Session,
    destination: str,
    token: str | None,
    format: str,
    shards: int,
    seed: int,
    runs: Sequence[str],
    where: str | None,
    unique: bool,
    output: Output,
) -> None:
    """Write episodes as shards for offline training into a folder, with a manifest that says what they are.

    Every shard is read back and compared before the manifest is written; without a manifest an export is not
    finished. An export that was interrupted goes on where it was when the same command is run again.

    Files of a foreign format have the episodes that were imported from it as they were, in the order of their source,
    one file each where the format keeps one. atif, nemo-gym, openai-chat, tau-bench, verifiers and verl also take any
    other episode of messages, by its columns; the other formats only what was imported from them.

    \b
    Examples:
      trajlake --lake ./lake export out --shards 4 --seed 7
      trajlake --lake ./lake export out --format jsonl --where "success"
      trajlake --lake ./lake export out --format verl --shards 8 --run today
      trajlake --lake ./lake export out --format swe-agent --where "source_format = 'swe-agent' AND success"
    """
    session.interrupted = "run the same command again to finish; nothing there looks like a finished export"
    snapshot = session.snapshot(token)
    with progress("export") as report:
        done = snapshot.export(
            destination,
            format=format,
            shards=shards,
            seed=seed,
            where=condition_of(snapshot, where, runs),
            unique=unique,
            on_progress=report,
        )
    files = done.manifest["files"]
    output.rows(files, list(files[0]), ("sha256",))
    if done.resumed_shards:
        say(f"{done.resumed_shards} of {len(files)} shards were there already, and are unchanged")
    if since := done.retracted_since:
        verb = "episode of it was" if len(since) == 1 else "episodes of it were"
        shown = ", ".join(map(one_line, since[:_SHOWN])) + (", …" if len(since) > _SHOWN else "")
        say(f"warning: {len(since):,} {verb} retracted since ({shown}): remove it, and export the newest snapshot")
    retracted, repeated = done.manifest["left_out_retracted"], done.manifest.get("left_out_repeated", 0)
    say(
        f"{done.episodes:,} episodes"
        + (f" ({retracted:,} retracted ones were left out)" if retracted else "")
        + (f" ({repeated:,} that repeat another were left out)" if repeated else "")
        + f" in {len(files)} files; {done.destination}/manifest.json says what they are"
    )
    if "as_imported" in done.manifest:
        exact, built = done.manifest["as_imported"], done.manifest["of_columns"]
        say(f"{exact:,} as they were imported from {format} + {built:,} made of their columns, without `extra`")
    if empty := _without_steps(snapshot, condition_of(snapshot, where, runs), unique):
        say(f'note: {empty:,} of them have no steps; --where "n_steps > 0" leaves such episodes out')
    say(f"snapshot {snapshot.token}, seed {seed}")


def _without_steps(snapshot: Snapshot, where: str | None, unique: bool) -> int:
    """How many of what was exported are returns without steps, which few trainers expect."""
    import polars as pl

    from trajlake.read.snapshot import USABLE, is_repeat

    frame = snapshot.where(where).filter(USABLE & (pl.col("n_steps") == 0))
    if unique:
        frame = frame.filter(~is_repeat(snapshot))
    return int(snapshot.collect(frame.select(pl.len())).item())

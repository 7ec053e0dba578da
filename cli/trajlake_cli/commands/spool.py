"""`trajlake spool`: what writers left on this machine's disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajlake_cli.options import Decorated, lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    from trajlake.ingest.recovery import SpoolEntry


def _folder_argument(command: Decorated) -> Decorated:
    return click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))(command)


def _spool(folder: Path | None) -> Path:
    from trajlake.ingest.options import default_spool

    return folder or default_spool()


@click.group(no_args_is_help=True, short_help="Look at what writers left on this machine's disk, and upload it.")
def command() -> None:
    """Look at what writers left on this machine's disk, and upload it.

    A writer keeps in its spool what the object store does not have yet. What one that died left there is uploaded
    by the next writer on this machine that uses the same spool and the same lake, or by `recover`.

    \b
    Examples:
      trajlake spool status
      trajlake --lake s3://bucket/lake spool recover /mnt/old-disk/spool
    """


@command.command(short_help="List the writers that have something in a spool.")
@_folder_argument
@output_option()
def status(folder: Path | None, output: Output) -> None:
    """List the writers that have something in the spool FOLDER.

    The default is TRAJLAKE_SPOOL, else the user's own. State `in use` is that of a writer whose process lives,
    `left` of one that is gone. `damaged` counts segments that the disk damaged: what could be read of them was
    uploaded, and episodes that lack the rest never look complete.

    \b
    Examples:
      trajlake spool status
      trajlake spool status /mnt/old-disk/spool --output json
    """
    from trajlake.ingest.recovery import spool_status

    spool = _spool(folder)
    entries = spool_status(spool)
    columns = ["state", "lake", "run_id", "worker_id", "pid", "segments", "bytes", "damaged", "path"]
    output.rows(_rows(entries), columns, expendable=["pid", "path"])
    left = sum(entry.bytes for entry in entries if entry.state == "left")
    if left:
        recover = "trajlake spool recover" + (f" {shlex.quote(str(folder))}" if folder else "")
        say(f"{left:,} bytes of writers that are gone wait in {spool}: `{recover}` uploads them")
    elif not entries:
        say(f"nothing waits in {spool}")
    if damaged := sum(entry.damaged for entry in entries):
        noun = "segment was" if damaged == 1 else "segments were"
        say(f"{damaged:,} {noun} damaged on this disk; what could be read was uploaded, the .damaged files are kept")


def _rows(entries: list[SpoolEntry]) -> Iterator[dict[str, Any]]:
    for entry in entries:
        meta = entry.meta
        yield {
            "state": entry.state,
            "lake": meta and meta.lake,
            "run_id": meta and meta.run_id,
            "worker_id": meta and meta.worker_id,
            "pid": meta and meta.pid,
            "segments": entry.segments,
            "bytes": entry.bytes,
            "damaged": entry.damaged,
            "path": str(entry.path),
        }


@command.command(short_help="Upload what writers that are gone left in a spool.")
@_folder_argument
@lake_option
@output_option()
@pass_session
def recover(session: Session, folder: Path | None, output: Output) -> None:
    """Upload what writers that are gone left in the spool FOLDER, and remove it there.

    The default is TRAJLAKE_SPOOL, else the user's own. Writers that live, and those of other lakes, are left alone.
    Exit code 1 where something stays: because the store does not answer, or a file is damaged.

    \b
    Examples:
      trajlake --lake s3://bucket/lake spool recover
      trajlake --lake s3://bucket/lake spool recover /mnt/old-disk/spool
    """
    from trajlake.ingest.recovery import recover as upload

    spool = _spool(folder)
    if folder is not None and not folder.is_dir():
        raise click.UsageError(f"there is no folder {folder}")
    lake = session.lake()
    done = upload(lake.store, spool, lake.check().lake_id)
    if output.is_table:
        output.rows([{"damaged": reason} for reason in done.unreadable], ["damaged"])
    else:
        row = {
            "segments": done.segments,
            "bytes": done.bytes,
            "damaged": list(done.unreadable),
            "stopped": done.stopped,
        }
        output.rows([row], list(row))
    noun = "segment" if done.segments == 1 else "segments"
    say(f"{done.segments:,} {noun} ({done.bytes:,} bytes) uploaded from {spool}")
    if done.stopped:
        say(f"stopped: {done.stopped}; {session.interrupted}")
    if done.stopped or done.unreadable:
        click.get_current_context().exit(1)

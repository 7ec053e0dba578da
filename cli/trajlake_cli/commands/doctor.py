"""`trajlake doctor`: find out whether a place can hold a lake safely, and whether the lake there is sound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from trajlake_cli.options import lake_option, output_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    from trajlake.storage import ObjectStore

_NAMED = 5  # of the files that are lost


@click.command(short_help="Check the store and the lake in it.")
@lake_option
@output_option()
@pass_session
def command(session: Session, output: Output) -> None:
    """Check that the store keeps the promises a lake needs, and that the lake in it can be read.

    Writes a few small objects below the address and removes them. Exit code 1 where a check fails.

    \b
    Examples:
      trajlake --lake ./lake doctor
      trajlake --lake s3://bucket/lake doctor --output json
    """
    uri = session.require_uri()
    from trajlake.storage import open_store
    from trajlake.storage.check import check_store

    store = open_store(uri)
    checks = [{"check": check.name, "ok": check.ok, "detail": check.detail} for check in check_store(store)]
    if all(check["ok"] for check in checks):
        checks += _lake_checks(store, uri)
    output.rows(checks, ["check", "ok", "detail"])
    failed = [check for check in checks if not check["ok"]]
    if failed:
        if output.is_table:  # which cuts what is long
            for check in failed:
                say(f"{check['check']}: {check['detail']}")
        say(f"{len(failed)} of {len(checks)} checks failed")
        click.get_current_context().exit(1)
    say(f"all {len(checks)} checks passed")


def _lake_checks(store: ObjectStore, uri: str) -> Iterator[dict[str, Any]]:
    import trajlake
    from trajlake.errors import TrajlakeError
    from trajlake.table.commit import missing_files
    from trajlake_cli.lake_schemas import stored_schemas
    from trajlake_pipelines.frontier import lost_segments
    from trajlake_pipelines.plan import load_plan, next_number
    from trajlake_schemas import TABLES, diff

    try:
        lake = trajlake.connect(uri)
        lake.check()
        schemas = stored_schemas(lake)
        lost = missing_files(store)
        load_plan(store, next_number(store))
        segments = lost_segments(store)
    except TrajlakeError as error:
        yield {"check": "lake", "ok": False, "detail": str(error)}
        return
    yield {"check": "lake", "ok": True, "detail": f"can be read at {store.uri}"}
    for name, stored in schemas.items():
        refused = [change for change in diff(stored, TABLES[name].arrow) if change.refusal]
        detail = "; ".join(f"{change.column} {change.change}" for change in refused)
        yield {"check": f"table {name}", "ok": not refused, "detail": detail or "columns are as this version has them"}
    files = f"{len(lost)} are lost: {', '.join(lost[:_NAMED])}; restore them from a backup" if lost else "all are there"
    yield {"check": "files of the tables", "ok": not lost, "detail": files}
    named = ", ".join(f"{count} of {folder}" for folder, count in list(segments.items())[:_NAMED])
    detail = (
        f"{sum(segments.values())} vanished before they were compacted: {named}; is there a rule that removes objects?"
    )
    landed = detail if segments else "all are there or compacted"
    yield {"check": "segments of closed writers", "ok": not segments, "detail": landed}

"""`trajlake demo`: the whole product once, on this machine."""

from __future__ import annotations

import click

from trajlake_cli.session import Session, pass_session


@click.command(short_help="Run everything once, on this machine.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    default=".demo",
    help="Where the server's data, the lake and the exported shards go.",
)
@click.option("--keep", is_flag=True, help="Add a run to what an earlier demo left there, instead of beginning anew.")
@click.option("--keep-server", is_flag=True, help="Let the S3 server run on at the end.")
@click.option("--local", is_flag=True, help="No server: the lake is a folder.")
@click.option("--small", is_flag=True, help="Fewer episodes.")
@pass_session
def command(session: Session, folder: str, keep: bool, keep_server: bool, local: bool, small: bool) -> None:
    """Run everything once: a real S3 server, four workers (one is killed), compact, query, replay, export.

    Takes under two minutes and leaves a lake in a folder to play with. A second run begins anew; --keep adds to the
    lake instead. --lake and TRAJLAKE_LAKE are not looked at: the demo touches no other lake. Exit code 1 where
    anything that was acknowledged is missing.

    \b
    Examples:
      trajlake demo
      trajlake demo --small --local
      trajlake demo --folder /tmp/trajlake-demo --keep-server
    """
    from trajlake.demo.gym import require_gymnasium

    require_gymnasium()
    from trajlake_cli.demo.folder import occupied
    from trajlake_cli.demo.stage import Stage
    from trajlake_cli.demo.tour import Tour, ended_in_order

    session.interrupted = "what the demo had started was ended; run it again to begin anew"
    stage = Stage()
    with ended_in_order(), occupied(folder, keep=keep) as place:
        stage.title(f"Trajlake, everything once. Folder: {folder}")
        tour = Tour(stage, place, "small" if small else "full", keep_server=keep_server)
        good = tour.on_folder() if local else tour.on_server()
    if not good:
        click.get_current_context().exit(1)

"""`trajlake init`: make an empty lake."""

from shlex import quote

import click

from trajlake_cli.options import lake_option
from trajlake_cli.output import say
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Make an empty lake in a folder or a bucket.")
@lake_option
@click.option("--if-missing", is_flag=True, help="Succeed where there is a lake already.")
@pass_session
def command(session: Session, if_missing: bool) -> None:
    """Make an empty lake in a folder or a bucket.

    The bucket itself must exist; a folder is made.

    \b
    Examples:
      trajlake --lake ./lake init
      trajlake --lake s3://bucket/lake init --if-missing
    """
    uri = session.require_uri()
    import trajlake
    from trajlake.errors import LakeExists

    try:
        lake = trajlake.create(uri)
    except LakeExists:
        if not if_missing:
            raise
        say(f"there is a lake at {uri} already")
        return
    say(f"made an empty lake at {lake.uri}; next: trajlake --lake {quote(uri)} import FILE… --run NAME")

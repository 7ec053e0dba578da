"""`trajlake lineage`: which samples and exports used an episode."""

from __future__ import annotations

from dataclasses import asdict

import click

from trajlake_cli.options import lake_option, output_option, snapshot_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import ELLIPSIS


@click.command(short_help="Say which samples and shards used an episode.")
@click.argument("episode")
@lake_option
@snapshot_option
@output_option()
@pass_session
def command(session: Session, episode: str, token: str | None, output: Output) -> None:
    """Say which samples (with a manifest) and which shards of exports used an episode, the oldest use first.

    The start of an id is enough where no other begins with it. Of an episode that was retracted for good the whole
    id is needed: that it is gone, and why, is said, and what used it is still known.

    \b
    Examples:
      trajlake --lake ./lake lineage 01a22cbd651f7b
      trajlake --lake ./lake lineage 01a22cbd651f7b --output json
    """
    from trajlake.errors import EpisodeRemoved
    from trajlake.read.lineage import uses_of

    snapshot = session.snapshot(token)
    try:
        row = snapshot.row_of(episode.rstrip(ELLIPSIS)).row(0, named=True)
    except EpisodeRemoved as error:  # whoever asks wants to know who has it still
        row = {"episode_id": episode, "retracted": None}
        say(str(error))
    episode_id = row["episode_id"]
    if row["retracted"] is not None:
        say(f"episode {episode_id} is retracted, because: {row['retracted']}")
    uses = uses_of(snapshot.lake, episode_id)
    columns = ["kind", "name", "part", "position", "made_at", "snapshot", "digest"]
    output.rows(map(asdict, uses), columns, ("digest", "snapshot", "position"), ("name", "part", "made_at"))
    if output.is_table and not uses:
        say(f"nothing is known to have used episode {episode_id}")

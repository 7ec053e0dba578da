"""`trajlake sample`: draw episodes, the same ones every time."""

from __future__ import annotations

import click

from trajlake_cli.options import lake_option, output_option, seed_option, snapshot_option, where_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session


@click.command(short_help="Draw episodes, the same ones every time.")
@lake_option
@snapshot_option
@click.option("-n", "--number", type=click.IntRange(min=1), default=32, help="How many to draw.")
@click.option("--strategy", type=click.Choice(["uniform"]), default="uniform", help="How to draw.")
@seed_option
@where_option
@output_option()
@pass_session
def command(
    session: Session, token: str | None, number: int, strategy: str, seed: int, where: str | None, output: Output
) -> None:
    """Draw episodes for experience replay, as a trainer's sampler with the same seed would.

    What is drawn depends on the snapshot, the filter, the strategy, the seed and the position, and on nothing
    else: it stays the same after compaction, and on every machine.

    \b
    Examples:
      trajlake --lake ./lake sample -n 32 --seed 7 --output json
      trajlake --lake ./lake sample -n 8 --where "success" --output csv
    """
    snapshot = session.snapshot(token)
    samples = snapshot.sampler(strategy, where=where, seed=seed).take(number)
    output.rows(
        (
            {"position": sample.position, "episode_id": sample.episode_id, "probability": sample.probability}
            for sample in samples
        ),
        ["position", "episode_id", "probability"],
    )
    say(f"snapshot {snapshot.token}")

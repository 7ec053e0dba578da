"""`trajlake demo`: the whole product once, on this machine."""

import click


@click.command(short_help="Run everything once, on this machine.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    default=".demo",
    help="Where the server's data, the lake and the exported shards go; it is made anew.",
)
def command(folder: str) -> None:
    """Run everything once: a real S3 server, four workers (one is killed), compact, query, replay, export.

    Takes under two minutes and leaves the lake in a folder to play with.

    \b
    Examples:
      trajlake demo
      trajlake demo --folder /tmp/trajlake-demo
    """
    from trajlake.demo import run

    run(folder, echo=click.echo)

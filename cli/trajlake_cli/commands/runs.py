"""`trajlake runs`: what is in the lake, one row a run."""

import click

from trajlake_cli.options import lake_option, output_option, snapshot_option
from trajlake_cli.output import Output, frame_rows, say
from trajlake_cli.session import Session, pass_session

_SQL = """
SELECT run_id, count(*) AS episodes, count(DISTINCT task_id) AS tasks, sum(n_steps) AS steps,
       avg(CAST(success AS DOUBLE)) AS success_rate, avg(reward) AS reward_mean,
       min(started_at) AS first, max(coalesce(ended_at, started_at)) AS last
FROM episodes GROUP BY run_id ORDER BY last DESC NULLS LAST, run_id
"""


@click.command(short_help="List the runs.")
@lake_option
@snapshot_option
@output_option()
@pass_session
def command(session: Session, token: str | None, output: Output) -> None:
    """List the runs: episodes, tasks, steps, success, reward, first and last time.

    Success and reward are means over the episodes that have one.

    \b
    Examples:
      trajlake --lake ./lake runs
      trajlake --lake ./lake runs --output json
    """
    snapshot = session.snapshot(token)
    frame = snapshot.query(_SQL)
    output.rows(frame_rows(frame), frame.columns, ("steps", "first", "tasks"))
    if frame.is_empty():
        say("no episodes yet: `trajlake import` or a worker brings them, `trajlake compact` puts them into the tables")
    say(f"snapshot {snapshot.token}")

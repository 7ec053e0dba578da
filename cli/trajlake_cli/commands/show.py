"""`trajlake show`: everything that is known of one episode."""

from __future__ import annotations

import shlex
from typing import Any

import click

from trajlake_cli.options import lake_option, output_option, snapshot_option
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.text import ELLIPSIS


@click.command(short_help="Show everything that is known of one episode.")
@click.argument("episode")
@lake_option
@snapshot_option
@output_option()
@pass_session
def command(session: Session, episode: str, token: str | None, output: Output) -> None:
    """Show one episode: its columns and its steps. The start of an id is enough where no other begins with it.

    A table shows what is set, and one line a step; json and jsonl give one object with all columns, and the
    steps with all of theirs as `steps`; csv gives the steps. `trajlake replay` shows the same for reading.

    \b
    Examples:
      trajlake --lake ./lake show 01a22cbd651f7b
      trajlake --lake ./lake show 01a22cbd651f7b --output json | jq '.[0].steps[3].tool_calls'
    """
    trajectory = session.snapshot(token).episode(episode.rstrip(ELLIPSIS))
    row: dict[str, Any] = dict(trajectory.episode)
    if isinstance(row.get("tags"), list):
        row["tags"] = {entry["key"]: entry["value"] for entry in row["tags"]}
    if row.get("retracted") is not None:
        say(f"episode {row['episode_id']} is retracted, because: {row['retracted']}; no sample and no export has it")
    if output.format in ("json", "jsonl"):
        output.rows([{**row, "steps": trajectory.steps}], [*row, "steps"])
        return
    from trajlake_schemas import STEPS

    if not output.is_table:
        output.rows(trajectory.steps, STEPS.names())
        return
    from trajlake_cli.replay.steps import summary

    output.rows(
        [{"column": name, "value": value} for name, value in row.items() if value is not None], ["column", "value"]
    )
    click.echo()
    output.rows(
        [
            {"step": step["step_index"], "source": step["source"], "reward": step.get("reward"), "what": summary(step)}
            for step in trajectory.steps
        ],
        ["step", "source", "reward", "what"],
    )
    say(f"to read it: trajlake replay {shlex.quote(row['episode_id'])}")

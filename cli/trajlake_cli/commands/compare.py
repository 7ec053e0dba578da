"""`trajlake compare`: which tasks got worse or better between two policies."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from trajlake_cli.options import (
    about_repeats,
    condition_of,
    lake_option,
    literal,
    output_option,
    resolve_columns,
    run_option,
    snapshot_option,
    unique_option,
    where_option,
)
from trajlake_cli.output import Output, Row, frame_rows, say
from trajlake_cli.session import Session, pass_session
from trajlake_cli.values import number

if TYPE_CHECKING:
    from trajlake.analysis.compare import Comparison

_TABLE_LIMIT = 20
_HARMLESS = re.compile(r"[\w ='./@:,-]*")


@click.command(short_help="Which tasks got worse or better between two policies.")
@click.argument("a")
@click.argument("b")
@lake_option
@snapshot_option
@click.option(
    "--by",
    metavar="COLUMN",
    show_default="policy_name, policy_version, run_id, or NAME@VERSION of a policy, whichever has both",
    help="The column that A and B are values of.",
)
@run_option
@where_option
@unique_option
@click.option("--metric", type=click.Choice(["success", "reward"]), default="success", help="What is compared.")
@click.option(
    "--nulls",
    type=click.Choice(["left-out", "failures"]),
    default="left-out",
    help="What becomes of episodes that were not judged or not scored: failures have success false and reward 0.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    metavar="LEVEL",
    help="Of the intervals.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    show_default=f"{_TABLE_LIMIT} in a table, else all",
    help="How many tasks to show, the worst changes first; 0 shows all.",
)
@output_option()
@pass_session
def command(
    session: Session,
    a: str,
    b: str,
    token: str | None,
    by: str | None,
    runs: Sequence[str],
    where: str | None,
    unique: bool,
    metric: Literal["success", "reward"],
    nulls: Literal["left-out", "failures"],
    confidence: float,
    limit: int | None,
    output: Output,
) -> None:
    """Compare two policies (or versions, or runs) task by task: what got worse from A to B, what got better.

    Tasks that both tried are compared, each by the mean over its trials, so it does not matter that one side tried
    harder tasks. low and high bound each difference (success: Newcombe's interval, reward: Welch's); ! marks those
    that leave out 0. Of many tasks without a change some are marked by chance: whether anything changed is what the
    sign test and the interval of the mean difference (bootstrap over tasks) say.

    json and jsonl give one object with all figures and the tasks as `tasks`; csv gives the tasks.

    \b
    Examples:
      trajlake --lake ./lake compare baseline grpo-7
      trajlake --lake ./lake compare 100 200 --by policy_version --run grpo-7
      trajlake --lake ./lake compare gpt-4o gpt-5 --metric reward --output json | jq '.[0].tasks[:5]'
    """
    from trajlake.analysis.compare import compare

    snapshot = session.snapshot(token)
    if by is not None and "@" not in by:
        (by,) = resolve_columns([by], snapshot.episodes.collect_schema().names())
    found = compare(
        snapshot, a, b, by, condition_of(snapshot, where, runs),
        metric=metric, nulls=nulls, confidence=confidence, unique=unique,
    )  # fmt: skip
    if limit is None:
        limit = _TABLE_LIMIT if output.is_table else 0
    tasks = list(frame_rows(found.tasks.head(limit) if limit else found.tasks))
    if output.format == "csv":
        output.rows(tasks, found.tasks.columns)
    elif not output.is_table:
        row = {**vars(found), "tasks": tasks}
        output.rows([row], list(row))
    else:
        output.rows(_summary(found), ["what", "value"])
        if tasks:
            click.echo()
        output.rows((_for_people(task, metric) for task in tasks), ["task", "a", "b", "change", "low", "high", ""])
        _advise(found, len(tasks))
    say(f"snapshot {snapshot.token}")


def _summary(found: Comparison) -> Iterator[dict[str, Any]]:
    def line(what: str, value: str) -> dict[str, Any]:
        return {"what": what, "value": value}

    level = f"{found.confidence * 100:g} %"
    yield line("a", f"{found.column} {found.a}: {found.episodes_a:,} episodes")
    yield line("b", f"{found.column} {found.b}: {found.episodes_b:,} episodes")
    if found.left_out_a or found.left_out_b:
        yield line("left out", f"{found.left_out_a:,} of a, {found.left_out_b:,} of b: no {found.metric}, or no task")
    if found.only_a or found.only_b:
        yield line("only in one", f"{found.only_a:,} tasks of a, {found.only_b:,} of b")
    clear = found.tasks.filter("clear")["difference"]
    total = len(found.tasks)
    yield line("tasks in both", f"{total:,}")
    if not total:
        return
    yield line("worse", f"{found.worse:,} ({int((clear < 0).sum()):,} marked !)")
    yield line("better", f"{found.better:,} ({int((clear > 0).sum()):,} marked !)")
    yield line("same", f"{found.same:,}")
    assert found.mean_a is not None
    assert found.mean_b is not None
    assert found.difference is not None
    bounds = "n/a" if found.low is None or found.high is None else f"{_signed(found.low)} … {_signed(found.high)}"
    yield line(f"mean {found.metric}", f"{found.mean_a:.3f} → {found.mean_b:.3f}: {_signed(found.difference)}")
    yield line(f"{level} interval", f"{bounds} (bootstrap over tasks)")
    if found.p_value is not None:
        yield line("sign test", f"p = {found.p_value:.3g} ({found.better:,} better, {found.worse:,} worse)")


def _for_people(task: Row, metric: str) -> dict[str, Any]:
    family, env = task["task_family"], task["env_name"]
    names = (family, env if env != family else None, task["domain"], task["task_id"], task["group"])
    return {
        "task": "/".join(name for name in names if name is not None),
        "a": _mean(task["mean_a"], task["trials_a"], metric),
        "b": _mean(task["mean_b"], task["trials_b"], metric),
        "change": _signed(task["difference"]),
        "low": None if task["low"] is None else _signed(task["low"]),
        "high": None if task["high"] is None else _signed(task["high"]),
        "": "!" if task["clear"] else "",
    }


def _mean(mean: float, trials: int, metric: str) -> str:
    """`3/4` solved, or `0.75 (4)`: the mean of so many rewards."""
    return f"{round(mean * trials)}/{trials}" if metric == "success" else f"{number(mean)} ({trials})"


def _signed(value: float) -> str:
    return f"{value:+.3f}" if round(value, 3) else "0"


def _advise(found: Comparison, shown: int) -> None:
    for name, side, pooled in (("a", found.a, found.pooled_a), ("b", found.b, found.pooled_b)):
        if pooled > 1:
            say(
                f"note: {name} ({side}) pools {pooled:,} runs or policy versions; "
                "--run, --where or NAME@VERSION choose one"
            )
    if found.repeats:
        say(about_repeats(found.repeats))
    total = len(found.tasks)
    if not total:
        say("no task was tried by both: a task is named by task_family, env_name, domain and task_id, or by group_id")
        return
    if shown < total:
        say(f"{shown:,} of {total:,} tasks, the worst changes first (--limit 0 shows all)")
    worst = found.tasks.row(0, named=True)
    if worst["difference"] < 0 and worst["task_id"] is not None and "@" not in found.column:
        said = {"domain": worst["domain"], "task_id": worst["task_id"], found.column: found.b}
        condition = " AND ".join(f"{name} = {literal(value)}" for name, value in said.items() if value is not None)
        # A task's name comes from outside: pasted into a shell it must stay a name.
        quoted = f'"{condition}"' if _HARMLESS.fullmatch(condition) else shlex.quote(condition)
        say(f"to see the worst: trajlake replay --where {quoted}")

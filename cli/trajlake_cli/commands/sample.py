"""`trajlake sample`: draw episodes, the same ones every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from trajlake_cli.options import (
    Columns,
    condition_of,
    lake_option,
    output_option,
    run_option,
    seed_option,
    snapshot_option,
    unique_option,
    where_option,
)
from trajlake_cli.output import Output, say
from trajlake_cli.session import Session, pass_session

if TYPE_CHECKING:
    from trajlake.read.batch import Batch
    from trajlake.read.sampler import Sample, Sampler

STRATEGIES = (
    "uniform", "epochs", "fifo", "lifo", "recency", "prioritized", "stratified", "difficulty", "curriculum", "group",
)  # fmt: skip


class Ratio(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """VALUE=RATIO."""

    name = "ratio"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        stratum, _, ratio = value.rpartition("=")
        try:
            return stratum, float(ratio)
        except ValueError:
            self.fail(f"{value!r} is not a ratio such as airline=2", param, ctx)


class Stage(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """STEP:LOW:HIGH."""

    name = "stage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float, float]:
        if isinstance(value, tuple):
            return value
        try:
            step, low, high = value.split(":")
            return int(step), float(low), float(high)
        except ValueError:
            self.fail(f"{value!r} is not a stage such as 1000:0.2:0.8", param, ctx)


@click.command(short_help="Draw episodes, the same ones every time.")
@lake_option
@snapshot_option
@click.option(
    "-n",
    "--number",
    type=click.IntRange(min=1),
    default=32,
    help="How many to draw: episodes; with --window slices; by strategy group groups.",
)
@click.option("--strategy", type=click.Choice(STRATEGIES), default="uniform", help="How to draw.")
@seed_option
@run_option
@where_option
@unique_option
@click.option("--with-empty", is_flag=True, help="Also draw episodes without steps, of which only the return is known.")
@click.option("--position", type=click.IntRange(min=0), default=0, help="Begin at this position of the sequence.")
@click.option("--priority", metavar="SQL", help="prioritized: a numeric column or expression.  [default: reward]")
@click.option("--alpha", type=float, help="prioritized: the exponent of the priority.  [default: 0.6]")
@click.option("--beta", type=float, help="prioritized: the exponent of the importance weights.  [default: 0.4]")
@click.option("--by", type=Columns(), help="stratified: the columns; group: the column.  [default: domain; group_id]")
@click.option("--ratio", "ratios", type=Ratio(), multiple=True, help="stratified: VALUE=RATIO, may be repeated.")
@click.option("--max-lag", type=float, help="recency: the most versions between the policies.")
@click.option("--half-life", type=float, help="recency: versions in which the chance is halved.")
@click.option(
    "--policy-version",
    type=float,
    help="The trainer's, for policy lags.  [default: the highest of each policy in each run]",
)
@click.option("--low", type=float, help="difficulty: the lowest pass rate of a task.  [default: 0.2]")
@click.option("--high", type=float, help="difficulty: the highest pass rate of a task.  [default: 0.8]")
@click.option(
    "--stage",
    "stages",
    type=Stage(),
    multiple=True,
    help="curriculum: STEP:LOW:HIGH (pass rates from that step on); at least one, may be repeated.",
)
@click.option("--order", metavar="SQL", help="fifo, lifo: what age is.  [default: ended_at]")
@click.option("--least", type=click.IntRange(min=1), help="group: leave out groups of fewer rollouts.  [default: 1]")
@click.option("--keep-constant", is_flag=True, help="group: also draw groups of which all rewards are equal.")
@click.option("--window", type=click.IntRange(min=1), help="Draw slices of so many steps instead of episodes.")
@click.option("--shift", type=click.IntRange(min=1), help="Slices begin at every so many steps.  [default: 1]")
@click.option("--max-times-sampled", type=click.IntRange(min=1), help="Draw nothing more often than this.")
@click.option("--normalize-reward", type=Columns(), help="Add rewards normalised within each value of these columns.")
@click.option("--manifest", type=click.Path(dir_okay=False), help="Write down what was drawn, for --from.")
@click.option(
    "--from",
    "source",
    type=click.Path(dir_okay=False),
    help="Draw again what this manifest lists; goes with --steps and --output only.",
)
@click.option("--steps", "target", type=click.Path(dir_okay=False), help="Write the steps to this Arrow file.")
@output_option()
@pass_session
def command(
    session: Session,
    /,
    token: str | None,
    number: int,
    strategy: str,
    seed: int,
    runs: Sequence[str],
    where: str | None,
    unique: bool,
    with_empty: bool,
    position: int,
    policy_version: float | None,
    window: int | None,
    shift: int | None,
    max_times_sampled: int | None,
    normalize_reward: Sequence[str] | None,
    manifest: str | None,
    source: str | None,
    target: str | None,
    output: Output,
    **options: Any,
) -> None:
    """Draw episodes for experience replay, as a trainer's sampler with the same seed would.

    What is drawn depends on the snapshot, the filter, the strategy, the seed and the position, and on nothing
    else: it stays the same after compaction, and on every machine. A manifest keeps a draw for ever: --from gives
    the same rows, and with --steps the same bytes, whatever was rewritten in the lake meanwhile.

    Retracted episodes are never drawn, and those without steps only where asked for; what was left out is said.

    \b
    Examples:
      trajlake --lake ./lake sample -n 32 --seed 7 --output json
      trajlake --lake ./lake sample -n 8 --where "success" --output csv
      trajlake --lake ./lake sample --strategy stratified --by domain --ratio airline=2 --ratio retail=1
      trajlake --lake ./lake sample --strategy prioritized --priority "abs(reward - 0.5)" --manifest m.json
      trajlake --lake ./lake sample -n 4 --strategy group --least 8
      trajlake --lake ./lake sample --from m.json --steps batch.arrow
    """
    if source is not None:
        _refuse_beside_from()
        _again(session, source, target, output)
        return
    from trajlake.read.items import Window
    from trajlake.read.manifest import write_manifest

    if strategy == "curriculum" and not options["stages"]:
        raise click.UsageError("curriculum needs --stage STEP:LOW:HIGH, e.g. --stage 0:0.5:1 --stage 1000:0.1:0.5")
    if shift is not None and window is None:
        raise click.UsageError("--shift says where slices begin: it needs --window, their length")
    snapshot = session.snapshot(token)
    sampler = snapshot.sampler(
        strategy,
        where=condition_of(snapshot, where, runs),
        seed=seed,
        unique=unique,
        empty=with_empty,
        window=None if window is None else Window(window, shift or 1),
        policy_version=policy_version,
        max_times_sampled=max_times_sampled,
        normalize_reward=normalize_reward,
        **_given(strategy, options),
    )
    sampler.go_to(position)
    batch = sampler.batch(number)
    # The files come before anything is printed: whoever reads that may stop reading.
    if target is not None:
        _write(target, batch)
    if manifest is not None:
        write_manifest(manifest, snapshot, sampler, batch.samples)
        say(f"written down in {manifest}: trajlake sample --from {manifest} draws the same")
    _show(batch.samples, output)
    _say_how_many(sampler, len({sample.position for sample in batch.samples}), batch.samples, number)
    if policy_version is not None:
        _warn_of_policies(sampler)
    for reason, count in sampler.left_out.items():
        say(f"{count:,} {'episode was' if count == 1 else 'episodes were'} left out: {reason}")
    say(f"snapshot {snapshot.token}")


def _refuse_beside_from() -> None:
    """Whoever gives -n beside --from expects it to count."""
    ctx = click.get_current_context()
    beside = [
        next(name for name in param.opts if name.startswith("--"))
        for param in ctx.command.params
        if isinstance(param, click.Option)
        and param.name not in ("source", "target", "output", "help")
        and param.expose_value
        and ctx.get_parameter_source(param.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if beside:
        raise click.UsageError(f"--from draws what its manifest lists: leave out {', '.join(beside)}")


def _warn_of_policies(sampler: Sampler) -> None:
    policies = sampler.population.rows.select("run_id", "policy_name").n_unique()
    if policies > 1:
        say(
            f"note: --policy-version is set beside the versions of {policies:,} policies: "
            "choose yours by --run or --where"
        )


def _say_how_many(sampler: Sampler, draws: int, samples: Sequence[Sample], number: int) -> None:
    what = "group" if sampler.strategy == "group" else "window" if sampler.recipe.window else "episode"
    if sampler.strategy == "group":
        say(f"{draws:,} {what}{'' if draws == 1 else 's'}, {len(samples):,} episodes")
    if draws < number:
        say(f"{draws:,} of the {number:,} asked for: the strategy ends there, after {len(sampler):,} {what}s")


def _given(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
    """The strategy's options that were given on the command line."""
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if given.pop("keep_constant"):
        if strategy != "group":
            raise click.UsageError("--keep-constant is for --strategy group")
        given["drop_constant"] = False
    if "ratios" in given:
        given["ratios"] = dict(given["ratios"])
    if "by" in given:
        given["by"] = ",".join(given["by"]) if strategy == "group" else tuple(given["by"])
    return given


def _again(session: Session, source: str, target: str | None, output: Output) -> None:
    from trajlake.read.manifest import open_manifest, read_manifest, retracted_since

    manifest = read_manifest(source)
    lake = session.lake()
    batch = open_manifest(lake, manifest)
    if target is not None:
        _write(target, batch)
    _show(batch.samples, output)
    for episode_id, reason in retracted_since(lake, batch).items():
        say(f"warning: episode {episode_id} is in this batch, but was retracted since, because: {reason}")
    say(f"snapshot {manifest['snapshot']}")


def _write(target: str, batch: Batch) -> None:
    from trajlake.read.manifest import write_steps

    write_steps(target, batch)
    say(f"{sum(map(len, batch.tables)):,} steps are in {target}")


def _show(samples: Sequence[Sample], output: Output) -> None:
    columns = ["position", "episode_id", "probability", "weight", "times_sampled", "policy_lag", "start", "stop"]
    if output.is_table and all(each.policy_lag is None for each in samples):
        columns.remove("policy_lag")
    columns += [
        name for name in ("group_id", "normalized_reward") if any(getattr(each, name) is not None for each in samples)
    ]
    output.rows(map(asdict, samples), columns, ("start", "stop", "weight", "times_sampled"), ("group_id",))

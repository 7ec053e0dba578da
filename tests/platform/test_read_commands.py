"""`trajlake sample` and `trajlake lineage`: thin over the samplers, so a few whole uses suffice."""

import json

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.rollouts import record

import trajlake
from trajlake.read.strategies import strategies
from trajlake_cli.commands.sample import STRATEGIES
from trajlake_cli.main import cli
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.beam


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    lake = trajlake.create(folder / "lake")
    with lake.writer(run="run", worker="w", spool=folder / "spool") as writer:
        for number in range(12):
            with writer.episode(
                episode_id=f"e{number:02d}",
                task_id=f"t{number // 4}",
                group_id=f"g{number // 4}",
                domain=("air", "sea")[number % 2],
                policy_version=number,
            ) as episode:
                for step in range(4):
                    episode.step(message=f"{number}/{step}")
                episode.end(reward=float(number % 4 == 0), success=number % 4 == 0)
    compact(lake)
    return lake


def ask(lake, *args, code=0):
    result = CliRunner().invoke(cli, [*map(str, args), "--lake", lake.uri], prog_name="trajlake")
    assert result.exit_code == code, result.stderr
    return result


def rows(lake, *args):
    return json.loads(ask(lake, *args, "-o", "json").stdout)


def test_the_command_knows_every_strategy():
    assert tuple(strategies()) == STRATEGIES


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--strategy", "fifo", "--order", "reward", "-n", "3", "--position", "9"], ["e00", "e04", "e08"]),
        (["--strategy", "lifo", "--order", "policy_version", "-n", "1"], ["e09"]),  # versions are text
        (["--strategy", "recency", "--max-lag", "0", "-n", "2"], ["e11", "e11"]),
        (["--strategy", "recency", "--max-lag", "5", "--policy-version", "16", "-n", "1"], ["e11"]),
        (["--strategy", "prioritized", "--where", "domain = 'air' AND task_id = 't1'", "-n", "2"], ["e04", "e04"]),
        (["--strategy", "group", "--where", "task_id = 't2'", "-n", "1"], ["e08", "e09", "e10", "e11"]),
        (
            ["--strategy", "group", "--least", "4", "--where", "episode_id >= 'e05'", "-n", "1"],
            ["e08", "e09", "e10", "e11"],
        ),
        (
            ["--strategy", "group", "--keep-constant", "--where", "episode_id IN ('e01', 'e02')", "-n", "1"],
            ["e01", "e02"],
        ),
        (
            ["--strategy", "fifo", "--order", "episode_id", "--window", "2", "--shift", "2", "-n", "3"],
            ["e00", "e00", "e01"],
        ),
        (["--strategy", "difficulty", "--low", "0.2", "--where", "task_id = 't0'", "-n", "1"], None),
        (["--strategy", "curriculum", "--stage", "0:0:1", "--stage", "9:0.2:0.3", "-n", "1"], None),
        (["--strategy", "stratified", "--by", "domain", "--ratio", "sea=1", "-n", "4"], None),
        (["--strategy", "epochs", "--normalize-reward", "group_id", "--max-times-sampled", "1", "-n", "99"], None),
    ],
)
def test_sample_draws_by_every_strategy(lake, options, ids):
    found = [row["episode_id"] for row in rows(lake, "sample", *options)]
    if ids is not None:
        assert found == ids
    if "stratified" in options:
        assert {int(name[1:]) % 2 for name in found} == {1}
    if "epochs" in options:
        assert sorted(found) == [f"e{number:02d}" for number in range(12)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--alpha", "1"], "strategy uniform has no option 'alpha'"),
        (["--strategy", "recency"], "recency needs max_lag"),
        (["--strategy", "group", "--least", "5"], "fewer than 5 rollouts in their group"),
        (["--keep-constant"], None),
        (["--strategy", "prioritized", "--priority", "rewrd"], "rewrd"),
        (["--strategy", "curriculum"], None),
        (["--from", "nothing.json"], "nothing.json cannot be read"),
        (["--from", "nothing.json", "-n", "3", "--seed", "1"], None),
    ],
)
def test_what_cannot_be_drawn_is_one_line(lake, options, reason):
    if reason is None:
        refused = ask(lake, "sample", *options, code=2).stderr
        reasons = ("needs --stage STEP", "leave out --number, --seed", "is for --strategy group")
        assert any(each in refused for each in reasons)
        return
    result = ask(lake, "sample", *options, code=1)
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    for wrong in (["--ratio", "air"], ["--stage", "1:2"], ["--strategy", "psychic"]):
        ask(lake, "sample", *wrong, code=2)


def test_a_manifest_draws_the_same_again_and_lineage_knows_it(lake, tmp_path):
    manifest, before, after = tmp_path / "m.json", tmp_path / "before.arrow", tmp_path / "after.arrow"
    first = ask(lake, "sample", "-n", "5", "--seed", "3", "-o", "json", "--manifest", manifest, "--steps", before)
    record(lake, range(20, 22), worker="later")
    compact(lake)
    optimize(lake, everything=True)
    again = ask(lake, "sample", "--from", manifest, "-o", "json", "--steps", after)
    assert again.stdout == first.stdout
    assert before.read_bytes() == after.read_bytes()
    assert len(pa.ipc.open_file(before).read_all()) == 20
    drawn = json.loads(first.stdout)[0]["episode_id"]
    ask(lake, "export", tmp_path / "out", "--shards", "2", "--where", f"episode_id = '{drawn}'")
    uses = rows(lake, "lineage", drawn)
    assert {use["kind"] for use in uses} == {"sample", "export"}
    assert {use["name"] for use in uses} == {str(manifest), str(tmp_path / "out")}
    assert "nothing is known to have used" in ask(lake, "lineage", "e0020").stderr
    assert "no episode nobody" in ask(lake, "lineage", "nobody", code=1).stderr


def test_a_policy_version_is_said_to_stand_beside_several_policies(lake):
    other = "note: --policy-version is set beside the versions of 2 policies"
    arguments = ["sample", "-n", "1", "--policy-version", "12"]
    assert other not in ask(lake, *arguments).stderr
    with (
        lake.writer(run="another", worker="w") as writer,
        writer.episode(episode_id="x", policy_version=900) as episode,
    ):
        episode.step(message="x")
    compact(lake)
    assert other in ask(lake, *arguments).stderr
    assert other not in ask(lake, *arguments, "--run", "run").stderr
    assert (
        rows(lake, "sample", "--run", "run", "--strategy", "recency", "--max-lag", "0", "-n", "1")[0]["policy_lag"] == 0
    )


def test_episodes_sorts_versions_that_are_numbers_as_numbers(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    with lake.writer(run="run", worker="w", spool=tmp_path / "spool") as writer:
        for version in ("900", "1200", None, "base", "60"):
            writer.episode(policy_version=version).end()
    compact(lake)
    up, down = (
        [row["policy_version"] for row in rows(lake, "episodes", "--sort", sort)]
        for sort in ("policy_version", "-policy_version")
    )
    assert up == ["60", "900", "1200", "base", None]
    assert down == ["1200", "900", "60", "base", None]

"""`retract`: episodes go for good, from every place that held them, and stay away."""

import pytest
from click.testing import CliRunner
from tests.rollouts import assert_sound, record, record_episode

import trajlake
from trajlake.errors import EpisodeMissing, TrajlakeError, UsageError
from trajlake_cli.main import cli
from trajlake_pipelines import retract_job
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize
from trajlake_pipelines.retract import retract

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(lake_uri):
    lake = trajlake.create(lake_uri)
    for part in range(2):
        record(lake, range(part * 5, part * 5 + 5), worker=f"w{part}")
        compact(lake)
    return lake


def holders(lake, episode):
    return retract_job.objects_that_hold(lake.store, [episode], also_active=True)


def test_nothing_that_holds_the_episode_is_left(lake):
    optimize(lake)  # so that old versions hold it as well
    before = lake.snapshot()
    report = retract(lake, ["e0003"], reason="names a customer", for_good=True)
    assert report.episodes == ["e0003"]
    assert len(report.objects) >= 3  # a segment, an old file of steps, an old file of episodes
    assert holders(lake, "e0003") == ([], [])
    assert_sound(lake)
    ids = lake.snapshot().episodes.collect()["episode_id"]
    assert "e0003" not in ids
    assert len(ids) == 9
    with pytest.raises(TrajlakeError):
        before.episode("e0003")


def test_by_default_it_is_marked_and_stays(lake):
    report = retract(lake, ["e0003"], reason="leaked")
    assert (report.episodes, report.for_good, report.objects) == (["e0003"], False, [])
    assert lake.snapshot().episode("e0003").episode["retracted"] == "leaked"
    assert len(lake.snapshot().episodes.collect()) == 10
    assert "e0003" not in {sample.episode_id for sample in lake.sampler("epochs").take(9)}
    assert retract(lake, ["e0003"], reason="leaked", for_good=True).episodes == ["e0003"]
    assert holders(lake, "e0003") == ([], [])


def test_one_that_is_sent_again_stays_away(lake):
    retract(lake, ["e0003"], reason="licence", for_good=True)
    record(lake, [3], worker="again", attempt=7)
    record(lake, [11], worker="new")
    report = compact(lake)
    assert (report.episodes, report.duplicate_episodes) == (1, 1)
    with pytest.raises(EpisodeMissing):
        lake.snapshot().episode("e0003")
    retract(lake, ["e0003"], reason="licence", for_good=True)  # takes the segment that was sent again
    assert holders(lake, "e0003") == ([], [])


def test_ids_and_a_condition_together_are_refused(lake):
    with pytest.raises(UsageError, match="not both"):
        retract(lake, ["e0003"], where="task_id = '2'", reason="x")


def test_by_a_condition_and_as_a_dry_run(lake):
    report = retract(lake, where="task_id = '2'", reason="contaminated", for_good=True, dry_run=True)
    assert (len(report.episodes), report.dry_run) == (2, True)
    assert len(report.objects) >= 4
    assert len(lake.snapshot().episodes.collect()) == 10
    assert retract(lake, where="task_id = '2'", reason="contaminated", for_good=True).episodes == ["e0002", "e0007"]
    assert len(lake.snapshot().episodes.collect()) == 8
    assert_sound(lake)


def test_a_crash_after_the_commits_is_finished_by_the_same_command(lake, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(retract_job, "objects_that_hold", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            retract(lake, ["e0003"], reason="x", for_good=True)
    retract(lake, ["e0003"], reason="x", for_good=True)
    assert holders(lake, "e0003") == ([], [])


def test_a_segment_that_others_need_is_named_and_goes_later(lake):
    with lake.writer(run="run", worker="both") as writer:
        record_episode(writer, 20)
        waits = record_episode(writer, 21, end=False)
        writer.flush()
        report = retract(lake, ["e0020"], reason="x", for_good=True)
        assert len(report.waiting) == 1
        waits.end(reward=1.0)
    compact(lake)
    assert lake.snapshot().episode("e0021").episode["n_steps"] == 3
    assert retract(lake, ["e0020"], reason="x", for_good=True).waiting == []
    assert holders(lake, "e0020") == ([], [])


@pytest.mark.parametrize("for_good", [False, True])
def test_an_export_that_holds_one_and_is_asked_for_again_says_so(lake, tmp_path, for_good):
    snapshot = lake.snapshot()
    assert not snapshot.export(tmp_path / "out").retracted_since
    assert not snapshot.export(tmp_path / "out").retracted_since
    retract(lake, ["e0003"], reason="x", for_good=for_good)
    assert list(snapshot.export(tmp_path / "out").retracted_since) == ["e0003"]
    result = CliRunner().invoke(
        cli, ["--lake", lake.uri, "export", str(tmp_path / "out"), "--snapshot", snapshot.token]
    )
    assert "warning: 1 episode of it was retracted since (e0003): remove it, and export the newest" in result.stderr


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_exports_that_hold_one_are_named(lake, tmp_path, format):
    lake.snapshot().export(tmp_path / "out", format=format, shards=2)
    report = retract(lake, ["e0003"], reason="x", for_good=True, exports=[tmp_path / "out"], dry_run=True)
    assert [(hit.kind, hit.name, hit.episodes) for hit in report.used_by] == [("export", str(tmp_path / "out"), 1)]
    known = retract(lake, ["e0003"], reason="x", dry_run=True).used_by  # it was registered when it was made
    assert [(hit.name, hit.episodes) for hit in known] == [(str(tmp_path / "out"), 1)]
    with pytest.raises(UsageError, match="is not an export"):
        retract(lake, ["e0003"], reason="x", for_good=True, exports=[tmp_path], dry_run=True)


def test_what_is_not_there_or_not_said_is_refused(lake):
    with pytest.raises(EpisodeMissing, match="e0099"):
        retract(lake, ["e0003", "e0099"], reason="x", for_good=True)
    assert len(lake.snapshot().episodes.collect()) == 10
    with pytest.raises(UsageError, match="which episodes"):
        retract(lake, reason="x")
    with pytest.raises(UsageError, match="say why"):
        retract(lake, ["e0003"], reason=" ", for_good=True)

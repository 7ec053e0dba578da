"""The commands that keep a lake, as a person calls them."""

import json

import pytest
from click.testing import CliRunner
from tests.pipelines.landed import land
from tests.rollouts import record

import trajlake
from trajlake_cli.main import cli
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    for part in range(2):
        record(lake, range(part * 3, part * 3 + 3), worker=f"w{part}")
        compact(lake)
    return lake


def run(lake, *arguments, code=0, input=None):
    result = CliRunner().invoke(cli, ["--lake", lake.uri, *arguments], input=input)
    assert result.exit_code == code, result.output
    return result


def test_optimize_says_what_became_of_the_files(lake):
    assert "2 files of steps became 1" in run(lake, "optimize").stdout
    assert "nothing to merge: 1 files" in run(lake, "optimize").stdout
    assert json.loads(run(lake, "optimize", "-o", "json").stdout)[0]["files_after"] == 1


def test_dedupe_counts(lake):
    assert "0 of 6 episodes repeat another one" in run(lake, "dedupe").stdout
    row = json.loads(run(lake, "dedupe", "--depth", "near", "--threshold", "0.1", "-o", "json").stdout)[0]
    assert row["depth"] == "near"
    run(lake, "dedupe", "--threshold", "0", code=2)


def test_segments_lists_says_why_and_tries_again(lake, tmp_path):
    land(lake.store, [0], worker="good")
    (tmp_path / "lake/landing/run/good/000000/00000001.arrow").write_bytes(b"no")
    assert "segments --quarantined" in run(lake, "compact").stderr
    rows = json.loads(run(lake, "segments", "-o", "json").stdout)
    assert sorted(row["state"] for row in rows) == ["consumed"] * 3 + ["quarantined"]
    (bad,) = json.loads(run(lake, "segments", "--quarantined", "-o", "json").stdout)
    assert "not an Arrow stream" in bad["reason"]
    assert "1 segments are tried again" in run(lake, "segments", "--retry").stderr
    assert json.loads(run(lake, "segments", "--quarantined", "-o", "json").stdout) == []


def test_retract_marks_and_for_good_removes_but_asks_first(lake):
    marked = run(lake, "retract", "e0002", "--reason", "leaked").stderr
    assert "1 episode (e0002) marked as not to be used; --for-good removes instead" in marked
    assert lake.snapshot().episode("e0002").episode["retracted"] == "leaked"
    result = run(lake, "retract", "e0001", "--reason", "licence", "--for-good", code=1, input="n\n")
    assert "Remove 1 episode for good (e0001)?" in result.stderr
    assert len(lake.snapshot().episodes.collect()) == 6
    nobody = run(lake, "retract", "e0001", "--reason", "licence", "--for-good", code=1, input="").stderr
    assert "nothing was removed: where nobody can be asked, --yes says yes" in nobody
    done = run(lake, "retract", "e0001", "--reason", "licence", "--for-good", "--yes")
    assert "1 episode (e0001) removed for good, from" in done.stderr
    assert len(lake.snapshot().episodes.collect()) == 5
    assert "no episode e0001x" in run(lake, "retract", "e0001x", "--reason", "x", code=1).stderr


def test_a_dry_run_says_which_episodes_what_holds_them_and_what_used_them(lake, tmp_path):
    lake.snapshot().export(tmp_path / "out", format="jsonl", shards=1)
    how = ("retract", "e0001", "e0002", "--reason", "x", "--dry-run")
    dry = run(lake, *how, "--for-good", "-o", "json")
    (report,) = json.loads(dry.stdout)
    assert report["episodes"] == ["e0001", "e0002"]
    assert {"the newest version of steps", "the newest version of episodes", "a segment as a worker sent it"} <= {
        held["what"] for held in report["objects"]
    }
    assert [hit["name"] for hit in report["used_by"]] == [str(tmp_path / "out")]
    assert "2 episodes (e0001, e0002) would be removed for good, from" in dry.stderr
    assert "1 export or sample holds some of them" in dry.stderr
    assert "2 episodes (e0001, e0002) would be marked as not to be used" in run(lake, *how).stderr
    assert len(lake.snapshot().episodes.collect()) == 6


def test_vacuum_says_what_goes_and_why(lake):
    nothing = run(lake, "vacuum").stderr
    assert "nothing to remove: whatever is no longer needed is younger" in nothing
    refused = run(lake, "vacuum", "--older-than", "2h", code=1).stderr
    assert "2 h is less than the retention period of 7 d" in refused
    dry = run(lake, "vacuum", "--older-than", "0s", "--force", "--dry-run").stderr
    assert "would be removed: " in dry
    assert "because its events are in the tables" in dry
    assert "nothing was (--dry-run)" in dry
    before = len(list(lake.store.list()))
    assert "removed: " in run(lake, "vacuum", "--older-than", "0s", "--force").stderr
    assert len(list(lake.store.list())) < before


def test_options_of_beam_stand_behind_two_dashes(lake):
    record(lake, [50], worker="w9")
    assert "1 episode added" in run(lake, "compact", "--", "--direct_runner_bundle_repeat=2").stdout
    assert "options for Beam look like" in run(lake, "compact", "what", code=2).stderr
    assert "needs the address of its job server" in run(lake, "compact", "--runner", "flink", code=1).stderr
    assert "--metrics-port is for --watch" in run(lake, "compact", "--metrics-port", "1", code=2).stderr

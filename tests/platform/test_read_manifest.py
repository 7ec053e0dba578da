"""Manifests and lineage: the same batch again after the lake was rewritten, and who used an episode."""

import hashlib
import json
import shutil
import time

import pyarrow as pa
import pytest
from tests.rollouts import record

import trajlake
from trajlake.errors import EpisodeMissing, UsageError
from trajlake.read.items import Window
from trajlake.read.lineage import uses_of
from trajlake.read.manifest import open_manifest, read_manifest, write_manifest, write_steps
from trajlake.table.retention import vacuum
from trajlake_pipelines.compact import compact
from trajlake_pipelines.optimize import optimize

pytestmark = pytest.mark.beam


@pytest.fixture
def lake(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    record(lake, range(12))
    compact(lake)
    return lake


def drawn(lake, path, count=8, **choices):
    snapshot = lake.snapshot()
    sampler = snapshot.sampler(**{"seed": 7, **choices})
    batch = sampler.batch(count)
    write_manifest(path, snapshot, sampler, batch.samples)
    return batch


def rewrite_everything(lake):
    """Replace every file of the tables, and remove the old ones: the old snapshot can then no longer be read."""
    for number in range(12, 15):
        record(lake, [number], worker=f"more{number}")
        compact(lake)
    record(lake, [13], worker="again", attempt=1)  # moves its neighbours into new files
    compact(lake)
    optimize(lake, everything=True)
    time.sleep(1.1)
    vacuum(lake, older_than_hours=0, force=True)


@pytest.mark.parametrize("choices", [{}, {"strategy": "prioritized"}, {"window": Window(2)}, {"strategy": "epochs"}])
def test_a_manifest_gives_the_same_bytes_after_everything_was_rewritten(lake, tmp_path, choices):
    batch = drawn(lake, tmp_path / "m.json", **choices)
    write_steps(tmp_path / "before.arrow", batch)
    files = set(lake.snapshot().collect(lake.snapshot().episodes)["steps_path"])
    rewrite_everything(lake)
    assert files != set(lake.snapshot().collect(lake.snapshot().episodes)["steps_path"])
    manifest = read_manifest(tmp_path / "m.json")
    again = open_manifest(lake, manifest)
    write_steps(tmp_path / "after.arrow", again)
    assert again.samples == batch.samples
    assert (tmp_path / "before.arrow").read_bytes() == (tmp_path / "after.arrow").read_bytes()
    with pa.memory_map(str(tmp_path / "after.arrow")) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table["position"].unique().to_pylist() == list(range(8))


def test_an_episode_that_is_no_longer_what_was_drawn_is_refused(lake, tmp_path):
    drawn(lake, tmp_path / "m.json", strategy="epochs", count=12)
    record(lake, [3], worker="again", attempt=1, message="other")
    compact(lake)
    assert len(open_manifest(lake, read_manifest(tmp_path / "m.json"))) == 12  # the snapshot is still there
    time.sleep(1.1)
    vacuum(lake, older_than_hours=0, force=True)
    with pytest.raises(EpisodeMissing, match="e0003 is no longer what was drawn"):
        open_manifest(lake, read_manifest(tmp_path / "m.json"))


def test_a_manifest_that_was_changed_or_is_none_is_refused(lake, tmp_path):
    drawn(lake, tmp_path / "m.json")
    manifest = json.loads((tmp_path / "m.json").read_text())
    manifest["samples"][0]["episode_id"] = "e0000x"
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="was changed after it was written"):
        read_manifest(tmp_path / "m.json")
    for text in ("", "[]", "{}", '{"manifest": 1}'):
        (tmp_path / "m.json").write_text(text)
        with pytest.raises(UsageError, match="not a manifest"):
            read_manifest(tmp_path / "m.json")
    with pytest.raises(UsageError, match="No such file"):
        read_manifest(tmp_path / "nothing.json")
    with pytest.raises(UsageError, match="cannot be written"):
        drawn(lake, tmp_path / "no" / "m.json")


@pytest.mark.parametrize("name", ["lake_id", "snapshot", "seed", "where", "window", "rank"])
def test_a_manifest_vouches_for_all_that_is_in_it(lake, tmp_path, name):
    drawn(lake, tmp_path / "m.json", window=Window(2))
    manifest = json.loads((tmp_path / "m.json").read_text())
    (tmp_path / "m.json").write_text(json.dumps({**manifest, name: None if name == "window" else "other"}))
    with pytest.raises(UsageError, match="was changed after it was written"):
        read_manifest(tmp_path / "m.json")


def as_first_written(path):
    """The manifest as version 1 wrote it: no lake_id, and a digest of the samples alone."""
    manifest = json.loads(path.read_text())
    del manifest["lake_id"]
    digest = hashlib.sha256(json.dumps(manifest["samples"], sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({**manifest, "manifest": 1, "digest": digest}))


def test_a_manifest_of_an_earlier_version_draws_the_same(lake, tmp_path):
    batch = drawn(lake, tmp_path / "m.json", window=Window(2))
    as_first_written(tmp_path / "m.json")
    assert open_manifest(lake, read_manifest(tmp_path / "m.json")).samples == batch.samples
    manifest = json.loads((tmp_path / "m.json").read_text())
    for damage in ({"window": {"width": 1}}, {"window": 3}, {"samples": [1], "digest": "0" * 64}):
        (tmp_path / "m.json").write_text(json.dumps({**manifest, **damage}))
        with pytest.raises(UsageError, match="not a manifest|was changed"):
            read_manifest(tmp_path / "m.json")
    del manifest["window"]
    (tmp_path / "m.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="not a manifest"):
        read_manifest(tmp_path / "m.json")


def test_a_manifest_of_another_lake_is_refused(lake, tmp_path):
    drawn(lake, tmp_path / "m.json", strategy="epochs", count=12)
    other = trajlake.create(tmp_path / "other")
    record(other, range(12))
    compact(other)
    with pytest.raises(UsageError, match=f"of another lake: it is of {lake.uri}"):
        open_manifest(other, read_manifest(tmp_path / "m.json"))
    shutil.rmtree(tmp_path / "lake")
    anew = trajlake.create(tmp_path / "lake")
    record(anew, range(12))
    compact(anew)
    with pytest.raises(UsageError, match="made anew since"):
        open_manifest(anew, read_manifest(tmp_path / "m.json"))
    as_first_written(tmp_path / "m.json")
    assert len(open_manifest(anew, read_manifest(tmp_path / "m.json"))) == 12


def test_every_manifest_and_export_that_used_an_episode_is_known(lake, tmp_path):
    drawn(lake, tmp_path / "m.json", strategy="epochs", count=12)
    lake.snapshot().export(tmp_path / "out", shards=3)
    lake.snapshot().export(tmp_path / "few", where="task_id = '1'", format="jsonl")
    sample, *exports = sorted(uses_of(lake, "e0001"), key=lambda use: use.kind, reverse=True)
    assert (sample.kind, sample.name, sample.snapshot) == ("sample", str(tmp_path / "m.json"), lake.snapshot().token)
    assert {use.name for use in exports} == {str(tmp_path / "out"), str(tmp_path / "few")}
    for use in exports:
        if use.name.endswith("few"):
            assert (
                json.loads((tmp_path / "few" / use.part).read_text().splitlines()[use.position])["episode_id"]
                == "e0001"
            )
    assert [use.name for use in uses_of(lake, "e0002")].count(str(tmp_path / "few")) == 0
    assert uses_of(lake, "nobody") == []
    count = len(list(lake.store.list("lineage/")))
    drawn(lake, tmp_path / "m.json", strategy="epochs", count=12)
    assert len(list(lake.store.list("lineage/"))) == count  # the same again is the same

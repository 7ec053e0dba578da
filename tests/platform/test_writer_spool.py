"""`trajlake spool`: what writers that died left on the disk is seen, and is uploaded."""

import json
import shutil
from time import monotonic, sleep

import pyarrow as pa
import pytest
from click.testing import CliRunner
from tests.rollouts import record_episode

import trajlake
from trajlake.ingest.epochs import claim_epoch
from trajlake.ingest.segment import EVENT_SCHEMA, SegmentName, encode_segment
from trajlake.ingest.spool import SpoolFolder
from trajlake.ingest.writer import Writer
from trajlake.storage.wrappers import FaultyStore
from trajlake_cli.main import cli
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.unit


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="trajlake")
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def left(tmp_path):
    """The address of a lake, and a spool in which a writer left ten events."""
    lake = trajlake.create(tmp_path / "lake")
    writer = Writer(FaultyStore(lake.store, probability=1.0), "run", "w")
    record_episode(writer, 1)
    record_episode(writer, 2)
    assert not writer.close(timeout=0.2).complete
    return lake.uri, tmp_path / "spool"


def test_status_lists_what_waits(left, tmp_path):
    uri, spool = left
    result = run("spool", "status", spool, "-o", "json")
    (row,) = json.loads(result.stdout)
    assert {name: row[name] for name in ("state", "lake", "run_id", "worker_id", "segments")} == {
        "state": "left", "lake": uri, "run_id": "run", "worker_id": "w", "segments": 1,
    }  # fmt: skip
    assert (
        f"{row['bytes']:,} bytes of writers that are gone wait in {spool}: `trajlake spool recover {spool}` uploads"
        in result.stderr
    )
    assert "left" in run("spool", "status").stdout, "TRAJLAKE_SPOOL is the default"
    assert "nothing waits in" in run("spool", "status", tmp_path / "none").stderr


def test_recover_uploads_it_once(left):
    uri, spool = left
    result = run("--lake", uri, "spool", "recover", spool, "-o", "json")
    assert json.loads(result.stdout)[0]["segments"] == 1
    assert len(list(trajlake.connect(uri).store.list("landing/"))) == 1
    assert "0 segments (0 bytes) uploaded" in run("spool", "recover", spool, "--lake", uri).stderr
    assert not list(spool.iterdir())


def leave(lake, run="run", store=None, number=1):
    """A writer of the lake that dies with what it recorded."""
    store = store or FaultyStore(lake.store, probability=1.0)
    writer = Writer(store, run, "w", lake_id=lake.check().lake_id)
    record_episode(writer, number)
    assert not writer.close(timeout=0.2).complete


def test_recover_tells_lakes_apart_by_their_ids_and_not_by_their_addresses(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    leave(lake)
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    shutil.move(tmp_path / "lake", tmp_path / "first")
    trajlake.create(tmp_path / "lake")
    assert "0 segments" in run("--lake", tmp_path / "lake", "spool", "recover").stderr, "made anew: another lake"
    with trajlake.connect(tmp_path / "lake").writer(run="run", worker="w") as writer:
        record_episode(writer, 2)
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "first")
    assert "1 segment " in run("--lake", tmp_path / "link", "spool", "recover").stderr, "the same by another name"
    for name, episode in (("lake", "e0002"), ("first", "e0001")):
        compact(trajlake.connect(tmp_path / name))
        assert trajlake.connect(tmp_path / name).snapshot().episodes.collect()["episode_id"].to_list() == [episode]


def test_recover_goes_on_behind_a_folder_that_cannot_be_uploaded(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    for number, name in enumerate(("a", "b", "c")):
        leave(lake, name, number=number)
    folders = {json.loads((path / "meta.json").read_text())["run_id"]: path for path in (tmp_path / "spool").iterdir()}
    first = min(folders, key=lambda name: folders[name].name)
    folder = SpoolFolder.adopt(folders[first])
    folder.set_epoch(epoch := claim_epoch(lake.store, folder))
    folder.release(remove=False)
    other = encode_segment(pa.Table.from_batches([], schema=EVENT_SCHEMA))
    lake.store.put_if_absent(SegmentName(first, "w", epoch, 0).key, other)
    result = run("--lake", lake.uri, "spool", "recover", code=1)
    assert "holds something else" in result.stdout + result.stderr
    assert "2 segments" in result.stderr
    compact(lake)
    assert len(lake.snapshot().episodes.collect()) == 2
    assert [path.name for path in (tmp_path / "spool").iterdir()] == [folders[first].name]


@pytest.mark.parametrize(("file", "content"), [("meta.json", b""), ("epoch", b"\0" * 20)])
def test_a_folder_whose_owner_cannot_be_told_is_said_and_kept(tmp_path, file, content):
    lake = trajlake.create(tmp_path / "lake")
    leave(lake)
    (folder,) = (tmp_path / "spool").iterdir()
    (folder / file).write_bytes(content)
    result = run("--lake", lake.uri, "spool", "recover", "-o", "json", code=1)
    assert "damaged" in json.loads(result.stdout)[0]["damaged"][0]
    assert json.loads(run("spool", "status", "-o", "json").stdout)[0]["state"] == "unreadable"
    assert list(folder.glob("*.arrow"))


def test_recover_leaves_other_lakes_alone_and_keeps_a_damaged_file(left, tmp_path):
    uri, spool = left
    other = trajlake.create(tmp_path / "other")
    run("spool", "recover", spool, "--lake", other.uri)
    (file,) = spool.glob("*/*.arrow")
    file.write_bytes(b"damaged by the disk")
    result = run("spool", "recover", spool, "--lake", uri, "-o", "json", code=1)
    assert "not an Arrow stream" in json.loads(result.stdout)[0]["damaged"][0]
    assert file.with_suffix(".damaged").read_bytes() == b"damaged by the disk"
    result = run("spool", "status", spool, "-o", "json")
    assert [(row["segments"], row["damaged"]) for row in json.loads(result.stdout)] == [(0, 1)]
    assert "1 segment was damaged on this disk" in result.stderr
    assert "0 segments" in run("spool", "recover", spool, "--lake", uri).stderr, "it is told once"


def test_of_a_damaged_segment_what_is_before_the_damage_is_uploaded_and_counted(tmp_path, caplog):
    lake = trajlake.create(tmp_path / "lake")
    down = FaultyStore(lake.store, probability=1.0)
    writer = Writer(down, "run", "w", segment_seconds=60, linger_seconds=60)
    for number in range(20):
        record_episode(writer, number, message="xylophone" if number == 12 else "step")
        if number % 5 == 4:
            sleep(0.5)  # so that it is a batch
    open_one = record_episode(writer, 20, end=False)
    sleep(0.5)
    open_one.end()
    assert not writer.close(timeout=0.3).complete
    (file,) = (tmp_path / "spool").glob("*/*.arrow")
    data = bytearray(file.read_bytes())
    place = data.rindex(b"xylophone")  # text that lz4 left as it is: nothing but a checksum can tell
    data[place] = ord("X")
    file.write_bytes(data)

    with lake.writer("run", "next") as following:
        following.flush()
        deadline = monotonic() + 30
        while not following.stats.damaged_segments and monotonic() < deadline:
            sleep(0.05)
        assert (following.stats.damaged_segments, following.stats.recovered_segments) == (1, 1)
        assert "DAMAGED" in following.stats.line()
    assert "of its 105 events cannot be read" in caplog.text
    compact(lake)
    assert lake.snapshot().episodes.collect()["episode_id"].sort().to_list() == [f"e{n:04d}" for n in range(10)]

"""`trajlake spool`: what writers that died left on the disk is seen, and is uploaded."""

import json
from time import monotonic, sleep

import pytest
from click.testing import CliRunner
from tests.rollouts import record_episode

import trajlake
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

"""`trajlake spool`: what writers that died left on the disk is seen, and is uploaded."""

import json

import pytest
from click.testing import CliRunner
from tests.rollouts import record_episode

import trajlake
from trajlake.ingest.writer import Writer
from trajlake.storage.wrappers import FaultyStore
from trajlake_cli.main import cli

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
    assert f"{row['bytes']:,} bytes of writers that are gone wait in {spool}" in result.stderr
    assert "left" in run("spool", "status").stdout, "TRAJLAKE_SPOOL is the default"
    assert "nothing waits in" in run("spool", "status", tmp_path / "none").stderr


def test_recover_uploads_it_once(left):
    uri, spool = left
    result = run("--lake", uri, "spool", "recover", spool, "-o", "json")
    assert json.loads(result.stdout)[0]["segments"] == 1
    assert len(list(trajlake.connect(uri).store.list("landing/"))) == 1
    assert "0 segments (0 bytes) uploaded" in run("spool", "recover", spool, "--lake", uri).stderr
    assert not list(spool.iterdir())


def test_recover_leaves_other_lakes_and_damaged_files_alone(left, tmp_path):
    uri, spool = left
    other = trajlake.create(tmp_path / "other")
    run("spool", "recover", spool, "--lake", other.uri)
    (file,) = spool.glob("*/*.arrow")
    file.write_bytes(b"damaged by the disk")
    result = run("spool", "recover", spool, "--lake", uri, "-o", "json", code=1)
    assert "not an Arrow stream" in json.loads(result.stdout)[0]["damaged"][0]
    assert file.exists()

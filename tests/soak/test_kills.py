"""Workers are killed with SIGKILL at random moments: nothing that was acknowledged is lost, nothing is there twice."""

import os
import time

import pytest

import trajlake
from tests.soak.proxy import fault_proxy
from tests.soak.rollouts import check_promises, kill_workers
from trajlake.storage import S3Store


def _kill(s3_uri, folder, kills, seed, capsys, faults=0.0):
    lake = trajlake.create(s3_uri)
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    with fault_proxy(os.environ["AWS_ENDPOINT_URL"], seed=seed, hang_seconds=1.5) as proxy:
        proxy.probability = faults
        store = S3Store(bucket, prefix, endpoint=proxy.url, region="us-east-1", patience=3, read_seconds=1)
        began = time.monotonic()
        killed = kill_workers(store, folder, kills, seed=seed)
        seconds = time.monotonic() - began
        proxy.probability = 0.0
        # What the workers left names the lake by the address through the proxy, so it is brought in that way too.
        through = trajlake.Lake(store)
        from trajlake.ingest.recovery import recover

        assert not recover(through.store, folder / "spool").stopped
    figures = check_promises(lake, folder / "spool", killed)
    assert figures.promised_episodes > kills
    with capsys.disabled():
        print(f"\n{kills} kills in {seconds:.0f} s, {dict(proxy.met)}: {figures}")


@pytest.mark.s3
@pytest.mark.e2e
def test_ten_kills(s3_uri, tmp_path, capsys):
    _kill(s3_uri, tmp_path, 10, 1, capsys, faults=0.1)


@pytest.mark.s3
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills(s3_uri, tmp_path, capsys):
    _kill(s3_uri, tmp_path, 200, int(os.environ.get("TRAJLAKE_SOAK_SEED", "7")), capsys, faults=0.1)

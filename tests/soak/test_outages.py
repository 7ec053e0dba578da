"""The server fails in every way while a rollout records: nothing is lost, memory is bounded, a step costs the same."""

import os
import time

import polars as pl
import pytest

import trajlake
from tests.soak.load import record_for, resident_bytes
from tests.soak.proxy import FAULTS, fault_proxy
from trajlake.ingest.writer import Writer
from trajlake.storage import S3Store
from trajlake_pipelines.compact import compact

pytestmark = pytest.mark.s3
MEMORY = 8 << 20


@pytest.fixture
def proxied(s3_uri):
    """The lake, a store that reaches it through a proxy, and the proxy."""
    lake = trajlake.create(s3_uri)
    bucket, _, prefix = s3_uri.removeprefix("s3://").partition("/")
    with fault_proxy(os.environ["AWS_ENDPOINT_URL"], hang_seconds=1.5) as proxy:
        store = S3Store(bucket, prefix, endpoint=proxy.url, region="us-east-1", patience=2, read_seconds=1)
        yield lake, store, proxy


def _is_all_there(lake, load, steps_each=20):
    compact(lake)
    snapshot = lake.snapshot()
    assert snapshot.episodes.filter(status="completed", n_steps=steps_each).collect().height == load.episodes
    keys = snapshot.steps.select("episode_id", "step_index").collect()
    assert len(keys) == len(load.seconds)
    assert keys.select(pl.struct("episode_id", "step_index").is_unique().all()).item()


def _writer(store, tmp_path, **choices):
    return Writer(
        store, "run", "w", spool=tmp_path / "spool", segment_seconds=0.2, segment_bytes=100_000, memory_bytes=MEMORY,
        **choices,
    )  # fmt: skip


@pytest.mark.e2e
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_at_half_of_all_requests(proxied, tmp_path, capsys, fault):
    lake, store, proxy = proxied
    proxy.faults = (fault,)
    with _writer(store, tmp_path) as writer:
        proxy.probability = 0.5
        load = record_for(writer, 1.5)
        proxy.probability = 0.0
        writer.flush(timeout=60)
    assert proxy.met[fault]
    assert load.held_bytes < 2 * MEMORY
    _is_all_there(lake, load)
    with capsys.disabled():
        print(f"\n{load.line(fault)}, {writer.stats.retries} retries")


def _down_for(proxied, tmp_path, capsys, seconds, **choices):
    lake, store, proxy = proxied
    with _writer(store, tmp_path, **choices) as writer:
        first = record_for(writer, 0.5, prefix="a")
        proxy.is_down = True
        during = record_for(writer, seconds, prefix="b")
        if choices.get("durability") != "memory":
            assert writer.stats.waits == 0, "the rollout never waits while the disk takes what comes"
        proxy.is_down = False
        back = time.monotonic()
        assert writer.close(timeout=120).complete
        caught_up = time.monotonic() - back
    compact(lake)
    assert lake.snapshot().episodes.collect().height == first.episodes + during.episodes
    assert during.held_bytes < 2 * MEMORY
    with capsys.disabled():
        print(f"\n{first.line('before')}\n{during.line(f'down for {seconds} s')}, caught up in {caught_up:.1f} s")


@pytest.mark.e2e
@pytest.mark.parametrize("durability", ["remote", "spool", "memory"])
def test_a_server_that_is_down_for_three_seconds(proxied, tmp_path, capsys, durability):
    _down_for(proxied, tmp_path, capsys, 3, durability=durability)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_server_that_is_down_for_a_minute(proxied, tmp_path, capsys):
    _down_for(proxied, tmp_path, capsys, 60)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_is_flat_over_a_million_steps(s3_uri, tmp_path, capsys):
    lake = trajlake.create(s3_uri)
    sizes = []
    began = time.monotonic()
    with lake.writer("run", "w", spool=tmp_path / "spool") as writer:
        for _ in range(10_000):
            with writer.episode(task_id="t") as episode:
                for step in range(100):
                    episode.step(message=f"step {step}", token_ids=[step, step + 1], reward=0.5)
            if writer.stats.episodes % 1_000 == 0:
                sizes.append(resident_bytes())
        assert writer.stats.events == 1_020_000
    seconds = time.monotonic() - began
    with capsys.disabled():
        megabytes = ", ".join(f"{size / 1e6:.0f}" for size in sizes)
        print(f"\na million steps in {seconds:.0f} s; MB resident at each 100,000: {megabytes}")
    assert writer.stats.durable_events == 1_020_000
    assert max(sizes[3:]) < sizes[2] + 64e6

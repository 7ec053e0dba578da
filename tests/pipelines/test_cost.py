"""A pass costs what is new: what it asks of the store is the same after a long history as after a short one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.benchmarks.planner import ids_of, make_history
from tests.pipelines.landed import episode_id, events_of, land, segment_bytes
from tests.rollouts import assert_sound
from tests.soak.proxy import fault_proxy

import trajlake
from trajlake.errors import ObjectMissing
from trajlake.ingest.segment import SegmentName
from trajlake.storage import Won
from trajlake.storage.wrappers import CountingStore
from trajlake.table.retention import vacuum
from trajlake_pipelines import lookup
from trajlake_pipelines.compact import compact
from trajlake_pipelines.frontier import Frontier, Mark, list_new
from trajlake_pipelines.plan import job_folder, load_or_make_plan

NEW = 5


def put_segment(store, number):
    """What `land` makes, on any store."""
    key = SegmentName("run", "w", 0, number).key
    assert store.put_if_absent(key, segment_bytes(events_of(episode_id(number), first=4 * number))) == Won()


class Listed(CountingStore):
    """Counts the keys of listings, too: a listing that reads past what is known costs in pages."""

    def list(self, prefix="", *, start_after=""):
        for info in super().list(prefix, start_after=start_after):
            self.calls["keys listed"] += 1
            yield info


def cost_of_a_pass(tmp_path, history, ids=None):
    how = {} if ids is None else {"ids": ids}
    lake = trajlake.create(tmp_path / f"lake{history}")
    for start in range(0, history, history // 2):
        land(lake.store, range(start, start + history // 2), **how)
        assert compact(lake).segments == history // 2
    land(lake.store, range(history, history + NEW), **how)
    store = Listed(lake.store)
    report = compact(trajlake.Lake(store))
    assert (report.segments, report.episodes) == (NEW, NEW)
    assert_sound(lake)
    return store


@pytest.mark.beam
def test_requests_and_bytes_of_a_pass_do_not_grow_with_history(tmp_path):
    short, long = cost_of_a_pass(tmp_path, 120), cost_of_a_pass(tmp_path, 1200)
    assert long.calls == short.calls
    assert long.calls["keys listed"] <= 2 * NEW + 20
    for operation, size in short.bytes.items():
        assert long.bytes[operation] <= size * 1.05 + 200  # numbers of more digits


@pytest.mark.beam
@pytest.mark.s3
def test_nor_does_what_is_asked_of_a_real_server(s3_uri, s3_server, monkeypatch):
    """All requests, those of the libraries too, and the keys in the answers to listings of landing."""
    requests, keys, size = {}, {}, {}
    with fault_proxy(s3_server["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for history in (120, 720):
            lake = trajlake.create(f"{s3_uri}/{history}")
            for numbers in (range(history // 2), range(history // 2, history), range(history, history + NEW)):
                with ThreadPoolExecutor(8) as pool:
                    list(pool.map(partial(put_segment, lake.store), numbers))
                proxy.log = []
                assert compact(lake).segments == len(numbers)
            requests[history] = len(proxy.log)
            size[history] = sum(len(content) for _, _, content in proxy.log)
            listings = [content for method, path, content in proxy.log if method == "GET" and "%2Flanding%2F" in path]
            assert listings
            keys[history] = sum(content.count(b"<Key>") for content in listings)
    assert requests[720] <= requests[120] + 4  # ranges of a larger checkpoint
    assert keys[720] == keys[120] <= 300  # two pages of a hundred, and what is new
    assert size[720] < 1.3 * size[120]


@pytest.mark.parametrize("again", [False, True])
def test_files_that_are_looked_into_do_not_grow_with_history_whatever_the_ids(tmp_path, monkeypatch, again):
    """Random ids: each file of the table could hold each of them, by its least and greatest id."""
    looked = []
    real = lookup.scan_files
    monkeypatch.setattr(lookup, "scan_files", lambda store, name, some: looked.extend(some) or real(store, name, some))
    costs = {}
    for history in (12, 72):
        lake = trajlake.create(tmp_path / str(history))
        make_history(lake.store, history, "random", 50)
        if again:
            land(lake.store, [history * 10 + 5], ids=lambda _: ids_of(2, "random", 50)[7])
        looked.clear()
        store = Listed(lake.store)
        plan = load_or_make_plan(store, stale_after=None)
        known = {episode: how[:2] for unit in plan.units for episode, how in unit.known.items()}
        assert known == ({ids_of(2, "random", 50)[7]: (0, True)} if again else {})
        assert len(looked) == again
        assert 0 < store.calls.pop("get") < 3 + history.bit_length()  # one for each run of the index
        costs[history] = dict(store.calls)
    assert costs[12] == costs[72]


def test_a_lake_without_a_frontier_finds_it_again_in_its_ledger(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    land(lake.store, range(6))
    compact(lake)
    lake.store.delete(f"{job_folder(1)}/frontier.json")
    assert compact(lake).compactions == 0
    land(lake.store, [6, 9])
    assert compact(lake).segments == 2


def test_a_vacuum_leaves_the_frontier_of_the_newest_compaction(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    for number in range(3):
        land(lake.store, [number])
        compact(lake)
    vacuum(lake, older_than_hours=0, force=True)
    assert lake.store.get(f"{job_folder(3)}/frontier.json")
    with pytest.raises(ObjectMissing):
        lake.store.get(f"{job_folder(2)}/frontier.json")
    land(lake.store, [3])
    assert compact(lake).episodes == 1
    assert_sound(lake)


def test_segments_that_arrive_out_of_order_are_all_consumed_once(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    for numbers in ([5, 7], [1], [0, 6, 2], [3, 4, 300], [120], [8]):
        land(lake.store, numbers)
        assert compact(lake).segments == len(numbers)
    assert compact(lake).compactions == 0
    assert_sound(lake)
    assert len(lake.snapshot().episodes.collect()) == 11


def test_marks_know_what_was_consumed():
    mark = Mark(-1)
    taken = set()
    for number in (4, 0, 9, 2, 1, 7, 3):
        mark = mark.with_number(number)
        taken.add(number)
        assert [mark.has(each) for each in range(12)] == [each in taken for each in range(12)]
        for start in range(12):
            assert mark.next_open(start) == min(each for each in range(start, 14) if each not in taken)
    frontier = Frontier({"landing/r/w/000000": mark}, frozenset({"landing/odd.arrow"}))
    assert Frontier.from_json(frontier.to_json()) == frontier
    key = "landing/r/w/000000/00000009.arrow"
    assert frontier.has(key)
    assert not frontier.without_keys([key]).has(key)
    assert frontier.without_keys([key]).with_keys([key]).has(key)


def test_epochs_that_landing_no_longer_holds_leave_the_frontier(tmp_path):
    lake = trajlake.create(tmp_path / "lake")
    land(lake.store, range(3), worker="old")
    compact(lake)
    for info in list(lake.store.list("landing/")):
        lake.store.delete(info.key)
    land(lake.store, range(3), worker="new")
    compact(lake)
    frontier = Frontier.from_json(lake.store.get(f"{job_folder(2)}/frontier.json"))
    assert set(frontier.marks) == {"landing/run/new/000000"}
    land(lake.store, [7], worker="old")  # its spool came back
    assert [info.key for info in list_new(lake.store, frontier).new] == ["landing/run/old/000000/00000007.arrow"]

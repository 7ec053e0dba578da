"""The index of episodes names every file that can hold one, few others, and costs the same after any history."""

import random

import pyarrow as pa
import pytest

from trajlake.errors import ObjectMissing
from trajlake.storage import LocalStore
from trajlake.storage.wrappers import CountingStore
from trajlake.table import id_index
from trajlake.table.id_index import plan_of
from trajlake.table.layout import encode_rows

pytestmark = pytest.mark.unit


class Table:
    """Files of `episodes` as plans write them, and the index beside them."""

    def __init__(self, folder):
        self.store = CountingStore(LocalStore(folder))
        self.files = {}
        self.runs = None
        self.number = 0

    def plan(self, new, without=()):
        """One file of these ids comes, some files go."""
        self.number += 1
        for path in without:
            del self.files[path]
        path = f"{self.number:08d}-x.parquet"
        self.store.put_if_absent(f"episodes/{path}", encode_rows(pa.table({"episode_id": sorted(new)})))
        self.files[path] = set(new)
        self.runs = id_index.after(self.store, self.runs, list(self.files), self.number)

    def holders(self, episode):
        numbers = id_index.numbers_of(self.store, self.runs, [episode])
        return {path for path in self.files if plan_of(path) in numbers}


@pytest.fixture
def small(monkeypatch):
    """Runs of a few hundred records are read in parts already."""
    monkeypatch.setattr(id_index, "WHOLE_BELOW", 64)
    monkeypatch.setattr(id_index, "BUCKET", 16)


def test_every_file_that_holds_an_episode_is_named_whatever_plans_have_done(tmp_path, small):
    table, chance = Table(tmp_path), random.Random(5)
    known = []
    for _ in range(60):
        new = [f"{chance.getrandbits(64):x}" for _ in range(chance.choice([1, 5, 40, 150]))]
        gone = chance.sample(sorted(table.files), min(len(table.files), chance.choice([0, 0, 0, 1, 4])))
        moved = [episode for path in gone for episode in table.files[path]]
        table.plan([*new, *moved[: len(moved) * 9 // 10]], gone)
        known += new
        for episode in chance.sample(known, min(20, len(known))):
            assert table.holders(episode) == {path for path, held in table.files.items() if episode in held}
    assert table.holders("never seen") == set()
    assert len(table.runs) <= 14


def test_whoever_repeats_a_plan_writes_the_same_objects(tmp_path, small):
    table = Table(tmp_path)
    for number in range(9):
        before = table.runs
        table.plan([f"{number}-{each}" for each in range(30)])
    objects = {info.key for info in table.store.list("ids/")}
    assert id_index.after(table.store, before, list(table.files), table.number) == table.runs
    assert {info.key for info in table.store.list("ids/")} == objects


def test_an_index_of_which_a_part_is_gone_is_made_anew(tmp_path):
    table = Table(tmp_path)
    for number in range(5):
        table.plan([f"{number}-{each}" for each in range(10 * 4 ** (5 - number))])
    table.store.delete(table.runs[0].key)
    with pytest.raises(ObjectMissing):
        table.holders("0-3")
    table.runs = (table.runs[0],)  # so that it is asked for
    table.plan([f"z{each}" for each in range(200_000)])
    assert table.holders("0-3") == {"00000001-x.parquet"}


def test_what_a_question_costs_does_not_grow_with_the_history(tmp_path):
    costs = {}
    for size in (100_000, 1_000_000):
        table = Table(tmp_path / str(size))
        table.plan([f"{number:x}" for number in range(size)])
        table.store.reset()
        for episode in ("1f", "none", "2a"):
            table.holders(episode)
        costs[size] = (table.store.calls["get_ranges"], table.store.bytes["get_ranges"])
    assert costs[100_000][0] == costs[1_000_000][0]
    assert costs[1_000_000][1] < costs[100_000][1] + 20_000  # the offsets of the buckets; the run has 12 MB

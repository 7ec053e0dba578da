"""What a store is, as tests: subclass `StoreConformance` for each implementation of `ObjectStore`.

    class TestLocalStore(StoreConformance):
        @pytest.fixture
        def store(self, tmp_path): return LocalStore(tmp_path)
        def put_raw(self, store, key, data): ...
        def get_raw(self, store, key): ...

`put_raw` and `get_raw` are the back door: they must not use the store, so that a test which reads what it wrote
cannot be fooled by an error that reading and writing share. Needs pytest.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier
from typing import Any

import pytest

from trajlake.errors import ObjectMissing, StoreError
from trajlake.storage.base import ByteRange, Lost, ObjectStore, PutOutcome, Won, byte_order, folder_order

RACERS = 32
MANY_OBJECTS = 1_050  # more than the 1,000 that S3 lists by one request

ODD_KEYS = [
    "a",
    "a b/c d",
    "a+b",
    "a-b/1",
    "a.b",
    "a/1",
    "a0",
    "percent%2Fencoded",
    "percent/encoded",
    "equals=1/and&amp",
    "tilde~",
    "quote'and\"",
    "Ünï/日本",
    "😀",
    "~",
]
"""In one store `a` cannot be beside `a/1` (a file is no folder), so the tests take one of the two."""

UNSAFE_KEYS = ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../../b", "a/./b", "a\\b", "a\0b"]


class StoreConformance:
    """The tests. A subclass gives the fixture `store` (empty) and the two back-door methods."""

    def put_raw(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Create or overwrite an object without the store's code."""
        raise NotImplementedError

    def get_raw(self, store: ObjectStore, key: str) -> bytes | None:
        """An object's bytes without the store's code; None where there is none."""
        raise NotImplementedError

    # Creating

    def test_put_creates_the_object(self, store: ObjectStore) -> None:
        assert store.put_if_absent("landing/a.arrow", b"some bytes") == Won()
        assert self.get_raw(store, "landing/a.arrow") == b"some bytes"

    def test_put_takes_a_memoryview(self, store: ObjectStore) -> None:
        assert store.put_if_absent("a", memoryview(b"0123456789")[2:5]) == Won()
        assert self.get_raw(store, "a") == b"234"

    def test_put_of_other_bytes_loses_and_changes_nothing(self, store: ObjectStore) -> None:
        self.put_raw(store, "a", b"first")
        assert store.put_if_absent("a", b"other") == Lost()
        assert store.put_if_absent("a", b"firs") == Lost()
        assert store.put_if_absent("a", b"") == Lost()
        assert self.get_raw(store, "a") == b"first"

    def test_put_of_equal_bytes_wins_again(self, store: ObjectStore) -> None:
        self.put_raw(store, "a", b"first")
        assert store.put_if_absent("a", b"first") == Won()
        assert store.put_if_absent("a", memoryview(b"first")) == Won()

    def test_put_of_an_empty_object(self, store: ObjectStore) -> None:
        assert store.put_if_absent("empty", b"") == Won()
        assert store.put_if_absent("empty", b"") == Won()
        assert store.put_if_absent("empty", b"x") == Lost()
        assert store.get("empty") == b""
        info = store.stat("empty")
        assert info is not None
        assert info.size == 0
        assert [found.key for found in store.list()] == ["empty"]

    def test_of_many_racing_puts_one_wins(self, store: ObjectStore) -> None:
        bodies = [f"racer {number}".encode() for number in range(RACERS)]
        outcomes = self._race(store, "claim", bodies)
        assert outcomes.count(Won()) == 1
        assert outcomes.count(Lost()) == RACERS - 1
        assert self.get_raw(store, "claim") == bodies[outcomes.index(Won())]

    def test_racing_puts_of_equal_bytes_all_win(self, store: ObjectStore) -> None:
        assert self._race(store, "claim", [b"same"] * RACERS) == [Won()] * RACERS

    def test_a_racing_reader_sees_the_whole_object_or_none(self, store: ObjectStore) -> None:
        body = bytes(range(256)) * 8_000
        seen: set[bytes] = set()
        with ThreadPoolExecutor(2) as threads:
            put = threads.submit(store.put_if_absent, "large", body)
            while not put.done():
                with contextlib.suppress(ObjectMissing):
                    seen.add(store.get("large"))
        assert put.result() == Won()
        assert seen <= {body}

    def test_put_of_a_large_object(self, store: ObjectStore) -> None:
        body = bytes(range(251)) * 83_559  # 20.97 MB, with a period that no chunk size shares
        assert store.put_if_absent("large", body) == Won()
        assert store.get("large") == body
        assert store.put_if_absent("large", body) == Won()
        assert store.put_if_absent("large", body[:-1] + b"\xff") == Lost()
        end = ByteRange(len(body) - 7, 7)
        assert store.get_ranges("large", [ByteRange(5, 3), end]) == [body[5:8], body[-7:]]

    def test_put_again_after_delete(self, store: ObjectStore) -> None:
        store.put_if_absent("a", b"first")
        store.delete("a")
        assert store.put_if_absent("a", b"second") == Won()
        assert self.get_raw(store, "a") == b"second"

    # Reading

    def test_get_reads_the_object(self, store: ObjectStore) -> None:
        self.put_raw(store, "a/b", b"some bytes")
        assert store.get("a/b") == b"some bytes"

    def test_get_of_what_is_not_there(self, store: ObjectStore) -> None:
        self.put_raw(store, "folder/a", b"x")
        for key in ("nothing", "folder", "folder/b"):
            with pytest.raises(ObjectMissing, match=key):
                store.get(key)

    def test_get_ranges_in_the_order_asked_for(self, store: ObjectStore) -> None:
        body = bytes(range(256)) * 4_000
        self.put_raw(store, "a", body)
        ranges = [
            ByteRange(900_000, 100),
            ByteRange(0, 1),
            ByteRange(500_000, 70_000),
            ByteRange(0, 1),
            ByteRange(1, 10),
            ByteRange(5, 3),
            ByteRange(len(body) - 1, 1),
        ]
        expected = [body[part.start : part.start + part.length] for part in ranges]
        assert store.get_ranges("a", ranges) == expected

    def test_get_ranges_of_nothing(self, store: ObjectStore) -> None:
        self.put_raw(store, "a", b"0123456789")
        assert store.get_ranges("a", []) == []

    @pytest.mark.parametrize("part", [ByteRange(5, 6), ByteRange(10, 1), ByteRange(1_000_000, 1)])
    def test_get_ranges_past_the_end(self, store: ObjectStore, part: ByteRange) -> None:
        self.put_raw(store, "a", b"0123456789")
        with pytest.raises(StoreError):
            store.get_ranges("a", [ByteRange(0, 1), part])

    def test_get_ranges_of_what_is_not_there(self, store: ObjectStore) -> None:
        with pytest.raises(ObjectMissing):
            store.get_ranges("nothing", [ByteRange(0, 1)])
        with pytest.raises(ObjectMissing):
            store.get_ranges("nothing", [ByteRange(0, 1), ByteRange(10_000_000, 1)])

    def test_stat(self, store: ObjectStore) -> None:
        assert store.stat("folder/a") is None
        self.put_raw(store, "folder/a", b"12345")
        info = store.stat("folder/a")
        assert info is not None
        assert (info.key, info.size) == ("folder/a", 5)
        assert abs(datetime.now(UTC) - info.modified_at) < timedelta(minutes=5)
        assert store.stat("folder/b") is None

    # Listing

    def test_list_of_an_empty_store(self, store: ObjectStore) -> None:
        assert list(store.list()) == []
        assert list(store.list("folder/", start_after="folder/a")) == []

    def test_list_says_what_stat_says(self, store: ObjectStore) -> None:
        for key in ("b/2", "a", "b/1"):
            self.put_raw(store, key, key.encode() * 3)
        listed = list(store.list())
        assert [info.key for info in listed] == ["a", "b/1", "b/2"]
        for info in listed:
            described = store.stat(info.key)
            assert described is not None
            assert described.size == info.size == len(info.key) * 3
            assert abs(described.modified_at - info.modified_at) < timedelta(seconds=2)

    @pytest.mark.parametrize("left_out", ["a", "a/1"])
    def test_odd_keys(self, store: ObjectStore, left_out: str) -> None:
        keys = [key for key in ODD_KEYS if key != left_out]
        for key in reversed(keys):
            assert store.put_if_absent(key, key.encode()) == Won()
        expected, order = self._as_listed(store, keys)
        for key in keys:
            assert store.get(key) == self.get_raw(store, key) == key.encode()
            info = store.stat(key)
            assert info is not None
            assert info.size == len(key.encode())
        for start in ["", "a", "a/", "a-b/1", "b", "zzz", *keys]:
            found = [info.key for info in store.list(start_after=start)]
            assert found == [key for key in expected if order(key) > order(start)], start
        for prefix in ["a", "a/", "a ", "Ü", "Ünï/", "percent", "percent%", "nothing", "😀", *keys]:
            found = [info.key for info in store.list(prefix)]
            assert found == [key for key in expected if key.startswith(prefix)], prefix

    def test_list_of_more_than_one_page(self, store: ObjectStore) -> None:
        # Names as a writer makes them, in folders of which one name begins another.
        keys = [f"{folder}/{number:08d}.arrow" for folder in ("run", "run-2") for number in range(MANY_OBJECTS // 2)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda key: self.put_raw(store, key, b"x"), keys))
        expected, _ = self._as_listed(store, keys)
        assert [info.key for info in store.list("run/", start_after=keys[9])] == keys[10 : MANY_OBJECTS // 2]
        assert [info.key for info in store.list(start_after=expected[600])] == expected[601:]

    def _as_listed(self, store: ObjectStore, keys: list[str]) -> tuple[list[str], Callable[[str], Any]]:
        """`keys` in the one order in which this store lists them, and that order."""
        listed = [info.key for info in store.list()]
        orders: list[Callable[[str], Any]] = [byte_order, folder_order]
        order = next((order for order in orders if listed == sorted(keys, key=order)), None)
        assert order is not None, "listed in byte order of the keys or in folder order"
        return listed, order

    def test_list_knows_a_put_at_once(self, store: ObjectStore) -> None:
        for number in range(10):
            store.put_if_absent(f"a/{number}", b"x")
            assert len(list(store.list("a/"))) == number + 1

    # Deleting

    def test_delete(self, store: ObjectStore) -> None:
        self.put_raw(store, "folder/a", b"x")
        self.put_raw(store, "folder/b", b"x")
        store.delete("folder/a")
        store.delete("folder/a")
        store.delete("nothing/there")
        assert self.get_raw(store, "folder/a") is None
        assert store.stat("folder/a") is None
        assert [info.key for info in store.list()] == ["folder/b"]

    # Keys, and the rest

    @pytest.mark.parametrize("key", UNSAFE_KEYS)
    def test_unsafe_keys_are_refused(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(ValueError):
            store.put_if_absent(key, b"x")
        with pytest.raises(ValueError):
            store.get(key)
        with pytest.raises(ValueError):
            store.get_ranges(key, [ByteRange(0, 1)])
        with pytest.raises(ValueError):
            store.stat(key)
        with pytest.raises(ValueError):
            store.delete(key)
        with pytest.raises(ValueError):
            store.location(key)

    def test_one_store_serves_several_threads(self, store: ObjectStore) -> None:
        def work(number: int) -> bytes:
            key, body = f"threads/{number}", bytes([number]) * 10_000
            assert store.put_if_absent(key, body) == Won()
            first, last = store.get_ranges(key, [ByteRange(0, 10), ByteRange(9_990, 10)])
            assert first == last == body[:10]
            return store.get(key)

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(work, range(64))) == [bytes([n]) * 10_000 for n in range(64)]

    def test_a_pickled_store_is_the_same_store(self, store: ObjectStore) -> None:
        store.put_if_absent("a", b"x")
        copy = pickle.loads(pickle.dumps(store))  # noqa: S301 (made here)
        assert copy.uri == store.uri
        assert copy.get("a") == b"x"
        assert copy.put_if_absent("a", b"y") == Lost()

    def test_it_is_an_object_store(self, store: ObjectStore) -> None:
        assert isinstance(store, ObjectStore)
        assert store.location("a/b").endswith("a/b")

    def _race(self, store: ObjectStore, key: str, bodies: list[bytes]) -> list[PutOutcome]:
        barrier = Barrier(len(bodies))

        def put(body: bytes) -> PutOutcome:
            barrier.wait()
            return store.put_if_absent(key, body)

        with ThreadPoolExecutor(len(bodies)) as threads:
            return list(threads.map(put, bodies))

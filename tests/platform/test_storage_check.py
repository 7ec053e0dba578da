"""`check_store` and `ensure_safe`: they find what is wrong, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from tests.platform.s3_fake import serve

from trajlake.errors import StoreUnavailable, StoreUnsafe
from trajlake.storage import LocalStore, ObjectInfo, PutOutcome, S3Store, Won, open_store
from trajlake.storage.check import check_store, ensure_safe
from trajlake.storage.wrappers import Fault, FaultyStore

NAMES = [
    "write, read, list, delete",
    "create only if absent",
    "one winner of a race",
    "listing in order",
    "Delta commits exclude each other",
    "clocks agree",
    "latency",
]


class OverwritingStore(LocalStore):
    """What a server without If-None-Match does."""

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        self.delete(key)
        super().put_if_absent(key, data)
        return Won()


class UnorderedStore(LocalStore):
    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        return reversed(list(super().list(prefix, start_after=start_after)))


class LateStore(LocalStore):
    def stat(self, key: str) -> ObjectInfo | None:
        info = super().stat(key)
        return info and ObjectInfo(info.key, info.size, info.modified_at - timedelta(minutes=10))


def failures(store: LocalStore) -> dict[str, str]:
    return {check.name: check.detail for check in check_store(store) if not check.ok}


@pytest.mark.unit
class TestChecks:
    def test_a_store_that_overwrites(self, tmp_path: Path) -> None:
        store = OverwritingStore(tmp_path)
        assert set(failures(store)) == {"create only if absent", "one winner of a race"}
        assert "ignores If-None-Match" in failures(store)["create only if absent"]
        with pytest.raises(StoreUnsafe, match="a second writer overwrote the first"):
            ensure_safe(store)
        assert list(store.list()) == []

    def test_a_listing_out_of_order(self, tmp_path: Path) -> None:
        assert failures(UnorderedStore(tmp_path)) == {
            "listing in order": "objects are listed in the order of neither their keys nor their folders"
        }

    def test_a_clock_that_is_late(self, tmp_path: Path) -> None:
        detail = failures(LateStore(tmp_path))["clocks agree"]
        assert "the server's clock is 599 s behind" in detail

    def test_a_store_that_does_not_answer(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore(tmp_path), probability=1.0)
        (only,) = check_store(store)
        assert (only.name, only.ok) == (NAMES[0], False)
        assert "injected" in only.detail
        with pytest.raises(StoreUnavailable):
            ensure_safe(FaultyStore(LocalStore(tmp_path), [Fault()]))

    def test_an_s3_server_without_conditions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with serve() as server:
            store = S3Store("bucket", endpoint=server.url)
            ensure_safe(store)
            server.ignores_conditions = True
            with pytest.raises(StoreUnsafe, match=server.url):
                ensure_safe(store)
            assert server.objects == {}


def test_every_check_passes(lake_uri: str) -> None:
    store = open_store(lake_uri)
    ensure_safe(store)
    checks = check_store(store)
    assert [check.name for check in checks] == NAMES
    assert [check for check in checks if not check.ok] == []
    assert list(store.list()) == []

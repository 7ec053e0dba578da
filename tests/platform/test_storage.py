"""Both stores, and both wrappers, against the conformance suite; `open_store`; the local store's own promises."""

from __future__ import annotations

import errno
import io
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from minio import Minio
from minio.error import S3Error

from trajlake.errors import AccessRefused, ObjectMissing, StoreError, StoreUnavailable, StoreUnsafe, UsageError
from trajlake.storage import LocalStore, ObjectStore, S3Store, Unknown, Won, open_store
from trajlake.storage.wrappers import CountingStore, Fault, FaultyStore, Moment
from trajlake.testing import StoreConformance


class LocalBackDoor(StoreConformance):
    def put_raw(self, store: ObjectStore, key: str, data: bytes) -> None:
        path = Path(store.uri) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def get_raw(self, store: ObjectStore, key: str) -> bytes | None:
        path = Path(store.uri) / key
        return path.read_bytes() if path.exists() else None


@pytest.mark.unit
class TestLocalStore(LocalBackDoor):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "root")


@pytest.mark.unit
class TestWrappedStore(LocalBackDoor):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return CountingStore(FaultyStore(LocalStore(tmp_path / "root")))


@pytest.mark.s3
class TestS3Store(StoreConformance):
    @pytest.fixture
    def store(self, s3_uri: str) -> ObjectStore:
        return open_store(s3_uri)

    def put_raw(self, store: ObjectStore, key: str, data: bytes) -> None:
        self._client().put_object("trajlake", self._name(store, key), io.BytesIO(data), len(data))

    def get_raw(self, store: ObjectStore, key: str) -> bytes | None:
        try:
            with self._client().get_object("trajlake", self._name(store, key)) as answer:
                return answer.read()
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise

    def _name(self, store: ObjectStore, key: str) -> str:
        return f"{store.uri.removeprefix('s3://trajlake/')}/{key}"

    def _client(self) -> Minio:
        return Minio(
            os.environ["AWS_ENDPOINT_URL"].partition("://")[2],
            os.environ["AWS_ACCESS_KEY_ID"],
            os.environ["AWS_SECRET_ACCESS_KEY"],
            secure=os.environ["AWS_ENDPOINT_URL"].startswith("https"),
            region="us-east-1",
        )


@pytest.mark.unit
class TestLocalPromises:
    def test_reading_makes_no_folder(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "root")
        assert list(store.list()) == []
        assert store.stat("a") is None
        assert not (tmp_path / "root").exists()

    def test_unfinished_files_are_hidden(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.put_if_absent("a", b"x")
        (tmp_path / ".tmp" / "123-unfinished").write_bytes(b"half")
        assert [info.key for info in store.list()] == ["a"]
        for key in (".tmp/123-unfinished", ".tmp"):
            with pytest.raises(ValueError, match="unfinished"):
                store.get(key)
        assert store.put_if_absent("folder/.tmp/a", b"x") == Won()
        assert [info.key for info in store.list("folder/")] == ["folder/.tmp/a"]

    def test_leftovers_of_killed_processes_are_removed_when_old(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp").mkdir()
        for name, age in (("old", 2 * 86_400), ("young", 60)):
            (tmp_path / ".tmp" / name).write_bytes(b"half")
            os.utime(tmp_path / ".tmp" / name, (time.time() - age,) * 2)
        LocalStore(tmp_path).put_if_absent("a", b"x")
        assert os.listdir(tmp_path / ".tmp") == ["young"]

    def test_a_key_cannot_be_the_folder_of_another(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        store.put_if_absent("a", b"x")
        with pytest.raises(StoreError, match="is an object, so no object can be in it"):
            store.put_if_absent("a/b", b"x")
        with pytest.raises(ObjectMissing):
            store.get("a/b")
        store.delete("a/b")
        assert os.listdir(tmp_path / ".tmp") == []

    def test_empty_folders_go_with_their_last_object(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "root")
        store.put_if_absent("a/b/c", b"x")
        store.put_if_absent("a/d", b"x")
        store.delete("a/b/c")
        assert sorted(os.listdir(tmp_path / "root" / "a")) == ["d"]
        store.delete("a/d")
        assert os.listdir(tmp_path / "root") == [".tmp"]

    def test_puts_and_deletes_in_one_folder_do_not_hinder_each_other(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)

        def work(number: int) -> None:
            for _ in range(50):
                assert store.put_if_absent(f"deep/folder/{number}", b"x") == Won()
                store.delete(f"deep/folder/{number}")

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        assert os.listdir(tmp_path) == [".tmp"]

    @pytest.mark.parametrize("step", ["write", "fsync", "link"])
    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
        store = LocalStore(tmp_path)
        store.put_if_absent("before", b"x")

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if step == "write":
            monkeypatch.setattr("trajlake.storage.local._write_durably", refuse)
        else:
            monkeypatch.setattr(os, step, refuse)
        with pytest.raises(StoreUnavailable, match="No space left on device; free some space") as caught:
            store.put_if_absent("a", b"x")
        assert str(tmp_path) in str(caught.value)
        monkeypatch.undo()
        assert os.listdir(tmp_path / ".tmp") == []
        assert [info.key for info in store.list()] == ["before"]
        assert store.put_if_absent("a", b"x") == Won()

    def test_a_file_system_without_hard_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(StoreUnsafe, match="hard links"):
            LocalStore(tmp_path).put_if_absent("a", b"x")

    def test_a_read_only_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        # Permissions do not stop the superuser, as whom tests may run.
        monkeypatch.setattr(os, "mkdir", refuse)
        with pytest.raises(AccessRefused, match="check the folder's permissions"):
            LocalStore(tmp_path).put_if_absent("a", b"x")

    def test_links_out_of_the_folder_are_not_listed(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret").write_bytes(b"x")
        store = LocalStore(tmp_path / "root")
        store.put_if_absent("a", b"x")
        (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
        (tmp_path / "root" / "file").symlink_to(tmp_path / "outside" / "secret")
        assert [info.key for info in store.list()] == ["a"]
        assert list(store.list("../outside/")) == []
        (tmp_path / "root" / "nowhere").symlink_to(tmp_path / "nothing")
        with pytest.raises(StoreError, match="nowhere/a"):
            store.put_if_absent("nowhere/a", b"x")


@pytest.mark.unit
class TestOpenStore:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith(("AWS_", "MINIO_")):
                monkeypatch.delenv(name)

    def test_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        for uri in (tmp_path / "a b", f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a b", "a b", "~/a b"):
            store = open_store(uri)
            assert isinstance(store, LocalStore)
            assert store.uri == str(tmp_path / "a b")
            assert store.location("k") == str(tmp_path / "a b" / "k")
            assert store.storage_options() is None

    @pytest.mark.parametrize(
        ("uri", "again", "endpoint"),
        [
            ("s3://bucket", "s3://bucket", "https://s3.amazonaws.com"),
            ("s3://bucket/", "s3://bucket", "https://s3.amazonaws.com"),
            ("s3://bucket/a/b?c#d/", "s3://bucket/a/b?c#d", "https://s3.amazonaws.com"),
            ("s3+http://host:9000/bucket", "s3+http://host:9000/bucket", "http://host:9000"),
            ("s3+https://host/bucket/a/", "s3+https://host/bucket/a", "https://host"),
        ],
    )
    def test_buckets(self, uri: str, again: str, endpoint: str) -> None:
        store = open_store(uri)
        assert isinstance(store, S3Store)
        assert store.uri == open_store(store.uri).uri == again
        assert endpoint in repr(store)
        assert store.location("k") == "s3://bucket" + again.partition("bucket")[2] + "/k"

    @pytest.mark.parametrize(
        ("variables", "endpoint"),
        [
            ({"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "https://b"}, "https://b"),
            ({"AWS_ENDPOINT_URL": "http://a:1/", "MINIO_ENDPOINT": "http://c"}, "http://a:1"),
            ({"MINIO_ENDPOINT": "c:9000"}, "https://c:9000"),
            ({"MINIO_ENDPOINT": "c:9000", "MINIO_SECURE": "false"}, "http://c:9000"),
            ({"MINIO_ENDPOINT": "http://c:9000"}, "http://c:9000"),
        ],
    )
    def test_endpoints(self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], endpoint: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert f"'{endpoint}'" in repr(open_store("s3://bucket"))

    @pytest.mark.parametrize(
        "uri",
        [
            "", "gs://bucket/lake", "http://host/bucket", "s3:/bucket", "s3://", "s3:///lake", "s3+http://host:9000",
            "s3://b", "s3://host:9000/bucket", "s3://bucket/a//b", "s3://bucket/a/../b", "file://host/folder",
            "s3+http://key:secret@host/bucket", "s3://192.168.1.1/bucket",
        ],
    )  # fmt: skip
    def test_other_addresses_are_refused(self, uri: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_store(uri)
        assert "secret" not in str(caught.value).replace("SECRET", "")

    def test_an_endpoint_that_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
        with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL is not an endpoint.*want http://host:port"):
            open_store("s3://bucket")


@pytest.mark.unit
class TestWrappers:
    def test_counting(self, tmp_path: Path) -> None:
        store = CountingStore(LocalStore(tmp_path))
        store.put_if_absent("a", b"12345")
        store.get("a")
        store.get("a")
        store.stat("a")
        list(store.list("x"))
        assert store.calls == {"put_if_absent": 1, "get": 2, "stat": 1, "list": 1}
        assert (store.bytes["put_if_absent"], store.bytes["get"]) == (5, 10)
        assert store.log == [("put_if_absent", "a"), ("get", "a"), ("get", "a"), ("stat", "a"), ("list", "x")]
        store.reset()
        assert store.log == []

    def test_a_lost_answer(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore(tmp_path), [Fault(moment=Moment.AFTER)])
        outcome = store.put_if_absent("a", b"x")
        assert isinstance(outcome, Unknown)
        assert isinstance(outcome.error, StoreUnavailable)
        assert store.store.get("a") == b"x"
        assert store.put_if_absent("a", b"x") == Won()

    def test_a_put_that_never_arrived(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore(tmp_path), [Fault(key="b"), Fault(key="a", is_raised=True)])
        assert store.put_if_absent("c", b"x") == Won()
        with pytest.raises(StoreUnavailable):
            store.put_if_absent("a", b"x")
        assert isinstance(store.put_if_absent("b", b"x"), Unknown)
        assert [info.key for info in store.list()] == ["c"]
        assert len(store.struck) == 2

    def test_faults_of_other_operations(self, tmp_path: Path) -> None:
        store = FaultyStore(LocalStore(tmp_path))
        store.put_if_absent("a", b"x")
        store.add(
            Fault("get"), Fault("delete", moment=Moment.AFTER), Fault("list"), Fault("stat", "a", Moment.NEVER, 0.05)
        )
        with pytest.raises(StoreUnavailable, match="injected: get of 'a' failed before"):
            store.get("a")
        assert store.get("a") == b"x"
        started = time.monotonic()
        assert store.stat("a") is not None
        assert time.monotonic() - started >= 0.05
        with pytest.raises(StoreUnavailable):
            store.delete("a")
        assert store.stat("a") is None
        with pytest.raises(StoreUnavailable):
            list(store.list())
        with pytest.raises(ValueError, match="no operation 'put'"):
            Fault("put")

    def test_chance_is_repeatable(self, tmp_path: Path) -> None:
        def run(name: str, seed: int) -> list[bool]:
            store = FaultyStore(LocalStore(tmp_path / name), probability=0.5, seed=seed, operations=["put_if_absent"])
            return [store.put_if_absent(f"{number}", b"x") == Won() for number in range(40)]

        first = run("a", 1)
        assert first == run("b", 1) != run("c", 2)
        assert 5 < sum(first) < 35

"""What `S3Store` promises when the server, or the network before it, misbehaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.platform.s3_fake import FakeS3, Trouble, serve

from trajlake.errors import AccessRefused, BucketMissing, ObjectMissing, StoreError, StoreUnavailable
from trajlake.storage import ByteRange, Lost, S3Store, Unknown, Won
from trajlake.storage import s3 as s3_module
from trajlake.storage.s3 import merge_ranges

pytestmark = pytest.mark.unit

SECRET = "the-secret-of-these-tests"
PASSING = [
    Trouble(500),
    Trouble(502, is_xml=False),
    Trouble(503),
    Trouble(503, is_xml=False),
    Trouble(504, is_xml=False),
    Trouble(429),
    Trouble(409),
    Trouble(400, code="RequestTimeout"),
    Trouble(None),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "MINIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_SECONDS", 0.005)


@pytest.fixture
def server() -> Iterator[FakeS3]:
    with serve() as state:
        yield state


@pytest.fixture
def store(server: FakeS3) -> S3Store:
    return S3Store("bucket", "lake", endpoint=server.url, patience=5.0)


def impatient(server: FakeS3, **options: float) -> S3Store:
    return S3Store("bucket", "lake", endpoint=server.url, **{"patience": 0.2, **options})


@pytest.mark.parametrize("trouble", PASSING, ids=str)
def test_what_can_pass_is_repeated(server: FakeS3, store: S3Store, trouble: Trouble) -> None:
    server.troubles += [trouble] * 3
    assert store.put_if_absent("a", b"x") == Won()
    assert server.seen == ["PUT"] * 4
    server.troubles += [trouble] * 2
    assert store.get("a") == b"x"
    server.troubles += [trouble]
    store.delete("a")
    assert server.objects == {}


@pytest.mark.parametrize(
    "trouble",
    [
        Trouble(500, after=True),
        Trouble(503, after=True),
        Trouble(504, after=True, is_xml=False),
        Trouble(None, after=True),
    ],
    ids=str,
)
def test_a_put_whose_answer_was_lost_is_won(server: FakeS3, store: S3Store, trouble: Trouble) -> None:
    server.troubles += [trouble]
    assert store.put_if_absent("a", b"mine") == Won()
    assert server.seen == ["PUT", "PUT", "GET"]
    assert server.objects == {"/bucket/lake/a": b"mine"}


def test_a_put_that_lost_behind_a_lost_answer_is_lost(server: FakeS3, store: S3Store) -> None:
    server.objects["/bucket/lake/a"] = b"theirs"
    server.troubles += [Trouble(None), Trouble(503)]
    assert store.put_if_absent("a", b"mine") == Lost()
    assert server.objects == {"/bucket/lake/a": b"theirs"}


def test_finding_out_whose_it_is_survives_trouble_too(server: FakeS3, store: S3Store) -> None:
    server.troubles += [Trouble(None, after=True), Trouble(412), Trouble(503), Trouble(None)]
    assert store.put_if_absent("a", b"mine") == Won()
    assert server.seen == ["PUT", "PUT", "GET", "GET", "GET"]


def test_an_object_that_is_deleted_before_we_look_is_put_again(server: FakeS3, store: S3Store) -> None:
    server.troubles += [Trouble(412)]
    assert store.put_if_absent("a", b"mine") == Won()
    assert server.seen == ["PUT", "GET", "PUT"]


def test_a_slow_answer_is_not_waited_for_and_not_counted_twice(server: FakeS3) -> None:
    store = S3Store("bucket", "lake", endpoint=server.url, patience=5.0, read_seconds=0.2)
    server.troubles += [Trouble(200, after=True, delay=0.6)]
    assert store.put_if_absent("a", b"mine") == Won()
    assert server.seen == ["PUT", "PUT", "GET"]


def test_when_patience_ends_the_outcome_is_unknown_and_asking_again_settles_it(server: FakeS3) -> None:
    store = impatient(server)
    server.troubles += [Trouble(None, after=True)] + [Trouble(503)] * 100
    outcome = store.put_if_absent("a", b"mine")
    assert isinstance(outcome, Unknown)
    assert isinstance(outcome.error, StoreUnavailable)
    assert "answered 503 (SlowDown: told to)" in str(outcome.error)
    server.troubles.clear()
    assert store.put_if_absent("a", b"mine") == Won()
    assert store.put_if_absent("a", b"other") == Lost()


def test_when_patience_ends_other_calls_raise(server: FakeS3) -> None:
    store = impatient(server)
    for call in (
        lambda: store.get("a"),
        lambda: store.stat("a"),
        lambda: store.delete("a"),
        lambda: list(store.list()),
    ):
        server.troubles = [Trouble(503)] * 100
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="503"):
            call()
        assert time.monotonic() - started < 2.0


def test_a_body_that_breaks_off_is_not_taken_for_the_object(server: FakeS3, store: S3Store) -> None:
    server.objects["/bucket/lake/a"] = b"x" * 1000
    server.troubles += [Trouble(None)]
    assert store.get("a") == b"x" * 1000


def test_a_server_that_ignores_conditions_is_not_noticed_by_a_put(server: FakeS3, store: S3Store) -> None:
    # Why `ensure_safe` exists: nothing in the answer tells.
    server.ignores_conditions = True
    assert store.put_if_absent("a", b"first") == Won()
    assert store.put_if_absent("a", b"other") == Won()
    assert store.get("a") == b"other"


@pytest.mark.parametrize(
    ("trouble", "error", "words"),
    [
        (
            Trouble(403, code="InvalidAccessKeyId"),
            AccessRefused,
            "the keys that were found are not its; set AWS_ACCESS",
        ),
        (Trouble(403, code="AccessDenied"), AccessRefused, "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (Trouble(403, code="SignatureDoesNotMatch"), AccessRefused, "MINIO_SECRET_KEY"),
        (Trouble(403, code="AccessDenied"), AccessRefused, "on bucket 'bucket'"),
        (Trouble(403, code="RequestTimeTooSkewed"), AccessRefused, "set the clock"),
        (Trouble(400, code="AuthorizationHeaderMalformed"), AccessRefused, "AWS_REGION"),
        (Trouble(400, code="ExpiredToken"), AccessRefused, "AWS_SESSION_TOKEN"),
        (Trouble(404, code="NoSuchBucket"), BucketMissing, "bucket 'bucket' does not exist at http://127.0.0.1:"),
        (Trouble(405, is_xml=False), StoreError, "AWS_ENDPOINT_URL"),
        (Trouble(400, code="EntityTooLarge"), StoreError, "EntityTooLarge"),
    ],
    ids=str,
)
def test_what_cannot_pass_is_said_at_once(
    server: FakeS3, store: S3Store, trouble: Trouble, error: type[StoreError], words: str
) -> None:
    for call in (lambda: store.put_if_absent("a", b"x"), lambda: store.get("a"), lambda: list(store.list())):
        server.troubles = [trouble]
        server.seen.clear()
        with pytest.raises(error) as caught:
            call()
        assert len(server.seen) == 1
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert SECRET not in repr(caught.value)


def test_a_page_of_a_web_server_is_no_listing(server: FakeS3, store: S3Store) -> None:
    store.put_if_absent("a", b"x")
    server.objects["/bucket"] = b"<html><body>Welcome<br></body></html>"
    with pytest.raises(StoreError, match="does not answer as an S3 server does"):
        list(store.list())


def test_keys_out_of_order_are_refused(server: FakeS3, store: S3Store) -> None:
    entry = "<Contents><Key>lake/{}</Key><Size>1</Size><LastModified>2024-01-01T00:00:00Z</LastModified></Contents>"
    listing = "".join(map(entry.format, ("a/b", "a-b")))
    server.objects["/bucket"] = f"<ListBucketResult><Name>bucket</Name>{listing}</ListBucketResult>".encode()
    with pytest.raises(StoreError, match=r"lists 'a-b' after 'a/b': out of order"):
        list(store.list())


def test_without_a_server_it_gives_up_soon() -> None:
    store = S3Store("bucket", endpoint="http://127.0.0.1:1", connect_patience=0.3)
    started = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"cannot reach http://127.0.0.1:1: Connection refused; is it running"):
        store.get("a")
    assert isinstance(store.put_if_absent("a", b"x"), Unknown)
    assert time.monotonic() - started < 3.0


def test_a_server_that_answered_before_is_waited_for() -> None:
    with serve() as server:
        store = S3Store("bucket", endpoint=server.url, patience=0.6, connect_patience=0.0)
        store.put_if_absent("a", b"x")
        copy = pickle.loads(pickle.dumps(store))
    for one in (store, copy):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            one.get("a")
        assert time.monotonic() - started > 0.5


def test_an_outage_is_said_once_before_the_patience_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3_module, "_SILENT_SECONDS", 0.1)
    with serve() as server:
        store = S3Store("bucket", endpoint=server.url, patience=0.5)
        store.put_if_absent("a", b"x")
    for _ in range(2):
        assert isinstance(store.put_if_absent("b", b"x"), Unknown)
    [line] = [record.getMessage() for record in caplog.records if record.name == "trajlake"]
    assert "trying again for up to 0 s: cannot reach" in line


def test_tls_against_a_plain_server(server: FakeS3) -> None:
    store = S3Store("bucket", endpoint=server.url.replace("http:", "https:"), connect_patience=0.1)
    with pytest.raises(StoreUnavailable, match="use http:// instead of https://"):
        store.get("a")


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_no_credentials(server: FakeS3, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delenv(missing)
    with pytest.raises(AccessRefused, match=r"no credentials for http://127\.0\.0\.1.*set AWS_ACCESS_KEY_ID"):
        impatient(server).get("a")
    assert server.seen == []


def test_credentials_of_a_profile_and_of_minio(server: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def keys() -> tuple[str, ...]:
        options = impatient(server).storage_options()
        assert options is not None
        return options["AWS_ACCESS_KEY_ID"], options["AWS_SECRET_ACCESS_KEY"], options.get("AWS_SESSION_TOKEN", "")

    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert keys() == ("key", SECRET, "token")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[lab]\naws_access_key_id = k2\naws_secret_access_key = s2\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert keys() == ("k2", "s2", "")
    monkeypatch.setenv("MINIO_ACCESS_KEY", "k3")
    monkeypatch.setenv("MINIO_SECRET_KEY", "s3")
    assert keys() == ("k3", "s3", "")


def test_storage_options(server: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert impatient(server).storage_options() == {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "eu-west-3",
        "AWS_CHECKSUM_ALGORITHM": "SHA256",
    }
    assert S3Store("bucket").storage_options() == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "eu-west-3",
        "AWS_CHECKSUM_ALGORITHM": "SHA256",
    }


def test_secrets_are_in_no_text_and_no_pickle(store: S3Store) -> None:
    store.put_if_absent("a", b"x")
    assert SECRET not in repr(store)
    assert SECRET.encode() not in pickle.dumps(store)
    assert pickle.loads(pickle.dumps(store)).get("a") == b"x"


def _read(store: S3Store, answers: multiprocessing.SimpleQueue[bytes]) -> None:
    answers.put(store.get("a"))


def test_a_forked_process_does_not_share_the_connection(server: FakeS3, store: S3Store) -> None:
    store.put_if_absent("a", b"x" * 100_000)
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.SimpleQueue[bytes] = context.SimpleQueue()
    children = [context.Process(target=_read, args=(store, answers)) for _ in range(3)]
    for child in children:
        child.start()
    assert [store.get("a") for _ in range(20)] == [b"x" * 100_000] * 20
    assert [answers.get() for _ in children] == [b"x" * 100_000] * 3
    for child in children:
        child.join()
        assert child.exitcode == 0


def test_missing_objects(store: S3Store) -> None:
    with pytest.raises(ObjectMissing, match="no object 'lake/a' in bucket 'bucket' at http://127"):
        store.get("a")


def test_ranges_are_merged_where_one_request_is_cheaper() -> None:
    kilobyte = 1024
    ranges = [
        ByteRange(2_100 * kilobyte, 10),
        ByteRange(0, 10),
        ByteRange(10, 10),
        ByteRange(5, 3),
        ByteRange(1_000 * kilobyte, kilobyte),
        ByteRange(20_000 * kilobyte, 9_000 * kilobyte),
        ByteRange(30_100 * kilobyte, 10),
    ]
    assert merge_ranges(ranges) == [
        (ByteRange(0, 1_001 * kilobyte), [1, 3, 2, 4]),
        (ByteRange(2_100 * kilobyte, 10), [0]),
        (ByteRange(20_000 * kilobyte, 9_000 * kilobyte), [5]),
        (ByteRange(30_100 * kilobyte, 10), [6]),
    ]
    assert merge_ranges([]) == []

"""Objects in a bucket of an S3 server, through the MinIO SDK.

The SDK's client does one request; everything that makes it a store is here: repeating what can pass, finding out
what became of a put whose answer was lost, and saying what to do when it does not pass.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from xml.etree import ElementTree

import urllib3
from minio.datatypes import Object, parse_list_objects
from minio.error import MinioException
from minio.helpers import check_bucket_name
from minio.time import from_http_header
from urllib3.exceptions import HTTPError

from trajlake.errors import ObjectMissing, StoreError, StoreUnavailable, UsageError
from trajlake.storage.base import (
    CONNECT_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    ByteRange,
    Lost,
    ObjectInfo,
    PutOutcome,
    Unknown,
    Won,
    byte_order,
    check_key,
    folder_order,
)
from trajlake.storage.s3_client import READ_SECONDS, S3Client, find_endpoint, find_region
from trajlake.storage.s3_errors import UNREACHABLE, AlreadyThereError, explain

log = logging.getLogger("trajlake")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_SILENT_SECONDS = 2.0  # what passes sooner is nobody's concern
_SAY_AGAIN_SECONDS = 30.0

FIRST_PAGE = 100  # keys: who lists what is new after a key often needs no more, and others ask once more

RANGE_THREADS = 8
RANGE_GAP = 1 << 20  # what a server sends in the time of another request; as in the Rust crate object_store
RANGE_LIMIT = 8 * 1024 * 1024
"""Ranges at most RANGE_GAP bytes apart are read by one request, as long as it is no larger than RANGE_LIMIT."""

Answer = TypeVar("Answer")


class S3Store:
    """An `ObjectStore` below `prefix` in `bucket`.

    `endpoint` is a URL, by default from the environment (see `s3_client`). Failures that can pass are repeated for
    `patience` seconds; a server that has never answered is given up after `connect_patience` seconds, because the
    address is wrong or it is not started. One attempt waits at most `read_seconds` for an answer.

    Copies and pickles hold no credentials: each process reads its own environment.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        patience: float = PATIENCE_SECONDS,
        connect_patience: float = CONNECT_PATIENCE_SECONDS,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        try:
            check_bucket_name(bucket)
            self._root = check_key(prefix.strip("/")) + "/" if prefix.strip("/") else ""
        except ValueError as error:
            raise UsageError(f"not the address of a bucket: s3://{bucket}/{prefix} ({error})") from error
        self._bucket = bucket
        self._endpoint = find_endpoint(endpoint)
        self._is_explicit = endpoint is not None
        self._region = region or find_region(self._endpoint)
        self._patience = patience
        self._connect_patience = connect_patience
        self._read_seconds = read_seconds
        self._has_answered = False
        self._said_at = float("-inf")
        self._keeps_tree_order: bool | None = None
        self._client = S3Client(self._endpoint, self._region, read_seconds)
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r}, endpoint={self._endpoint.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_client", "_process"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = 0

    @property
    def uri(self) -> str:
        """`s3://bucket/prefix`, or `s3+http://host:port/bucket/prefix` where the endpoint was named."""
        path = f"{self._bucket}/{self._root}".rstrip("/")
        return f"s3+{self._endpoint.url}/{path}" if self._is_explicit else f"s3://{path}"

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        """PUT with `If-None-Match: *`; where an object is there already, its bytes say whose it is.

        `Unknown` when no answer came within the patience. Raises `BucketMissing`, `AccessRefused`, `StoreError`.
        """
        name, body, patience = self._name(key), bytes(data), self._new_patience()
        # Without a digest SeaweedFS makes an empty object of a put whose sender died after the headers.
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode("ascii")
        headers = {"If-None-Match": "*", "Content-MD5": digest}
        try:
            while True:
                try:
                    self._send("PUT", name, patience, body=body, headers=headers)
                    return Won()
                except AlreadyThereError:
                    # Ours, if an earlier answer was lost, here or in a process that was killed.
                    try:
                        found = self._send("GET", name, patience).data
                    except ObjectMissing as error:
                        patience.wait(StoreUnavailable(f"{key!r} is there and is not: {error}"))
                        continue
                    return Won() if found == body else Lost()
        except StoreUnavailable as error:
            return Unknown(error)

    def get(self, key: str) -> bytes:
        """The whole object. Raises `ObjectMissing`."""
        return self._send("GET", self._name(key), self._new_patience()).data

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Ranges of one object, near ones by one request and the others by several at a time."""
        name = self._name(key)
        spans = merge_ranges(ranges)
        if len(spans) <= 1:
            contents = [self._get_range(name, span) for span, _ in spans]
        else:
            with ThreadPoolExecutor(min(RANGE_THREADS, len(spans))) as threads:
                contents = list(threads.map(lambda item: self._get_range(name, item[0]), spans))
        found = [b""] * len(ranges)
        for (span, positions), content in zip(spans, contents, strict=True):
            for position in positions:
                begin = ranges[position].start - span.start
                found[position] = content[begin : begin + ranges[position].length]
        return found

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects in byte order of their keys, on SeaweedFS in folder order; a page of up to 1,000 at a time.

        Raises `StoreError` where the server keeps neither order, since then a listing after a key could miss some.
        """
        if self._keeps_tree_order is None:
            self._look_at_bucket()
        begin = start_after
        if self._keeps_tree_order:
            # SeaweedFS looks at a key outside of the prefix as bytes, and leaves out a whole folder of that name.
            # Without its last character it comes earlier, and next to nothing lies between.
            begin = start_after.rstrip("/")[:-1] if start_after.startswith(prefix) else ""
        order: Callable[[str], Any] = folder_order if self._keeps_tree_order else byte_order
        after, previous = order(start_after), ""
        for info in self._list_as_served(prefix, begin):
            place = order(info.key)
            if place <= order(previous):
                raise StoreError(f"{self._endpoint.url} lists {info.key!r} after {previous!r}: out of order")
            previous = info.key
            if place > after:
                yield info

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and time of creation, or None where there is none."""
        try:
            headers = self._send("HEAD", self._name(key), self._new_patience()).headers
        except ObjectMissing:
            if not self._has_answered:
                # An answer to HEAD has no body, so that a missing bucket looks like a missing object.
                self._look_at_bucket()
            return None
        return ObjectInfo(key, int(headers["content-length"]), from_http_header(headers["last-modified"]))

    def delete(self, key: str) -> None:
        """Remove the object; fine where it is gone already."""
        try:
            self._send("DELETE", self._name(key), self._new_patience())
        except ObjectMissing:
            return

    def location(self, key: str) -> str:
        """`s3://bucket/prefix/key`."""
        return f"s3://{self._bucket}/{self._name(key)}"

    def storage_options(self) -> dict[str, str] | None:
        """Endpoint, region and credentials by the names that deltalake and Polars know. Holds the secret."""
        region = self._repeat(lambda client: client.region_of(self._bucket), None, self._new_patience())
        credentials = self._connection().credentials()
        options = {
            "AWS_ACCESS_KEY_ID": credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
            "AWS_REGION": region,
            "AWS_CHECKSUM_ALGORITHM": "SHA256",  # for the reason that put_if_absent gives
        }
        if credentials.session_token:
            options["AWS_SESSION_TOKEN"] = credentials.session_token
        if not self._endpoint.is_aws:
            options["AWS_ENDPOINT_URL"] = self._endpoint.url
        if not self._endpoint.is_secure:
            options["AWS_ALLOW_HTTP"] = "true"
        return options

    def _name(self, key: str) -> str:
        return self._root + check_key(key)

    def _connection(self) -> S3Client:
        # Sockets must not be shared with the process that forked us.
        if self._process != os.getpid():
            self._client = S3Client(self._endpoint, self._region, self._read_seconds)
            self._process = os.getpid()
        return self._client

    def _look_at_bucket(self) -> None:
        """Raise what is wrong with the bucket, by a request that is answered with reasons, which HEAD is not."""
        query = {"list-type": "2", "max-keys": "1", "prefix": self._root}
        self._send("GET", None, self._new_patience(), query=query)

    def _get_range(self, name: str, span: ByteRange) -> bytes:
        header = f"bytes={span.start}-{span.start + span.length - 1}"
        content = self._send("GET", name, self._new_patience(), headers={"Range": header}).data
        if len(content) != span.length:
            raise StoreError(f"{span} of {name!r} gave {len(content)} bytes: it reaches past the end")
        return content

    def _list_as_served(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        query = {"list-type": "2", "encoding-type": "url", "delimiter": "", "prefix": self._root + prefix}
        query["max-keys"] = str(FIRST_PAGE)
        if start_after:
            query["start-after"] = self._root + start_after
        more = True
        while more:
            answer = self._send("GET", None, self._new_patience(), query=query)
            try:
                found, more, token, _ = parse_list_objects(answer)
            except (ElementTree.ParseError, ValueError) as error:
                raise StoreError(f"{self._endpoint.url} does not answer as an S3 server does: {error}") from error
            query["continuation-token"] = token or ""
            query["max-keys"] = "1000"
            yield from (self._describe(entry) for entry in found if not entry.is_dir)

    def _describe(self, entry: Object) -> ObjectInfo:
        assert entry.object_name is not None
        assert entry.size is not None
        assert entry.last_modified is not None
        return ObjectInfo(entry.object_name[len(self._root) :], entry.size, entry.last_modified)

    def _new_patience(self) -> _Patience:
        return _Patience(self._patience, self._say)

    def _say(self, failure: StoreUnavailable) -> None:
        """An outage must be seen before the patience ends, and not by each of many threads."""
        if time.monotonic() - self._said_at >= _SAY_AGAIN_SECONDS:
            self._said_at = time.monotonic()
            log.warning("trying again for up to %.0f s: %s", self._patience, failure)

    def _send(
        self,
        method: str,
        name: str | None,
        patience: _Patience,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """The answer to a request on the object `name`, or on the bucket."""
        answer = self._repeat(
            lambda client: client.request(method, self._bucket, name, body=body, headers=headers, query=query),
            name,
            patience,
        )
        self._keeps_tree_order = "seaweedfs" in answer.headers.get("server", "").lower()
        return answer

    def _repeat(self, call: Callable[[S3Client], Answer], name: str | None, patience: _Patience) -> Answer:
        """The result of `call`, which is repeated while its failure can pass and `patience` lasts."""
        while True:
            try:
                answer = call(self._connection())
            except (MinioException, HTTPError, ElementTree.ParseError) as error:
                failure = explain(error, self._endpoint.url, self._bucket, name)
                if not isinstance(failure, StoreUnavailable):
                    raise failure from error
                gives_up_early = isinstance(error, UNREACHABLE) and not self._has_answered
                patience.wait(failure, self._connect_patience if gives_up_early else None)
            else:
                self._has_answered = True
                return answer


class _Patience:
    """How long one call goes on trying, with pauses that double and differ between workers."""

    def __init__(self, seconds: float, say: Callable[[StoreUnavailable], None]) -> None:
        self._seconds = seconds
        self._say = say
        self._started = time.monotonic()
        self._pause = FIRST_PAUSE_SECONDS

    def wait(self, failure: StoreUnavailable, at_most: float | None = None) -> None:
        """Pause before the next attempt. Raises `failure` when `seconds`, or `at_most` of them, have passed."""
        limit = self._seconds if at_most is None else min(self._seconds, at_most)
        remaining = self._started + limit - time.monotonic()
        if remaining <= 0:
            raise failure
        if at_most is None and time.monotonic() - self._started >= _SILENT_SECONDS:
            self._say(failure)
        time.sleep(min(remaining, self._pause * random.uniform(0.5, 1.0)))  # noqa: S311 (no secret)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def merge_ranges(ranges: Sequence[ByteRange]) -> list[tuple[ByteRange, list[int]]]:
    """Spans that cover `ranges`, each with the positions in `ranges` of those that it holds."""
    spans: list[tuple[ByteRange, list[int]]] = []
    for position in sorted(range(len(ranges)), key=lambda i: ranges[i].start):
        part = ranges[position]
        if spans:
            span, positions = spans[-1]
            span_end = span.start + span.length
            length = max(span_end, part.start + part.length) - span.start
            if part.start <= span_end + RANGE_GAP and length <= max(RANGE_LIMIT, span.length):
                spans[-1] = (ByteRange(span.start, length), [*positions, position])
                continue
        spans.append((part, [position]))
    return spans

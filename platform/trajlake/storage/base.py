"""What an object store is: seven calls on immutable objects.

Nothing is ever overwritten. `put_if_absent` is the only way to create an object and is atomic: of any number
of racing calls for one key exactly one wins. `trajlake.testing.StoreConformance` is the definition in tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

PATIENCE_SECONDS = 30.0  # how long a server that answers with troubles is asked again, see S3Store
CONNECT_PATIENCE_SECONDS = 2.0  # and one that does not answer


@dataclass(frozen=True)
class ObjectInfo:
    """One object: its key below the store's root, its size in bytes, and when the server says it was written."""

    key: str
    size: int
    modified_at: datetime


@dataclass(frozen=True)
class Won:
    """The object was created by this call, and is durable."""


@dataclass(frozen=True)
class Lost:
    """An object with this key was there before, with other content or from another writer."""


@dataclass(frozen=True)
class Unknown:
    """The server gave no usable answer: the object may or may not be there. Repeat the same call to find out."""

    error: Exception


PutOutcome = Won | Lost | Unknown


@dataclass(frozen=True)
class ByteRange:
    """`length` bytes from `start`; both in bytes, `start >= 0`, `length >= 1`."""

    start: int
    length: int


@runtime_checkable
class ObjectStore(Protocol):
    """A flat space of immutable objects below one root.

    Keys are relative, `/`-separated, without empty, `.` or `..` parts. Every call may raise `BucketMissing`,
    `AccessRefused` or `StoreUnavailable`; calls are safe from several threads.
    """

    @property
    def uri(self) -> str:
        """The root as people write it: `s3://bucket/prefix` or an absolute folder."""
        ...

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        """Create the object whole or not at all. A repeated call with equal bytes after an answer that was lost
        gives `Won`, so a caller may retry for as long as it likes."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises `ObjectMissing`."""
        ...

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Several ranges of one object, in the order asked for. Raises `ObjectMissing`, and `StoreError` where a
        range reaches past the end."""
        ...

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and comes after `start_after`, always in the same order: that of the
        bytes of their keys, or `folder_order` where the server lists so. What comes before costs nothing."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's description, or None where there is none."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; fine where it is gone already."""
        ...

    def location(self, key: str) -> str:
        """The address of `key` for libraries that open it themselves (deltalake, Polars)."""
        ...

    def storage_options(self) -> dict[str, str] | None:
        """What those libraries need beside the address (endpoint, credentials), or None for local folders."""
        ...


def byte_order(key: str) -> bytes:
    """Sorts keys as S3 lists them: `a-b` before `a/b`."""
    return key.encode()


def folder_order(key: str) -> list[bytes]:
    """Sorts keys as a server lists them that keeps a tree of folders: `a/b` before `a-b`."""
    return [part.encode() for part in key.split("/")]


def check_key(key: str) -> str:
    """`key` unchanged. Raises ValueError where it could leave the root or means no object."""
    parts = key.split("/")
    if not key or any(part in {"", ".", ".."} for part in parts) or "\\" in key or "\0" in key:
        raise ValueError(f"not an object key: {key!r}")
    return key

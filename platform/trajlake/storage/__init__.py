"""Immutable objects in an S3 bucket or in a folder, behind one small protocol."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from trajlake.errors import UsageError
from trajlake.storage.base import (
    CONNECT_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    ByteRange,
    Lost,
    ObjectInfo,
    ObjectStore,
    PutOutcome,
    Unknown,
    Won,
    check_key,
)
from trajlake.storage.local import LocalStore

if TYPE_CHECKING:
    from trajlake.storage.s3 import S3Store

__all__ = [
    "ByteRange",
    "LocalStore",
    "Lost",
    "ObjectInfo",
    "ObjectStore",
    "PutOutcome",
    "S3Store",
    "Unknown",
    "Won",
    "check_key",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name != "S3Store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trajlake.storage.s3 import S3Store  # a client that takes long to import, which folders do not need

    return S3Store


_ACCEPTED = "s3://bucket/prefix, s3+http://host:port/bucket/prefix, s3+https://…, file:///folder, or a folder"


def open_store(
    uri: str | os.PathLike[str],
    *,
    patience: float = PATIENCE_SECONDS,
    connect_patience: float = CONNECT_PATIENCE_SECONDS,
) -> ObjectStore:
    """The store at `uri`; nothing is read or made yet.

    `s3://bucket/prefix` is on the server that the environment names (AWS_ENDPOINT_URL, MINIO_ENDPOINT), else on
    Amazon's; `s3+http://host:port/bucket/prefix` and `s3+https://…` name the server; everything else is a folder.
    `patience` and `connect_patience` are seconds, see `S3Store`. Raises `UsageError` for other addresses.
    """
    text = os.fspath(uri)
    if not text:
        raise UsageError(f"an empty address: want {_ACCEPTED}")
    scheme, _, rest = text.partition("://")
    host, _, path = rest.partition("/")
    if scheme in {"s3", "s3+http", "s3+https"}:
        from trajlake.storage.s3 import S3Store
    if scheme == "s3" and host and ":" not in host:
        return S3Store(host, path, patience=patience, connect_patience=connect_patience)
    if scheme in {"s3+http", "s3+https"} and host and path:
        bucket, _, prefix = path.partition("/")
        endpoint = f"{scheme.removeprefix('s3+')}://{host}"
        return S3Store(bucket, prefix, endpoint=endpoint, patience=patience, connect_patience=connect_patience)
    if scheme == "file" and host in {"", "localhost"} and path:
        return LocalStore("/" + unquote(path))
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text):
        raise UsageError(f"not the address of a store: {text!r}; want {_ACCEPTED}")
    return LocalStore(os.path.expanduser(text))

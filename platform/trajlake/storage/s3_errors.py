"""What the errors of the MinIO SDK and of urllib3 mean for who calls a store, and what to do about them."""

from __future__ import annotations

from minio.error import InvalidResponseError, S3Error, ServerError
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from trajlake.errors import AccessRefused, BucketMissing, ObjectMissing, StoreError, StoreUnavailable
from trajlake.storage.s3_client import HOW_TO_SET_CREDENTIALS

UNREACHABLE = (NewConnectionError, ConnectTimeoutError, SSLError)
"""Errors before a server could have seen the request."""

_PASSING_STATUS = {408, 409, 429, 500, 502, 503, 504, 507}
_PASSING_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable"}
_REFUSING_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch"}
_ADDRESS = "check that AWS_ENDPOINT_URL is the address of its S3 API"


class AlreadyThereError(StoreError):
    """An object with this key exists: `If-None-Match: *` was refused."""


def explain(error: Exception, url: str, bucket: str, name: str | None) -> StoreError:
    """The error that says what to do about the SDK's `error`; `StoreUnavailable` where repeating can help."""
    if isinstance(error, HTTPError):
        return StoreUnavailable(f"cannot reach {url}: {_reason(error)}; is it running? {_ADDRESS}")
    if isinstance(error, S3Error):
        status, code, message = error.response.status, error.code or "", f"{error.code}: {error.message}"
    elif isinstance(error, ServerError):
        status, code, message = error.status_code, "", "no reason given"
    elif isinstance(error, InvalidResponseError):
        status, code, message = error._code, "", f"not the S3 API, {_ADDRESS}"
    else:
        return StoreError(f"{url} does not answer as an S3 server does ({error}); {_ADDRESS}")
    answer = f"{url} answered {status} ({message})"
    if code == "NoSuchBucket":
        return BucketMissing(f"bucket {bucket!r} does not exist at {url}: create it, or correct the address")
    if code == "NoSuchKey":
        return ObjectMissing(f"no object {name!r} in bucket {bucket!r} at {url}")
    if status == 412:
        return AlreadyThereError(answer)
    if code == "RequestTimeTooSkewed":
        return AccessRefused(f"{answer}: set the clock of this machine, or of the server")
    if code == "AuthorizationHeaderMalformed":
        return AccessRefused(f"{answer}: set AWS_REGION to the region of the server")
    if code in _WRONG_KEYS:
        wrong = "the keys that were found are not its"
        return AccessRefused(f"{answer} on bucket {bucket!r}: {wrong}; {HOW_TO_SET_CREDENTIALS}")
    if status in {401, 403} or code in _REFUSING_CODES:
        return AccessRefused(f"{answer} on bucket {bucket!r}: {HOW_TO_SET_CREDENTIALS}")
    if status in _PASSING_STATUS or code in _PASSING_CODES:
        return StoreUnavailable(f"{answer}; it may be overloaded or starting, repeat later")
    return StoreError(f"{answer} on {name or bucket!r}")


def _reason(error: HTTPError) -> str:
    if isinstance(error, NameResolutionError):
        return "its name is not known"
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return "it does not take connections"
    if isinstance(error, ReadTimeoutError):
        return "it took too long to answer"
    if "WRONG_VERSION_NUMBER" in str(error):
        return "it does not speak TLS, so use http:// instead of https://"
    cause = error.__cause__ or error.__context__
    return getattr(cause, "strerror", None) or str(cause or error)

"""Where the S3 server is, with which credentials, and a MinIO client that sends conditions.

Everything comes from the environment that other S3 tools read; nothing here prints a secret.
"""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

import certifi
import urllib3
from minio import Minio
from minio.credentials.credentials import Credentials
from minio.credentials.providers import (
    AWSConfigProvider,
    ChainedProvider,
    EnvAWSProvider,
    EnvMinioProvider,
    IamAwsProvider,
    Provider,
)
from urllib3.util import Timeout

from trajlake.errors import AccessRefused, UsageError

AWS_ENDPOINT = "https://s3.amazonaws.com"
CONNECTIONS = 32
CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0

HOW_TO_SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary ones), or AWS_PROFILE, "
    "or MINIO_ACCESS_KEY and MINIO_SECRET_KEY"
)


@dataclass(frozen=True)
class Endpoint:
    """The server's address as a URL, and whether it was named by MINIO_ENDPOINT, whose keys then come first."""

    url: str
    is_minio: bool = False

    @property
    def host(self) -> str:
        """`host` or `host:port`."""
        return urlsplit(self.url).netloc

    @property
    def is_secure(self) -> bool:
        """Whether it speaks https."""
        return self.url.startswith("https://")

    @property
    def is_aws(self) -> bool:
        """Whether it is Amazon's."""
        return ".amazonaws.com" in self.host


def find_endpoint(url: str | None = None) -> Endpoint:
    """The endpoint at `url`, else of AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or MINIO_ENDPOINT, else Amazon's.

    Raises UsageError where it is not an address `http://host:port` or `https://host:port`.
    """
    if url:
        return Endpoint(_check_url(url, "the address"))
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if value := os.environ.get(variable):
            return Endpoint(_check_url(value, variable))
    if value := os.environ.get("MINIO_ENDPOINT"):
        if "://" not in value:
            # As in MinIO's own clients, TLS is the default and MINIO_SECURE=false turns it off.
            plain = os.environ.get("MINIO_SECURE", "true").lower() in {"0", "false", "no"}
            value = f"{'http' if plain else 'https'}://{value}"
        return Endpoint(_check_url(value, "MINIO_ENDPOINT"), is_minio=True)
    return Endpoint(AWS_ENDPOINT)


def find_region(endpoint: Endpoint) -> str | None:
    """The region of AWS_REGION or AWS_DEFAULT_REGION. None, which lets the client ask, only for Amazon."""
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or (None if endpoint.is_aws else "us-east-1")


def find_credentials(endpoint: Endpoint) -> EnvironmentCredentials:
    """Credentials that are looked up at the first request, and again when they expire."""
    providers: list[Provider] = [EnvAWSProvider(), AWSConfigProvider()]
    providers.insert(0 if endpoint.is_minio else 1, EnvMinioProvider())
    if endpoint.is_aws or "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ:
        quick = urllib3.PoolManager(timeout=Timeout(connect=1.0, read=5.0), retries=False)
        providers.append(IamAwsProvider(http_client=quick))
    return EnvironmentCredentials(providers, endpoint)


class EnvironmentCredentials(ChainedProvider):
    """The first credentials that are set anywhere, or an `AccessRefused` that names where to set them."""

    def __init__(self, providers: list[Provider], endpoint: Endpoint) -> None:
        super().__init__(providers)
        self._endpoint = endpoint

    def retrieve(self) -> Credentials:
        """The credentials. Raises `AccessRefused` where there are none."""
        try:
            return super().retrieve()
        except (ValueError, OSError, configparser.Error, urllib3.exceptions.HTTPError) as error:
            raise AccessRefused(f"no credentials for {self._endpoint.url}: {HOW_TO_SET_CREDENTIALS}") from error


class S3Client(Minio):
    """The SDK's client with one call for everything that `S3Store` does.

    `put_object(metadata={"If-None-Match": "*"})` would send `x-amz-meta-if-none-match` and overwrite, so the
    condition goes with the request itself. Retries are off: a retry that the caller does not see would turn its
    own success into a refusal.
    """

    def __init__(self, endpoint: Endpoint, region: str | None, read_seconds: float = READ_SECONDS) -> None:
        try:
            super().__init__(
                endpoint.host,
                secure=endpoint.is_secure,
                region=region,
                credentials=find_credentials(endpoint),
                http_client=urllib3.PoolManager(
                    num_pools=4,
                    maxsize=CONNECTIONS,
                    timeout=Timeout(connect=CONNECT_SECONDS, read=read_seconds),
                    retries=False,
                    cert_reqs="CERT_REQUIRED",
                    ca_certs=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or certifi.where(),
                ),
            )
        except ValueError as error:
            raise UsageError(f"not an S3 endpoint: {endpoint.url} ({error})") from error

    def request(
        self,
        method: str,
        bucket: str,
        name: str | None = None,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        query: dict[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """One signed request, answered with its whole body. Raises the SDK's and urllib3's errors."""
        # Both are copied because the SDK adds to them.
        return self._execute(
            method, bucket, name, body=body, headers=dict(headers or {}), query_params=dict(query or {})
        )

    def credentials(self) -> Credentials:
        """The credentials that the next request would use. Raises `AccessRefused` where there are none."""
        assert self._provider is not None
        return self._provider.retrieve()

    def region_of(self, bucket: str) -> str:
        """The bucket's region, asked of the server where it is not set."""
        return self._get_region(bucket)


def _check_url(url: str, source: str) -> str:
    parts = urlsplit(url.rstrip("/"))
    if "@" in parts.netloc:
        raise UsageError(f"{source} must not hold credentials: {HOW_TO_SET_CREDENTIALS}")
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path or parts.query:
        raise UsageError(f"{source} is not an endpoint: {url!r} (want http://host:port or https://host)")
    return f"{parts.scheme}://{parts.netloc}"

"""Fixtures for all tests: an S3 server, empty addresses for lakes, real data."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from trajlake import devserver
from trajlake.storage.s3_client import S3Client, find_endpoint

# Time is no property of the code: the machines that run this are shared.
hypothesis.settings.register_profile("trajlake", deadline=None, print_blob=True)
hypothesis.settings.load_profile("trajlake")

REPOSITORY = Path(__file__).resolve().parent.parent
SERVER_FOLDER = "TRAJLAKE_TEST_SERVER_FOLDER"
TEST_BUCKET = "trajlake"
# What could lead a test to another server or to other keys than those of `s3_server`.
FOREIGN_VARIABLES = (
    "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SHARED_CREDENTIALS_FILE",
    "MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # All workers of pytest-xdist share one server: its folder goes to them by the environment.
    if not hasattr(config, "workerinput"):
        os.environ[SERVER_FOLDER] = str(Path(tempfile.mkdtemp(prefix="trajlake-s3-")) / "server")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        folder = Path(os.environ.pop(SERVER_FOLDER))
        devserver.stop(folder)
        shutil.rmtree(folder.parent)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """What the command line does to loggers does not outlive a test."""
    saved = [
        (logger, logger.handlers[:], logger.propagate, logger.level)
        for logger in (logging.getLogger("trajlake"), logging.getLogger())
    ]
    yield
    for logger, handlers, propagate, level in saved:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="session")
def s3_server() -> dict[str, str]:
    """The environment that leads to a real S3 server with the bucket `trajlake`.

    TRAJLAKE_TEST_S3_URL, with the usual AWS variables, names a server to use instead of a local one; the bucket is
    made there.
    """
    if url := os.environ.get("TRAJLAKE_TEST_S3_URL"):
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")
        client = S3Client(find_endpoint(url), os.environ.get("AWS_REGION"))
        if not client.bucket_exists(TEST_BUCKET):
            client.make_bucket(TEST_BUCKET)
        return {"AWS_ENDPOINT_URL": url} | {name: os.environ[name] for name in names if name in os.environ}
    environment = devserver.start(os.environ[SERVER_FOLDER], bucket=TEST_BUCKET).environment()
    del environment["TRAJLAKE_LAKE"]
    return environment


@pytest.fixture
def s3_uri(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An address on the S3 server under which there is nothing; the environment leads to it."""
    for name in FOREIGN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    return f"s3://{TEST_BUCKET}/tests/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def lake_uri(request: pytest.FixtureRequest) -> str:
    """An address under which there is nothing: a folder, and a prefix on a real S3 server."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_uri"))
    return str(request.getfixturevalue("tmp_path") / "lake")


@pytest.fixture(autouse=True)
def _own_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one, or the machine's user, left in a spool."""
    monkeypatch.setenv("TRAJLAKE_SPOOL", str(tmp_path / "spool"))


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Trajectories as other projects published them."""
    folder = Path(os.environ.get("TRAJLAKE_REALDATA", REPOSITORY.parent / "shared" / "realdata"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}: set TRAJLAKE_REALDATA to a folder that holds it")
    return folder

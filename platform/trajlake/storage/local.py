"""Objects as files of one folder: created whole or not at all, and durable when the call returns."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from trajlake.errors import AccessRefused, ObjectMissing, StoreError, StoreUnavailable, StoreUnsafe
from trajlake.storage.base import ByteRange, Lost, ObjectInfo, PutOutcome, Won, check_key

TEMPORARY = ".tmp"
"""The hidden folder below the root in which files are written before they get their name."""

LEFTOVER_AGE_SECONDS = 24 * 3600.0
LINK_ATTEMPTS = 1_000

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS}


class LocalStore:
    """An `ObjectStore` in a folder, which is made at the first put.

    A key cannot be the folder of another key (`a` beside `a/b`), and no key starts with `.tmp/`.
    Symbolic links below the root are not listed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(os.path.abspath(root))
        self._temporary = self._root / TEMPORARY
        self._is_swept = False

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def uri(self) -> str:
        """The absolute folder."""
        return str(self._root)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> PutOutcome:
        """Write a temporary file and link it to its name, which fails where the name is taken."""
        path = self._path(key)
        with _explained(f"cannot write {key!r} in {self._root}"):
            self._make_folder(self._temporary)
            self._sweep()
            temporary = self._temporary / f"{os.getpid()}-{uuid.uuid4().hex}"
            try:
                _write_durably(temporary, data)
                outcome: PutOutcome = Won() if self._link(temporary, path) else _compare(path, data)
            finally:
                temporary.unlink(missing_ok=True)
            # Also where the object was there before: whoever linked it may have died before this.
            with suppress(FileNotFoundError):  # deleted since, and its folder with it
                _sync_folder(path.parent)
            return outcome

    def get(self, key: str) -> bytes:
        """The file's bytes. Raises `ObjectMissing`."""
        with self._reading(key) as path:
            return path.read_bytes()

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Ranges of one file, in the order asked for. Raises `ObjectMissing`, `StoreError` past the end."""
        with self._reading(key) as path, path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = []
            for part in ranges:
                if part.start + part.length > size:
                    raise StoreError(f"{part} reaches past the end of {key!r}, which has {size} bytes")
                file.seek(part.start)
                found.append(file.read(part.length))
            return found

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Files in byte order of their keys. Raises `AccessRefused` where a folder may not be read."""
        with _explained(f"cannot list {self._root}"):
            yield from self._walk("", os.fsencode(prefix), os.fsencode(start_after))

    def stat(self, key: str) -> ObjectInfo | None:
        """The file's size and time of last change, or None."""
        path = self._path(key)
        with _explained(f"cannot look at {key!r} in {self._root}"):
            try:
                found = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return None if path.is_dir() else _describe(key, found)

    def delete(self, key: str) -> None:
        """Remove the file, and the folders that it leaves empty."""
        path = self._path(key)
        with _explained(f"cannot delete {key!r} in {self._root}"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
        for folder in path.parents:
            if folder == self._root:
                return
            try:
                folder.rmdir()
            except OSError:
                return  # it holds something

    def location(self, key: str) -> str:
        """The file's absolute path."""
        return str(self._path(key))

    def storage_options(self) -> dict[str, str] | None:
        """None: a folder needs no options."""
        return None

    def _path(self, key: str) -> Path:
        if check_key(key).split("/", 1)[0] == TEMPORARY:
            raise ValueError(f"not an object key: {key!r} ({TEMPORARY} holds unfinished files)")
        return self._root / key

    @contextmanager
    def _reading(self, key: str) -> Iterator[Path]:
        path = self._path(key)
        with _explained(f"cannot read {key!r} in {self._root}"):
            try:
                yield path
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                raise ObjectMissing(f"no object {key!r} in {self._root}") from error

    def _link(self, temporary: Path, path: Path) -> bool:
        attempts = 0
        while True:
            attempts += 1
            try:
                self._make_folder(path.parent)
                os.link(temporary, path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                # A delete removed the folder that it had emptied. (A link to nowhere looks the same, for ever.)
                if attempts == LINK_ATTEMPTS:
                    raise
            except OSError as error:
                if error.errno in _NO_LINKS and os.access(path.parent, os.W_OK):
                    raise StoreUnsafe(
                        f"the file system of {self._root} has no hard links, so that two writers could overwrite "
                        "each other: use another folder, or an S3 server"
                    ) from error
                raise

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            if folder.is_file():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is an object, so no object can be in it")
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            with suppress(FileExistsError):  # another put was quicker
                os.mkdir(new)
            _sync_folder(new.parent)

    def _sweep(self) -> None:
        """Remove what processes that were killed in the middle of a put have left, once for each store."""
        if self._is_swept:
            return
        self._is_swept = True
        oldest = time.time() - LEFTOVER_AGE_SECONDS
        for leftover in self._temporary.iterdir():
            try:
                if leftover.stat().st_mtime < oldest:
                    leftover.unlink(missing_ok=True)
            except FileNotFoundError:
                continue

    def _walk(self, folder: str, prefix: bytes, start_after: bytes) -> Iterator[ObjectInfo]:
        for name, entry in _entries(self._root, folder):
            key = folder + name
            encoded = os.fsencode(key)
            if name.endswith("/"):
                holds_prefix = encoded.startswith(prefix) or prefix.startswith(encoded)
                if holds_prefix and (encoded > start_after or start_after.startswith(encoded)):
                    yield from self._walk(key, prefix, start_after)
            elif encoded.startswith(prefix) and encoded > start_after:
                try:
                    yield _describe(key, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # deleted while we listed


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Give every error of the operating system the name it has for an object store."""
    try:
        yield
    except OSError as error:
        reason = f"{what}: {error.strerror or error}"
        if error.errno in _FULL:
            raise StoreUnavailable(f"{reason}; free some space, then repeat") from error
        if error.errno in _REFUSED:
            raise AccessRefused(f"{reason}; check the folder's permissions") from error
        raise StoreError(reason) from error


def _entries(root: Path, folder: str) -> list[tuple[str, os.DirEntry[str]]]:
    """Names in the order of the keys they begin: `a-b` comes before what is in the folder `a/`."""
    entries = []
    try:
        with os.scandir(root / folder) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    if folder or entry.name != TEMPORARY:
                        entries.append((entry.name + "/", entry))
                elif entry.is_file(follow_symlinks=False):
                    entries.append((entry.name, entry))
    except FileNotFoundError:
        return []
    return sorted(entries, key=lambda item: os.fsencode(item[0]))


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    with path.open("xb", buffering=0) as file:
        rest = memoryview(data)
        rest = rest.cast("B") if rest.nbytes else rest
        while rest.nbytes:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compare(path: Path, data: bytes | memoryview) -> PutOutcome:
    if path.is_dir():
        return Lost()
    try:
        return Won() if path.read_bytes() == bytes(data) else Lost()
    except FileNotFoundError:
        return Lost()  # it was there when we came, and deleted since


def _describe(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, datetime.fromtimestamp(found.st_mtime, UTC))

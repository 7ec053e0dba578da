"""ZIP archives from strangers: nothing is unpacked to disk, and no member becomes larger than a bound."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa

from trajlake.errors import FormatError
from trajlake.formats.json_rows import loads
from trajlake.formats.source import Source

MEMBER_BYTES = 256 << 20
"""What a member may hold; a value of this size is still read in less than a GiB of memory."""
RATIO = 200
"""How far what is larger than `_FREE_BYTES` may have been compressed: texts come to 20, a bomb to 1,000 and more."""

_FREE_BYTES = 32 << 20
_MEMBERS = 500_000
_ZSTD = 93
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, _ZSTD}
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DAMAGE = (
    zipfile.BadZipFile,
    pa.ArrowException,
    OSError,
    EOFError,
    zlib.error,
    struct.error,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
)


def is_archive(source: Source) -> bool:
    """Whether the file begins as a ZIP archive that is not empty."""
    return source.head.startswith(b"PK\x03\x04")


class Archive:
    """An open archive. Made by `open_archive`."""

    def __init__(self, file: BinaryIO, zipped: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> None:
        self._file = file
        self._zipped = zipped
        self._members = members

    @property
    def names(self) -> list[str]:
        """The members' names, in the order of the archive; no folders."""
        return list(self._members)

    def read(self, name: str) -> bytes:
        """One member whole. Raises FormatError where it is damaged, encrypted, or larger than the bound."""
        member = self._members[name]
        if member.flag_bits & 1:
            raise FormatError("it is encrypted")
        if member.compress_type not in _METHODS:
            raise FormatError(f"it is compressed with method {member.compress_type}; repack the archive with deflate")
        if member.file_size > MEMBER_BYTES:
            raise FormatError(f"it would be larger than {MEMBER_BYTES >> 20} MiB")
        if _is_bomb(member.file_size, member.compress_size):
            raise FormatError(f"it was compressed more than {RATIO}-fold, as no trajectory is: a bomb?")
        try:
            if member.compress_type == _ZSTD:
                return self._read_zstd(member)
            with self._zipped.open(member) as file:
                return file.read()
        except _DAMAGE as error:
            raise FormatError(f"it is damaged: {error}") from error

    def read_json(self, name: str) -> Any:
        """One member as a JSON value. Raises FormatError."""
        try:
            return loads(self.read(name))
        except UnicodeDecodeError:
            raise FormatError("it holds bytes that are not UTF-8") from None
        except ValueError as error:
            raise FormatError(f"it is not JSON: {error}") from error

    def _read_zstd(self, member: zipfile.ZipInfo) -> bytes:
        # Python reads this method from 3.14 on; newer versions of Inspect write it.
        self._file.seek(member.header_offset)
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        if signature != b"PK\x03\x04":
            raise zipfile.BadZipFile("there is no member where the directory says")
        self._file.seek(name_length + extra_length, 1)
        packed = self._file.read(member.compress_size)
        with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
            data = bytes(stream.read(member.file_size + 1))
        if len(data) != member.file_size or zlib.crc32(data) != member.CRC:
            raise zipfile.BadZipFile("its size or checksum is not what the directory says")
        return data


@contextmanager
def open_archive(source: Source) -> Iterator[Archive]:
    """The archive, checked. Raises FormatError where it is damaged, or its members could leave their folder, are
    there twice, or are together a bomb."""
    with source.open() as file:
        try:
            zipped = zipfile.ZipFile(file)
        except _DAMAGE as error:
            raise FormatError(f"{source.path}: a damaged ZIP archive: {error}") from error
        with zipped:
            try:
                members = _checked(zipped.infolist(), source.size)
            except FormatError as error:
                raise FormatError(f"{source.path}: {error}") from error
            yield Archive(file, zipped, members)


def _checked(found: list[zipfile.ZipInfo], size: int) -> dict[str, zipfile.ZipInfo]:
    if len(found) > _MEMBERS:
        raise FormatError(f"its archive has more than {_MEMBERS:,} members")
    members: dict[str, zipfile.ZipInfo] = {}
    for member in found:
        name = member.orig_filename
        if _leaves(name) or stat.S_ISLNK(member.external_attr >> 16):
            raise FormatError(f"the archive's member {_short(name)} leads out of its folder: not a file to trust")
        if member.is_dir():
            continue
        if member.filename in members:
            raise FormatError(f"the archive holds {_short(name)} twice, and which one is meant cannot be known")
        members[member.filename] = member
    if _is_bomb(sum(member.file_size for member in members.values()), size):
        raise FormatError(f"the archive holds more than {RATIO} times its size, as no trajectories do: a bomb?")
    return members


def _leaves(name: str) -> bool:
    return (
        name.startswith(("/", "\\")) or "\0" in name or name[1:2] == ":" or ".." in name.replace("\\", "/").split("/")
    )


def _is_bomb(size: int, packed: int) -> bool:
    return size > _FREE_BYTES and size > RATIO * packed


def _short(name: str) -> str:
    return repr(name if len(name) <= 60 else name[:60] + "…")

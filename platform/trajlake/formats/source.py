"""A file that is to be imported: what it is, its hash, its text, and its JSON rows."""

from __future__ import annotations

import codecs
import hashlib
import stat
from collections.abc import Iterator
from functools import cached_property
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from trajlake.errors import FormatError
from trajlake.formats.json_rows import Layout, Refused, Row, layout_of, loads, read_rows
from trajlake.formats.text import Text

_HEAD_BYTES = 64 * 1024
_SMALL_BYTES = 1 << 20  # a file up to this size is read once, and kept while it is looked at
_WHOLE_BYTES = 32 << 20  # a file up to this size may be in memory with all of its rows
_FIRST_ROWS = 5  # how many rows are looked at to tell the format

_LFS = b"version https://git-lfs.github.com/spec/"
_KINDS = (
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "compressed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it first"),
    (b"\xfd7zXZ\x00", "compressed with xz: unpack it first"),
    (b"BZh", "compressed with bzip2: unpack it first"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3\0", "an SQLite database"),
)
_BYTE_ORDER_MARKS = (  # longest first: the mark of UTF-32 LE begins with that of UTF-16 LE
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class Source:
    """One file. Made by `open_source`. Its rows are to be read once, and left alone by who looks at the first."""

    def __init__(self, path: Path, size: int, begin: bytes) -> None:
        self.path = path
        self.size = size
        self.head = begin[:_HEAD_BYTES]
        self._whole = begin if len(begin) == size else None
        self.position = 0
        """Bytes read so far by the newest `rows()`: for progress."""
        self._begun: Iterator[Row | Refused] | None = None

    @cached_property
    def sha256(self) -> str:
        """The hash of the file's bytes, in hex."""
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @cached_property
    def kind(self) -> str:
        """What the file is if it is not text, in words, else empty."""
        for magic, words in _KINDS:
            if self.head.startswith(magic):
                return words
        if self._encoding[1] == 0 and b"\0" in self.head:
            if self.head[:1] == b"\0" or self.head[1:2] == b"\0":
                return "binary, or UTF-16 without a byte order mark: save it as UTF-8"
            if self.head.lstrip()[:1] not in {b"{", b"["}:
                return "binary"
        return ""

    def open(self) -> BufferedReader | BytesIO:
        """The bytes. Raises FormatError where they cannot be had."""
        if self._whole is not None:
            return BytesIO(self._whole)
        try:
            return self.path.open("rb")
        except OSError as error:
            raise FormatError(f"{self.path}: {error.strerror or error}") from error

    @cached_property
    def layout(self) -> Layout:
        """How the file's JSON values stand in it: one array, one value a line, or one after another."""
        with self.open() as file:
            return layout_of(self._text(file, _HEAD_BYTES))

    def rows(self) -> Iterator[Row | Refused]:
        """The JSON rows: elements of an array, lines of JSONL, or values that follow each other.

        A row that is not JSON is Refused and the others go on. Raises FormatError where the file is not text.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            yield from self._rows()
        else:  # nobody has read on since the first rows were looked at: they are not read twice
            yield from self.first_rows
            yield from begun

    def _rows(self) -> Iterator[Row | Refused]:
        layout = self.layout
        with self.open() as file:
            text = self._text(file)
            for row in read_rows(text, layout, whole=self.size <= _WHOLE_BYTES):
                self.position = text.bytes_read
                yield row
            self.position = text.bytes_read

    @cached_property
    def first_rows(self) -> list[Row | Refused]:
        """Up to five of the first rows; none where the file is not text."""
        if self.kind:
            return []
        self._begun = self._rows()
        rows = list(islice(self._begun, _FIRST_ROWS))
        self.position = 0
        return rows

    @cached_property
    def first_values(self) -> list[Any]:
        """The values of the first rows that are JSON, for `detect`."""
        return [row.value for row in self.first_rows if isinstance(row, Row)]

    @property
    def appearance(self) -> str:
        """What the file looks like, for people whose file is of no known format."""
        if self.kind:
            return f"it is {self.kind}"
        if not self.first_rows:
            return "it holds no rows"
        if not self.first_values:
            problem = self.first_rows[0]
            assert isinstance(problem, Refused)
            return f"its {problem.row}: {problem.reason}"
        first = self.first_values[0]
        if _holds_json(first) or (isinstance(first, list) and first and _holds_json(first[0])):
            return "its rows are text that holds JSON, which was encoded twice: decode them once more and write that"
        if not isinstance(first, dict):
            return "its rows are not JSON objects"
        names = [name if len(name) <= 40 else name[:40] + "…" for name in list(first)[:8]]
        return f"its rows have the keys {', '.join(map(repr, names))}{', …' if len(first) > 8 else ''}"

    @cached_property
    def _encoding(self) -> tuple[str, int]:
        for mark, encoding in _BYTE_ORDER_MARKS:
            if self.head.startswith(mark):
                return encoding, len(mark)
        return "utf-8", 0

    def _text(self, file: BinaryIO, chunk_bytes: int | None = None) -> Text:
        if self.kind:
            raise FormatError(f"{self.path}: not text; it is {self.kind}")
        encoding, start = self._encoding
        file.seek(start)
        return Text(file, encoding, start, chunk_bytes)


def _holds_json(value: Any) -> bool:
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return False
    try:
        loads(value)
    except ValueError:
        return False
    return True


def open_source(path: str | Path, *, sha256: str | None = None) -> Source:
    """The file, looked at; `sha256` is its hash where that is known already. Raises FormatError where there is none, it
    is a folder, empty, or a Git LFS pointer."""
    path = Path(path)
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise FormatError(f"{path}: a folder, not a file")
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for without end
            raise FormatError(f"{path}: not a regular file")
        size = found.st_size
        with path.open("rb") as file:
            begin = file.read(max(size + 1, _HEAD_BYTES) if size <= _SMALL_BYTES else _HEAD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not begin or (len(begin) == size and not begin.removeprefix(codecs.BOM_UTF8).strip()):
        raise FormatError(f"{path}: empty, there is nothing to import")
    if begin.startswith(_LFS):
        raise FormatError(f"{path}: a Git LFS pointer, not the file itself: run `git lfs pull` where it came from")
    source = Source(path, size, begin)
    if sha256 is not None:
        source.sha256 = sha256
    return source

"""A window on a file's text that moves on: the file may be larger than memory, one row of it may not."""

from __future__ import annotations

import codecs
import re
from typing import BinaryIO

_CHUNK_BYTES = 4 << 20  # a value that is cut off is read again from its start
_SPACE = re.compile(r"[ \t\r\n]*+")
_BAD_UNIT = "\udcff"


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _BAD_UNIT, error.end


codecs.register_error("trajlake.stand_in", _stand_in)


class Text:
    """`buffer[position:]` is what is read and not yet consumed; `more()` reads on.

    Bytes that are not valid in the encoding become lone surrogates, so that only the row that holds them is lost.
    """

    def __init__(self, file: BinaryIO, encoding: str, start: int, chunk_bytes: int | None = None) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes or _CHUNK_BYTES
        self._encoding = encoding
        self._errors = "surrogateescape" if encoding == "utf-8" else "trajlake.stand_in"
        self._decoder = codecs.getincrementaldecoder(encoding)(self._errors)
        self._damaged: bool | None = False  # None: not known of what was read last
        self._dropped = start
        self.buffer = ""
        self.position = 0
        self.ended = False
        self.bytes_read = start

    @property
    def encoding_name(self) -> str:
        """The encoding in the spelling for people."""
        return self._encoding.removesuffix("-le").removesuffix("-be").upper()

    def more(self) -> bool:
        """Read on; False at the end of the file. If it is True, what was consumed is dropped: `position` is 0."""
        text = ""
        while not text and not self.ended:
            # As much as waits already: a row that needs many chunks is then scanned few times.
            data = self._file.read(max(self._chunk_bytes, len(self.buffer) - self.position))
            self.bytes_read += len(data)
            self.ended = not data
            text = self._decoder.decode(data, final=self.ended)
        if not text:
            return False
        self._damaged = None
        self._dropped += self._length(self.buffer[: self.position])
        self.buffer = self.buffer[self.position :] + text
        self.position = 0
        return True

    def all_bytes(self) -> bytes:
        """The bytes of the whole file, of which nothing was read yet; `begin_again` lets it be read after all."""
        data = self._file.read()
        self.bytes_read += len(data)
        return data

    def begin_again(self) -> None:
        """To the start of the file, after `all_bytes`."""
        self._file.seek(self._dropped)
        self.bytes_read = self._dropped

    def byte(self, position: int) -> int:
        """The offset in the file, in bytes, of a position in the buffer."""
        return self._dropped + self._length(self.buffer[:position])

    def is_damaged(self, start: int, end: int) -> bool:
        """Whether bytes in this part of the buffer were not valid in the file's encoding."""
        if self._damaged is None:
            self._damaged = has_surrogates(self.buffer)
        return self._damaged and has_surrogates(self.buffer[start:end])

    def find_line(self, limit: int | None = None) -> tuple[int, int] | None:
        """Consume the rest of the line and give its place in the buffer, without its end; None where more than
        `limit` characters hold no line end. At the end of the file the line is empty."""
        searched = self.position
        while (end := self.buffer.find("\n", searched)) < 0:
            searched = len(self.buffer) - self.position
            if limit is not None and searched > limit:
                return None
            if not self.more():
                end = len(self.buffer)
                break
        start, self.position = self.position, min(end + 1, len(self.buffer))
        return start, end

    def skip_space(self) -> bool:
        """Consume white space; False where the file ends."""
        while True:
            space = _SPACE.match(self.buffer, self.position)
            assert space is not None
            self.position = space.end()
            if self.position < len(self.buffer):
                return True
            if not self.more():
                return False

    def _length(self, text: str) -> int:
        return len(text.encode(self._encoding, "surrogateescape" if self._encoding == "utf-8" else "surrogatepass"))


def has_surrogates(text: str) -> bool:
    """Whether the text has no UTF-8 form."""
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False

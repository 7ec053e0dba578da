"""What a trajectory says was written by a model: here it becomes text that a terminal can show without harm."""

from __future__ import annotations

import re

ELLIPSIS = "…"

_FOREIGN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_JSON_FOREIGN = re.compile(_FOREIGN.pattern)
_PICTURES = 0x2400  # U+2400 … U+241F picture the control characters 0 … 31


def neutralise(text: str) -> str:
    """`text` with newlines and tabs kept, and everything else that could steer a terminal made visible.

    Control characters become their pictures (ESC is ␛); C1 controls, bidirectional overrides, invisible format
    characters and lone surrogates become ⟨U+202E⟩. The joiners that emoji and Persian need are kept.
    """
    return _FOREIGN.sub(_picture, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """As `neutralise`, in one line: newlines become ↵ and tabs become spaces."""
    return neutralise(text).strip("\n").replace("\n", "↵").replace("\t", " ")


def message_line(text: str) -> str:
    """An error or a warning in one line of plain words: every run of white space becomes one space."""
    return neutralise(" ".join(text.split()))


def escape_json(encoded: str) -> str:
    """JSON text with the same characters as JSON escapes: the value is unchanged and no terminal obeys it."""
    return _JSON_FOREIGN.sub(_json_escape, encoded)


def cut(text: str, length: int) -> tuple[str, int]:
    """At most `length` characters of `text` (all where `length` is 0), and how many were left out."""
    if not length or len(text) <= length:
        return text, 0
    return text[:length], len(text) - length


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(_PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def _json_escape(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def count(number: int, one: str, many: str = "") -> str:
    """`1 episode`, `1,200 episodes`; `many` where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"

"""Tables that fit the terminal; rows that are too wide for one are shown one below the other."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trajlake_cli.text import ELLIPSIS, one_line
from trajlake_cli.values import NULL_CELL, cell, is_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from trajlake_cli.output import Row

_GAP = 2
_NARROWEST = 9  # a text column that is cut keeps this much
_NARROWEST_KEY = 24
_SHORT_ID = 17  # 16 digits are enough to name an episode, and … stands behind them
_WIDEST_PIPED = 100  # where there is no terminal that says how wide
_LONGEST_NAME = 40
_WITH_ERROR = re.compile(r"-?[\d.]+ (±|\[)")  # a number with its error or interval
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ")
_DATE, _MINUTE = 10, 16  # of a moment that is cut, the day or the minute is left
_KEPT_WHOLE = ("token", "sha256", "url")  # people copy these
_PATHS = ("file", "path", "folder", "steps_path")  # cut at their beginning: the name is at the end


@dataclass(frozen=True)
class _Column:
    name: str
    cells: list[str]
    width: int
    is_numeric: bool
    is_key: bool = False

    @property
    def is_id(self) -> bool:
        return self.name.endswith("episode_id")

    @property
    def is_moment(self) -> bool:
        return all(text == NULL_CELL or _MOMENT.fullmatch(text) for text in self.cells)

    @property
    def is_path(self) -> bool:
        return self.name in _PATHS or all(text.startswith("/") for text in self.cells)

    @property
    def least(self) -> int:
        """How narrow it may become."""
        if self.is_numeric or self.name in _KEPT_WHOLE or any(map(_WITH_ERROR.match, self.cells)):
            return self.width
        if self.is_moment:
            return min(self.width, _DATE)
        return min(self.width, _SHORT_ID if self.is_id else _NARROWEST_KEY if self.is_key else _NARROWEST)


def make_console(*, stderr: bool = False) -> Console:
    """A console that takes nothing as markup, and never narrows what goes into a pipe."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or os.environ.get("COLUMNS", "").isdigit() else 100_000
    return Console(file=file, markup=False, highlight=False, emoji=False, soft_wrap=False, width=width)


def print_table(
    rows: Sequence[Row], columns: Sequence[str], expendable: Sequence[str] = (), keys: Sequence[str] = ()
) -> None:
    """Print `rows` as a table in the terminal's width; nothing where there are none.

    First long texts are cut, then episode ids are shortened, then `expendable` columns are left out, the first ones
    first. What still does not fit is shown one column below the other.
    """
    if not rows:
        return
    console = make_console()
    piped = console.width > 10_000
    measured = [_measure(name, [row.get(name) for row in rows], piped=piped, is_key=name in keys) for name in columns]
    shown, dropped = measured, 0
    while (widths := _fit(shown, console.width)) is None and dropped < len(expendable):
        dropped += 1
        shown = [column for column in measured if column.name not in expendable[:dropped]]
    if widths is None:
        _print_records(console, measured, len(rows))
        return
    from rich.text import Text

    _print_line(console, shown, widths, [Text(column.name, style="bold") for column in shown])
    _print_line(console, shown, widths, [Text("─" * width, style="bright_black") for width in widths])
    for at in range(len(rows)):
        _print_line(console, shown, widths, [_cell_text(column.cells[at]) for column in shown])


def _measure(name: str, values: list[Any], *, piped: bool, is_key: bool) -> _Column:
    from rich.cells import cell_len

    shown = one_line(name)[:_LONGEST_NAME]  # a query may call its columns anything
    cells = [cell(value) for value in values]
    numeric = any(map(is_number, values)) and all(value is None or is_number(value) for value in values)
    width = max(cell_len(shown), max(map(cell_len, cells)))
    if piped and name not in _PATHS:
        width = min(width, max(cell_len(shown), _WIDEST_PIPED))
    return _Column(shown, cells, width, numeric, is_key)


def _fit(columns: Sequence[_Column], available: int) -> list[int] | None:
    """The columns' widths in `available` cells, the widest texts cut first; None where they cannot fit."""
    widths = [column.width for column in columns]
    excess = sum(widths) + _GAP * (len(columns) - 1) - available
    for ids in (False, True):
        while excess > 0:
            wide = [at for at, column in enumerate(columns) if column.is_id is ids and widths[at] > column.least]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
            excess -= 1
    return widths if excess <= 0 else None


def _print_line(console: Console, columns: Sequence[_Column], widths: Sequence[int], texts: list[Text]) -> None:
    from rich.text import Text

    line = Text()
    for at, (column, width, text) in enumerate(zip(columns, widths, texts, strict=True)):
        if column.is_moment and text.cell_len > width:
            text = text[: _MINUTE if width >= _MINUTE else _DATE]
        text = _cut(text, width, at_start=column.is_path)
        padding = " " * (width - text.cell_len)
        last = at == len(columns) - 1
        line.append_text(Text(padding) + text if column.is_numeric else text + Text("" if last else padding))
        if not last:
            line.append(" " * _GAP)
    console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _print_records(console: Console, columns: Sequence[_Column], rows: int) -> None:
    from rich.cells import cell_len
    from rich.text import Text

    margin = max(cell_len(column.name) for column in columns)
    for at in range(rows):
        if rows > 1:
            console.print(Text(f"── {at + 1} ──", style="bright_black"))
        for column in columns:
            value = _cell_text(column.cells[at])
            if column.name not in _KEPT_WHOLE:
                value = _cut(value, max(console.width - margin - _GAP, _NARROWEST), at_start=column.is_path)
            line = Text(column.name.ljust(margin + _GAP), style="bold") + value
            console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _cut(text: Text, width: int, *, at_start: bool) -> Text:
    if at_start and text.cell_len > width:
        while text.cell_len > width - 1:
            text = text[1:]
        return text.__class__(ELLIPSIS) + text
    text.truncate(width, overflow="ellipsis")
    return text


def _cell_text(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="bright_black" if text in (NULL_CELL, ELLIPSIS) else "not bold")

"""Lines of text in a given width: wrapped, cut where they are too long, and with nothing that steers a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from trajlake_cli.text import cut, neutralise

QUIET = "bright_black"
GOOD = "green"
BAD = "bold red"

_SLACK = 80  # characters


@dataclass
class Page:
    """Collects lines. `max_chars` bounds every single text (0: no bound); `left_out` counts the texts that were cut."""

    width: int
    max_chars: int = 0
    lines: list[Text] = field(default_factory=list)
    left_out: int = 0

    def __post_init__(self) -> None:
        self._printed = ""
        self._console = Console(width=max(self.width, 20), markup=False, highlight=False, emoji=False)

    def add(self, *parts: str | tuple[str, str], gutter: Text | None = None, indent: int = 0) -> None:
        """One logical line of (text, style) parts, wrapped below itself and behind `gutter`."""
        line = Text()
        for part in parts:
            text, style = (part, "") if isinstance(part, str) else part
            line.append(neutralise(text).replace("\n", "↵"), style=style or None)
        self._wrap(line, gutter, indent)

    def add_text(self, text: str, style: str = "", gutter: Text | None = None, indent: int = 0) -> None:
        """A text of many lines, cut at about `max_chars` with a note that says how much was left out."""
        shown, left = self._cut(text)
        for line in neutralise(shown).expandtabs(4).split("\n"):
            self._wrap(Text(line, style=style), gutter, indent)
        if left:
            self.left_out += 1
            self._wrap(Text(f"… {left:,} more characters", style=f"{QUIET} italic"), gutter, indent)

    def gap(self) -> None:
        """One empty line, but never two."""
        last = self.lines[-1].plain if self.lines else self._printed
        if last.strip():
            self.lines.append(Text())

    def print_to(self, console: Console) -> None:
        """Print the lines and go on with an empty page."""
        for line in self.lines:
            console.print(line, no_wrap=True, overflow="ignore", crop=False)
        if self.lines:
            self._printed = self.lines[-1].plain
        self.lines.clear()

    def rule(self, style: str = QUIET, character: str = "─") -> None:
        """A line across the page."""
        self.lines.append(Text(character * self.width, style=style))

    def spread(self, left: Text, right: Text) -> None:
        """One line with something at each end; the left is cut where both do not fit, the right goes where little
        of the left would remain."""
        room = self.width - right.cell_len - 2
        if room < _SLACK // 4 or not right.plain:
            left.truncate(self.width, overflow="ellipsis")
            self.lines.append(left)
            return
        left.truncate(room, overflow="ellipsis")
        self.lines.append(left + Text(" " * (self.width - left.cell_len - right.cell_len)) + right)

    def _cut(self, text: str) -> tuple[str, int]:
        """Cut at the end of a line or word where one is near; a text that is hardly longer is left whole."""
        if len(text) <= self.max_chars + _SLACK:
            return text, 0
        shown, left = cut(text, self.max_chars)
        if left:
            end = max(shown.rfind("\n", -_SLACK), shown.rfind(" ", -_SLACK // 4))
            shown = (shown[:end] if end > 0 else shown).rstrip()
        return shown, len(text) - len(shown)

    def _wrap(self, line: Text, gutter: Text | None, indent: int) -> None:
        """Pieces of a line that is too long keep the line's own indentation."""
        own = len(line.plain) - len(line.plain.lstrip(" "))
        front = (gutter.copy() if gutter else Text()) + Text(" " * (indent + own))
        room = max(self.width - front.cell_len, 10)
        for piece in line[own:].wrap(self._console, room, overflow="fold") or [Text()]:
            piece.rstrip()
            self.lines.append(front + piece)

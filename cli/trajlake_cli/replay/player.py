"""Stepping through trajectories by keys. The Player is a state that keys change; `play` joins it to a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.control import Control
from rich.text import Text

from trajlake_cli.replay.header import policy, task, verdict
from trajlake_cli.replay.keys import keyboard
from trajlake_cli.replay.page import BAD, QUIET, Page
from trajlake_cli.replay.steps import Step, add_step, searchable, tool_names
from trajlake_cli.text import one_line
from trajlake_cli.values import cell

FORWARD = {"n", "j", "\r", "\n", "\x1b[C", "\x1bOC"}
BACK = {"p", "k", "\x1b[D", "\x1bOD"}
DOWN = {" ", "d", "\x1b[B", "\x1bOB", "\x1b[6~"}
UP = {"b", "u", "\x1b[A", "\x1bOA", "\x1b[5~"}
FIRST = {"0", "\x1b[H", "\x1bOH", "\x1b[1~"}
LAST = {"$", "\x1b[F", "\x1bOF", "\x1b[4~"}
QUIT = {"q", "Q", "\x1b", "\x03", "\x04"}
ERASE = {"\x7f", "\x08"}

HELP = (
    ("n j Enter →", "next step"),
    ("p k ←", "previous step"),
    ("Space ↓   b ↑", "down, up in a step longer than the screen"),
    ("g 12 Enter", "go to step 12"),
    ("0   $", "first, last step"),
    ("/ text Enter", "find text in the following steps; / Enter finds it again"),
    ("]   [", "next, previous episode"),
    ("q", "quit"),
)
_KEYS = "n next  p back  g go to  / find  ] episode  ? help  q quit"


class Recorded(Protocol):
    """A trajectory: the episode's row and its steps."""

    @property
    def episode(self) -> Mapping[str, Any]: ...
    @property
    def steps(self) -> Sequence[Step]: ...


class Player:
    """Where the person is in `count` trajectories, each of which `load` brings when it is wanted."""

    def __init__(self, count: int, load: Callable[[int], Recorded], start: int = 0) -> None:
        self._count = count
        self._load = load
        self._at = 0
        self._trajectory = load(0)
        self._step = min(start, max(len(self._trajectory.steps) - 1, 0))
        self._scroll = 0
        self._overhang = 0  # lines that do not fit on the screen
        self._window = 1
        self._prompt = ""
        self._typed = ""
        self._sought = ""
        self._note = ""
        self._helping = False

    @property
    def step(self) -> int:
        """The index of the shown step."""
        return self._step

    @property
    def note(self) -> str:
        """What the last key had to say, such as a text that was not found."""
        return self._note

    def press(self, key: str) -> bool:
        """Do what `key` asks for; False when it asks to end."""
        self._note = ""
        if self._prompt:
            self._type(key)
            return True
        if self._helping:
            self._helping = False
            return True
        if key in QUIT:
            return False
        if key in FORWARD:
            self._go(self._step + 1)
        elif key in BACK:
            self._go(self._step - 1)
        elif key in DOWN:
            self._scroll_down(key)
        elif key in UP:
            self._scroll = max(self._scroll - (1 if key.endswith("A") else self._window), 0)
        elif key in FIRST:
            self._go(0)
        elif key in LAST:
            self._go(len(self._trajectory.steps) - 1)
        elif key in ("]", "["):
            self._turn(self._at + (1 if key == "]" else -1))
        elif key in ("g", ":", "/"):
            self._prompt, self._typed = ("find: " if key == "/" else "go to step: "), ""
        else:
            self._helping = True
        return True

    def screen(self, width: int, height: int) -> list[Text]:
        """Exactly `height` lines of at most `width` cells."""
        episode = self._trajectory.episode
        mark, style = verdict(episode)
        top = Page(width)
        place = f"episode {self._at + 1} of {self._count}" if self._count > 1 else ""
        top.spread(Text(f"{mark}  ", style=style) + Text(task(episode), style="bold"), Text(place, style=QUIET))
        names = " · ".join(filter(None, (cell(episode["episode_id"]), policy(episode))))
        top.spread(Text(names, style=QUIET), Text())
        if episode.get("retracted") is not None:
            top.spread(Text(f"retracted, because: {cell(episode['retracted'])}", style=BAD), Text())
        top.rule()
        body = self._help(width) if self._helping else self._body(width)
        self._window = max(height - len(top.lines) - 2, 1)
        self._overhang = max(len(body) - self._window, 0)
        self._scroll = min(self._scroll, self._overhang)
        shown = body[self._scroll : self._scroll + self._window]
        below = len(body) - self._scroll - len(shown)
        more = Text(f"… {below} more lines (Space)" if below > 0 else "", style=f"{QUIET} italic")
        more.truncate(width)
        filler = [Text()] * (self._window - len(shown))
        return [*top.lines, *shown, *filler, more, self._status(width)][-height:]

    def _body(self, width: int) -> list[Text]:
        steps = self._trajectory.steps
        page = Page(width)
        if not steps:
            page.add(("This episode has no steps.", QUIET))
            return page.lines
        add_step(page, steps[self._step], tool_names(steps[: self._step + 1]))
        if self._sought:
            for line in page.lines:
                line.highlight_regex(re.compile(re.escape(self._sought), re.IGNORECASE), "reverse")
        return page.lines

    @staticmethod
    def _help(width: int) -> list[Text]:
        page = Page(width)
        for keys, meaning in HELP:
            page.add((keys.ljust(16), "bold"), meaning, indent=2)
        return page.lines

    def _status(self, width: int) -> Text:
        if self._prompt:
            line = Text(self._prompt + one_line(self._typed) + "▏", style="bold")
            return line[-width:]
        status = Text(f" step {self._step} of 0–{max(len(self._trajectory.steps) - 1, 0)} ", style="reverse")
        if self._note:
            status.append("  " + one_line(self._note), style="not reverse yellow")
        else:
            status.append("  " + _KEYS, style=f"not reverse {QUIET}")
        status.truncate(width, overflow="ellipsis")
        return status

    def _go(self, step: int) -> None:
        last = len(self._trajectory.steps) - 1
        if step > last:
            self._note = "last step; ] goes to the next episode" if self._at + 1 < self._count else "last step"
        elif step < 0:
            self._note = "first step"
        else:
            self._step, self._scroll = step, 0

    def _turn(self, at: int) -> None:
        if not 0 <= at < self._count:
            self._note = "last episode" if at > 0 else "first episode"
            return
        self._trajectory = self._load(at)
        self._at, self._step, self._scroll = at, 0, 0

    def _scroll_down(self, key: str) -> None:
        if self._scroll < self._overhang:
            self._scroll = min(self._scroll + (1 if key.endswith("B") else self._window), self._overhang)
        elif key == " ":
            self._go(self._step + 1)

    def _type(self, key: str) -> None:
        if key in ("\r", "\n"):
            self._answer()
        elif key in ERASE:
            self._typed = self._typed[:-1]
        elif key in ("\x1b", "\x03", "\x04"):
            self._prompt = ""
        elif key.isprintable():
            self._typed += key

    def _answer(self) -> None:
        asked, self._prompt = self._prompt, ""
        if asked == "find: ":
            self._sought = self._typed or self._sought
            self._find()
        elif self._typed.strip().isdecimal() and int(self._typed) < len(self._trajectory.steps):
            self._go(int(self._typed))
        elif self._typed.strip():
            self._note = f"there is no step {self._typed}"

    def _find(self) -> None:
        steps = self._trajectory.steps
        if not self._sought:
            return
        for distance in range(1, len(steps) + 1):
            at = (self._step + distance) % len(steps)
            if self._sought.casefold() in searchable(steps[at]).casefold():
                if at <= self._step:
                    self._note = f"{self._sought!r}: from the first step again"
                self._step, self._scroll = at, 0
                return
        self._note = f"{self._sought!r} is in no step of this episode"


def play(player: Player, console: Console) -> None:
    """Show the player and give it keys until it ends; the terminal is as before afterwards."""
    with keyboard() as read_keys, console.screen(hide_cursor=True):
        while True:
            width, height = console.size
            console.control(Control.home(), Control.clear())
            for at, line in enumerate(player.screen(width, height)):
                console.print(line, end="\n" if at < height - 1 else "", no_wrap=True, crop=True)
            try:
                if not all(player.press(key) for key in read_keys()):
                    return
            except (KeyboardInterrupt, EOFError):
                return

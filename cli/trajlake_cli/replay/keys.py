"""Keys of a terminal, one by one, none of them lost while the screen is drawn."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

ReadKeys = Callable[[], list[str]]
"""Waits for keys and gives what came, in order: characters, or the sequences that arrow keys send."""

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_SEQUENCE_SECONDS = 0.05  # within which the rest of a sequence follows its escape character


def split_keys(text: str) -> list[str]:
    """What was read in one go, key by key."""
    return _KEY.findall(text)


@contextmanager
def keyboard() -> Iterator[ReadKeys]:
    """Lets keys come at once and unseen while the block runs; the terminal is as before afterwards."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield lambda: split_keys(click.getchar())
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        # Once for all keys, and without a flush: `click.getchar` would drop what is typed between two calls.
        tty.setcbreak(terminal, termios.TCSADRAIN)
        yield lambda: _read(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read(terminal: int) -> list[str]:
    data = os.read(terminal, 1024)
    if not data:
        raise EOFError
    while data.endswith(b"\x1b") and select.select([terminal], [], [], _SEQUENCE_SECONDS)[0]:
        data += os.read(terminal, 1024)
    return split_keys(data.decode(errors="replace"))

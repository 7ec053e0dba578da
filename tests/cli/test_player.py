"""Stepping by keys, without a terminal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from trajlake_cli.replay.keys import split_keys
from trajlake_cli.replay.player import Player

pytestmark = pytest.mark.unit


@dataclass
class Recorded:
    episode: dict[str, Any]
    steps: list[dict[str, Any]] = field(default_factory=list)


EPISODES = [
    Recorded(
        {"episode_id": f"e{number}", "status": "completed", "task_id": f"task-{number}"},
        [{"step_index": at, "source": "agent", "message": f"message {at} of {number}"} for at in range(12)],
    )
    for number in range(2)
] + [Recorded({"episode_id": "empty", "status": "aborted"})]


@pytest.fixture
def player() -> Player:
    return Player(len(EPISODES), EPISODES.__getitem__)


def press(player: Player, *keys: str) -> bool:
    return all(player.press(key) for key in keys)


def text(player: Player, width: int = 80, height: int = 12) -> str:
    lines = player.screen(width, height)
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


def test_forward_and_back(player: Player) -> None:
    assert "message 0 of 0" in text(player)
    press(player, "n", "j", "\r", "\x1b[C")
    assert player.step == 4
    assert "message 4 of 0" in text(player)
    press(player, "p", "k", "\x1b[D")
    assert player.step == 1
    press(player, "p", "p")
    assert player.step == 0
    assert player.note == "first step"
    press(player, "$", "n")
    assert player.step == 11
    assert "] goes to the next episode" in text(player)
    press(player, "0")
    assert player.step == 0


def test_jump(player: Player) -> None:
    press(player, "g", "1", "2", "\x7f", "0")
    assert "go to step: 10" in text(player)
    press(player, "\r")
    assert player.step == 10
    press(player, "g", "9", "9", "\r")
    assert player.step == 10
    assert player.note == "there is no step 99"
    press(player, ":", "\x1b")
    assert player.step == 10
    press(player, "g", "x", "\r")
    assert player.note == "there is no step x"


def test_search(player: Player) -> None:
    press(player, "/", *"MESSAGE 3", "\r")
    assert player.step == 3
    press(player, "/", *"message 1", "\r", "/", "\r")
    assert player.step == 11
    press(player, "/", "\r")
    assert player.step == 1
    assert "from the first step again" in player.note
    press(player, "/", *"nowhere", "\r")
    assert player.step == 1
    assert "is in no step" in player.note


def test_episodes(player: Player) -> None:
    press(player, "n", "]")
    assert player.step == 0
    assert "message 0 of 1" in text(player)
    press(player, "]")
    assert "This episode has no steps." in text(player)
    press(player, "n", "p", "$", "0", " ", "/", "x", "\r")
    press(player, "]")
    assert player.note == "last episode"
    press(player, "[", "[", "[")
    assert player.note == "first episode"


def test_a_step_longer_than_the_screen_scrolls() -> None:
    lines = "\n".join(f"line {at}" for at in range(30))
    player = Player(1, lambda _: Recorded({"episode_id": "e"}, [{"step_index": 0, "source": "user", "message": lines}]))
    assert "line 0" in text(player)
    assert "more lines" in text(player)
    player.press(" ")
    assert "line 0\n" not in text(player)
    player.press("\x1b[B")
    for _ in range(9):
        player.press(" ")
        text(player)
    assert "line 29" in text(player)
    assert player.note == "last step"
    for _ in range(9):
        player.press("b")
    assert "line 0" in text(player)


@pytest.mark.parametrize("key", ["q", "\x1b", "\x03", "\x04"])
def test_quit(player: Player, key: str) -> None:
    assert not player.press(key)


def test_help(player: Player) -> None:
    player.press("?")
    assert "previous step" in text(player)
    player.press("q")
    assert "message 0" in text(player), "any key leaves the help"


def test_start_at_a_step() -> None:
    assert Player(1, EPISODES.__getitem__, 5).step == 5
    assert Player(1, EPISODES.__getitem__, 500).step == 11


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 3), (200, 60)])
def test_any_screen(player: Player, width: int, height: int) -> None:
    for _ in range(3):
        text(player, width, height)
        press(player, " ", "n", "?", "x", "/")
        text(player, width, height)
        player.press("\x1b")


def test_keys_that_come_at_once() -> None:
    assert split_keys("nn\x1b[C\x1bOA\x1b[6~é\x1b") == ["n", "n", "\x1b[C", "\x1bOA", "\x1b[6~", "é", "\x1b"]

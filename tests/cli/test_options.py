"""Values of options: lengths of time, columns, numbers."""

from __future__ import annotations

import re

import click
import pytest

from trajlake.errors import UsageError
from trajlake_cli.options import Columns, Duration, Numbers, resolve_columns

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604800), ("1h30m", 5400), ("1.5h", 5400)]
)
def test_duration(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-2h", "2 h", "1.2.3s", "2H"])
def test_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 90s, 30m, 2h"):
        Duration().convert(text, None, None)


def test_lists() -> None:
    assert Columns().convert("a, b", None, None) == ["a", "b"]
    assert Numbers().convert("1,2,4", None, None) == [1, 2, 4]


def test_unknown_columns_are_named_with_what_is_alike() -> None:
    with pytest.raises(UsageError, match="no column 'rewrad'; there is reward"):
        resolve_columns(["reward", "rewrad"], ["episode_id", "reward", "task_id"])
    with pytest.raises(UsageError, match="no column 'x'; `trajlake schema show episodes` lists them all"):
        resolve_columns(["x"], ["episode_id", "reward", "task_id"])
    assert resolve_columns(["tags['a b']"], ["tags"]) == ["tags['a b']"]
    with pytest.raises(UsageError, match=re.escape("no column 'tags.team'; there is tags['team']")):
        resolve_columns(["tags.team"], ["tags"])
